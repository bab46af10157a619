"""This module chooses tokens column by column over all rows, for user code that has to see all rows.

Shapes: `B` rows, `C` columns (the verified tokens, anchor first), `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import utils as generation_utils
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from dflash_hf.generation.choose import accepted, choose_block, scores_of_block, walk_of
from dflash_hf.generation.sampling import (
    BlockProcessors,
    check_drawable,
    choose,
    ends_row,
    of_vocabulary,
)
from dflash_hf.generation.state import DecodeState

# Older releases give a column to the streamer before they call the criteria, which may read the streamer.
STREAMS_BEFORE_CRITERIA = not hasattr(generation_utils, "StopCheck")


def pads_ended_rows(criteria: list[StoppingCriteria], state: DecodeState) -> bool:
    """Returns True if rows that have ended continue with padding. Plain `generate` asks the criteria for an attribute.

    `criteria` are the criteria without those for length and end of sequence.
    """
    names_ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return state.host.has_eos or names_ends


class SynchronizedRows:
    """Chooses tokens column by column over all rows, and calls user code that has to see all rows.

    User processors and stopping criteria may keep state or compare rows, and a streamer gets one token of every row at
    a time. They are called once per column, in the order of plain `generate`. All rows then have the same
    number of columns, and finished rows are padded. A block is committed up to the first column at which a running row
    does not continue with its proposal. So with several rows, a verify commits fewer tokens than it would for each row
    alone.

    Args:
        processors (`BlockProcessors`): The processors of the run.
        criteria (`list[StoppingCriteria]`): The criteria without those for length and end of sequence.
        streamer (`BaseStreamer`, *optional*): Gets each column `[B]` on the CPU.
        state (`DecodeState`): The state of the run, which has begun. Unless [`pads_ended_rows`], finished rows
            continue with their own tokens until all rows have finished, as in plain `generate`.
        has_scores (`bool`): Whether the call asks for `output_scores`. The criteria then get these scores.
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
        self.pads = pads_ended_rows(criteria, state)
        self.is_running = ~state.done  # [B], bool: rows that nothing has stopped yet
        self.has_scores = has_scores
        self.scores: list[Tensor] = []  # processed scores of every column
        self.num_columns = 0

    def choose(self, state: DecodeState, logits_BCV: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses columns as long as all running rows continue with their proposals; reads on the host.

        Writes `state.tokens` and columns of `state.ids` that are not committed yet. Lowers `state.remaining` of rows
        that are stopped. Returns processed scores `[B, C, V]`, in float32 or in the dtype that a processor returns,
        but raw after the last chosen column. Also returns the number of proposals that each row accepts, `[B]`.
        """
        # Read again at every step, because another rank may have decided how many columns are committed.
        self.num_columns = int(state.num_new.max())
        columns: _Columns
        if self.processors.is_stateless:
            columns = _ChosenColumns(state, logits_BCV, self.processors)
        else:
            columns = _ProcessedColumns(state, logits_BCV, self.processors)
        committed = torch.zeros_like(state.remaining)
        was_counted = self._counted()
        for column in range(state.width):
            # This is the order of plain `generate`: processors first, then criteria and the streamer.
            tokens = columns.choose(column, self.num_columns)
            if state.host.is_sampled:
                check_drawable(columns.scores[self._counted(), column])
            committed += self._take_column(state, tokens, columns.scores[:, column])
            is_last = column == state.width - 1
            if is_last or not bool(self.is_running.any()):
                break
            goes_on = columns.go_on(column, tokens)
            # If one row does not continue with its proposal, the block ends for all rows. The next columns of this row
            # were verified after another token.
            all_go_on = (goes_on | ~self._counted()).all()
            if not bool(all_go_on):
                break
        # Rows that were stopped end with the tokens of this step. If no row is running any more, all rows end.
        is_open = self._counted() & self.is_running.any()
        has_stopped = was_counted & ~is_open
        remaining = torch.where(has_stopped, committed, state.remaining)
        state.remaining.copy_(remaining)
        # The last column of a row is its bonus token, which is no proposal.
        num_accepted = (committed - 1).clamp_min(0)
        return columns.scores, num_accepted

    def _counted(self) -> Tensor:
        """Returns the rows whose tokens count `[B]`."""
        if self.pads:
            return self.is_running
        return torch.ones_like(self.is_running)

    def _take_column(self, state: DecodeState, tokens: Tensor, scores: Tensor) -> Tensor:
        """Appends a column to every row and tests which rows have finished; returns rows whose token counts `[B]`."""
        counted = self._counted()
        if self.pads:
            tokens = torch.where(counted, tokens, self.processors.pad_id)
        state.ids[:, state.host.columns + self.num_columns] = tokens
        self.num_columns += 1
        # Plain `generate` passes the scores so far to criteria, or `None` if it keeps no scores.
        given: tuple[Tensor, ...] | None = None
        if self.has_scores:
            self.scores.append(scores.clone())
            given = tuple(self.scores)
        if STREAMS_BEFORE_CRITERIA:
            self._stream(tokens)
        stopped = ends_row(tokens, state.padded_eos_ids)
        if self.num_columns >= state.host.limit:
            stopped.fill_(True)
        ids = state.ids[:, : state.host.columns + self.num_columns]
        for criterion in self.criteria:
            # The criterion gets a contiguous copy, as from plain `generate`, because it may keep the tensor.
            verdict = criterion(ids.clone(), given)  # pyright: ignore[reportArgumentType]
            # Plain `generate` also accepts numbers as verdicts.
            stopped |= torch.as_tensor(verdict, device=stopped.device, dtype=torch.bool)
        self.is_running = self.is_running & ~stopped
        if not STREAMS_BEFORE_CRITERIA:
            self._stream(tokens)
        return counted

    def _stream(self, tokens: Tensor) -> None:
        """Gives a column of tokens `[B]` to the streamer, if there is one."""
        if self.streamer is not None:
            # The streamer gets a copy, because it may keep the tensor.
            self.streamer.put(tokens.to("cpu", copy=True))


class _ChosenColumns:
    """The columns of a block whose tokens are all chosen at once."""

    def __init__(self, state: DecodeState, logits_BCV: Tensor, processors: BlockProcessors) -> None:
        self.state = state
        # No processor reads the prefix. Only criteria and streamers keep the rows synchronized.
        num_accepted = choose_block(state, logits_BCV, processors)
        self.num_accepted = accepted(state, num_accepted)
        self.scores = scores_of_block(state, logits_BCV, processors)

    def choose(self, column: int, num_new: int) -> Tensor:
        """Returns the tokens of a column `[B]`."""
        return self.state.tokens[:, column]

    def go_on(self, column: int, tokens: Tensor) -> Tensor:
        """Returns a mask `[B]` of the rows that continue with their proposal after a column."""
        return self.num_accepted > column


class _ProcessedColumns:
    """The columns of a block in which each is chosen after the column before it: processors read the prefix."""

    def __init__(self, state: DecodeState, logits_BCV: Tensor, processors: BlockProcessors) -> None:
        self.state = state
        self.processors = processors
        self.positions = state.decided_positions
        self.scores = logits_BCV.to(torch.float32, copy=True)
        self.walk = walk_of(state, self.scores)

    def choose(self, column: int, num_new: int) -> Tensor:
        """Chooses the tokens of a column `[B]` after `num_new` new tokens, and writes them into `state.tokens`."""
        state = self.state
        prefix = state.ids[:, : state.host.columns + num_new].clone()
        # The scores are copied, because processors may write into them, and the call may ask for the raw scores.
        raw = self.scores[:, column].to(torch.float32, copy=True)
        processed = self.processors.processors(prefix, raw)
        processed = of_vocabulary(processed, *raw.shape)
        # A user's processor may return float64 scores for float32 scores.
        self.scores = self.scores.to(torch.promote_types(self.scores.dtype, processed.dtype))
        self.scores[:, column] = processed
        of_column = slice(column, column + 1)
        chosen = choose(self.scores[:, of_column], state.key, self.positions[:, of_column])
        state.tokens[:, column] = chosen[:, 0]
        return state.tokens[:, column]

    def go_on(self, column: int, tokens: Tensor) -> Tensor:
        """Returns a mask `[B]` of the rows that continue with their proposal after a column."""
        self.walk.step(column, tokens, self.scores)
        return tokens == self.state.proposals[:, column]


_Columns = _ChosenColumns | _ProcessedColumns
