"""From the target's logits to committed tokens: choose, count what is accepted, commit.

There are several ways to decide and one way to commit, [`commit`]. What is decided is in `state.tokens`, and in a
number of accepted proposals per row where that is not simply how many match. A stopping criterion lowers what a row
may still generate, so that the commit ends the row there.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria

from dflash_hf import ops
from dflash_hf.generation.acceptance import accept_rejection, choose, ends_row
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.state import NUM_REPORTED, DecodeState

# See `iterate`: proposals [B, W - 1], the target's tokens [B, W] and logits [B, W, V] -> number accepted [B].
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]


def commit(state: DecodeState, mask_token_id: int, num_accepted: Tensor | None = None) -> None:
    """Commits what was decided and prepares the next step: the only place where rows move on. No host sync.

    Args:
        state (`DecodeState`): Changed in place; `outcome` says what has happened.
        mask_token_id (`int`): The draft's.
        num_accepted (`torch.Tensor` of shape `[B]`, int64, *optional*): In `[0, W - 1]`; by default the proposals that
            equal `state.tokens`, up to the first that does not.
    """
    ops.commit(
        state.block,
        state.tokens,
        lengths_B=state.lengths,
        cursor_B=state.cursor,
        remaining_B=state.remaining,
        done_B=state.done,
        ids_BT=state.ids,
        draft_ids_BK=state.draft_ids,
        positions_BP=state.next_positions,
        record_FB=state.outcome[: NUM_REPORTED + state.width],
        mask_token_id=mask_token_id,
        eos_ids_N=state.eos_ids,
        accepted_B=num_accepted,
    )


def decide_at_once(
    state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors, accept: Accept | None = None
) -> tuple[Tensor, Tensor | None]:
    """Decides when the processors can see the block at once. No host sync, unless a rule of the user's has one.

    Args:
        state (`DecodeState`): Its `tokens` are written.
        logits_BWV (`torch.Tensor` of shape `[B, W, V]`): The target's.
        processors (`BlockProcessors`): The run's, all stateless.
        accept (callable, *optional*): A rule of the user's: behind the proposals that it keeps stands the target's own
            token.

    Returns:
        `tuple[torch.Tensor, torch.Tensor | None]`: Processed scores `[B, W, V]`, and the number accepted `[B]` where
        that is not how many match.
    """
    # As float32 a half's scores are in the same order, those of a double need not be.
    is_plain = not processors.warpers and not state.is_sampled and logits_BWV.dtype.itemsize <= 4
    scores = logits_BWV if is_plain else processors.warp(logits_BWV)
    if state.draft_probs is not None and state.key is not None and state.width > 1:
        num_accepted, tokens = accept_rejection(
            state.proposals, scores, state.draft_probs, state.key, state.decided_positions
        )
        state.tokens.copy_(tokens)
        return scores, num_accepted
    state.tokens.copy_(choose(scores, state.key, state.decided_positions))
    if accept is None:
        return scores, None
    num_accepted = accept(state.proposals, state.tokens, logits_BWV)
    kept = torch.arange(state.width - 1, device=state.tokens.device) < num_accepted[:, None]
    state.tokens[:, :-1] = torch.where(kept, state.proposals, state.tokens[:, :-1])
    return scores, num_accepted.to(torch.long)


def decide_by_position(state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors) -> Tensor:
    """Decides position by position, each row as long as its proposals match: for processors that read the prefix.

    Writes `state.tokens`, reads on the host; returns processed scores `[B, W, V]`, raw beyond a row's first mismatch.
    """
    positions = state.decided_positions

    def choose_at(scores: Tensor, index: int) -> Tensor:
        return choose(scores[:, None], state.key, positions[:, index : index + 1])[:, 0]

    def ends(tokens: Tensor, index: int) -> Tensor:
        at_limit = state.remaining <= index + 1
        return at_limit if state.eos_ids is None else at_limit | ends_row(tokens, state.eos_ids)

    columns = state.cursor.tolist()
    running = (~state.done).tolist()
    scores, tokens = processors.walk(logits_BWV, state.proposals, state.ids, columns, running, choose_at, ends)
    state.tokens.copy_(tokens)
    return scores


def stop_by_criteria(state: DecodeState, criteria: list[StoppingCriteria], num_accepted: Tensor | None) -> None:
    """Asks stopping criteria after each token that would be committed, row by row, and ends rows where they say so.

    Only those that look at a row's own tokens: with any other, rows are synchronized. Reads on the host.

    Args:
        state (`DecodeState`): Decided; `remaining` is lowered, and `ids` changed behind what is committed.
        criteria (`list[StoppingCriteria]`): Those besides length and end of sequence.
        num_accepted (`torch.Tensor` of shape `[B]`, *optional*): See [`commit`].
    """
    if num_accepted is None:
        num_accepted = accept_matching(state.proposals, state.tokens)
    ahead = torch.minimum(num_accepted + 1, state.remaining).masked_fill(state.done, 0).tolist()
    columns = torch.arange(state.width, device=state.ids.device) + state.cursor[:, None]
    state.ids.scatter_(1, columns, state.tokens)
    ends = torch.zeros_like(state.tokens, dtype=torch.bool)
    if state.eos_ids is not None:
        ends = ends_row(state.tokens, state.eos_ids)
    is_end = ends.tolist()
    for row, column in enumerate(state.cursor.tolist()):
        for num in range(1, ahead[row] + 1):
            ids = cast(torch.LongTensor, state.ids[row : row + 1, : column + num])
            if any(bool(torch.as_tensor(criterion(ids, None), device="cpu").all()) for criterion in criteria):
                state.remaining[row] = num
                break
            if is_end[row][num - 1]:
                break


def accept_matching(proposals: Tensor, tokens_BW: Tensor) -> Tensor:
    """Counts the proposals `[B, W - 1]` that equal the target's own tokens, up to the first that does not: `[B]`."""
    return (proposals == tokens_BW[:, :-1]).cumprod(dim=1).sum(dim=1)


__all__ = ["Accept", "accept_matching", "commit", "decide_at_once", "decide_by_position", "stop_by_criteria"]
