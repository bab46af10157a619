"""From the target's logits to committed tokens: choose, count what is accepted, commit.

Three rules choose, and [`rule_for`] says which one a run has. Each writes the target's tokens into `state.tokens`, and
returns how many proposals it accepts where that is not simply how many match:

* [`BlockRule`] looks at the whole block at once: greedy, sampled with warpers of single scores, or by rejection;
* [`PositionRule`] goes position by position, for processors that read the prefix;
* [`SynchronizedRows`] goes column by column over all rows, where something of the user's has to see all of them.

There is one way to commit, [`commit`]. A stopping criterion lowers what a row may still generate, so that the commit
ends the row there.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
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
from dflash_hf.generation.stats import Recorder
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
        eos_ids_N=state.padded_eos_ids,
        accepted_B=num_accepted,
    )


class BlockRule:
    """Chooses when the processors can see the block at once. No host sync, unless a rule of the user's has one.

    Args:
        processors (`BlockProcessors`): Stateless ones.
        criteria (`list[StoppingCriteria]`): Besides length and end of sequence; they look at a row's own tokens.
        has_scores (`bool`): Whether anybody wants the processed scores.
    """

    # Whether the rule itself hands tokens to the streamer.
    feeds_streamer = False

    def __init__(self, processors: BlockProcessors, criteria: list[StoppingCriteria], has_scores: bool) -> None:
        self.processors = processors
        self.criteria = criteria
        self.has_scores = has_scores
        # Only `iterate` sets one: behind the proposals that it keeps stands the target's own token.
        self.rule_of_user: Accept | None = None

    @property
    def runs_on_device(self) -> bool:
        """Whether a step is decided without a look on the host."""
        return not self.criteria and not self.has_scores and self.rule_of_user is None

    def unfinished(self, state: DecodeState) -> Tensor:
        """Returns the rows that nothing has stopped yet `[B]`, bool."""
        return ~state.done

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses the tokens of a block.

        Writes `state.tokens`, and lowers `state.remaining` where a criterion stops a row.

        Args:
            state (`DecodeState`): Changed in place.
            logits_BWV (`torch.Tensor`): The target's logits of what was verified.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: Scores `[B, W, V]`, processed if somebody wants them; and the
            number accepted `[B]`, int64, where that is not how many match.
        """
        num_accepted = choose_block(state, logits_BWV, self.processors)
        if self.rule_of_user is not None:
            num_accepted = _accepted_by(self.rule_of_user, state, logits_BWV)
        if self.criteria:
            stop_by_criteria(state, self.criteria, num_accepted)
        scores = logits_BWV
        if self.has_scores:
            scores = self.processors.warp(state.along_path(logits_BWV))
        return scores, num_accepted


def choose_block(state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors) -> Tensor | None:
    """Chooses the tokens of a block at once: writes `state.tokens`; returns as [`BlockRule.choose`]."""
    is_by_rejection = state.draft_probs is not None and state.key is not None and state.width > 1
    if is_by_rejection:
        return _choose_by_rejection(state, logits_BWV, processors)
    tree = state.tree
    if state.key is None:
        tokens = likeliest_from_logits(logits_BWV, processors)
    elif tree is None:
        tokens = draw_from_logits(logits_BWV, processors, state.key, state.decided_positions)
    else:
        tokens = draw_from_logits(logits_BWV, processors, state.key, state.positions_behind(tree))
    state.tokens.copy_(tokens)
    if tree is not None:
        state.follow(tree)
    return None


def _choose_by_rejection(state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors) -> Tensor:
    """Keeps drawn proposals, or redraws behind them; returns the number accepted `[B]`."""
    assert state.draft_probs is not None
    assert state.key is not None
    scores = processors.warp(logits_BWV)
    num_accepted, tokens = accept_rejection(
        state.proposals, scores, state.draft_probs, state.key, state.decided_positions
    )
    state.tokens.copy_(tokens)
    return num_accepted


def _accepted_by(accept: Accept, state: DecodeState, logits_BWV: Tensor) -> Tensor:
    """Asks a rule of the user's how many proposals it keeps `[B]`, int64, and writes these into `state.tokens`."""
    num_accepted = accept(state.proposals, state.tokens, logits_BWV)
    is_kept = torch.arange(state.width - 1, device=state.tokens.device) < num_accepted[:, None]
    state.tokens[:, :-1] = torch.where(is_kept, state.proposals, state.tokens[:, :-1])
    return num_accepted.to(torch.long)


