"""`accept_and_prepare` in Triton: one program per row."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportUnnecessaryComparison=false
# (jit functions are Triton's language: their arguments are typed by the launch, which takes options besides)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import power_of_two


# What differs from run to run must not make it compile again.
@triton.jit(do_not_specialize=["num_eos", "num_ids", "mask_token_id"])
def _accept_and_prepare_kernel(
    block,
    tokens,
    accepted_ptr,
    eos_ids,
    lengths,
    cursor_ptr,
    remaining_ptr,
    done_ptr,
    ids,
    draft_ids,
    positions,
    record,
    step_ptr,
    num_eos,
    num_rows,
    width,
    num_ids,
    num_drafted,
    num_positions,
    num_slots,
    mask_token_id,
    stride_block,
    stride_tokens,
    stride_ids,
    stride_draft,
    stride_positions,
    HAS_ACCEPTED: tl.constexpr,
    HAS_EOS: tl.constexpr,
    HAS_STEP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Per row, with `i` counting from 0:

    `accepted  = min {i : block[i + 1] != tokens[i]}`, `W - 1` where there is none
    `committed = 0 if done else min(accepted + 1, remaining, 1 + min {i : tokens[i] is EOS})`
    `ids[cursor + i] = tokens[i]` for `i < committed`; `block[0] = tokens[committed - 1]`;
    `lengths += committed`, `cursor += committed`, `remaining -= committed`, `positions[i] = lengths + i`.
    """
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK_W)
    inside = index < width
    token = tl.load(tokens + row * stride_tokens + index, mask=inside, other=0)
    anchor = tl.load(block + row * stride_block)
    if HAS_ACCEPTED:
        accepted = tl.load(accepted_ptr + row).to(tl.int64)
    else:
        proposed = index < width - 1
        proposal = tl.load(block + row * stride_block + 1 + index, mask=proposed, other=0)
        accepted = tl.min(tl.where(proposed & (proposal != token), index, width - 1), axis=0).to(tl.int64)

    cursor = tl.load(cursor_ptr + row).to(tl.int64)
    remaining = tl.load(remaining_ptr + row).to(tl.int64)
    was_done = tl.load(done_ptr + row) != 0
    up_to_end = tl.full([], BLOCK_W + 1, tl.int64)
    if HAS_EOS:
        ends = index < 0
        for i in range(num_eos):
            ends = ends | (token == tl.load(eos_ids + i))
        # Lanes behind the block may seem to end the text: behind anything that can be committed.
        up_to_end = tl.min(tl.where(ends, index + 1, BLOCK_W + 1), axis=0).to(tl.int64)
    committed = tl.minimum(tl.minimum(accepted + 1, remaining), up_to_end)
    finished = was_done | (committed == up_to_end) | (committed >= remaining)
    committed = tl.where(was_done, 0, committed)

    column = cursor + index
    tl.store(ids + row.to(tl.int64) * stride_ids + column, token, mask=(index < committed) & (column < num_ids))
    last = tl.sum(tl.where(index == committed - 1, token, 0), axis=0)
    anchor = tl.where(committed > 0, last, anchor)
    # With one warp every lane has loaded before one of them stores.
    length = tl.load(lengths + row).to(tl.int64) + committed
    tl.store(lengths + row, length)
    tl.store(cursor_ptr + row, cursor + committed)
    tl.store(remaining_ptr + row, remaining - committed)
    tl.store(done_ptr + row, finished)
    tl.store(block + row * stride_block, anchor)

    slot = tl.arange(0, BLOCK_P)
    tl.store(
        draft_ids + row * stride_draft + slot, tl.where(slot == 0, anchor, mask_token_id), mask=slot < num_drafted
    )
    tl.store(positions + row * stride_positions + slot, length + slot, mask=slot < num_positions)

    start = record + row
    if HAS_STEP:
        step = tl.load(step_ptr + row).to(tl.int64)
        start += (step % num_slots) * (width + 5) * num_rows
        tl.store(step_ptr + row, step + 1)
    tl.store(start, committed)
    tl.store(start + num_rows, accepted)
    tl.store(start + 2 * num_rows, length)
    tl.store(start + 3 * num_rows, finished.to(tl.int64))
    tl.store(start + 4 * num_rows, cursor + committed)
    tl.store(start + (5 + index) * num_rows, token, mask=inside)


def accept_and_prepare_triton(
    block_BW: Tensor,
    tokens_BW: Tensor,
    accepted_B: Tensor | None,
    eos_ids_N: Tensor | None,
    lengths_B: Tensor,
    cursor_B: Tensor,
    remaining_B: Tensor,
    done_B: Tensor,
    ids_BT: Tensor,
    draft_ids_BK: Tensor,
    positions_BP: Tensor,
    record_SCB: Tensor,
    step_B: Tensor | None,
    mask_token_id: int,
) -> None:
    """Launches the kernel; arguments as [`accept_and_prepare`]."""
    batch, width = tokens_BW.shape
    _accept_and_prepare_kernel[(batch,)](
        block_BW,
        tokens_BW,
        accepted_B,
        eos_ids_N,
        lengths_B,
        cursor_B,
        remaining_B,
        done_B,
        ids_BT,
        draft_ids_BK,
        positions_BP,
        record_SCB,
        step_B,
        0 if eos_ids_N is None else eos_ids_N.shape[0],
        batch,
        width,
        ids_BT.shape[1],
        draft_ids_BK.shape[1],
        positions_BP.shape[1],
        record_SCB.shape[0],
        mask_token_id,
        block_BW.stride(0),
        tokens_BW.stride(0),
        ids_BT.stride(0),
        draft_ids_BK.stride(0),
        positions_BP.stride(0),
        HAS_ACCEPTED=accepted_B is not None,
        HAS_EOS=eos_ids_N is not None,
        HAS_STEP=step_B is not None,
        BLOCK_W=power_of_two(width),
        BLOCK_P=power_of_two(max(draft_ids_BK.shape[1], positions_BP.shape[1])),
        num_warps=1,
    )


__all__ = ["accept_and_prepare_triton"]
