"""From the target's logits to committed tokens: choose, count what is accepted, commit.

There are several ways to decide and one way to commit, [`commit`]. What is decided is in `state.tokens`, and in a
number of accepted proposals per row where that is not simply how many match. A stopping criterion lowers what a row
may still generate, so that the commit ends the row there.

Logits processors and stopping criteria of the user's own may keep state or compare rows, and a streamer gets one token
of every row at a time. Then the rows are synchronized ([`SynchronizedRows`]): these are called once per column, with
every row as long as the others and finished rows padded, in the order processors, criteria, streamer. A block is
committed up to the first column at which a running row does not continue with its proposal, so with several rows
fewer tokens are committed per verify than each row alone would.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from dflash_hf import ops
from dflash_hf.generation.sampling import (
    BlockProcessors,
    accept_rejection,
    choose,
    draw_from_logits,
    ends_row,
    likeliest_from_logits,
)
from dflash_hf.generation.state import NUM_REPORTED, DecodeState
from dflash_hf.tree import along

# See `iterate`: proposals [B, W - 1], the target's tokens [B, W] and logits [B, W, V] -> number accepted [B].
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]


def commit(state: DecodeState, num_accepted: Tensor | None = None) -> None:
    """Commits what was decided and prepares the next step: the only place where rows move on. No host sync.

    `num_accepted` `[B]`, int64, is in `[0, W - 1]`; by default the proposals that equal `state.tokens`, up to the
    first that does not. `state.outcome` says what has happened.
    """
    ops.either(ops.accept_and_prepare, state.block)(
        state.block,
        state.tokens,
        cursor_B=state.cursor,
        remaining_B=state.remaining,
        done_B=state.done,
        ids_BT=state.ids,
        draft_ids_BK=state.draft_ids,
        positions_BP=state.next_positions,
        record_FB=state.outcome[: NUM_REPORTED + state.width],
        eos_ids_N=state.eos_ids,
        accepted_B=num_accepted,
    )


def decide_at_once(
    state: DecodeState,
    logits_BWV: Tensor,
    processors: BlockProcessors,
    accept: Accept | None = None,
) -> Tensor | None:
    """Decides when the processors can see the block at once. No host sync, unless a rule of the user's has one.

    Writes `state.tokens`; returns the number accepted `[B]` where that is not how many match. Behind the proposals
    that the user's rule `accept` keeps stands the target's own token.
    """
    tree = state.tree
    if state.draft_probs is not None and state.key is not None and state.width > 1:
        scores = processors.warp(logits_BWV)
        num_accepted, tokens = accept_rejection(
            state.proposals, scores, state.draft_probs, state.key, state.decided_positions
        )
        state.tokens.copy_(tokens)
        return num_accepted
    if state.key is None:
        state.tokens.copy_(likeliest_from_logits(logits_BWV, processors))
    else:
        positions = state.decided_positions if tree is None else state.positions_behind(tree)
        state.tokens.copy_(draw_from_logits(logits_BWV, processors, state.key, positions))
    if tree is not None:
        state.follow(tree)
    if accept is None:
        return None
    num_accepted = accept(state.proposals, state.tokens, logits_BWV)
    kept = torch.arange(state.width - 1, device=state.tokens.device) < num_accepted[:, None]
    state.tokens[:, :-1] = torch.where(kept, state.proposals, state.tokens[:, :-1])
    return num_accepted.to(torch.long)


def decide_by_position(state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors) -> Tensor:
    """Decides position by position, each row as long as its proposals match: for processors that read the prefix.

    No processor ever sees a rejected token. Writes `state.tokens` and columns of `state.ids` that are not committed
    yet, reads on the host; returns processed scores `[B, W, V]`, raw beyond a row's first mismatch.
    """
    scores = logits_BWV.to(torch.float32, copy=True)
    ids = state.ids
    filled = state.cursor
    columns = filled.tolist()
    active = ~state.done
    positions = state.decided_positions
    walk = Walk(state, scores)
    state.tokens.zero_()
    for position in range(state.width):
        lengths = filled + position
        for length in sorted({n + position for n, on in zip(columns, active.tolist(), strict=True) if on}):
            rows = active & (lengths == length)
            # All rows every time, because processors hold settings per row; rows that stand elsewhere show their own
            # committed tokens, then padding, and what comes back for them is dropped.
            seen = torch.where(active, lengths, filled).clamp_max(length)
            prefix = ids[:, :length].clone()
            prefix[torch.arange(length, device=ids.device) >= seen[:, None]] = processors.pad_id
            processed = processors.at(prefix, scores[:, position].clone(), rows)
            scores[:, position] = torch.where(rows[:, None], processed, scores[:, position])
        chosen = choose(scores[:, position, None], state.key, positions[:, position, None])[:, 0]
        state.tokens[:, position] = chosen
        if position == state.width - 1:
            break
        walk.step(position, chosen, scores)
        active = active & (chosen == state.proposals[:, position]) & (state.remaining > position + 1)
        if state.eos_ids is not None:
            active = active & ~ends_row(chosen, state.eos_ids)
        if not bool(active.any()):
            break
        written = ids.gather(1, lengths[:, None])[:, 0]
        ids.scatter_(1, lengths[:, None], torch.where(active, state.proposals[:, position], written)[:, None])
    return scores


class Walk:
    """Goes through what is verified token by token, where a token is decided only behind the ones before it.

    Of a tree, what is walked comes to stand in the order of the path, as if it had been a chain: in the state's
    `proposals` and `path`, and in the scores, of which the first ones, `raw_BWV`, are then copied.
    """

    def __init__(self, state: DecodeState, raw_BWV: Tensor) -> None:
        self.state = state
        self.tree = state.tree
        report = state.report
        if report is not None:
            report.node_ids.copy_(state.block)
            self.path = report.path.zero_()
            self.raw = raw_BWV.clone()
            self.block = state.block.clone()
            self.node = torch.zeros_like(state.anchor)
            state.proposals.fill_(-1)

    def step(self, position: int, tokens_B: Tensor, scores_BWV: Tensor) -> None:
        """Goes on to the child that has the token decided at `position`; where there is none, no proposal matches."""
        if self.tree is None:
            return
        self.node, found = self.tree.child(self.block, self.node, tokens_B)
        self.path[:, position + 1] = self.node
        self.state.proposals[:, position] = torch.where(found, tokens_B, -1)
        scores_BWV[:, position + 1] = along(self.node[:, None], self.raw)[:, 0]


def stop_by_criteria(state: DecodeState, criteria: list[StoppingCriteria], num_accepted: Tensor | None) -> None:
    """Asks stopping criteria after each token that would be committed, row by row, and ends rows where they say so.

    Only those that look at a row's own tokens: with any other, rows are synchronized. Reads on the host. Lowers
    `remaining` of what is decided, and changes `ids` behind what is committed; for `num_accepted` see [`commit`].
    """
    num_accepted = accepted(state, num_accepted)
    ahead = torch.minimum(num_accepted + 1, state.remaining).masked_fill(state.done, 0).tolist()
    columns = torch.arange(state.width, device=state.ids.device) + state.cursor[:, None]
    state.ids.scatter_(1, columns, state.tokens)
    is_end = ends_row(state.tokens, state.padded_eos_ids).tolist()
    for row, column in enumerate(state.cursor.tolist()):
        for num in range(1, ahead[row] + 1):
            ids = cast(torch.LongTensor, state.ids[row : row + 1, : column + num])
            if any(bool(torch.as_tensor(criterion(ids, None), device="cpu").all()) for criterion in criteria):
                state.remaining[row] = num
                break
            if is_end[row][num - 1]:
                break


def accepted(state: DecodeState, num_accepted: Tensor | None) -> Tensor:
    """Returns how many proposals stand `[B]`: if not given, as many as equal the target's tokens without a gap."""
    if num_accepted is not None:
        return num_accepted
    return (state.proposals == state.tokens[:, :-1]).cumprod(dim=1).sum(dim=1)


