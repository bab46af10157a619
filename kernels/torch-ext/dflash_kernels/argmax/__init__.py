"""The greatest logit of each row, as two small kernels over many programs."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import on_device_of, runs_kernel
from .._ops import add_op_namespace_prefix
from .reference import argmax_reference


def argmax(logits: Tensor) -> Tensor:
    """`out[...] = min {v : logits[..., v] = max_u logits[..., u]}`, what `torch.argmax(logits, dim=-1)` gives.

    Ties go to the first index, -0 and 0 are equal, and the first NaN of a row wins over every number.

    Args:
        logits (`torch.Tensor` of shape `[..., V]`): Any strides; float32, float16 and bfloat16 have a kernel.

    Returns:
        `torch.Tensor` of shape `[...]`, int64. No host sync.

    Raises:
        ValueError: If there is no vocabulary to choose from, or one of 2^31 tokens or more.
    """
    if logits.dim() < 1 or not 0 < logits.shape[-1] < 2**31:
        raise ValueError(
            f"expected logits [..., V] with 0 < V < 2^31, got shape {tuple(logits.shape)}; pass at least one column"
        )
    leading = logits.shape[:-1]
    # Up to two leading dimensions keep their strides: a slice of the block's slots is not copied.
    rows = logits.reshape((1,) * max(3 - logits.dim(), 0) + logits.shape) if logits.dim() < 3 else logits
    rows = rows if rows.dim() == 3 else rows.reshape(1, -1, rows.shape[-1])
    return _argmax(rows).reshape(leading)


@torch.library.custom_op(add_op_namespace_prefix("argmax"), mutates_args=())
def _argmax(logits_BKV: Tensor) -> Tensor:
    if runs_kernel(logits_BKV) and logits_BKV.numel() > 0:
        from .kernel import argmax_triton

        with on_device_of(logits_BKV):
            return argmax_triton(logits_BKV)
    return argmax_reference(logits_BKV)


@_argmax.register_fake
def _(logits_BKV: Tensor) -> Tensor:
    return logits_BKV.new_empty(logits_BKV.shape[:-1], dtype=torch.int64)


__all__ = ["argmax", "argmax_reference"]
