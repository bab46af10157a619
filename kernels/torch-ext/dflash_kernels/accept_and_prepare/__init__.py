"""What follows a verify, in one launch: accepted prefix, end of the text, new lengths, the next block."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import has_triton, interprets, on_device_of
from .._ops import add_op_namespace_prefix
from .reference import accept_and_prepare_reference

NUM_FIGURES = 5


def accept_and_prepare(
    block_BW: Tensor,
    tokens_BW: Tensor,
    *,
    lengths_B: Tensor,
    cursor_B: Tensor,
    remaining_B: Tensor,
    done_B: Tensor,
    ids_BT: Tensor,
    draft_ids_BK: Tensor,
    positions_BP: Tensor,
    record_SCB: Tensor,
    mask_token_id: int,
    step_B: Tensor | None = None,
    eos_ids_N: Tensor | None = None,
    accepted_B: Tensor | None = None,
) -> None:
    """Commits what a verify decided and prepares the next step, in place; no host sync.

    Per row, with `i` from 0:

        accepted  = min {i : block[i + 1] != tokens[i]}, W - 1 where there is none
        committed = 0 if done, else min(accepted + 1, remaining, 1 + min {i : tokens[i] in eos_ids})
        done      = done or the text ended or nothing remains
        ids[cursor + i] = tokens[i] for i < committed
        lengths += committed, cursor += committed, remaining -= committed
        block[0] = draft_ids[0] = tokens[committed - 1], the new anchor; draft_ids[i > 0] = mask_token_id
        positions[i] = lengths + i
        record[step mod S] = [committed, accepted, lengths, done, cursor, tokens...]; step += 1, where it is counted

    A row that is done commits nothing and keeps its anchor. Nothing is written outside `ids`, whatever the counts.

    Args:
        block_BW (`torch.Tensor` of shape `[B, W]`, int64): What was verified: anchor, proposals. Column 0 is written.
        tokens_BW (`torch.Tensor` of shape `[B, W]`, int64): The target's token after each of them.
        lengths_B (`torch.Tensor` of shape `[B]`, int64 or int32): Tokens in the caches. Written.
        cursor_B (`torch.Tensor` of shape `[B]`, int64 or int32): Column of `ids` for the next token. Written.
        remaining_B (`torch.Tensor` of shape `[B]`, int64 or int32): Tokens a row may still generate. Written.
        done_B (`torch.Tensor` of shape `[B]`, bool): Rows that have finished. Written.
        ids_BT (`torch.Tensor` of shape `[B, T]`, int64): Prompts, then the answers. Written.
        draft_ids_BK (`torch.Tensor` of shape `[B, K]`, int64): The draft's next input. Written.
        positions_BP (`torch.Tensor` of shape `[B, P]`, int64): Indices of the next block's tokens. Written.
        record_SCB (`torch.Tensor` of shape `[S, 5 + W, B]`, int64, contiguous): A ring of what the last `S` steps did,
            to be copied to the host while the next step runs. One slot is written.
        mask_token_id (`int`): The draft's mask token.
        step_B (`torch.Tensor` of shape `[B]`, int64, *optional*): Steps so far, the same number in each row. Written.
            Without it the record is in slot 0.
        eos_ids_N (`torch.Tensor` of shape `[N]`, int64, *optional*): End-of-sequence ids; negative ones are none.
        accepted_B (`torch.Tensor` of shape `[B]`, int64, *optional*): Proposals accepted, in `[0, W - 1]`, where
            another rule than equality decides.

    Raises:
        ValueError: If shapes, dtypes or strides are not as said.
    """
    counts = {"lengths_B": lengths_B, "cursor_B": cursor_B, "remaining_B": remaining_B}
    counts |= {"done_B": done_B} if step_B is None else {"done_B": done_B, "step_B": step_B}
    tables = {"block_BW": block_BW, "ids_BT": ids_BT, "draft_ids_BK": draft_ids_BK, "positions_BP": positions_BP}
    _check(tokens_BW, counts, tables, record_SCB, eos_ids_N, accepted_B)
    _accept_and_prepare(
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
        mask_token_id,
    )


def _check(
    tokens_BW: Tensor,
    counts: dict[str, Tensor],
    tables: dict[str, Tensor],
    record_SCB: Tensor,
    eos_ids_N: Tensor | None,
    accepted_B: Tensor | None,
) -> None:
    """Checks shapes, dtypes and strides; `counts` have one entry per row, `tables` one line."""
    batch, width = tokens_BW.shape
    shapes = dict.fromkeys(counts, (batch,)) | {name: (batch, table.shape[-1]) for name, table in tables.items()}
    shapes |= {"block_BW": (batch, width), "accepted_B": (batch,)}
    given = {"tokens_BW": tokens_BW, **counts, **tables}
    given |= {} if eos_ids_N is None else {"eos_ids_N": eos_ids_N}
    given |= {} if accepted_B is None else {"accepted_B": accepted_B}
    for name, tensor in given.items():
        shape = shapes.get(name, tuple(tensor.shape))
        if tuple(tensor.shape) != shape:
            raise ValueError(f"expected {name} of shape {shape}, got {tuple(tensor.shape)}; allocate it so")
        if tensor.dtype not in ((torch.bool,) if name == "done_B" else (torch.int64, torch.int32)):
            wanted = "bool" if name == "done_B" else "int64"
            raise ValueError(f"expected {name} of dtype {wanted}, got {tensor.dtype}; allocate it so")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"expected {name} with unit stride in its last dimension, got {tensor.stride()}; copy it")
    shape = (record_SCB.shape[0], NUM_FIGURES + width, batch)
    if tuple(record_SCB.shape) != shape or record_SCB.dtype != torch.int64 or not record_SCB.is_contiguous():
        raise ValueError(
            f"expected a contiguous int64 record_SCB of shape {shape}, got {record_SCB.dtype} of shape "
            f"{tuple(record_SCB.shape)} and strides {record_SCB.stride()}; allocate it so"
        )


@torch.library.custom_op(
    add_op_namespace_prefix("accept_and_prepare"),
    mutates_args=(
        "block",
        "lengths",
        "cursor",
        "remaining",
        "done",
        "ids",
        "draft_ids",
        "positions",
        "record",
        "step",
    ),
)
def _accept_and_prepare(
    block: Tensor,
    tokens: Tensor,
    accepted: Tensor | None,
    eos_ids: Tensor | None,
    lengths: Tensor,
    cursor: Tensor,
    remaining: Tensor,
    done: Tensor,
    ids: Tensor,
    draft_ids: Tensor,
    positions: Tensor,
    record: Tensor,
    step: Tensor | None,
    mask_token_id: int,
) -> None:
    arguments = (
        block,
        tokens,
        accepted,
        eos_ids,
        lengths,
        cursor,
        remaining,
        done,
        ids,
        draft_ids,
        positions,
        record,
        step,
        mask_token_id,
    )
    if has_triton() and (tokens.is_cuda or interprets()):
        from .kernel import accept_and_prepare_triton

        with on_device_of(tokens):
            accept_and_prepare_triton(*arguments)
    else:
        accept_and_prepare_reference(*arguments)


@_accept_and_prepare.register_fake
def _(
    block: Tensor,
    tokens: Tensor,
    accepted: Tensor | None,
    eos_ids: Tensor | None,
    lengths: Tensor,
    cursor: Tensor,
    remaining: Tensor,
    done: Tensor,
    ids: Tensor,
    draft_ids: Tensor,
    positions: Tensor,
    record: Tensor,
    step: Tensor | None,
    mask_token_id: int,
) -> None:
    return None


__all__ = ["NUM_FIGURES", "accept_and_prepare", "accept_and_prepare_reference"]
