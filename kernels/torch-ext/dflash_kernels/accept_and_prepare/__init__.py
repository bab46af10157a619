"""This operation follows a verify, in one launch. It commits the accepted prefix and prepares the next block."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from ..operation import Given, Sizes, check_dtype, operation

NUM_FIGURES = 5
COUNTS = ("cursor_B", "remaining_B", "done_B")
TABLES = ("block_BW", "ids_BT", "draft_ids_BK", "positions_BP", "record_FB")


def _check(given: Given, size: Sizes) -> None:
    dtypes = {"done_B": [torch.bool], "record_FB": [torch.int64]}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            continue
        check_dtype(given, dtypes.get(name, (torch.int64, torch.int32)), name)
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"expected {name} with unit stride in its last dimension, got {tensor.stride()}; copy it"
            )
    if size["F"] != NUM_FIGURES + size["W"]:
        raise ValueError(
            f"expected record_FB with {NUM_FIGURES} + {size['W']} lines, got {size['F']}; allocate it so"
        )


@operation(check=_check, mutates=COUNTS + TABLES, covers=lambda *_: True)
def accept_and_prepare(
    block_BW: Tensor,
    tokens_BW: Tensor,
    cursor_B: Tensor,
    remaining_B: Tensor,
    done_B: Tensor,
    ids_BT: Tensor,
    draft_ids_BK: Tensor,
    positions_BP: Tensor,
    record_FB: Tensor,
    eos_ids_N: Tensor | None = None,
    accepted_B: Tensor | None = None,
) -> None:
    """Commits the result of a verify and prepares the next step, in place; no host sync.

    Per row, with `i` from 0:

        accepted  = min {i : block[i + 1] != tokens[i]}, W - 1 where there is none
        committed = 0 if done, else min(accepted + 1, remaining, 1 + min {i : tokens[i] in eos_ids})
        done      = done or the text ended or nothing remains
        ids[cursor + i] = tokens[i] for i < committed
        cursor += committed, remaining -= committed, positions[i] += committed
        block[0] = draft_ids[0] = tokens[committed - 1], the new anchor
        record = [committed, accepted, positions[0], done, cursor, tokens...]

    A row that is done commits nothing and keeps its anchor. Nothing is written outside `ids`, for any counts.

    Args:
        block_BW (`torch.Tensor` of shape `[B, W]`, int64): The verified tokens: the anchor, then proposals. Column 0
            is written.
        tokens_BW (`torch.Tensor` of shape `[B, W]`, int64): The target's token after each verified token.
        cursor_B, remaining_B (`torch.Tensor` of shape `[B]`, int64 or int32): Column of `ids` for the next token, and
            the number of tokens that may still be generated. Both are written.
        done_B (`torch.Tensor` of shape `[B]`, bool): Whether each row has finished. Written.
        ids_BT (`torch.Tensor` of shape `[B, T]`, int64): The prompts, followed by the answers. Written.
        draft_ids_BK (`torch.Tensor` of shape `[B, K]`, int64): The draft's next input. Column 0 is written.
        positions_BP (`torch.Tensor` of shape `[B, P]`, int64): Indices of the block's tokens. The first index is the
            number of tokens in the caches. Afterwards these are the next block's indices. Written.
        record_FB (`torch.Tensor` of shape `[5 + W, B]`, int64): The outcome of the step, for the host. Written.
        eos_ids_N (`torch.Tensor` of shape `[N]`, int64, *optional*): End-of-sequence ids. Negative ids are ignored.
        accepted_B (`torch.Tensor` of shape `[B]`, int64, *optional*): Number of accepted proposals, at most `W - 1`,
            if another rule than equality decides.

    Raises:
        ValueError: If shapes, dtypes or strides are not as described.
    """
    width, device = tokens_BW.shape[1], tokens_BW.device
    index = torch.arange(width, device=device)
    if accepted_B is None:
        accepted_B = (block_BW[:, 1:] == tokens_BW[:, :-1]).cumprod(dim=1).sum(dim=1)
    committed = torch.minimum(accepted_B + 1, remaining_B)
    finished = done_B | (committed == remaining_B)
    if eos_ids_N is not None:
        # `torch.isin` is not used, because it may read on the host.
        ends = (tokens_BW[..., None] == eos_ids_N).any(dim=-1)
        up_to_end = torch.where(ends, index + 1, width + 1).amin(dim=1)
        finished = finished | (up_to_end <= committed)
        committed = torch.minimum(committed, up_to_end)
    committed = committed.masked_fill(done_B, 0)

    size = ids_BT.shape[1]
    # If no token is kept at a column, or the buffer has ended, the value that is already there is written again.
    column = (cursor_B[:, None] + index) % size
    kept = index < torch.minimum(committed, size - cursor_B)[:, None]
    ids_BT.scatter_(
        1, column, torch.where(kept, tokens_BW.to(ids_BT.dtype), ids_BT.gather(1, column))
    )
    anchor = torch.cat([block_BW[:, :1], tokens_BW], dim=1).gather(1, committed[:, None])

    cursor_B += committed
    remaining_B -= committed
    positions_BP += committed[:, None]
    done_B.copy_(finished)
    block_BW[:, :1] = anchor
    draft_ids_BK[:, :1] = anchor
    figures = torch.stack([committed, accepted_B, positions_BP[:, 0], finished, cursor_B])
    record_FB.copy_(torch.cat([figures, tokens_BW.T]))


__all__ = ["NUM_FIGURES", "accept_and_prepare"]
