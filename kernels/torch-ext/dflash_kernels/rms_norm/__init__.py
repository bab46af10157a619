"""The RMS norm of hidden states, rounded where Transformers' modules round, in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, check_dtype, operation

# A row is one program's.
MAX_SIZE = 32768


def check_norm(given: Given, size: Sizes) -> None:
    """Raises a `ValueError` unless `states` are rows as long as the weight, of its dtype."""
    states = given["states"]
    if not states.dim() or states.shape[-1] != size["D"]:
        raise ValueError(
            f"expected states [..., {size['D']}] beside this weight_D, got {list(states.shape)}; pass one that fits"
        )
    check_dtype(given, [states.dtype], "weight_D")


def covers(states: Tensor, *_: object) -> bool:
    """Returns True if the kernel takes these states: not none, and of rows that one program can hold."""
    return runs_kernel(states) and states.numel() > 0 and states.shape[-1] <= MAX_SIZE


@operation(check=check_norm, fake=lambda states, *_: states.new_empty(states.shape), covers=covers)
def rms_norm(states: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, as the norms of Qwen3 and Llama compute it.

    Mean and quotient are float32 and rounded to the dtype of `states`; the product with the weight is in that dtype.

    Args:
        states (`torch.Tensor` of shape `[..., D]`): Hidden states, any strides.
        weight_D (`torch.Tensor` of shape `[D]`): Of the same dtype.
        eps (`float`): Of the norm.

    Returns:
        `torch.Tensor` of shape `[..., D]`, contiguous.

    Raises:
        ValueError: If shapes or dtypes are not as said.

    Source: Transformers `Qwen3RMSNorm.forward`.
    """
    wide = states.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight_D * normed.to(states.dtype)).contiguous()


__all__ = ["check_norm", "covers", "rms_norm"]
