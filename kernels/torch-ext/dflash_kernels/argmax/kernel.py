"""This is the kernel of `argmax`, in two stages, because a row of 150 thousand logits is spread over many programs."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import cdiv, power_of_two
from ..operation import Given

# A program makes one load and has no loop. A row of 150 thousand logits has 37 programs.
BLOCK_V = 4096


@triton.jit
def order_of(value):
    """Maps a float32 to an int32 with the same order.

    The result has the bits of the number. If it is negative, all bits except the sign are flipped. -0 is treated as 0,
    and NaN as the largest number.
    """
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def pack(value, column):
    """Returns `order_of(value) << 32 | 2^31 - 1 - column`.

    The greatest key is that of the greatest value's first column.
    """
    return (order_of(value).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit(do_not_specialize=["num_columns", "num_chunks"])
def _argmax_chunk_kernel(
    logits,
    partial,
    num_columns,
    vocab_size,
    num_chunks,
    stride_b,
    stride_k,
    stride_v,
    BLOCK_V: tl.constexpr,
):
    """Computes `partial[row, chunk] = max over the chunk of pack(logits[v], v)`."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    start = (row // num_columns).to(tl.int64) * stride_b + (row % num_columns).to(
        tl.int64
    ) * stride_k
    # Columns past the end lose against every other column, because they are the last columns of the smallest value.
    value = tl.load(
        logits + start + column.to(tl.int64) * stride_v,
        mask=column < vocab_size,
        other=float("-inf"),
    ).to(tl.float32)
    tl.store(partial + row * num_chunks + chunk, tl.max(pack(value, column), axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def argmax_row_kernel(partial, out, num_chunks, BLOCK_C: tl.constexpr):
    """Computes `out[row] = 2^31 - 1 - (max over chunks of partial[row, chunk] mod 2^31)`."""
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_C)
    # Lanes without a chunk read the first chunk again, which changes no maximum.
    packed = tl.load(partial + row * num_chunks + tl.where(chunk < num_chunks, chunk, 0))
    tl.store(out + row, 0x7FFFFFFF - (tl.max(packed, axis=0) & 0x7FFFFFFF))


def launch(given: Given) -> Tensor:
    """Returns the tokens `[...]`, int64, with two launches. The logits `[..., V]` may have any strides."""
    logits: Tensor = given["logits"]
    # Up to two leading dimensions keep their strides, so a slice of the block's slots is not copied.
    rows = logits[(None,) * (3 - logits.dim())] if logits.dim() < 4 else logits.flatten(0, -2)[None]
    batch, num_columns, vocab_size = rows.shape
    num_rows, num_chunks = batch * num_columns, cdiv(vocab_size, BLOCK_V)
    partial = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    out = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    sizes = (num_columns, vocab_size, num_chunks)
    _argmax_chunk_kernel[(num_rows, num_chunks)](
        rows, partial, *sizes, *rows.stride(), BLOCK_V=BLOCK_V, num_warps=8
    )
    argmax_row_kernel[(num_rows,)](
        partial, out, num_chunks, BLOCK_C=power_of_two(num_chunks), num_warps=1
    )
    return out


__all__ = ["argmax_row_kernel", "launch", "order_of", "pack"]
