"""This package holds the parts of the draft model: norms, RoPE, layers, and the parts that DFlash 2 and DSpark add."""
