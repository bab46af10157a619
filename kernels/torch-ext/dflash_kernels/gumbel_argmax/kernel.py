"""This is the kernel of `gumbel_argmax`: hash, noise and maximum of a chunk of the vocabulary, then the maximum of all
chunks.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import cdiv, power_of_two
from ..argmax.kernel import argmax_row_kernel, pack
from ..operation import Given, run_kernel
from . import GOLDEN, MULTIPLIER

BLOCK_V = 2048
_MULTIPLIER: tl.constexpr = tl.constexpr(MULTIPLIER)
_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
# The kernel always gets these tensors. If one is not given, it gets another tensor in its place and does not read it.
_OPTIONAL = ("least_BK", "rows_B", "first_BK")


@triton.jit
def _mix(bits):
    """Returns the hash of the definition's `_mix`."""
    bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * _MULTIPLIER
    bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * _MULTIPLIER
    return bits ^ ((bits >> 32) & 0xFFFFFFFF)


@triton.jit(
    do_not_specialize=["num_columns", "vocab_size", "num_chunks", "temperature", "noise_stream"]
)
def _gumbel_chunk_kernel(
    logits,
    seed,
    positions,
    rows,
    least,
    first,
    partial,
    num_columns,
    vocab_size,
    num_chunks,
    temperature,
    noise_stream,
    stride_logits_b,
    stride_logits_k,
    stride_logits_v,
    stride_positions_b,
    stride_positions_k,
    HAS_ROWS: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes `partial[row, chunk] = max over the chunk of pack(score + noise, token)`."""
    line, chunk = tl.program_id(0), tl.program_id(1)
    row, column = (line // num_columns).to(tl.int64), (line % num_columns).to(tl.int64)
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    at = (
        logits
        + row * stride_logits_b
        + column * stride_logits_k
        + token.to(tl.int64) * stride_logits_v
    )
    score = tl.load(at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(score, tl.full((BLOCK_V,), 1.0, tl.float32) * temperature)
    if HAS_LEAST:
        lowest = tl.div_rn(tl.load(least + line), temperature + tl.zeros((), tl.float32))
        left_out = score < lowest
        if HAS_FIRST:
            left_out = left_out | ((score == lowest) & (token < tl.load(first + line)))
        score = tl.where(left_out, float("-inf"), score)
    position = tl.load(positions + row * stride_positions_b + column * stride_positions_k)
    number = row
    if HAS_ROWS:
        number = tl.load(rows + row)
    lane = _mix(_mix(tl.load(seed) + noise_stream) ^ (number << 40) ^ position)
    bits = _mix(lane + (token.to(tl.int64) + 1) * _GOLDEN)
    uniform = (((bits >> 20) & 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    uniform = tl.minimum(uniform, 0.99999994)  # 1 - 2^-24
    # This is -log1p(-u). The noise that wins a draw is small, and there a logarithm of 1 - u would lose digits. So a
    # series is used below 1/16.
    series = uniform * (
        1.0
        + uniform
        * (0.5 + uniform * (1 / 3 + uniform * (0.25 + uniform * (0.2 + uniform * (1 / 6)))))
    )
    noise = tl.where(uniform < 0.0625, series, -tl.log(1.0 - uniform))
    value = tl.where(token < vocab_size, score - tl.log(noise), float("-inf"))
    tl.store(partial + line * num_chunks + chunk, tl.max(pack(value, token), axis=0))


def launch(given: Given) -> Tensor:
    """Returns the tokens `[B, K]`, int64, with two launches. The logits and positions may have any strides."""
    logits: Tensor = given["logits_BKV"]
    least: Tensor | None = given["least_BK"]
    first: Tensor | None = given["first_BK"]
    rows: Tensor | None = given["rows_B"]
    batch, num_columns, vocab_size = logits.shape
    num_lines, num_chunks = batch * num_columns, cdiv(vocab_size, BLOCK_V)
    partial = torch.empty(num_lines, num_chunks, dtype=torch.int64, device=logits.device)
    out = torch.empty(batch, num_columns, dtype=torch.int64, device=logits.device)
    run_kernel(
        _gumbel_chunk_kernel,
        (num_lines, num_chunks),
        {name: value for name, value in given.items() if name not in _OPTIONAL},
        least=partial if least is None else least.contiguous(),
        first=partial if first is None else first.contiguous(),
        rows=partial if rows is None else rows.contiguous(),
        partial=partial,
        num_columns=num_columns,
        vocab_size=vocab_size,
        num_chunks=num_chunks,
        noise_stream=given["stream"],  # Triton keeps the name `stream` for itself
        HAS_LEAST=least is not None,
        HAS_FIRST=first is not None,
        HAS_ROWS=rows is not None,
        BLOCK_V=BLOCK_V,
        num_warps=8,
    )
    argmax_row_kernel[(num_lines,)](
        partial, out, num_chunks, BLOCK_C=power_of_two(num_chunks), num_warps=1
    )
    return out


__all__ = ["launch"]
