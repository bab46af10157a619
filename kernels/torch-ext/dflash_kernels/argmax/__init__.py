"""This operation finds the greatest logit of each row, with two small kernels over many programs."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, operation


def _check(given: Given, size: Sizes) -> None:
    shape = tuple(given["logits"].shape)
    if not shape or not 0 < shape[-1] < 2**31:
        raise ValueError(
            f"expected logits [..., V] with 0 < V < 2^31, got shape {shape}; pass at least one column"
        )


@operation(
    check=_check,
    fake=lambda logits: logits.new_empty(logits.shape[:-1], dtype=torch.int64),
    covers=lambda logits: runs_kernel(logits) and logits.numel() > 0,
)
def argmax(logits: Tensor) -> Tensor:
    """Returns `out[...] = min {v : logits[..., v] = max_u logits[..., u]}`, which is
    `torch.argmax(logits, dim=-1)`.

    Ties go to the first index. -0 and 0 are equal, and the first NaN of a row wins over every number.

    Args:
        logits (`torch.Tensor` of shape `[..., V]`): Logits with any strides. The kernel supports float32, float16 and
            bfloat16.

    Returns:
        `torch.Tensor` of shape `[...]`, int64. No host sync.

    Raises:
        ValueError: If the vocabulary is empty, or has 2^31 tokens or more.
    """
    return logits.argmax(dim=-1)


__all__ = ["argmax"]
