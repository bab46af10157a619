"""This operation computes the RMS norm of hidden states, rounded as in Transformers' modules, in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, check_dtype, operation

# The largest size of a row, because one program handles a row.
MAX_SIZE = 32768


def check_norm(given: Given, size: Sizes) -> None:
    """Raises a `ValueError` unless the rows of `states` have the length and the dtype of the weight."""
    states = given["states"]
    if not states.dim() or states.shape[-1] != size["D"]:
        raise ValueError(
            f"expected states [..., {size['D']}] beside this weight_D, got {list(states.shape)}; pass one that fits"
        )
    check_dtype(given, [states.dtype], "weight_D")


def covers(states: Tensor, *_: object) -> bool:
    """Returns True if the kernel supports these states: they are not empty, and one program can hold a row."""
    return runs_kernel(states) and states.numel() > 0 and states.shape[-1] <= MAX_SIZE


@operation(check=check_norm, fake=lambda states, *_: states.new_empty(states.shape), covers=covers)
def rms_norm(states: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Returns `weight * x / sqrt(mean(x^2) + eps)` over the last dimension, computed as in the norms of Qwen3 and
    Llama.

    Mean and quotient are computed in float32, and the quotient is rounded to the dtype of `states`. The product with
    the weight is in this dtype.

    Args:
        states (`torch.Tensor` of shape `[..., D]`): Hidden states, any strides.
        weight_D (`torch.Tensor` of shape `[D]`): Weight of the norm, in the same dtype.
        eps (`float`): Epsilon of the norm.

    Returns:
        `torch.Tensor` of shape `[..., D]`, contiguous.

    Raises:
        ValueError: If shapes or dtypes are not as described.

    Source: Transformers `Qwen3RMSNorm.forward`.
    """
    wide = states.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight_D * normed.to(states.dtype)).contiguous()


__all__ = ["check_norm", "covers", "rms_norm"]
