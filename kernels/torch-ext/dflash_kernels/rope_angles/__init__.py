"""This operation computes the cosines and sines of RoPE at given positions, in one launch.

They are rounded in the same way as in Transformers' modules.
"""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import DTYPES, runs_kernel
from ..operation import Given, Sizes, operation


def _check(given: Given, size: Sizes) -> None:
    if not given["dtype"].is_floating_point:
        raise ValueError(
            f"expected a dtype of floating point, got {given['dtype']}; pass that of the states"
        )


def _fake(positions_BW: Tensor, inv_freq_F: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    shape = (2, *positions_BW.shape, 2 * len(inv_freq_F))
    return inv_freq_F.new_empty(shape, dtype=dtype)


def _covers(positions_BW: Tensor, inv_freq_F: Tensor, scaling: float, dtype: torch.dtype) -> bool:
    has_numbers = positions_BW.numel() > 0 and inv_freq_F.numel() > 0
    return has_numbers and dtype in DTYPES and runs_kernel(inv_freq_F)


@operation(check=_check, fake=_fake, covers=_covers)
def rope_angles(
    positions_BW: Tensor, inv_freq_F: Tensor, scaling: float, dtype: torch.dtype
) -> Tensor:
    """Returns `[cos(a), sin(a)] * scaling` of the angles `a = position * inv_freq`.

    Both channels of a pair get the pair's values.

    Angles, cosines, sines and their products are computed in float32, and rounded to `dtype` at the end.

    Args:
        positions_BW (`torch.Tensor` of shape `[B, W]`): Integer positions, with any strides.
        inv_freq_F (`torch.Tensor` of shape `[F]`): Radians per position, one for each pair of channels.
        scaling (`float`): Factor on cosines and sines.
        dtype (`torch.dtype`): Dtype of the result.

    Returns:
        `torch.Tensor` of shape `[2, B, W, 2 F]`, contiguous: the cosines, then the sines.

    Raises:
        ValueError: If shapes or the dtype are not as described.

    Source: Transformers `Qwen3RotaryEmbedding.forward`.
    """
    freqs = positions_BW[..., None].float() * inv_freq_F.float()
    # Channels `i` and `i + F` are a pair and have the same angle.
    angles = torch.cat((freqs, freqs), dim=-1)
    both = torch.stack((angles.cos(), angles.sin()))
    return (both * scaling).to(dtype)


__all__ = ["rope_angles"]
