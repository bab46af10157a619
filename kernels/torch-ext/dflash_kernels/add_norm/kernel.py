"""This is the kernel of `add_norm`. It is the kernel of `rms_norm` with a sum before it."""

from __future__ import annotations

from torch import Tensor

from ..operation import Given
from ..rms_norm.kernel import run


def launch(given: Given) -> Tensor:
    """Returns `[2, ..., D]` in the dtype of `states`: the sum, then its norm. It makes one launch."""
    return run(given["states"], given["update"], given["weight_D"], given["eps"])


__all__ = ["launch"]
