"""This operation computes a residual sum and the RMS norm after it, in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from ..operation import Given, Sizes, check_dtype, operation
from ..rms_norm import check_norm, covers, rms_norm


def _check(given: Given, size: Sizes) -> None:
    check_norm(given, size)
    states, update = given["states"], given["update"]
    if update.shape != states.shape:
        raise ValueError(
            f"expected update of shape {list(states.shape)}, got {list(update.shape)}; pass one that fits"
        )
    check_dtype(given, [states.dtype], "update")


@operation(
    check=_check, fake=lambda states, *_: states.new_empty((2, *states.shape)), covers=covers
)
def add_norm(states: Tensor, update: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Returns `[x, norm(x)]` of the sum `x = states + update`, rounded to their dtype.

    `norm` is that of `rms_norm`.

    Args:
        states, update (`torch.Tensor` of shape `[..., D]`): The residual stream, and the states that are added to it.
            Both have one dtype, and any strides.
        weight_D (`torch.Tensor` of shape `[D]`): Weight of the norm, in the same dtype.
        eps (`float`): Epsilon of the norm.

    Returns:
        `torch.Tensor` of shape `[2, ..., D]`, contiguous: the sum, and its norm.

    Raises:
        ValueError: If shapes or dtypes are not as described.
    """
    total = states + update
    return torch.stack((total, rms_norm.reference(total, weight_D, eps)))


__all__ = ["add_norm"]
