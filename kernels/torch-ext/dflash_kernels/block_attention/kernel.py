"""This is the kernel of `block_attention`. It is split over the cache, and packs the query heads of a key head.

All queries of a key head read the same keys. So its `H / G * W` rows (64 for Qwen3-8B) are one tile of a matrix
product, and the cache is read once. Each row's length is read on the device, and its part of the cache is divided
among a fixed number of programs. A second kernel joins their partial results.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import cdiv, interprets, power_of_two
from ..operation import Given, run_kernel

LOG2_E = tl.constexpr(math.log2(math.e))
# A program that reads fewer tiles than this costs more in the reduction than it saves.
MIN_TILES_PER_SPLIT = 2
MIN_TILES = tl.constexpr(MIN_TILES_PER_SPLIT)
MAX_SPLITS = 128


@triton.jit
def _slots_of_share(num_slots, splits, BLOCK_N: tl.constexpr):
    """Returns how many of a row's slots a program reads.

    A row may be far shorter than its buffer, for which `splits` was chosen. Then only some of the shares have slots.
    They take the same time, and the reduction has less to do.
    """
    num_tiles = tl.cdiv(num_slots, BLOCK_N)
    return tl.maximum(tl.cdiv(num_tiles, splits), MIN_TILES) * BLOCK_N


@triton.jit
def _attend_tiles(
    acc,
    top,
    total,
    query,
    key,
    value,
    begin,
    end,
    length,
    position,
    is_row,
    depths,
    ancestors,
    width,
    ring,
    scaling,
    softcap,
    stride_depths_w,
    stride_ancestors_a,
    stride_key_r,
    stride_key_e,
    stride_value_r,
    stride_value_e,
    MASKED: tl.constexpr,
    WORDS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FROM_ANCHOR: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes an online softmax over slots `[begin, end)`: `m' = max(m, max s)`,
    `l' = l 2^(m - m') + sum 2^(s - m')`, and `acc' = acc 2^(m - m') + 2^(s - m') v`, with
    `s = log2(e) cap(scaling q k^T)`.

    Without a soft cap `log2(e)` is in `scaling`.

    Without `MASKED`, every query sees every slot, and `end - begin` is a multiple of the tile. `WORDS` is the number
    of words of a node's ancestors in a tree, or 0 if the block is a chain.
    """
    size_k, size_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    lane = tl.arange(0, BLOCK_N)
    last = length + width - 1
    # In a row that has wrapped, slots up to `turn` were written in this round of the ring, and the others in the round
    # before.
    turn, lap = last % ring, last - last % ring
    # The start is computed in 64 bits once, because the offsets within a tile fit into 32 bits.
    key += begin.to(tl.int64) * stride_key_r
    value += begin.to(tl.int64) * stride_value_r
    for start in range(begin, end, BLOCK_N):
        slot = start + lane
        inside = slot < end
        keys = key + lane[None, :] * stride_key_r + size_k[:, None] * stride_key_e
        values = value + lane[:, None] * stride_value_r + size_v[None, :] * stride_value_e
        if MASKED:
            k = tl.load(keys, mask=inside[None, :] & (size_k[:, None] < KEY_SIZE), other=0.0)
            v = tl.load(values, mask=inside[:, None] & (size_v[None, :] < VALUE_SIZE), other=0.0)
        else:
            k = tl.load(keys, mask=size_k[:, None] < KEY_SIZE, other=0.0)
            v = tl.load(values, mask=size_v[None, :] < VALUE_SIZE, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(query, k, input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = LOG2_E * softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if MASKED:
            held = slot + tl.where(slot <= turn, lap, lap - ring)
            seen = (inside & (held >= 0))[None, :] & (position >= 0)[:, None]
            if WORDS > 0:
                node = tl.maximum(held - length, 0)
                is_node = inside & (held >= length)
                depth = tl.load(depths + node * stride_depths_w, mask=is_node, other=0).to(tl.int32)
                # Words are split into halves of 32 bits, because a tile of 64-bit integers needs more registers than
                # there are.
                half = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
                for word in tl.static_range(WORDS):
                    bits = tl.load(ancestors + word * stride_ancestors_a, mask=is_row, other=0)
                    low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
                    half = tl.where((node // 32 == 2 * word)[None, :], low[:, None], half)
                    half = tl.where((node // 32 == 2 * word + 1)[None, :], high[:, None], half)
                is_ancestor = ((half >> (node % 32)[None, :]) & 1) != 0
                seen = seen & (is_ancestor | (held < length)[None, :])
                held = tl.where(is_node, length + depth, held)
            ahead = held[None, :] - position[:, None]
            if CAUSAL:
                seen = seen & (ahead <= 0)
            if WINDOW is not None:
                if FROM_ANCHOR:
                    seen = seen & (length - held <= WINDOW)[None, :]
                else:
                    seen = seen & (-ahead < WINDOW)
                    if not CAUSAL:
                        seen = seen & (ahead < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, axis=1)
        weights = weights.to(value.dtype.element_ty)
        if UPCAST:
            weights = weights.to(tl.float32)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
        top = new_top
        key += BLOCK_N * stride_key_r
        value += BLOCK_N * stride_value_r
    return acc, top, total


# Arguments that grow with the context must not make the kernel compile again.
@triton.jit(do_not_specialize=["width", "ring", "splits"])
def _block_attention_kernel(
    query,
    key,
    value,
    lengths,
    sinks,
    depths,
    ancestors,
    out,
    partial,
    tops,
    totals,
    width,
    ring,
    splits,
    scaling,
    softcap,
    stride_lengths_b,
    stride_depths_b,
    stride_depths_w,
    stride_ancestors_b,
    stride_ancestors_w,
    stride_ancestors_a,
    stride_query_b,
    stride_query_h,
    stride_query_w,
    stride_query_e,
    stride_key_b,
    stride_key_g,
    stride_key_r,
    stride_key_e,
    stride_value_b,
    stride_value_g,
    stride_value_r,
    stride_value_f,
    H: tl.constexpr,
    G: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WORDS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FROM_ANCHOR: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes the attention of `BLOCK_M` queries of one key head over one of `splits` shares of a row's slots.

    With one share, `out = acc / (l + 2^(sink - m))`. With more shares, `acc`, `m` and `l` are stored for the
    reduction.
    """
    tile, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, group = (pair // G).to(tl.int64), pair % G
    length = tl.load(lengths + batch * stride_lengths_b).to(tl.int32)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < (H // G) * width
    head, index = group * (H // G) + row // width, row % width
    size_k, size_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    at = query + batch * stride_query_b + head * stride_query_h + index * stride_query_w
    q = tl.load(
        at[:, None] + size_k[None, :] * stride_query_e,
        mask=is_row[:, None] & (size_k[None, :] < KEY_SIZE),
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    # The heads of keys that a target expands are as far apart as its buffer is long, which is more than 2^31 in a long
    # buffer.
    key += batch * stride_key_b + group.to(tl.int64) * stride_key_g
    value += batch * stride_value_b + group.to(tl.int64) * stride_value_g

    num_filled = tl.minimum(tl.maximum(length + width, 0), ring)
    lowest, num_plain = 0, tl.minimum(length + 1, num_filled)
    if WINDOW is not None:
        # Before `lowest` nothing is seen, as long as slots are indices. Everything after it may be near an edge of the
        # window.
        lowest, num_plain = tl.where(length + width <= ring, tl.maximum(length - WINDOW, 0), 0), 0
    share = _slots_of_share(num_filled - lowest, splits, BLOCK_N)
    begin = lowest + split * share
    end = tl.minimum(begin + share, num_filled)
    # These are whole tiles that every query of the block sees: up to the anchor, in a row that has not wrapped.
    num_plain = tl.where((length + width <= ring) & (length >= 0), num_plain, 0)
    middle = begin + tl.maximum(tl.minimum(end, num_plain) - begin, 0) // BLOCK_N * BLOCK_N

    position = length + index
    if WORDS > 0:
        depths += batch * stride_depths_b
        position = length + tl.load(depths + index * stride_depths_w, mask=is_row, other=0).to(
            tl.int32
        )
        ancestors += batch * stride_ancestors_b + index * stride_ancestors_w

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for masked in tl.static_range(2):
        acc, top, total = _attend_tiles(
            acc, top, total, q, key, value,
            middle if masked else begin, end if masked else middle,
            length, position, is_row, depths, ancestors, width, ring, scaling, softcap, stride_depths_w,
            stride_ancestors_a, stride_key_r, stride_key_e, stride_value_r, stride_value_f,
            masked, WORDS, CAUSAL, WINDOW, FROM_ANCHOR, HAS_SOFTCAP, UPCAST,
            KEY_SIZE, VALUE_SIZE, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_V,
        )  # fmt: skip

    line = (batch * width + index) * H + head
    is_out = is_row[:, None] & (size_v[None, :] < VALUE_SIZE)
    if IS_SPLIT:
        line = line * splits + split
        tl.store(tops + line, top, mask=is_row)
        tl.store(totals + line, total, mask=is_row)
        # A share without slots does not write its part. The reduction does not read parts whose total is 0.
        tl.store(
            partial + line[:, None] * VALUE_SIZE + size_v[None, :],
            acc,
            mask=is_out & (total > 0)[:, None],
        )
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            new_top = tl.maximum(top, sink)
            decay = tl.exp2(top - new_top)
            acc, total = acc * decay[:, None], total * decay + tl.exp2(sink - new_top)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + line[:, None] * VALUE_SIZE + size_v[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_out,
        )


@triton.jit(do_not_specialize=["splits"])
def _reduce_kernel(
    partial,
    tops,
    totals,
    sinks,
    out,
    splits,
    H: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Joins the partial results of a line, where `m` is the greatest `m_s` or sink:

    `out = sum_s acc_s 2^(m_s - m) / (sum_s l_s 2^(m_s - m) + 2^(sink - m))`.
    """
    line = tl.program_id(0).to(tl.int64)
    split, size = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    is_split = split < splits
    top = tl.load(tops + line * splits + split, mask=is_split, other=float("-inf"))
    total = tl.load(totals + line * splits + split, mask=is_split, other=0.0)
    greatest = tl.max(top, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + line % H).to(tl.float32) * LOG2_E
        greatest = tl.maximum(greatest, sink)
    greatest = tl.where(greatest == float("-inf"), 0.0, greatest)
    share = tl.exp2(top - greatest)
    norm = tl.sum(total * share, axis=0)
    if HAS_SINKS:
        norm += tl.exp2(sink - greatest)
    at = partial + (line * splits + split)[:, None] * VALUE_SIZE + size[None, :]
    parts = tl.load(at, mask=(total > 0)[:, None] & (size[None, :] < VALUE_SIZE), other=0.0)
    joined = tl.sum(parts * share[:, None], axis=0) / tl.where(norm > 0, norm, 1.0)
    tl.store(
        out + line * VALUE_SIZE + size, joined.to(out.dtype.element_ty), mask=size < VALUE_SIZE
    )


@functools.cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Returns the number of multiprocessors, and the bytes of shared memory that a program may have.

    On a CPU both are small.
    """
    if device.type != "cuda":
        return 4, 99 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def tile_sizes(
    width: int, heads_per_key: int, key_size: int, value_size: int, itemsize: int, shared_bytes: int
) -> tuple[int, int, int, int]:
    """Returns rows and slots of a tile, stages and warps, so that no registers spill on Hopper (see the tests).

    In 16 bits, Hopper's matrix units take 64 rows at once, and two programs fit into a multiprocessor. With less
    shared memory, a tile has half the slots. With very little shared memory, there is also one stage less. In float32
    there are no matrix units for exact products, so tiles are small.
    """
    block_m = max(power_of_two(width * heads_per_key), 16)
    size = power_of_two(max(key_size, value_size))
    if itemsize > 2:
        return 16, 32 if size <= 64 else 16, 2, 4
    block_n = 64 if size <= 64 or (size <= 128 and shared_bytes > 200 * 1024) else 32
    num_stages = 3 if shared_bytes > 128 * 1024 else 2
    return min(block_m, 64), block_n, num_stages, 4 if size <= 128 else 8


def choose_num_splits(num_tiles: int, num_programs: int, num_processors: int) -> int:
    """Returns the number of shares of a row's slots.

    No share is too small, and there are at most two programs per multiprocessor.

    If there were more programs than fit at once, one more program would take as long again as all others. The number
    follows from sizes that the host knows, so the grid of a captured launch never changes.

    Args:
        num_tiles (`int`): Number of tiles of a full row.
        num_programs (`int`): Number of programs of one share.
        num_processors (`int`): Number of multiprocessors of the device.
    """
    wanted = 2 * num_processors // num_programs
    return max(1, min(wanted, num_tiles // MIN_TILES_PER_SPLIT, MAX_SPLITS))


def launch(given: Given) -> Tensor:
    """Returns the attention `[B, W, H, F]` in the dtype of the queries.

    It launches the kernel. With more than one split, it also launches the reduction over the splits.
    """
    query, (_, groups, ring, value_size) = given["query_BHWE"], given["value_BGRF"].shape
    batch, num_heads, width, key_size = query.shape
    softcap, sinks = given["softcap"], given["sinks_H"]
    sinks = None if sinks is None else sinks.contiguous()
    num_processors, shared_bytes = device_limits(query.device)
    block_m, block_n, num_stages, num_warps = tile_sizes(
        width, num_heads // groups, key_size, value_size, query.element_size(), shared_bytes
    )
    words = 0 if given["ancestors_BWA"] is None else given["ancestors_BWA"].shape[2]
    if words > 0:
        block_n = min(block_n, 32)  # a tree's mask needs the registers of a larger tile
    if words > 2:
        num_warps = 8  # the mask of a large tree needs the registers of more than 4 warps
    num_blocks = cdiv(num_heads // groups * width, block_m)
    splits = choose_num_splits(cdiv(ring, block_n), num_blocks * batch * groups, num_processors)
    out = query.new_empty(batch, width, num_heads, value_size)
    lines = (batch, width, num_heads, splits)
    partial = out if splits == 1 else out.new_empty(*lines, value_size, dtype=torch.float32)
    tops, totals = (
        (out, out) if splits == 1 else out.new_empty(2, *lines, dtype=torch.float32).unbind(0)
    )
    shared: Given = {
        "sinks": sinks,
        "out": out,
        "partial": partial,
        "tops": tops,
        "totals": totals,
        "splits": splits,
        "H": num_heads,
        "HAS_SINKS": sinks is not None,
        "VALUE_SIZE": value_size,
        "BLOCK_V": max(power_of_two(value_size), 16),
    }
    run_kernel(
        _block_attention_kernel,
        (num_blocks, splits, batch * groups),
        given,
        **shared,
        width=width,
        ring=ring,
        # Powers of two are cheaper than powers of e. So log2(e) is part of the factor on the scores, or is applied
        # after the soft cap.
        scaling=given["scaling"] * (1.0 if softcap is not None else math.log2(math.e)),
        softcap=softcap or 0.0,
        G=groups,
        IS_SPLIT=splits > 1,
        WORDS=words,
        CAUSAL=given["causal"],
        WINDOW=given["window"],
        FROM_ANCHOR=given["from_anchor"],
        HAS_SOFTCAP=softcap is not None,
        # The interpreter's tl.dot does not support bfloat16.
        UPCAST=interprets() and query.dtype == torch.bfloat16,
        KEY_SIZE=key_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=max(power_of_two(key_size), 16),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if splits > 1:
        num_warps = 4 if splits <= 64 else 8  # the partial results of a line are in registers
        _reduce_kernel[(batch * width * num_heads,)](
            **shared, BLOCK_S=power_of_two(splits), num_warps=num_warps
        )
    return out


__all__ = ["choose_num_splits", "device_limits", "launch", "tile_sizes"]