# Transformers' own processors look at nothing but each row's prefix and scores; SynthID keeps state.
TOKEN_LOCAL_PROCESSORS = "transformers.generation.logits_process"
# These decide for a row by its own tokens; so do criteria of the user's that say `is_row_wise = True`.
ROW_WISE_CRITERIA = (MaxTimeCriteria, StopStringCriteria)


@dataclass(slots=True)
class SynchronizedRows:
    """What is called at every column, and which rows go on."""

    processors: BlockProcessors
    criteria: list[StoppingCriteria]  # besides length and end of sequence
    streamer: BaseStreamer | None  # gets each column [B] on the CPU
    # What finished rows go on with; `None` without an end-of-sequence id, where they go on with tokens of their own
    # until all rows have finished.
    pad_id: int | None
    unfinished: Tensor  # [B], bool: rows that nothing has stopped yet
    scores: list[Tensor] | None  # processed ones of every column, for criteria, if the call asks for `output_scores`
    num_columns: int = field(default=0, init=False)

    @classmethod
    def if_needed(
        cls,
        processors: BlockProcessors,
        criteria: list[StoppingCriteria],
        streamer: BaseStreamer | None,
        state: DecodeState,
        has_scores: bool,
    ) -> SynchronizedRows | None:
        """Returns one if the rows of a run have to advance together, else `None`.

        One row is in step with itself: nothing is lost by it. Without an end-of-sequence id plain `generate` lets
        stopped rows run on until all have stopped.
        """
        stateful = any(
            type(p).__module__ != TOKEN_LOCAL_PROCESSORS or isinstance(p, SynthIDTextWatermarkLogitsProcessor)
            for p in processors.processors
        )
        has_eos = state.eos_ids is not None
        foreign = any(type(c) not in ROW_WISE_CRITERIA and not getattr(c, "is_row_wise", False) for c in criteria)
        if state.ids.shape[0] == 1:
            needed = stateful or bool(criteria)
        else:
            needed = stateful or foreign or streamer is not None or (bool(criteria) and not has_eos)
        pad_id = processors.pad_id if has_eos else None
        return cls(processors, criteria, streamer, pad_id, ~state.done, [] if has_scores else None) if needed else None

    def decide(self, state: DecodeState, logits_BCV: Tensor) -> tuple[Tensor, Tensor]:
        """Decides as many columns as all running rows agree to go on with; reads on the host.

        Writes the state's `tokens` and columns of `ids` that are not committed yet, and lowers `remaining` where
        something stops a row. Returns processed scores `[B, C, V]`, float32 or what a processor makes of it, raw
        beyond the last column; and the number of proposals that each row keeps `[B]`.
        """
        last = state.width - 1
        positions = state.decided_positions
        if self.processors.is_stateless:
            agreed = accepted(state, decide_at_once(state, logits_BCV, self.processors))
            walk = None
            scores = self.processors.warp(state.along_path(logits_BCV))
        else:
            agreed = None
            scores = logits_BCV.to(torch.float32, copy=True)
            walk = Walk(state, scores)
        self.num_columns = int(state.num_new.max())  # what stands, which another rank may have decided
        committed = torch.zeros_like(state.remaining)
        was_running = self._running()
        for column in range(last + 1):
            if walk is not None:
                prefix = state.ids[:, : state.columns + self.num_columns]
                # A copy, because processors may write into what they get while the raw logits may be asked for.
                processed = self.processors.processors(prefix, scores[:, column].to(torch.float32, copy=True))
                scores = scores.to(torch.promote_types(scores.dtype, processed.dtype))
                scores[:, column] = processed
                state.tokens[:, column] = choose(scores[:, column, None], state.key, positions[:, column, None])[:, 0]
            tokens = state.tokens[:, column]
            running = self._take_column(state, tokens, scores[:, column])
            committed += running
            if not bool(self.unfinished.any()) or column == last:
                break
            if walk is not None:
                walk.step(column, tokens, scores)
            going_on = tokens == state.proposals[:, column] if agreed is None else agreed > column
            if not bool((going_on | ~self._running()).all()):
                break
        goes_on = self._running() & self.unfinished.any()
        state.remaining.copy_(torch.where(was_running & ~goes_on, committed, state.remaining))
        return scores, (committed - 1).clamp_min(0)

    def _running(self) -> Tensor:
        """Rows whose tokens count `[B]`."""
        return self.unfinished if self.pad_id is not None else torch.ones_like(self.unfinished)

    def _take_column(self, state: DecodeState, tokens: Tensor, scores: Tensor) -> Tensor:
        """Appends one column to every row and asks what has finished; returns the rows whose token counts `[B]`."""
        running = self._running()
        if self.pad_id is not None:
            tokens = torch.where(running, tokens, self.pad_id)
        state.ids[:, state.columns + self.num_columns] = tokens
        self.num_columns += 1
        if self.scores is not None:
            self.scores.append(scores.clone())
        stopped = ends_row(tokens, state.padded_eos_ids)
        if self.num_columns >= state.limit:
            stopped |= True
        ids = state.ids[:, : state.columns + self.num_columns]
        given = None if self.scores is None else tuple(self.scores)
        for criterion in self.criteria:
            stopped |= torch.as_tensor(criterion(ids, given), device=stopped.device)  # pyright: ignore[reportArgumentType]
        self.unfinished = self.unfinished & ~stopped
        if self.streamer is not None:
            # A copy: a streamer may keep what it gets.
            self.streamer.put(tokens.to("cpu", copy=True))
        return running