class PositionRule:
    """Chooses position by position, each row as long as its proposals match: for processors that read the prefix.

    No processor ever sees a rejected token. Arguments as of [`BlockRule`].
    """

    feeds_streamer = False
    runs_on_device = False

    def __init__(self, processors: BlockProcessors, criteria: list[StoppingCriteria]) -> None:
        self.processors = processors
        self.criteria = criteria

    def unfinished(self, state: DecodeState) -> Tensor:
        """Returns the rows that nothing has stopped yet `[B]`, bool."""
        return ~state.done

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses as [`BlockRule.choose`]; the scores `[B, W, V]` are raw beyond a row's first mismatch.

        Writes columns of `state.ids` that are not committed yet; reads on the host.
        """
        scores = self._choose_tokens(state, logits_BWV)
        if self.criteria:
            stop_by_criteria(state, self.criteria, None)
        return scores, None

    def _choose_tokens(self, state: DecodeState, logits_BWV: Tensor) -> Tensor:
        """Writes `state.tokens`; returns the scores."""
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
                # All rows every time, because processors hold settings per row; rows that stand elsewhere show their
                # own committed tokens, then padding, and what comes back for them is dropped.
                seen = torch.where(active, lengths, filled).clamp_max(length)
                prefix = ids[:, :length].clone()
                prefix[torch.arange(length, device=ids.device) >= seen[:, None]] = self.processors.pad_id
                processed = self.processors.at(prefix, scores[:, position].clone(), rows)
                scores[:, position] = torch.where(rows[:, None], processed, scores[:, position])
            chosen = choose(scores[:, position, None], state.key, positions[:, position, None])[:, 0]
            state.tokens[:, position] = chosen
            if position == state.width - 1:
                break
            walk.step(position, chosen, scores)
            active = active & (chosen == state.proposals[:, position]) & (state.remaining > position + 1)
            if state.has_eos:
                active = active & ~ends_row(chosen, state.padded_eos_ids)
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


class SynchronizedRows:
    """Chooses column by column over all rows, and calls what has to see all of them.

    Logits processors and stopping criteria of the user's own may keep state or compare rows, and a streamer gets one
    token of every row at a time. These are called once per column, with every row as long as the others and finished
    rows padded, in the order processors, criteria, streamer. A block is committed up to the first column at which a
    running row does not continue with its proposal, so with several rows fewer tokens are committed per verify than
    each row alone would.

    Args:
        processors (`BlockProcessors`): The run's.
        criteria (`list[StoppingCriteria]`): Besides length and end of sequence.
        streamer (`BaseStreamer`, *optional*): Gets each column `[B]` on the CPU.
        state (`DecodeState`): Of the run, begun. Without end-of-sequence ids finished rows go on with tokens of their
            own until all rows have finished, as in plain `generate`; else with padding.
        has_scores (`bool`): Whether the call asks for `output_scores`, which criteria then get.
    """

    feeds_streamer = True
    runs_on_device = False

    def __init__(
        self,
        processors: BlockProcessors,
        criteria: list[StoppingCriteria],
        streamer: BaseStreamer | None,
        state: DecodeState,
        has_scores: bool,
    ) -> None:
        self.processors = processors
        self.criteria = criteria
        self.streamer = streamer
        self.pads = state.has_eos
        self.is_running = ~state.done  # [B], bool: rows that nothing has stopped yet
        self.has_scores = has_scores
        self.scores: list[Tensor] = []  # processed ones of every column
        self.num_columns = 0

    def unfinished(self, state: DecodeState) -> Tensor:
        """Returns the rows that nothing has stopped yet `[B]`, bool."""
        return self.is_running

    def choose(self, state: DecodeState, logits_BCV: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses as many columns as all running rows agree to go on with; reads on the host.

        Writes the state's `tokens` and columns of `ids` that are not committed yet, and lowers `remaining` where
        something stops a row. Returns processed scores `[B, C, V]`, float32 or what a processor makes of it, raw
        beyond the last column; and the number of proposals that each row keeps `[B]`.
        """
        self.num_columns = int(state.num_new.max())  # what stands, which another rank may have decided
        if self.processors.is_stateless:
            columns: _Columns = _ChosenColumns(state, logits_BCV, self.processors)
        else:
            columns = _ProcessedColumns(state, logits_BCV, self.processors)
        committed = torch.zeros_like(state.remaining)
        was_counted = self._counted()
        for column in range(state.width):
            tokens = columns.choose(column, self.num_columns)
            committed += self._take_column(state, tokens, columns.scores[:, column])
            is_last = column == state.width - 1
            if is_last or not bool(self.is_running.any()):
                break
            goes_on = columns.go_on(column, tokens)
            if not bool((goes_on | ~self._counted()).all()):
                break
        is_open = self._counted() & self.is_running.any()
        state.remaining.copy_(torch.where(was_counted & ~is_open, committed, state.remaining))
        return columns.scores, (committed - 1).clamp_min(0)

    def _counted(self) -> Tensor:
        """Returns the rows whose tokens count `[B]`."""
        return self.is_running if self.pads else torch.ones_like(self.is_running)

    def _take_column(self, state: DecodeState, tokens: Tensor, scores: Tensor) -> Tensor:
        """Appends one column to every row and asks what has finished; returns the rows whose token counts `[B]`."""
        counted = self._counted()
        if self.pads:
            tokens = torch.where(counted, tokens, self.processors.pad_id)
        state.ids[:, state.columns + self.num_columns] = tokens
        self.num_columns += 1
        given: tuple[Tensor, ...] | None = None
        if self.has_scores:
            self.scores.append(scores.clone())
            given = tuple(self.scores)
        stopped = ends_row(tokens, state.padded_eos_ids)
        if self.num_columns >= state.limit:
            stopped |= True
        ids = state.ids[:, : state.columns + self.num_columns]
        for criterion in self.criteria:
            stopped |= torch.as_tensor(criterion(ids, given), device=stopped.device)  # pyright: ignore[reportArgumentType]
        self.is_running = self.is_running & ~stopped
        if self.streamer is not None:
            # A copy: a streamer may keep what it gets.
            self.streamer.put(tokens.to("cpu", copy=True))
        return counted


