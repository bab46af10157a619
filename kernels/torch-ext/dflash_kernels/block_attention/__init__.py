"""Attention of a block of new tokens over the ragged cache that already holds them."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import on_device_of, runs_kernel
from .._ops import add_op_namespace_prefix
from .reference import block_attention_reference

MAX_HEAD_SIZE = 256


def block_attention(
    query_BHWE: Tensor,
    key_BGRE: Tensor,
    value_BGRE: Tensor,
    lengths_B: Tensor,
    *,
    scaling: float,
    causal: bool,
    window: int | None = None,
    from_anchor: bool = False,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Softmax attention of `W` new tokens per row, the first of row `b` at index `lengths[b]`; no host sync.

    The cache is a ring: with `n = lengths[b] + W` tokens in row `b`, slot `r` holds the token of the greatest index
    `t(r) < n` that is congruent to `r` modulo `R`, and nothing where that is negative. The query at index
    `q = lengths[b] + i >= 0` sees slot `r` if `t(r) >= 0` and

        t(r) <= q                       causal
        q - t(r) < window               with a window, and t(r) - q < window if not causal
        lengths[b] - t(r) <= window     with a window from the anchor, instead of the line above

        s(r) = cap(scaling q k(r)^T),  cap(s) = softcap tanh(s / softcap)
        out  = sum_r exp(s(r)) v(r) / (sum_r exp(s(r)) + exp(sink))

    A query that sees nothing gives zeros. Slots that hold nothing are not read. Scores, weights' sum and the output
    are accumulated in float32.

    Args:
        query_BHWE (`torch.Tensor`): Queries. Any strides; `H` is a multiple of `G`.
        key_BGRE, value_BGRE (`torch.Tensor`): One layer of the cache, or its first slots if none of them has wrapped.
            Any strides; of one dtype with the queries; values may have another head size.
        lengths_B (`torch.Tensor` of shape `[B]`, integer): Tokens each row had before the block; read on the device.
        scaling (`float`): Factor on the scores.
        causal (`bool`): Whether a query sees later tokens of its block.
        window (`int`, *optional*): Sliding window in tokens.
        from_anchor (`bool`): Whether the window counts from the block's first token and hides nothing of the block.
        softcap (`float`, *optional*): Soft cap.
        sinks_H (`torch.Tensor` of shape `[H]`, *optional*): Sink score per head.
        num_splits (`int`, *optional*): Shares that a row's slots are cut into; by default what fills the device.

    Returns:
        `torch.Tensor` of shape `[B, W, H, E]` (the values' `E`), contiguous, in the queries' dtype.

    Raises:
        ValueError: If shapes or dtypes are not as said.
    """
    _check(query_BHWE, key_BGRE, value_BGRE, lengths_B, sinks_H)
    if (window is not None and window < 0) or (softcap is not None and softcap <= 0):
        raise ValueError(f"expected window >= 0 and softcap > 0, got {window} and {softcap}; pass None for none")
    return _block_attention(
        query_BHWE,
        key_BGRE,
        value_BGRE,
        lengths_B,
        scaling,
        causal,
        window,
        from_anchor,
        softcap,
        None if sinks_H is None else sinks_H.contiguous(),
        num_splits,
    )


def _check(
    query_BHWE: Tensor, key_BGRE: Tensor, value_BGRE: Tensor, lengths_B: Tensor, sinks_H: Tensor | None
) -> None:
    """Checks shapes and dtypes."""
    batch, num_heads, width, key_size = query_BHWE.shape
    groups, ring, value_size = key_BGRE.shape[1], key_BGRE.shape[2], value_BGRE.shape[3]
    for name, tensor, shape in (
        ("key_BGRE", key_BGRE, (batch, groups, ring, key_size)),
        ("value_BGRE", value_BGRE, (batch, groups, ring, value_size)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != query_BHWE.dtype:
            raise ValueError(
                f"expected {name} of shape {shape} and dtype {query_BHWE.dtype}, got {tuple(tensor.shape)} and "
                f"{tensor.dtype}; pass one layer of the cache"
            )
    if groups == 0 or num_heads % groups or ring < width or width < 1:
        raise ValueError(
            f"expected H a multiple of G and R >= W >= 1, got H {num_heads}, G {groups}, R {ring}, W {width}; the "
            "cache must hold the block"
        )
    if tuple(lengths_B.shape) != (batch,) or lengths_B.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"expected int64 lengths_B of shape {(batch,)}, got {lengths_B.dtype} of shape {tuple(lengths_B.shape)}; "
            "pass one per row"
        )
    if sinks_H is not None and tuple(sinks_H.shape) != (num_heads,):
        raise ValueError(f"expected sinks_H of shape {(num_heads,)}, got {tuple(sinks_H.shape)}; pass one per head")


def covers(query_BHWE: Tensor, key_BGRE: Tensor, value_BGRE: Tensor) -> bool:
    """Whether the kernel, not the reference, would compute this attention."""
    sizes = (query_BHWE.shape[-1], value_BGRE.shape[-1])
    same = query_BHWE.dtype == key_BGRE.dtype == value_BGRE.dtype
    return same and runs_kernel(query_BHWE) and max(sizes) <= MAX_HEAD_SIZE


@torch.library.custom_op(add_op_namespace_prefix("block_attention"), mutates_args=())
def _block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scaling: float,
    causal: bool,
    window: int | None,
    from_anchor: bool,
    softcap: float | None,
    sinks: Tensor | None,
    num_splits: int | None,
) -> Tensor:
    arguments = (query, key, value, lengths, scaling, causal, window, from_anchor, softcap, sinks)
    if covers(query, key, value):
        from .kernel import block_attention_triton

        with on_device_of(query):
            return block_attention_triton(*arguments, num_splits)
    return block_attention_reference(*arguments)


@_block_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scaling: float,
    causal: bool,
    window: int | None,
    from_anchor: bool,
    softcap: float | None,
    sinks: Tensor | None,
    num_splits: int | None,
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


__all__ = ["block_attention", "block_attention_reference", "covers"]
