"""This package finds mistakes that ruin a draft's acceptance but do not change a text."""
