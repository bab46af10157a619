"""This is the kernel of `norm_rope_write`, with one warp per token and head."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import power_of_two
from ..operation import Given, run_kernel
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
    stride_lengths_b,
    stride_query_b,
    stride_query_w,
    stride_query_h,
    stride_query_e,
    stride_key_b,
    stride_key_w,
    stride_key_g,
    stride_key_e,
    stride_value_b,
    stride_value_w,
    stride_value_g,
    stride_value_e,
    stride_query_weight_e,
    stride_key_weight_e,
    stride_cos_b,
    stride_cos_w,
    stride_cos_e,
    stride_sin_b,
    stride_sin_w,
    stride_sin_e,
    stride_key_buffer_b,
    stride_key_buffer_r,
    stride_key_buffer_g,
    stride_key_buffer_e,
    stride_value_buffer_b,
    stride_value_buffer_r,
    stride_value_buffer_g,
    stride_value_buffer_e,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Handles token `i` of row `b`, at `p = lengths[b] + i`. Without weights `norm(x) = x`.

    It computes `out = rope(norm(query))` and, only for `p >= 0`, `key_buffer[b, p mod R] = rope(norm(key))` and
    `value_buffer[b, p mod R] = value`.
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
            stride_query_weight_e,
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
        position = tl.load(lengths + row * stride_lengths_b).to(tl.int64) + index
        written = inside & (position >= 0)
        slot = tl.where(position >= 0, position, 0) % ring
        if head < H + G:
            # The offset of a head has 64 bits for any order of the buffer, because its heads may be as far apart as it
            # is long.
            group = (head - H).to(tl.int64)
            key += row * stride_key_b + index * stride_key_w + group * stride_key_g
            key1, key2 = norm_and_rotate(
                key,
                key_weight,
                cos,
                sin,
                stride_key_e,
                stride_key_weight_e,
                stride_cos_e,
                stride_sin_e,
                eps,
                E,
                BLOCK,
            )
            dtype: tl.constexpr = key.dtype.element_ty
            key_dtype: tl.constexpr = key_buffer.dtype.element_ty
            key_buffer += (
                row * stride_key_buffer_b + slot * stride_key_buffer_r + group * stride_key_buffer_g
            )
            # If the buffer has another dtype, the key is first rounded to its own dtype.
            tl.store(
                key_buffer + lane * stride_key_buffer_e, key1.to(dtype).to(key_dtype), mask=written
            )
            tl.store(
                key_buffer + (HALF + lane) * stride_key_buffer_e,
                key2.to(dtype).to(key_dtype),
                mask=written,
            )
        else:
            pair = (head - H - G).to(tl.int64)
            value_dtype: tl.constexpr = value_buffer.dtype.element_ty
            value += row * stride_value_b + index * stride_value_w + pair * stride_value_g
            value_buffer += (
                row * stride_value_buffer_b
                + slot * stride_value_buffer_r
                + pair * stride_value_buffer_g
            )
            value1 = tl.load(value + lane * stride_value_e, mask=inside)
            value2 = tl.load(value + (HALF + lane) * stride_value_e, mask=inside)
            tl.store(
                value_buffer + lane * stride_value_buffer_e, value1.to(value_dtype), mask=written
            )
            tl.store(
                value_buffer + (HALF + lane) * stride_value_buffer_e,
                value2.to(value_dtype),
                mask=written,
            )


def launch(given: Given) -> Tensor:
    """Returns the queries `[B, W, H, E]` and writes keys and values.

    There is one program per token and head of all three.
    """
    query: Tensor = given["query_BWHE"]
    batch, width, num_heads, size = query.shape
    _, ring, groups, _ = given["key_buffer_BRGE"].shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    run_kernel(
        _norm_rope_write_kernel,
        (batch * width, num_heads + 2 * groups),
        given,
        out=out,
        width=width,
        ring=ring,
        H=num_heads,
        G=groups,
        E=size,
        BLOCK=power_of_two(size // 2),
        num_warps=1,
    )
    return out


__all__ = ["launch"]
