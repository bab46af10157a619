"""This is the kernel of `context_kv`. It handles all layers in one launch, with one warp per token, layer and head."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import triton
import triton.language as tl

from .._dispatch import power_of_two, split_rings
from ..operation import Given, run_kernel
from ..rotary_kernel import norm_and_rotate


@triton.jit
def _address(pointers, layer, L: tl.constexpr):
    """Returns the pointer of a layer as an integer. The layer is known only when the kernel runs."""
    address = pointers[0].to(tl.int64)
    for index in tl.static_range(1, L):
        address = tl.where(layer == index, pointers[index].to(tl.int64), address)
    return address


@triton.jit(do_not_specialize=["longest", "width"])
def _context_kv_kernel(
    projected,
    weight,
    cos,
    sin,
    lengths,
    key_buffers,
    value_buffers,
    longest,
    shorter,
    width,
    eps,
    stride_lengths_b,
    stride_projected_b,
    stride_projected_w,
    stride_projected_l,
    stride_projected_a,
    stride_projected_g,
    stride_projected_e,
    stride_weight_l,
    stride_weight_e,
    stride_cos_b,
    stride_cos_w,
    stride_cos_e,
    stride_sin_b,
    stride_sin_w,
    stride_sin_e,
    L: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes token `i` of row `b`, at `p = lengths[b] + i >= 0`, for every layer `l` with a ring of `R` slots:

    `keys[l][b, p mod R] = rope(norm(projected[b, i, l, 0]))`, `values[l][b, p mod R] = projected[b, i, l, 1]`.
    """
    token, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, index = (token // width).to(tl.int64), token % width
    dtype: tl.constexpr = projected.dtype.element_ty
    projected += row * stride_projected_b + index * stride_projected_w + layer * stride_projected_l
    ring = longest
    for other in tl.static_range(L):
        if shorter[other] is not None:
            ring = tl.where(layer == other, shorter[other], ring)
    position = tl.load(lengths + row * stride_lengths_b).to(tl.int64) + index
    HALF: tl.constexpr = E // 2
    lane = tl.arange(0, BLOCK)
    written = (lane < HALF) & (position >= 0)
    start = (row * ring + tl.where(position >= 0, position, 0) % ring) * G
    if head < G:
        buffer_dtype: tl.constexpr = key_buffers[0].dtype.element_ty
        key1, key2 = norm_and_rotate(
            projected + head * stride_projected_g,
            weight + layer * stride_weight_l,
            cos + row * stride_cos_b + index * stride_cos_w,
            sin + row * stride_sin_b + index * stride_sin_w,
            stride_projected_e,
            stride_weight_e,
            stride_cos_e,
            stride_sin_e,
            eps,
            E,
            BLOCK,
        )
        keys = (
            _address(key_buffers, layer, L).to(tl.pointer_type(buffer_dtype)) + (start + head) * E
        )
        # If the buffer has another dtype, the key is first rounded to its own dtype.
        tl.store(keys + lane, key1.to(dtype).to(buffer_dtype), mask=written)
        tl.store(keys + HALF + lane, key2.to(dtype).to(buffer_dtype), mask=written)
    else:
        group = head - G
        value_dtype: tl.constexpr = value_buffers[0].dtype.element_ty
        projected += stride_projected_a + group * stride_projected_g
        value1 = tl.load(projected + lane * stride_projected_e, mask=written)
        value2 = tl.load(projected + (HALF + lane) * stride_projected_e, mask=written)
        values = (
            _address(value_buffers, layer, L).to(tl.pointer_type(value_dtype)) + (start + group) * E
        )
        tl.store(values + lane, value1.to(value_dtype), mask=written)
        tl.store(values + HALF + lane, value2.to(value_dtype), mask=written)


def launch(given: Given) -> None:
    """Launches the kernel, with one program per token, layer and head of keys and values."""
    batch, width, num_layers, _, groups, size = given["projected_BWLAGE"].shape
    keys, values = tuple(given["key_buffers"]), tuple(given["value_buffers"])
    longest, shorter = split_rings([buffer.shape[1] for buffer in keys])
    run_kernel(
        _context_kv_kernel,
        (batch * width, num_layers, 2 * groups),
        given | {"key_buffers": keys, "value_buffers": values},
        longest=longest,
        shorter=shorter,
        width=width,
        L=num_layers,
        G=groups,
        E=size,
        BLOCK=power_of_two(size // 2),
        num_warps=1,
    )


__all__ = ["launch"]
