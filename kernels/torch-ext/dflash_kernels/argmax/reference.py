"""What `argmax` computes, in plain torch."""

from __future__ import annotations

from torch import Tensor


def argmax_reference(logits: Tensor) -> Tensor:
    """`torch.argmax` over the last dimension `[..., V]`: the first of equal maxima, and the first NaN before them."""
    return logits.argmax(dim=-1)


__all__ = ["argmax_reference"]
