"""Norm and RoPE of a head, rounded where the draft's own modules round: the torch half of two operations."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_and_rotate(
    states: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """`rotate(weight * x / sqrt(mean(x^2) + eps))`, where `rotate(x) = x * cos + [-x2, x1] * sin` for halves `x1, x2`.

    Without a weight it is `rotate(x)`.

    The norm is float32 (float64 for float64) and rounded to the dtype of `states`; everything after it is computed
    in that dtype, product by product.

    Args:
        states (`torch.Tensor` of shape `[..., E]`): Projected heads.
        weight (`torch.Tensor`, *optional*): Broadcastable to `states`.
        cos, sin (`torch.Tensor`): Broadcastable to `states`.
        eps (`float`): Of the norm.
    """
    if weight is not None:
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        states = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(
            states.dtype
        ) * weight
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def write_slots(buffer_BRGE: Tensor, states_BWGE: Tensor, positions_BW: Tensor) -> None:
    """`buffer[b, positions[b, i] mod R] = states[b, i]`, in place; negative positions are written nowhere."""
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
