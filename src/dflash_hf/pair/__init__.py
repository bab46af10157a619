"""This package loads a target with its draft, answers prompts with both, and compares the answers with the
target's."""
