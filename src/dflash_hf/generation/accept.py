"""This module chooses the target's tokens from its logits, counts the accepted proposals, and commits.

There are three rules of acceptance, and [`rule_for`] returns the rule of a run. Each rule writes the target's tokens
into `state.tokens`. It also returns the number of accepted proposals, if this is not the number of proposals that
match:

* [`BlockRule`] chooses the whole block at once: greedily, with stateless warpers, or by rejection sampling.
* [`PositionRule`] chooses position by position, for processors that read the prefix.
* [`SynchronizedRows`] chooses column by column over all rows, for user code that must see all rows.

Only [`commit`] commits tokens. A stopping criterion lowers the number of tokens that a row may still generate, so that
the commit ends the row there.

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
    """Commits the chosen tokens and prepares the next step. No other function advances rows. It has no host sync.

    Args:
        state (`DecodeState`): Changed in place. `state.outcome` then holds what the step has done.
        num_accepted (`torch.Tensor` of shape `[B]`, int64, *optional*): The number of accepted proposals, in
            `[0, W - 1]`. By default it is the number of proposals before the first one that differs from
            `state.tokens`.
    """
    accept_and_prepare = ops.implementation(ops.accept_and_prepare, state.block)
    # The part of the outcome that every step writes. The part that describes a tree has been written before.
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
    """Chooses all tokens of a block at once, for processors that do not read the prefix.

    It copies nothing to the host if [`runs_on_device`] is true.

    Args:
        processors (`BlockProcessors`): The run's processors. All of them are stateless.
        criteria (`list[StoppingCriteria]`): The criteria besides length and end of sequence. They look at a row's own
            tokens only.
        is_recorded (`bool`): Whether the steps are recorded. In this case the rule also returns processed scores, and
            a step needs the host.
    """

    # Whether the rule itself passes tokens to the streamer.
    feeds_streamer = False

    def __init__(
        self, processors: BlockProcessors, criteria: list[StoppingCriteria], is_recorded: bool
    ) -> None:
        self.processors = processors
        self.criteria = criteria
        self.is_recorded = is_recorded

    @property
    def runs_on_device(self) -> bool:
        """Whether a step needs no copy to the host."""
        return not self.criteria and not self.is_recorded

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses the tokens of a block.

        Writes `state.tokens`, and lowers `state.remaining` of each row that a criterion stops.

        Args:
            state (`DecodeState`): Changed in place.
            logits_BWV (`torch.Tensor`): The target's logits for the verified tokens.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: The scores `[B, W, V]`, which are processed if steps are
            recorded. Then the number of accepted proposals `[B]`, int64, or `None` for the number that match.
        """
        scores, num_accepted = self._choose_block(state, logits_BWV)
        # Criteria see the chosen tokens before the commit, so that no committed token is ever removed.
        if self.criteria:
            stop_by_criteria(state, self.criteria, num_accepted)
        return scores, num_accepted

    def _choose_block(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses as [`choose`] does, without the criteria."""
        num_accepted = choose_block(state, logits_BWV, self.processors)
        scores = logits_BWV
        if self.is_recorded:
            # A kernel may have chosen the tokens without computing the scores of the whole vocabulary.
            scores = scores_of_block(state, logits_BWV, self.processors)
        return scores, num_accepted


class PositionRule:
    """Chooses position by position, each row up to its first mismatch, for processors that read the prefix.

    No processor ever sees a rejected token.

    Args:
        processors (`BlockProcessors`): The run's processors.
        criteria (`list[StoppingCriteria]`): As in [`BlockRule`].
    """

    feeds_streamer = False
    runs_on_device = False

    def __init__(self, processors: BlockProcessors, criteria: list[StoppingCriteria]) -> None:
        self.processors = processors
        self.criteria = criteria

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses as [`BlockRule.choose`] does. The scores `[B, W, V]` are unprocessed after a row's first mismatch.

        Writes columns of `state.ids` that are not committed yet. Copies tensors to the host.

        Raises:
            ValueError: If a sampled token has scores from which no token can be drawn. In a running batch, the error
                is stored for the row instead ([`RowProcessors`]).
        """
        scores, is_chosen = self._choose_tokens(state, logits_BWV)
        if self.criteria:
            stop_by_criteria(state, self.criteria, None)
        if state.host.is_sampled:
            # Tokens after a criterion's stop are not checked, because plain `generate` does not draw them.
            place = torch.arange(state.width, device=state.ids.device)
            is_drawn = is_chosen & (place < state.remaining[:, None])
            self.processors.check_drawable(scores, is_drawn)
        return scores, None

    def _choose_tokens(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor]:
        """Writes `state.tokens`. Returns the scores, and the positions `[B, W]`, bool, for which a token is chosen.

        These are a row's positions up to its first mismatch, end or limit. A row that has ended has none.
        """
        # A copy, because processors write into their scores, and the caller may have asked for the logits.
        scores = logits_BWV.to(torch.float32, copy=True)
        columns = state.cursor.tolist()
        # The rows whose proposals have all matched so far.
        active = ~state.done
        positions = state.decided_positions
        walk = walk_of(state, scores)
        # After a row's first mismatch no token is chosen. The zeros replace the tokens of the step before.
        state.tokens.zero_()
        is_chosen = torch.zeros_like(state.tokens, dtype=torch.bool)
        for position in range(state.width):
            is_chosen[:, position] = active
            lengths = state.cursor + position
            # Rows of one length are processed together, because a processor gets prefixes of one length for all rows.
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
            # The walk comes first: for a tree, it writes the next proposal on the path into `state.proposals`.
            walk.step(position, chosen, scores)
            active = active & self._goes_on(state, position, chosen)
            if not bool(active.any()):
                break
            # The processors of the next position read this proposal as the last token of the prefix.
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
        """Returns scores `[B, V]` that are processed for the active rows with a prefix of `length` columns.

        All rows go through the processors each time, because processors may hold settings per row. The other rows have
        their own tokens as prefix, cut or padded to `length`. Their processed scores are dropped.

        Raises `ValueError` if a processor returns scores of a wrong shape.
        """
        rows = active_B & (lengths_B == length)
        # In a row that is not active, rejected proposals stand in the columns after the committed tokens.
        num_seen = torch.where(active_B, lengths_B, state.cursor).clamp_max(length)
        prefix = state.ids[:, :length].clone()
        column = torch.arange(length, device=state.ids.device)
        is_padding = column >= num_seen[:, None]
        # Processors look scores up by token id, so the padding needs an id that has a score. Old configs use -1 if
        # there is no padding, and a pad token may be known to the tokenizer only.
        has_score = 0 <= self.processors.pad_id < scores_BV.shape[1]
        prefix[is_padding] = self.processors.pad_id if has_score else 0
        # A copy in float32, which processors expect. The scores may be float64 after rows of another length.
        raw = scores_BV.to(torch.float32, copy=True)
        processed = self.processors.at(prefix, raw, rows)
        processed = of_vocabulary(processed, *scores_BV.shape)
        return torch.where(rows[:, None], processed, scores_BV)

    def _goes_on(self, state: DecodeState, position: int, chosen_B: Tensor) -> Tensor:
        """Returns which rows `[B]`, bool, have chosen the proposal at a position and do not end with this token."""
        matches = chosen_B == state.proposals[:, position]
        # A row also ends at its limit, which a criterion may have lowered.
        goes_on = matches & (state.remaining > position + 1)
        if state.host.has_eos:
            goes_on = goes_on & ~ends_row(chosen_B, state.padded_eos_ids)
        return goes_on


def _show_proposal(state: DecodeState, position: int, active_B: Tensor, lengths_B: Tensor) -> None:
    """Writes the proposal at a position after the prefixes of the active rows in `state.ids`, for the processors."""
    columns = lengths_B[:, None]
    before = state.ids.gather(1, columns)[:, 0]
    shown = torch.where(active_B, state.proposals[:, position], before)
    state.ids.scatter_(1, columns, shown[:, None])


def stop_by_criteria(
    state: DecodeState, criteria: list[StoppingCriteria], num_accepted: Tensor | None
) -> None:
    """Calls the stopping criteria after each token that would be committed, row by row, and ends rows that they stop.

    The criteria look at a row's own tokens only. A run with other criteria uses [`SynchronizedRows`]. The function
    copies tensors to the host. It lowers `state.remaining` of the rows that stop, and writes columns of `state.ids`
    after the committed ones. `num_accepted` is the argument of [`commit`].
    """
    # The number of tokens that the commit would take in each row.
    num_accepted = accepted(state, num_accepted)
    would_commit = torch.minimum(num_accepted + 1, state.remaining)
    num_ahead = would_commit.masked_fill(state.done, 0).tolist()
    # The tokens are written after the committed ids as scratch, because a criterion gets the text up to the token.
    place = torch.arange(state.width, device=state.ids.device)
    columns = place + state.cursor[:, None]
    state.ids.scatter_(1, columns, state.tokens)
    is_end = ends_row(state.tokens, state.padded_eos_ids).tolist()
    for row, column in enumerate(state.cursor.tolist()):
        has_ended = num_ahead[row] == 0
        if has_ended:
            continue
        # A copy, because a criterion may keep the tensor, and the columns are overwritten.
        text = state.ids[row : row + 1, : column + num_ahead[row]].clone()
        for num in range(1, num_ahead[row] + 1):
            ids = cast(torch.LongTensor, text[:, : column + num])
            if _stops(criteria, ids):
                # The commit ends a row that has no token left to generate.
                state.remaining[row] = num
                break
            # The commit ends the row here, and plain `generate` calls no criterion for tokens after the end.
            if is_end[row][num - 1]:
                break


def _stops(criteria: list[StoppingCriteria], ids: torch.LongTensor) -> bool:
    """Returns True if a criterion stops the one row `[1, n]` after its last token. Copies the verdict to the host."""
    for criterion in criteria:
        verdict = torch.as_tensor(criterion(ids, None), device="cpu")
        if bool(verdict.all()):
            return True
    return False


# Transformers' own processors look only at each row's prefix and scores. So do user processors that declare
# `is_row_wise = True`.
TOKEN_LOCAL_PROCESSORS = "transformers.generation.logits_process"
# These are the exceptions: they keep state (guidance keeps a cache of the target) or treat several rows as one.
OF_WHOLE_BATCH = (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    DiaEOSChannelFilterLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
)
# Criteria that decide for a row by its own tokens. So do user criteria that declare `is_row_wise = True`.
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

    The arguments are those of [`SynchronizedRows`]. `recorder` says whether steps and their scores are recorded.
    """
    keeps_state = any(may_keep_state(processor) for processor in processors.processors)
    compares_rows = any(may_compare_rows(criterion) for criterion in criteria)
    if state.ids.shape[0] == 1:
        # One row needs no synchronization, and its streamer gets all tokens of a commit at once.
        is_synchronized = keeps_state or compares_rows
    else:
        # Without an end-of-sequence id, plain `generate` continues stopped rows until all rows have stopped.
        stops_late = bool(criteria) and not pads_ended_rows(criteria, state)
        is_synchronized = keeps_state or compares_rows or streamer is not None or stops_late
    if is_synchronized:
        return SynchronizedRows(processors, criteria, streamer, state, recorder.has_scores)
    if processors.is_stateless:
        return BlockRule(processors, criteria, recorder.is_on)
    return PositionRule(processors, criteria)


def may_keep_state(processor: Any) -> bool:
    """Returns False if a logits processor is known, or declares, to look only at a row's prefix and scores."""
    if getattr(processor, "is_row_wise", False):
        return False
    # The module decides, so that a user's subclass counts as unknown.
    is_unknown = type(processor).__module__ != TOKEN_LOCAL_PROCESSORS
    return is_unknown or isinstance(processor, OF_WHOLE_BATCH)


def may_compare_rows(criterion: Any) -> bool:
    """Returns False if a stopping criterion is known, or declares, to decide for a row by its own tokens."""
    is_row_wise = getattr(criterion, "is_row_wise", False)
    return type(criterion) not in ROW_WISE_CRITERIA and not is_row_wise
