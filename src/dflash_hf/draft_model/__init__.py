"""The parts of the draft model: norms and RoPE, layers, and what DFlash 2 adds."""
