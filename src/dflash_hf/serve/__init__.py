"""This package is an OpenAI-style server for a pair. Its answers are generated with the draft."""
