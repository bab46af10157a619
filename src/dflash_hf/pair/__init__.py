"""This package loads a target with its draft, answers prompts, and compares the answers with the target's own."""
