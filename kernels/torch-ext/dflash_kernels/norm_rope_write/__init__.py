"""Norm, RoPE and cache write of a block's heads, in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import on_device_of, runs_kernel
from .._ops import add_op_namespace_prefix
from .reference import norm_rope_write_reference


def norm_rope_write(
    query_BWHE: Tensor,
    key_BWGE: Tensor,
    value_BWGE: Tensor,
    query_weight_E: Tensor,
    key_weight_E: Tensor,
    cos_BWE: Tensor,
    sin_BWE: Tensor,
    lengths_B: Tensor,
    key_buffer_BRGE: Tensor,
    value_buffer_BRGE: Tensor,
    eps: float,
) -> Tensor:
    """Norms and rotates queries and keys, writes keys and values into the cache; no host sync.

    With `p = lengths[b] + i`, `norm(x) = weight * x / sqrt(mean(x^2) + eps)` and, for halves `[x1, x2]`,
    `rope(x) = x * cos[b, i] + [-x2, x1] * sin[b, i]`:

        out[b, i]                     = rope(norm(query[b, i]))
        key_buffer[b, p mod R]        = rope(norm(key[b, i]))
        value_buffer[b, p mod R]      = value[b, i]

    A token at a negative `p` is written nowhere. Rounding is that of the draft's modules: the norm in float32, then
    each product and sum in the dtype of the states.

    Args:
        query_BWHE, key_BWGE, value_BWGE (`torch.Tensor`): Outputs of the projections, any strides (views of one fused
            product, say); one dtype, `E` even.
        query_weight_E, key_weight_E (`torch.Tensor` of shape `[E]`): Of the norms, of the same dtype.
        cos_BWE, sin_BWE (`torch.Tensor` of shape `[B, W, E]`): Of the tokens' positions, of the same dtype.
        lengths_B (`torch.Tensor` of shape `[B]`, integer): Index of each row's first token.
        key_buffer_BRGE, value_buffer_BRGE (`torch.Tensor` of shape `[B, R, G, E]`): One layer of the cache, `R >= W`.
            Written in place, in its own dtype.
        eps (`float`): Of the norms.

    Returns:
        `torch.Tensor` of shape `[B, W, H, E]`, contiguous.

    Raises:
        ValueError: If shapes or dtypes are not as said.
    """
    batch, width, _, size = query_BWHE.shape
    groups, ring = key_BWGE.shape[2], key_buffer_BRGE.shape[1]
    for name, tensor, shape in (
        ("key_BWGE", key_BWGE, (batch, width, groups, size)),
        ("value_BWGE", value_BWGE, (batch, width, groups, size)),
        ("query_weight_E", query_weight_E, (size,)),
        ("key_weight_E", key_weight_E, (size,)),
        ("cos_BWE", cos_BWE, (batch, width, size)),
        ("sin_BWE", sin_BWE, (batch, width, size)),
        ("lengths_B", lengths_B, (batch,)),
        ("key_buffer_BRGE", key_buffer_BRGE, (batch, ring, groups, size)),
        ("value_buffer_BRGE", value_buffer_BRGE, (batch, ring, groups, size)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"expected {name} of shape {shape}, got {tuple(tensor.shape)}; pass one that fits")
    for tensor in (key_BWGE, value_BWGE, query_weight_E, key_weight_E, cos_BWE, sin_BWE):
        if tensor.dtype != query_BWHE.dtype:
            raise ValueError(f"expected states, weights, cos and sin of one dtype, got {tensor.dtype}; convert them")
    if size % 2 or ring < width:
        raise ValueError(f"expected an even E and R >= W, got E {size}, R {ring}, W {width}; the cache must hold it")
    return _norm_rope_write(
        query_BWHE,
        key_BWGE,
        value_BWGE,
        query_weight_E,
        key_weight_E,
        cos_BWE,
        sin_BWE,
        lengths_B,
        key_buffer_BRGE,
        value_buffer_BRGE,
        eps,
    )


@torch.library.custom_op(add_op_namespace_prefix("norm_rope_write"), mutates_args=("key_buffer", "value_buffer"))
def _norm_rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    eps: float,
) -> Tensor:
    arguments = (query, key, value, query_weight, key_weight, cos, sin, lengths, key_buffer, value_buffer, eps)
    if runs_kernel(query):
        from .kernel import norm_rope_write_triton

        with on_device_of(query):
            return norm_rope_write_triton(*arguments)
    return norm_rope_write_reference(*arguments)


@_norm_rope_write.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    eps: float,
) -> Tensor:
    return query.new_empty(query.shape)


__all__ = ["norm_rope_write", "norm_rope_write_reference"]
