"""`top_tokens` in Triton: what is greatest in each block of tokens, then in the best blocks of each row."""

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

# Tokens of a block, and blocks that a program of the first launch looks at.
BLOCK_V = 128
BLOCKS = 32
# Below the key of every token, and above it.
_NONE: tl.constexpr = tl.constexpr(-(1 << 63))
_ALL: tl.constexpr = tl.constexpr((1 << 63) - 1)


@triton.jit
def _value_of(order):
    """Returns the float32 whose `order_of` this is."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _row(scores, line, num_levels, num_states, stride_b, stride_d, stride_s):
    """Returns where a row of scores begins."""
    row, level = line // (num_levels * num_states), line // num_states % num_levels
    start = row.to(tl.int64) * stride_b + level.to(tl.int64) * stride_d
    return scores + start + (line % num_states).to(tl.int64) * stride_s


@triton.jit
def _greatest(keys, num, BLOCK_R: tl.constexpr):
    """Returns the `num` greatest of keys that all differ, falling, and `_NONE` where there are no more."""
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
    mass,
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
    """`greatest[row, block] = order_of(max over the block)` and `mass[row, block] = sum exp(score - max)`."""
    line = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None]
    at = _row(scores, line, num_levels, num_states, stride_scores_b, stride_scores_d, stride_scores_s)
    value = tl.load(at + token.to(tl.int64) * stride_scores_v, mask=token < vocab_size, other=float("-inf"))
    value = value.to(tl.float32)
    order = tl.max(order_of(value), axis=1)
    most = _value_of(order)
    # Of -inf alone there is nothing to sum.
    shifted = value - tl.where(most == float("-inf"), 0, most)[:, None]
    place = line.to(tl.int64) * num_blocks + block
    tl.store(greatest + place, order, mask=block < num_blocks)
    tl.store(mass + place, tl.sum(tl.exp(shifted), axis=1), mask=block < num_blocks)


@triton.jit(do_not_specialize=["num", "num_levels", "num_states", "num_blocks"])
def _top_tokens_row_kernel(
    scores,
    greatest,
    mass,
    log_probs,
    order,
    num,
    num_levels,
    num_states,
    vocab_size,
    num_blocks,
    stride_scores_b,
    stride_scores_d,
    stride_scores_s,
    stride_scores_v,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The `num` greatest of a row are in the `num` blocks that have the greatest maxima, of equal ones the first."""
    line = tl.program_id(0)
    block = tl.arange(0, BLOCK_C)
    is_block = block < num_blocks
    place = line.to(tl.int64) * num_blocks + block
    its_order = tl.load(greatest + place, mask=is_block, other=0)
    its_most = tl.where(is_block, _value_of(its_order), float("-inf"))
    keys = tl.where(is_block, (its_order.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64), _NONE)
    found = _greatest(keys, num, BLOCK_R)
    most = _value_of((tl.max(keys) >> 32).to(tl.int32))
    its_mass = tl.load(mass + place, mask=is_block, other=0)
    log_total = tl.log(tl.sum(its_mass * tl.exp(its_most - most), axis=0))

    token = (0x7FFFFFFF - (found & 0x7FFFFFFF))[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None]
    is_token = (found > _NONE)[:, None] & (token < vocab_size)
    at = _row(scores, line, num_levels, num_states, stride_scores_b, stride_scores_d, stride_scores_s)
    value = tl.load(at + token * stride_scores_v, mask=is_token, other=0).to(tl.float32)
    found = _greatest(tl.where(is_token, pack(value, token), _NONE), num, BLOCK_R)

    rank = tl.arange(0, BLOCK_R)
    place = line.to(tl.int64) * num + rank
    tl.store(log_probs + place, _value_of((found >> 32).to(tl.int32)) - most - log_total, mask=rank < num)
    tl.store(order + place, 0x7FFFFFFF - (found & 0x7FFFFFFF), mask=rank < num)


def launch(given: Given) -> tuple[Tensor, Tensor]:
    """Launches both, over scores of any strides."""
    scores: Tensor = given["scores_BDSV"]
    num: int = given["num"]
    batch, num_levels, num_states, vocab_size = scores.shape
    num_rows, num_blocks = batch * num_levels * num_states, cdiv(vocab_size, BLOCK_V)
    greatest = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=scores.device)
    mass = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=scores.device)
    log_probs = torch.empty(*scores.shape[:-1], num, dtype=torch.float32, device=scores.device)
    order = torch.empty(*scores.shape[:-1], num, dtype=torch.int64, device=scores.device)
    shared = {
        "greatest": greatest,
        "mass": mass,
        "num_levels": num_levels,
        "num_states": num_states,
        "vocab_size": vocab_size,
        "num_blocks": num_blocks,
        "BLOCK_V": BLOCK_V,
        "num_warps": 8,
    }
    run_kernel(_top_tokens_block_kernel, (num_rows, cdiv(num_blocks, BLOCKS)), given, BLOCKS=BLOCKS, **shared)
    sizes = {"BLOCK_C": power_of_two(num_blocks), "BLOCK_R": power_of_two(num)}
    run_kernel(_top_tokens_row_kernel, (num_rows,), given, log_probs=log_probs, order=order, **shared, **sizes)
    return log_probs, order


__all__ = ["launch"]
