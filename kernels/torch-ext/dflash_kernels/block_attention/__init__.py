"""This operation computes the attention of a block of new tokens over the ragged cache that already holds them."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..ancestors import MAX_NODES, are_ancestors, num_words
from ..operation import Given, Sizes, check_dtype, operation

MAX_HEAD_SIZE = 256


def covers(query_BHWE: Tensor, key_BGRE: Tensor, value_BGRF: Tensor, *_: object) -> bool:
    """Returns True if the kernel, and not the reference, would compute this attention."""
    sizes = (query_BHWE.shape[-1], value_BGRF.shape[-1])
    same = query_BHWE.dtype == key_BGRE.dtype == value_BGRF.dtype
    return same and runs_kernel(query_BHWE) and max(sizes) <= MAX_HEAD_SIZE


def _check(given: Given, size: Sizes) -> None:
    check_dtype(given, [given["query_BHWE"].dtype], "key_BGRE", "value_BGRF")
    check_dtype(given, (torch.int64, torch.int32), "lengths_B")
    check_dtype(given, (torch.int64,), "depths_BW", "ancestors_BWA")
    heads, groups, ring, width = (size[dim] for dim in "HGRW")
    if groups == 0 or heads % groups or ring < width or width < 1:
        raise ValueError(
            f"expected H a multiple of G and R >= W >= 1, got H {heads}, G {groups}, R {ring}, W {width}; the "
            "cache must hold the block"
        )
    has_depths, has_ancestors = given["depths_BW"] is not None, given["ancestors_BWA"] is not None
    may_be_tree = width <= MAX_NODES and given["causal"] and not given["from_anchor"]
    if has_depths != has_ancestors or (has_depths and not may_be_tree):
        raise ValueError(
            f"expected depths and ancestors together, for a causal block of at most {MAX_NODES} tokens, got width "
            f"{width}, causal {given['causal']}, from_anchor {given['from_anchor']}; leave both out"
        )
    if has_ancestors and size["A"] != num_words(width):
        raise ValueError(
            f"expected {num_words(width)} words of ancestors of {width} tokens, got {size['A']}; pass as many"
        )
    window, softcap = given["window"], given["softcap"]
    if (window is not None and window < 0) or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"expected window >= 0 and softcap > 0, got {window} and {softcap}; pass None for none"
        )


def seen_by(
    lengths_B: Tensor,
    width: int,
    ring: int,
    causal: bool,
    window: int | None,
    from_anchor: bool,
    depths_BW: Tensor | None = None,
    ancestors_BWA: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns which slots a block's queries see, and which slots hold a token.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Boolean tensors `[B, W, R]` and `[B, R]`. See [`block_attention`].
    """
    slots = torch.arange(ring, device=lengths_B.device)
    last = lengths_B[:, None] + (width - 1)
    held_BR = last - (last - slots) % ring
    filled = held_BR >= 0
    held = held_BR[:, None]
    position = lengths_B[:, None, None] + torch.arange(width, device=lengths_B.device)[:, None]
    seen = filled[:, None] & (position >= 0)
    if depths_BW is not None and ancestors_BWA is not None:
        node = held - lengths_B[:, None, None]
        is_node, node = node >= 0, node.clamp_min(0)[:, 0]
        position = lengths_B[:, None, None] + depths_BW[:, :, None]
        held = torch.where(
            is_node, lengths_B[:, None, None] + depths_BW.gather(1, node)[:, None], held
        )
        seen = seen & (~is_node | are_ancestors(ancestors_BWA, node))
    if causal:
        seen = seen & (held <= position)
    if window is not None and from_anchor:
        seen = seen & (lengths_B[:, None, None] - held <= window)
    elif window is not None:
        seen = seen & (position - held < window)
        if not causal:
            seen = seen & (held - position < window)
    return seen, filled


@operation(
    check=_check,
    fake=lambda query, key, value, *_: query.new_empty(
        *query.transpose(1, 2).shape[:3], value.shape[3]
    ),
    covers=covers,
)
def block_attention(
    query_BHWE: Tensor,
    key_BGRE: Tensor,
    value_BGRF: Tensor,
    lengths_B: Tensor,
    scaling: float,
    causal: bool,
    window: int | None = None,
    from_anchor: bool = False,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    depths_BW: Tensor | None = None,
    ancestors_BWA: Tensor | None = None,
) -> Tensor:
    """Returns the softmax attention of `W` new tokens per row, of which the first is at index `lengths[b]`; no host
    sync.

    The cache is a ring. With `n = lengths[b] + W` tokens in row `b`, slot `r` holds the token of the greatest index
    `t(r) < n` that is congruent to `r` modulo `R`. If this index is negative, the slot is empty. The query at index
    `q = lengths[b] + i >= 0` sees slot `r` if `t(r) >= 0` and

        t(r) <= q                       causal
        q - t(r) < window               with a window, and t(r) - q < window if not causal
        lengths[b] - t(r) <= window     with a window from the anchor, instead of the line above

        s(r) = cap(scaling q k(r)^T),  cap(s) = softcap tanh(s / softcap)
        out  = sum_r exp(s(r)) v(r) / (sum_r exp(s(r)) + exp(sink))

    The new tokens may be nodes of a tree. Then node `i` is at index `lengths[b] + depths[b, i]` in all of these
    formulas, as a query and as a key. It sees node `j` only if `j` is one of its ancestors or the node itself; see
    `ancestors.py`.

    The output of a query that sees no slot is zero. Empty slots are not read. Scores, the sum of the weights and the
    output are accumulated in float32.

    Args:
        query_BHWE (`torch.Tensor`): Queries with any strides. `H` is a multiple of `G`.
        key_BGRE, value_BGRF (`torch.Tensor`): One layer of the cache, or its first slots if none of them has wrapped.
            They have any strides and the dtype of the queries. Values may have another head size.
        lengths_B (`torch.Tensor` of shape `[B]`, integer): Number of tokens that each row had before the block. It is
            read on the device.
        scaling (`float`): Factor on the scores.
        causal (`bool`): Whether a query sees later tokens of its block.
        window (`int`, *optional*): Sliding window in tokens.
        from_anchor (`bool`): Whether the window counts from the block's first token and hides nothing of the block.
        softcap (`float`, *optional*): Soft cap on the scores.
        sinks_H (`torch.Tensor` of shape `[H]`, *optional*): Sink score per head.
        depths_BW (`torch.Tensor` of shape `[B, W]`, int64, *optional*): Depths of a tree's nodes, with any strides.
        ancestors_BWA (`torch.Tensor` of shape `[B, W, A]`, int64, *optional*): Words of the nodes' ancestors, with any
            strides.

    Returns:
        `torch.Tensor` of shape `[B, W, H, F]`, contiguous, in the queries' dtype.

    Raises:
        ValueError: If shapes or dtypes are not as described.
    """
    batch, num_heads, width, _ = query_BHWE.shape
    groups, ring = key_BGRE.shape[1], key_BGRE.shape[2]
    wide = torch.promote_types(query_BHWE.dtype, torch.float32)
    query = query_BHWE.to(wide).unflatten(1, (groups, num_heads // groups))
    seen, filled = seen_by(
        lengths_B, width, ring, causal, window, from_anchor, depths_BW, ancestors_BWA
    )
    # Empty slots may hold any values, and 0 * NaN is NaN.
    empty = ~filled[:, None, :, None]
    key, value = (
        states.to(wide).masked_fill(empty, 0)[:, :, None] for states in (key_BGRE, value_BGRF)
    )
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


__all__ = ["block_attention", "covers"]
