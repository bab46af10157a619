"""This is the kernel of `top_tokens`.

It finds the greatest in each block of tokens, then in the best blocks of each row.
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
from ..argmax.kernel import order_of, pack
from ..operation import Given, run_kernel

# CHUNK is the number of tokens that a program of the first launch reads, in blocks of LONG or SHORT tokens. The second
# launch holds as many blocks as tokens are requested, which is up to 15 of the long blocks.
CHUNK, LONG, SHORT = 4096, 512, 128
# One key below the key of every token, and one above.
_NONE: tl.constexpr = tl.constexpr(-(1 << 63))
_ALL: tl.constexpr = tl.constexpr((1 << 63) - 1)


@triton.jit
def _value_of(order):
    """Returns the float32 whose `order_of` is `order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _row(scores, line, num_levels, num_states, stride_b, stride_d, stride_s):
    """Returns the pointer to the beginning of a row of scores."""
    row, level = line // (num_levels * num_states), line // num_states % num_levels
    start = row.to(tl.int64) * stride_b + level.to(tl.int64) * stride_d
    return scores + start + (line % num_states).to(tl.int64) * stride_s


@triton.jit
def _greatest(keys, num, BLOCK_R: tl.constexpr):
    """Returns the `num` greatest of keys that all differ, in falling order, and `_NONE` if there are no more."""
    rank = tl.arange(0, BLOCK_R)
    found, last = tl.full([BLOCK_R], _NONE, tl.int64), tl.full([], _ALL, tl.int64)
    for index in range(num):
        last = tl.max(tl.where(keys < last, keys, _NONE))
        found = tl.where(rank == index, last, found)
    return found


@triton.jit(do_not_specialize=["num_levels", "num_states", "num_blocks"])
def _top_tokens_block_kernel(
    scores,
    greatest,
    partial,
    num_levels,
    num_states,
    vocab_size,
    num_blocks,
    stride_scores_b,
    stride_scores_d,
    stride_scores_s,
    stride_scores_v,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes `greatest[row, block] = order_of(max over the block)`, and
    `partial[row, chunk] = log sum exp(score)`.
    """
    line, chunk = tl.program_id(0), tl.program_id(1)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None]
    at = _row(
        scores, line, num_levels, num_states, stride_scores_b, stride_scores_d, stride_scores_s
    )
    value = tl.load(
        at + token.to(tl.int64) * stride_scores_v, mask=token < vocab_size, other=float("-inf")
    )
    value = value.to(tl.float32)
    order = tl.max(order_of(value), axis=1)
    tl.store(greatest + line.to(tl.int64) * num_blocks + block, order, mask=block < num_blocks)
    most = _value_of(tl.max(order, axis=0))
    # If all scores are -inf, the sum is 0.
    most = tl.where(most == float("-inf"), 0, most)
    total = tl.sum(tl.sum(tl.exp(value - most), axis=1), axis=0)
    tl.store(partial + line.to(tl.int64) * tl.num_programs(1) + chunk, most + tl.log(total))


@triton.jit(do_not_specialize=["num", "num_levels", "num_states", "num_blocks", "num_chunks"])
def _top_tokens_row_kernel(
    scores,
    greatest,
    partial,
    log_probs,
    order,
    num,
    num_levels,
    num_states,
    vocab_size,
    num_blocks,
    num_chunks,
    stride_scores_b,
    stride_scores_d,
    stride_scores_s,
    stride_scores_v,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Finds the `num` greatest scores of a row.

    They are in the `num` blocks with the greatest maxima, the first of equal ones.
    """
    line = tl.program_id(0)
    block, chunk = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_C)
    is_block = block < num_blocks
    its_order = tl.load(greatest + line.to(tl.int64) * num_blocks + block, mask=is_block, other=0)
    keys = tl.where(
        is_block, (its_order.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64), _NONE
    )
    found = _greatest(keys, num, BLOCK_R)
    most = _value_of((tl.max(keys) >> 32).to(tl.int32))
    log_sum = tl.load(
        partial + line.to(tl.int64) * num_chunks + chunk,
        mask=chunk < num_chunks,
        other=float("-inf"),
    )
    log_total = tl.log(tl.sum(tl.exp(log_sum - most), axis=0))

    token = (0x7FFFFFFF - (found & 0x7FFFFFFF))[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None]
    is_token = (found > _NONE)[:, None] & (token < vocab_size)
    at = _row(
        scores, line, num_levels, num_states, stride_scores_b, stride_scores_d, stride_scores_s
    )
    value = tl.load(at + token * stride_scores_v, mask=is_token, other=0).to(tl.float32)
    found = _greatest(tl.where(is_token, pack(value, token), _NONE), num, BLOCK_R)

    rank = tl.arange(0, BLOCK_R)
    place = line.to(tl.int64) * num + rank
    tl.store(
        log_probs + place, _value_of((found >> 32).to(tl.int32)) - most - log_total, mask=rank < num
    )
    tl.store(order + place, 0x7FFFFFFF - (found & 0x7FFFFFFF), mask=rank < num)


def launch(given: Given) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities, float32, and tokens, int64, `[B, D, S, num]` each.

    The scores may have any strides.
    """
    scores: Tensor = given["scores_BDSV"]
    num: int = given["num"]
    batch, num_levels, num_states, vocab_size = scores.shape
    length = LONG if num < 16 else SHORT
    num_rows, num_blocks = batch * num_levels * num_states, cdiv(vocab_size, length)
    num_chunks = cdiv(vocab_size, CHUNK)
    greatest = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=scores.device)
    partial = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=scores.device)
    log_probs = torch.empty(*scores.shape[:-1], num, dtype=torch.float32, device=scores.device)
    order = torch.empty(*scores.shape[:-1], num, dtype=torch.int64, device=scores.device)
    shared = {
        "greatest": greatest,
        "partial": partial,
        "num_levels": num_levels,
        "num_states": num_states,
        "vocab_size": vocab_size,
        "num_blocks": num_blocks,
        "BLOCK_V": length,
        "num_warps": 8,
    }
    run_kernel(
        _top_tokens_block_kernel, (num_rows, num_chunks), given, BLOCKS=CHUNK // length, **shared
    )
    sizes = {
        "BLOCK_B": power_of_two(num_blocks),
        "BLOCK_C": power_of_two(num_chunks),
        "BLOCK_R": power_of_two(num),
    }
    run_kernel(
        _top_tokens_row_kernel,
        (num_rows,),
        given,
        log_probs=log_probs,
        order=order,
        num_chunks=num_chunks,
        **shared,
        **sizes,
    )
    return log_probs, order


__all__ = ["launch"]
