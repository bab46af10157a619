"""This operation computes the activation of a gated MLP in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, check_dtype, operation


def _check(given: Given, size: Sizes) -> None:
    gate, up = given["gate"], given["up"]
    if gate.shape != up.shape:
        raise ValueError(
            f"expected up of shape {list(gate.shape)}, got {list(up.shape)}; pass one that fits"
        )
    check_dtype(given, [gate.dtype], "up")


@operation(
    check=_check,
    fake=lambda gate, *_: gate.new_empty(gate.shape),
    covers=lambda gate, *_: runs_kernel(gate) and gate.numel() > 0,
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns `silu(gate) * up`.

    `silu(x) = x / (1 + exp(-x))` is computed in float32 and rounded before the product.

    Args:
        gate, up (`torch.Tensor`): Tensors of the same shape and dtype, with any strides.

    Returns:
        `torch.Tensor` of the same shape and dtype, contiguous.

    Raises:
        ValueError: If shapes or dtypes differ.
    """
    return (torch.nn.functional.silu(gate) * up).contiguous()


__all__ = ["silu_mul"]
