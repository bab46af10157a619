"""`norm_rope_write` in Triton: one warp per token and head."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import power_of_two
from ..rotary_kernel import norm_and_rotate


@triton.jit(do_not_specialize=["width", "ring"])
def _norm_rope_write_kernel(
    query,
    key,
    value,
    query_weight,
    key_weight,
    cos,
    sin,
    lengths,
    out,
    key_buffer,
    value_buffer,
    width,
    ring,
    eps,
    stride_lengths,
    stride_query_b,
    stride_query_w,
    stride_query_h,
    stride_query_e,
    stride_key_b,
    stride_key_w,
    stride_key_h,
    stride_key_e,
    stride_value_b,
    stride_value_w,
    stride_value_h,
    stride_value_e,
    stride_query_weight,
    stride_key_weight,
    stride_cos_b,
    stride_cos_w,
    stride_cos_e,
    stride_sin_b,
    stride_sin_w,
    stride_sin_e,
    stride_keys_b,
    stride_keys_r,
    stride_keys_h,
    stride_keys_e,
    stride_values_b,
    stride_values_r,
    stride_values_h,
    stride_values_e,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For token `i` of row `b`, at `p = lengths[b] + i`: `out = rope(norm(query))`,

    `key_buffer[b, p mod R] = rope(norm(key))` and `value_buffer[b, p mod R] = value`, the last two only for `p >= 0`.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row, index = (token // width).to(tl.int64), token % width
    cos += row * stride_cos_b + index * stride_cos_w
    sin += row * stride_sin_b + index * stride_sin_w
    HALF: tl.constexpr = E // 2
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    if head < H:
        query += row * stride_query_b + index * stride_query_w + head * stride_query_h
        query1, query2 = norm_and_rotate(
            query,
            query_weight,
            cos,
            sin,
            stride_query_e,
            stride_query_weight,
            stride_cos_e,
            stride_sin_e,
            eps,
            E,
            BLOCK,
        )
        out += (token.to(tl.int64) * H + head) * E
        tl.store(out + lane, query1.to(out.dtype.element_ty), mask=inside)
        tl.store(out + HALF + lane, query2.to(out.dtype.element_ty), mask=inside)
    else:
        position = tl.load(lengths + row * stride_lengths).to(tl.int64) + index
        written = inside & (position >= 0)
        slot = tl.where(position >= 0, position, 0) % ring
        if head < H + G:
            group = head - H
            key += row * stride_key_b + index * stride_key_w + group * stride_key_h
            key1, key2 = norm_and_rotate(
                key,
                key_weight,
                cos,
                sin,
                stride_key_e,
                stride_key_weight,
                stride_cos_e,
                stride_sin_e,
                eps,
                E,
                BLOCK,
            )
            dtype: tl.constexpr = key.dtype.element_ty
            key_dtype: tl.constexpr = key_buffer.dtype.element_ty
            key_buffer += row * stride_keys_b + slot * stride_keys_r + group * stride_keys_h
            # Rounded as the key is first, where the buffer has another dtype.
            tl.store(key_buffer + lane * stride_keys_e, key1.to(dtype).to(key_dtype), mask=written)
            tl.store(key_buffer + (HALF + lane) * stride_keys_e, key2.to(dtype).to(key_dtype), mask=written)
        else:
            pair = head - H - G
            value_dtype: tl.constexpr = value_buffer.dtype.element_ty
            value += row * stride_value_b + index * stride_value_w + pair * stride_value_h
            value_buffer += row * stride_values_b + slot * stride_values_r + pair * stride_values_h
            value1 = tl.load(value + lane * stride_value_e, mask=inside)
            value2 = tl.load(value + (HALF + lane) * stride_value_e, mask=inside)
            tl.store(value_buffer + lane * stride_values_e, value1.to(value_dtype), mask=written)
            tl.store(value_buffer + (HALF + lane) * stride_values_e, value2.to(value_dtype), mask=written)


def norm_rope_write_triton(
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
    """Launches the kernel; arguments and result as [`norm_rope_write`]."""
    batch, width, num_heads, size = query_BWHE.shape
    groups = key_BWGE.shape[2]
    out = torch.empty(batch, width, num_heads, size, dtype=query_BWHE.dtype, device=query_BWHE.device)
    _norm_rope_write_kernel[(batch * width, num_heads + 2 * groups)](
        query_BWHE,
        key_BWGE,
        value_BWGE,
        query_weight_E,
        key_weight_E,
        cos_BWE,
        sin_BWE,
        lengths_B,
        out,
        key_buffer_BRGE,
        value_buffer_BRGE,
        width,
        key_buffer_BRGE.shape[1],
        eps,
        *lengths_B.stride(),
        *query_BWHE.stride(),
        *key_BWGE.stride(),
        *value_BWGE.stride(),
        *query_weight_E.stride(),
        *key_weight_E.stride(),
        *cos_BWE.stride(),
        *sin_BWE.stride(),
        *key_buffer_BRGE.stride(),
        *value_buffer_BRGE.stride(),
        H=num_heads,
        G=groups,
        E=size,
        BLOCK=power_of_two(size // 2),
        num_warps=1,
    )
    return out


__all__ = ["norm_rope_write_triton"]
