"""What `block_attention` computes, in plain torch with the scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_by(
    lengths_B: Tensor, width: int, ring: int, causal: bool, window: int | None, from_anchor: bool
) -> tuple[Tensor, Tensor]:
    """Says which slots a block's queries see, and which hold anything at all.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Boolean, `[B, W, R]` and `[B, R]`. See [`block_attention`].
    """
    slots = torch.arange(ring, device=lengths_B.device)
    last = lengths_B[:, None] + (width - 1)
    held_BR = last - (last - slots) % ring
    filled = held_BR >= 0
    held = held_BR[:, None]
    position = lengths_B[:, None, None] + torch.arange(width, device=lengths_B.device)[:, None]
    seen = filled[:, None] & (position >= 0)
    if causal:
        seen = seen & (held <= position)
    if window is not None and from_anchor:
        seen = seen & (lengths_B[:, None, None] - held <= window)
    elif window is not None:
        seen = seen & (position - held < window)
        if not causal:
            seen = seen & (held - position < window)
    return seen, filled


def block_attention_reference(
    query_BHWE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    lengths_B: Tensor,
    scaling: float,
    causal: bool,
    window: int | None,
    from_anchor: bool,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """See [`block_attention`]; in float32 (float64 for float64), nothing is read on the host."""
    batch, num_heads, width, _ = query_BHWE.shape
    groups, ring = key_BGRE.shape[1], key_BGRE.shape[2]
    wide = torch.promote_types(query_BHWE.dtype, torch.float32)
    query = query_BHWE.to(wide).unflatten(1, (groups, num_heads // groups))
    seen, filled = seen_by(lengths_B, width, ring, causal, window, from_anchor)
    # Slots that nothing was written to may hold anything, and 0 * NaN is NaN.
    empty = ~filled[:, None, :, None]
    key, value = (states.to(wide).masked_fill(empty, 0)[:, :, None] for states in (key_BGRE, value_BGRE))
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks_H is None:
        sink = torch.full_like(scores[..., :1], -torch.inf)
    else:
        sink = sinks_H.to(wide).view(1, groups, -1, 1, 1).expand(batch, -1, -1, width, 1)
    top = torch.cat([scores, sink], dim=-1).amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - top)
    out = (weights / torch.where(total > 0, total, 1)) @ value
    return out.flatten(1, 2).transpose(1, 2).to(query_BHWE.dtype).contiguous()


__all__ = ["block_attention_reference", "seen_by"]
