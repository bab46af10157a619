"""This module computes norm and RoPE of a head in torch, rounded as in the draft's own modules.

Two operations use it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm_and_rotate(
    states: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Returns `rotate(weight * x / sqrt(mean(x^2) + eps))`, or `rotate(x)` without a weight.

    The rotation is `rotate(x) = x * cos + [-x2, x1] * sin` for halves `x1, x2`.

    The norm is computed in float32 (in float64 for float64) and rounded to the dtype of `states`. Everything after it
    is computed in this dtype, product by product.

    Args:
        states (`torch.Tensor` of shape `[..., E]`): Projected heads.
        weight (`torch.Tensor`, *optional*): Broadcastable to `states`.
        cos, sin (`torch.Tensor`): Broadcastable to `states`.
        eps (`float`): Epsilon of the norm.
    """
    if weight is not None:
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        states = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(
            states.dtype
        ) * weight
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def write_slots(buffer_BRGE: Tensor, states_BWGE: Tensor, positions_BW: Tensor) -> None:
    """Sets `buffer[b, positions[b, i] mod R] = states[b, i]` in place.

    Tokens at negative positions are not written.
    """
    ring = buffer_BRGE.shape[1]
    rows = torch.arange(positions_BW.shape[0], device=positions_BW.device)[:, None].expand_as(
        positions_BW
    )
    slots = positions_BW % ring
    kept = buffer_BRGE[rows, slots]
    written = torch.where(
        (positions_BW >= 0)[..., None, None], states_BWGE.to(buffer_BRGE.dtype), kept
    )
    buffer_BRGE[rows, slots] = written


__all__ = ["norm_and_rotate", "write_slots"]
