"""Decoding: the step, the loop around it, and the hook into Transformers' `generate`."""
