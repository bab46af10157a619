"""Measuring a pair of target and draft on prompts."""
