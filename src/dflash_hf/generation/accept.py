"""From the target's logits to committed tokens: choose, count the proposals that stand, commit.

Three rules choose, and [`rule_for`] says which one a run has. Each writes the target's tokens into `state.tokens`, and
returns the number of proposals that it accepts where that is another one than the number that match:

* [`BlockRule`] looks at the whole block at once: greedy, sampled with warpers of single scores, or by rejection;
* [`PositionRule`] goes position by position, for processors that read the prefix;
* [`SynchronizedRows`] goes column by column over all rows, where user code has to see all of them.

There is one way to commit, [`commit`]. A stopping criterion lowers the number of tokens that a row may still generate,
so that the commit ends the row there.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    DiaEOSChannelFilterLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from dflash_hf import ops
from dflash_hf.generation.choose import accepted, choose_block, scores_of_block, walk_of
from dflash_hf.generation.sampling import BlockProcessors, choose, ends_row, of_vocabulary
from dflash_hf.generation.state import NUM_REPORTED, DecodeState
from dflash_hf.generation.stats import Recorder
from dflash_hf.generation.synchronized_rows import SynchronizedRows, pads_ended_rows


def commit(state: DecodeState, num_accepted: Tensor | None = None) -> None:
    """Commits the chosen tokens and prepares the next step: the only place where rows move on. No host sync.

    `num_accepted` `[B]`, int64, is in `[0, W - 1]`; by default the number of proposals that equal `state.tokens`, up
    to the first that does not. `state.outcome` says what has happened.
    """
    accept_and_prepare = ops.implementation(ops.accept_and_prepare, state.block)
    # The part of the report that every step writes; a tree's is written before.
    record = state.outcome[: NUM_REPORTED + state.width]
    accept_and_prepare(
        state.block,
        state.tokens,
        cursor_B=state.cursor,
        remaining_B=state.remaining,
        done_B=state.done,
        ids_BT=state.ids,
        draft_ids_BK=state.draft_ids,
        positions_BP=state.next_positions,
        record_FB=record,
        eos_ids_N=state.padded_eos_ids,
        accepted_B=num_accepted,
    )


class BlockRule:
    """Chooses tokens where the processors can see the whole block at once.

    It reads nothing on the host where [`runs_on_device`].

    Args:
        processors (`BlockProcessors`): The run's, all of them stateless.
        criteria (`list[StoppingCriteria]`): Besides length and end of sequence; they look at a row's own tokens.
        is_recorded (`bool`): Whether somebody records the steps: scores are processed then, and the host takes part.
    """

    # Whether the rule itself hands tokens to the streamer.
    feeds_streamer = False

    def __init__(
        self, processors: BlockProcessors, criteria: list[StoppingCriteria], is_recorded: bool
    ) -> None:
        self.processors = processors
        self.criteria = criteria
        self.is_recorded = is_recorded

    @property
    def runs_on_device(self) -> bool:
        """Whether a step is decided without a look on the host."""
        return not self.criteria and not self.is_recorded

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses the tokens of a block.

        Writes `state.tokens`, and lowers `state.remaining` where a criterion stops a row.

        Args:
            state (`DecodeState`): Changed in place.
            logits_BWV (`torch.Tensor`): The target's logits for the verified tokens.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: Scores `[B, W, V]`, processed if somebody wants them; and the
            number accepted `[B]`, int64, where it is another one than the number that match.
        """
        scores, num_accepted = self._choose_block(state, logits_BWV)
        # Criteria see tokens that are chosen and not committed: what they stop is never taken back.
        if self.criteria:
            stop_by_criteria(state, self.criteria, num_accepted)
        return scores, num_accepted

    def _choose_block(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses as [`choose`], whatever the criteria say."""
        num_accepted = choose_block(state, logits_BWV, self.processors)
        scores = logits_BWV
        if self.is_recorded:
            # The tokens were chosen without scores of the whole vocabulary, where a kernel could.
            scores = scores_of_block(state, logits_BWV, self.processors)
        return scores, num_accepted


class PositionRule:
    """Chooses position by position, each row until its first mismatch: for processors that read the prefix.

    No processor ever sees a rejected token. Arguments as of [`BlockRule`].
    """

    feeds_streamer = False
    runs_on_device = False

    def __init__(self, processors: BlockProcessors, criteria: list[StoppingCriteria]) -> None:
        self.processors = processors
        self.criteria = criteria

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses as [`BlockRule.choose`]; the scores `[B, W, V]` are raw beyond a row's first mismatch.

        Writes columns of `state.ids` that are not committed yet; reads on the host.
        """
        scores, is_chosen = self._choose_tokens(state, logits_BWV)
        if self.criteria:
            stop_by_criteria(state, self.criteria, None)
        if state.host.is_sampled:
            # Plain `generate` draws nothing behind the token at which a criterion stops a row.
            place = torch.arange(state.width, device=state.ids.device)
            is_drawn = is_chosen & (place < state.remaining[:, None])
            self.processors.check_drawable(scores, is_drawn)
        return scores, None

    def _choose_tokens(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Writes `state.tokens`; returns the scores, and at which positions they are a row's `[B, W]`, bool.

        Those are the positions up to a row's first mismatch, end or limit, and none of a row that is done.
        """
        # Processors write into the scores that they get; the logits may be asked for.
        scores = logits_BWV.to(torch.float32, copy=True)
        columns = state.cursor.tolist()
        # The rows whose proposals have all matched so far.
        active = ~state.done
        positions = state.decided_positions
        walk = walk_of(state, scores)
        # Behind a row's first mismatch nothing is chosen, and nothing is left of the step before.
        state.tokens.zero_()
        is_chosen = torch.zeros_like(state.tokens, dtype=torch.bool)
        for position in range(state.width):
            is_chosen[:, position] = active
            lengths = state.cursor + position
            # Rows of one length are processed together: a processor gets a prefix that is as long for all rows.
            rows = zip(columns, active.tolist(), strict=True)
            found = {column + position for column, is_active in rows if is_active}
            for length in sorted(found):
                processed = self._processed(state, scores[:, position], active, lengths, length)
                # A user processor may make float64 scores of float32 ones.
                scores = scores.to(torch.promote_types(scores.dtype, processed.dtype))
                scores[:, position] = processed
            of_position = slice(position, position + 1)
            chosen = choose(scores[:, of_position], state.key, positions[:, of_position])
            chosen = chosen[:, 0]
            state.tokens[:, position] = chosen
            is_last = position == state.width - 1
            if is_last:
                break
            # First the walk, which puts the proposal of the next node on a tree's path into `state.proposals`.
            walk.step(position, chosen, scores)
            active = active & self._goes_on(state, position, chosen)
            if not bool(active.any()):
                break
            # The processors of the next position read it as the last token of the prefix.
            _show_proposal(state, position, active, lengths)
        return scores, is_chosen

    def _processed(
        self,
        state: DecodeState,
        scores_BV: Tensor,
        active_B: Tensor,
        lengths_B: Tensor,
        length: int,
    ) -> Tensor:
        """Returns scores `[B, V]`, processed for the active rows that have `length` columns before them.

        All rows go through the processors every time, because these may hold settings per row. Rows that stand
        elsewhere show their own committed tokens, then padding, and their scores are dropped.
        """
        rows = active_B & (lengths_B == length)
        # A row that is not active has columns of rejected proposals behind its committed ones.
        num_seen = torch.where(active_B, lengths_B, state.cursor).clamp_max(length)
        prefix = state.ids[:, :length].clone()
        column = torch.arange(length, device=state.ids.device)
        is_padding = column >= num_seen[:, None]
        # Processors look scores up by id. Old configs say -1 where there is no padding, and a pad token may be the
        # tokenizer's alone.
        has_score = 0 <= self.processors.pad_id < scores_BV.shape[1]
        prefix[is_padding] = self.processors.pad_id if has_score else 0
        # A copy in float32, which processors expect: rows of another length may have float64 scores by now.
        raw = scores_BV.to(torch.float32, copy=True)
        processed = self.processors.at(prefix, raw, rows)
        processed = of_vocabulary(processed, *scores_BV.shape)
        return torch.where(rows[:, None], processed, scores_BV)

    def _goes_on(self, state: DecodeState, position: int, chosen_B: Tensor) -> Tensor:
        """Returns the rows whose token at a position equals the proposal and does not end them `[B]`."""
        matches = chosen_B == state.proposals[:, position]
        # The row's limit, which a criterion may have lowered.
        goes_on = matches & (state.remaining > position + 1)
        if state.host.has_eos:
            goes_on = goes_on & ~ends_row(chosen_B, state.padded_eos_ids)
        return goes_on


def _show_proposal(state: DecodeState, position: int, active_B: Tensor, lengths_B: Tensor) -> None:
    """Writes the proposal at a position behind the ids of the active rows, where processors read the prefix."""
    columns = lengths_B[:, None]
    before = state.ids.gather(1, columns)[:, 0]
    shown = torch.where(active_B, state.proposals[:, position], before)
    state.ids.scatter_(1, columns, shown[:, None])


def stop_by_criteria(
    state: DecodeState, criteria: list[StoppingCriteria], num_accepted: Tensor | None
) -> None:
    """Asks stopping criteria after each token that would be committed, row by row, and ends rows where they say so.

    The criteria look at a row's own tokens: with any other, rows are synchronized. Reads on the host. Lowers
    `remaining` of the rows that stop, and changes `ids` behind the committed columns; for `num_accepted` see
    [`commit`].
    """
    # The tokens that the commit would take, row by row.
    num_accepted = accepted(state, num_accepted)
    would_commit = torch.minimum(num_accepted + 1, state.remaining)
    num_ahead = would_commit.masked_fill(state.done, 0).tolist()
    # They are written behind the ids as scratch: a criterion is given the text with the token at its end.
    place = torch.arange(state.width, device=state.ids.device)
    columns = place + state.cursor[:, None]
    state.ids.scatter_(1, columns, state.tokens)
    is_end = ends_row(state.tokens, state.padded_eos_ids).tolist()
    for row, column in enumerate(state.cursor.tolist()):
        has_ended = num_ahead[row] == 0
        if has_ended:
            continue
        # A copy: a criterion may keep what it gets, and the columns are written again.
        text = state.ids[row : row + 1, : column + num_ahead[row]].clone()
        for num in range(1, num_ahead[row] + 1):
            ids = cast(torch.LongTensor, text[:, : column + num])
            if _stops(criteria, ids):
                # The commit ends the row where nothing remains to be generated.
                state.remaining[row] = num
                break
            # The commit ends the row here, and plain `generate` asks no criterion about tokens behind the end.
            if is_end[row][num - 1]:
                break


def _stops(criteria: list[StoppingCriteria], ids: torch.LongTensor) -> bool:
    """Returns True if a criterion stops the one row `[1, n]` behind its last token; reads on the host."""
    for criterion in criteria:
        verdict = torch.as_tensor(criterion(ids, None), device="cpu")
        if bool(verdict.all()):
            return True
    return False


# Transformers' own processors look at nothing but each row's prefix and scores. Processors of the user's that say
# `is_row_wise = True` do so too.
TOKEN_LOCAL_PROCESSORS = "transformers.generation.logits_process"
# But for these, which keep state (guidance a cache of the target's) or take several rows for one.
OF_WHOLE_BATCH = (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    DiaEOSChannelFilterLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
)
# Criteria that decide for a row by its own tokens; so do user criteria that say `is_row_wise = True`.
ROW_WISE_CRITERIA = (MaxTimeCriteria, StopStringCriteria)

AcceptanceRule = BlockRule | PositionRule | SynchronizedRows


def rule_for(
    processors: BlockProcessors,
    criteria: list[StoppingCriteria],
    streamer: BaseStreamer | None,
    state: DecodeState,
    recorder: Recorder,
) -> AcceptanceRule:
    """Returns the rule by which a run chooses tokens.

    Arguments as of [`SynchronizedRows`]; `recorder` says whether the steps and their scores are recorded.
    """
    keeps_state = any(may_keep_state(processor) for processor in processors.processors)
    compares_rows = any(may_compare_rows(criterion) for criterion in criteria)
    if state.ids.shape[0] == 1:
        # One row is in step with itself, and its streamer gets all tokens of a commit at once.
        is_synchronized = keeps_state or compares_rows
    else:
        # Without an end-of-sequence id plain `generate` lets stopped rows run on until all have stopped.
        stops_late = bool(criteria) and not pads_ended_rows(criteria, state)
        is_synchronized = keeps_state or compares_rows or streamer is not None or stops_late
    if is_synchronized:
        return SynchronizedRows(processors, criteria, streamer, state, recorder.has_scores)
    if processors.is_stateless:
        return BlockRule(processors, criteria, recorder.is_on)
    return PositionRule(processors, criteria)


def may_keep_state(processor: Any) -> bool:
    """Returns True unless a logits processor is known, or says, to look at a row's prefix and scores alone."""
    if getattr(processor, "is_row_wise", False):
        return False
    # By the module, so that a subclass of the user's counts as unknown.
    is_unknown = type(processor).__module__ != TOKEN_LOCAL_PROCESSORS
    return is_unknown or isinstance(processor, OF_WHOLE_BATCH)


def may_compare_rows(criterion: Any) -> bool:
    """Returns True unless a stopping criterion decides for a row by its own tokens."""
    is_row_wise = getattr(criterion, "is_row_wise", False)
    return type(criterion) not in ROW_WISE_CRITERIA and not is_row_wise
