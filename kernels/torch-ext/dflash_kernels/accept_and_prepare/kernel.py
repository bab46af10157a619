"""This is the kernel of `accept_and_prepare`, with one program per row."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import triton
import triton.language as tl

from .._dispatch import power_of_two
from ..operation import Given, run_kernel


# Arguments that differ from run to run must not make the kernel compile again.
@triton.jit(do_not_specialize=["stride_ids_b", "stride_record_f", "num_eos", "num_ids"])
def _accept_and_prepare_kernel(
    block,
    tokens,
    cursor,
    remaining,
    done,
    ids,
    draft_ids,
    positions,
    record,
    eos_ids,
    accepted,
    stride_block_b,
    stride_tokens_b,
    stride_ids_b,
    stride_draft_ids_b,
    stride_positions_b,
    stride_record_f,
    num_eos,
    width,
    num_ids,
    num_positions,
    HAS_ACCEPTED: tl.constexpr,
    HAS_EOS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Computes for each row, with `i` counting from 0:

    `accepted  = min {i : block[i + 1] != tokens[i]}`, `W - 1` where there is none
    `committed = 0 if done else min(accepted + 1, remaining, 1 + min {i : tokens[i] is EOS})`
    `ids[cursor + i] = tokens[i]` for `i < committed`; `block[0] = tokens[committed - 1]`;
    `cursor += committed`, `remaining -= committed`, `positions[i] += committed`.
    """
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK_W)
    inside = index < width
    token = tl.load(tokens + row * stride_tokens_b + index, mask=inside, other=0)
    anchor = tl.load(block + row * stride_block_b)
    if HAS_ACCEPTED:
        num_accepted = tl.load(accepted + row).to(tl.int64)
    else:
        proposed = index < width - 1
        proposal = tl.load(block + row * stride_block_b + 1 + index, mask=proposed, other=0)
        num_accepted = tl.min(
            tl.where(proposed & (proposal != token), index, width - 1), axis=0
        ).to(tl.int64)

    first = tl.load(cursor + row).to(tl.int64)
    left = tl.load(remaining + row).to(tl.int64)
    was_done = tl.load(done + row) != 0
    up_to_end = tl.full([], BLOCK_W + 1, tl.int64)
    if HAS_EOS:
        ends = index < 0
        for i in range(num_eos):
            ends = ends | (token == tl.load(eos_ids + i))
        # Lanes behind the block may look like an end of the text. This end is behind every token that can be
        # committed.
        up_to_end = tl.min(tl.where(ends, index + 1, BLOCK_W + 1), axis=0).to(tl.int64)
    committed = tl.minimum(tl.minimum(num_accepted + 1, left), up_to_end)
    finished = was_done | (committed == up_to_end) | (committed >= left)
    committed = tl.where(was_done, 0, committed)

    column = first + index
    tl.store(
        ids + row.to(tl.int64) * stride_ids_b + column,
        token,
        mask=(index < committed) & (column < num_ids),
    )
    last = tl.sum(tl.where(index == committed - 1, token, 0), axis=0)
    anchor = tl.where(committed > 0, last, anchor)
    # With one warp, every lane has loaded its values before one of them stores.
    tl.store(cursor + row, first + committed)
    tl.store(remaining + row, left - committed)
    tl.store(done + row, finished)
    tl.store(block + row * stride_block_b, anchor)

    tl.store(draft_ids + row * stride_draft_ids_b, anchor)
    positions += row * stride_positions_b
    slot = tl.arange(0, BLOCK_P)
    length = tl.load(positions) + committed
    position = tl.load(positions + slot, mask=slot < num_positions, other=0)
    tl.store(positions + slot, position + committed, mask=slot < num_positions)

    record += row
    tl.store(record, committed)
    tl.store(record + stride_record_f, num_accepted)
    tl.store(record + 2 * stride_record_f, length)
    tl.store(record + 3 * stride_record_f, finished.to(tl.int64))
    tl.store(record + 4 * stride_record_f, first + committed)
    tl.store(record + (5 + index) * stride_record_f, token, mask=inside)


def launch(given: Given) -> None:
    """Launches the kernel, one program per row."""
    batch, width = given["tokens_BW"].shape
    eos_ids, num_positions = given["eos_ids_N"], given["positions_BP"].shape[1]
    run_kernel(
        _accept_and_prepare_kernel,
        (batch,),
        given,
        num_eos=0 if eos_ids is None else eos_ids.shape[0],
        width=width,
        num_ids=given["ids_BT"].shape[1],
        num_positions=num_positions,
        HAS_ACCEPTED=given["accepted_B"] is not None,
        HAS_EOS=eos_ids is not None,
        BLOCK_W=power_of_two(width),
        BLOCK_P=power_of_two(num_positions),
        num_warps=1,
    )


__all__ = ["launch"]