class _ChosenColumns:
    """The columns of a block that is chosen at once."""

    def __init__(self, state: DecodeState, logits_BCV: Tensor, processors: BlockProcessors) -> None:
        self.state = state
        self.num_accepted = accepted(state, choose_block(state, logits_BCV, processors))
        self.scores = processors.warp(state.along_path(logits_BCV))

    def choose(self, column: int, num_new: int) -> Tensor:
        """Returns the tokens of a column `[B]`."""
        return self.state.tokens[:, column]

    def go_on(self, column: int, tokens: Tensor) -> Tensor:
        """Says which rows continue with their proposal behind a column `[B]`."""
        return self.num_accepted > column


class _ProcessedColumns:
    """The columns of a block of which each is chosen behind the ones before it: processors read the prefix."""

    def __init__(self, state: DecodeState, logits_BCV: Tensor, processors: BlockProcessors) -> None:
        self.state = state
        self.processors = processors
        self.positions = state.decided_positions
        self.scores = logits_BCV.to(torch.float32, copy=True)
        self.walk = Walk(state, self.scores)

    def choose(self, column: int, num_new: int) -> Tensor:
        """Chooses the tokens of a column `[B]` behind so many new ones, and writes them into `state.tokens`."""
        state = self.state
        prefix = state.ids[:, : state.columns + num_new]
        # A copy, because processors may write into what they get while the raw logits may be asked for.
        raw = self.scores[:, column].to(torch.float32, copy=True)
        processed = self.processors.processors(prefix, raw)
        self.scores = self.scores.to(torch.promote_types(self.scores.dtype, processed.dtype))
        self.scores[:, column] = processed
        chosen = choose(self.scores[:, column, None], state.key, self.positions[:, column, None])
        state.tokens[:, column] = chosen[:, 0]
        return state.tokens[:, column]

    def go_on(self, column: int, tokens: Tensor) -> Tensor:
        """Says which rows continue with their proposal behind a column `[B]`."""
        self.walk.step(column, tokens, self.scores)
        return tokens == self.state.proposals[:, column]


_Columns = _ChosenColumns | _ProcessedColumns
AcceptanceRule = BlockRule | PositionRule | SynchronizedRows


def rule_for(
    processors: BlockProcessors,
    criteria: list[StoppingCriteria],
    streamer: BaseStreamer | None,
    state: DecodeState,
    recorder: Recorder,
) -> AcceptanceRule:
    """Returns the rule by which a run chooses tokens; arguments as of [`SynchronizedRows`].

    One row is in step with itself: nothing is lost by it. Without an end-of-sequence id plain `generate` lets stopped
    rows run on until all have stopped.
    """
    keeps_state = any(
        type(processor).__module__ != TOKEN_LOCAL_PROCESSORS
        or isinstance(processor, SynthIDTextWatermarkLogitsProcessor)
        for processor in processors.processors
    )
    compares_rows = any(
        type(criterion) not in ROW_WISE_CRITERIA and not getattr(criterion, "is_row_wise", False)
        for criterion in criteria
    )
    if state.ids.shape[0] == 1:
        is_synchronized = keeps_state or bool(criteria)
    else:
        stops_late = bool(criteria) and not state.has_eos
        is_synchronized = keeps_state or compares_rows or streamer is not None or stops_late
    if is_synchronized:
        return SynchronizedRows(processors, criteria, streamer, state, recorder.has_scores)
    if processors.is_stateless:
        return BlockRule(processors, criteria, recorder.is_on)
    return PositionRule(processors, criteria)
