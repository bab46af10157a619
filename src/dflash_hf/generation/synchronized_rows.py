"""Choosing column by column over all rows, where user code has to see all of them.

Shapes: `B` rows, `C` columns (the verified tokens, anchor first), `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
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


def pads_ended_rows(criteria: list[StoppingCriteria], state: DecodeState) -> bool:
    """Returns True if rows that have ended go on with padding; plain `generate` asks the criteria for an attribute.

    `criteria` are those besides length and end of sequence.
    """
    names_ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return state.host.has_eos or names_ends


class SynchronizedRows:
    """Chooses column by column over all rows, and calls user code that has to see all of them.

    User processors and stopping criteria may keep state or compare rows, and a streamer gets one token of every row at
    a time. They are called once per column, with every row as long as the others and finished rows padded, in the
    order processors, criteria, streamer. A block is committed up to the first column at which a running row does not
    continue with its proposal, so with several rows fewer tokens are committed per verify than each row alone would.

    Args:
        processors (`BlockProcessors`): The run's.
        criteria (`list[StoppingCriteria]`): Besides length and end of sequence.
        streamer (`BaseStreamer`, *optional*): Gets each column `[B]` on the CPU.
        state (`DecodeState`): Of the run, begun. Unless [`pads_ended_rows`], finished rows go on with tokens of their
            own until all rows have finished, as in plain `generate`.
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
        self.pads = pads_ended_rows(criteria, state)
        self.is_running = ~state.done  # [B], bool: rows that nothing has stopped yet
        self.has_scores = has_scores
        self.scores: list[Tensor] = []  # processed scores of every column
        self.num_columns = 0

    def choose(self, state: DecodeState, logits_BCV: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses as many columns as all running rows agree to go on with; reads on the host.

        Writes the state's `tokens` and columns of `ids` that are not committed yet, and lowers `remaining` where
        something stops a row. Returns processed scores `[B, C, V]`, float32 or the dtype that a processor makes of
        it, raw beyond the last column; and the number of proposals that each row keeps `[B]`.
        """
        # Read anew at every step: another rank may have decided how many columns stand.
        self.num_columns = int(state.num_new.max())
        columns: _Columns
        if self.processors.is_stateless:
            columns = _ChosenColumns(state, logits_BCV, self.processors)
        else:
            columns = _ProcessedColumns(state, logits_BCV, self.processors)
        committed = torch.zeros_like(state.remaining)
        was_counted = self._counted()
        for column in range(state.width):
            # Processors, then criteria, then the streamer: the order in which plain `generate` calls them.
            tokens = columns.choose(column, self.num_columns)
            if state.host.is_sampled:
                check_drawable(columns.scores[self._counted(), column])
            committed += self._take_column(state, tokens, columns.scores[:, column])
            is_last = column == state.width - 1
            if is_last or not bool(self.is_running.any()):
                break
            goes_on = columns.go_on(column, tokens)
            # One row that leaves its proposals ends the block for all: the next column of the others is not verified
            # behind the token that it has got.
            all_go_on = (goes_on | ~self._counted()).all()
            if not bool(all_go_on):
                break
        # Rows that have stopped end with the tokens of this step; once none is running, all of them do.
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
        """Appends one column to every row and asks what has finished; returns the rows whose token counts `[B]`."""
        counted = self._counted()
        if self.pads:
            tokens = torch.where(counted, tokens, self.processors.pad_id)
        state.ids[:, state.host.columns + self.num_columns] = tokens
        self.num_columns += 1
        # Plain `generate` hands criteria the scores so far, or `None` where it keeps none.
        given: tuple[Tensor, ...] | None = None
        if self.has_scores:
            self.scores.append(scores.clone())
            given = tuple(self.scores)
        stopped = ends_row(tokens, state.padded_eos_ids)
        if self.num_columns >= state.host.limit:
            stopped.fill_(True)
        ids = state.ids[:, : state.host.columns + self.num_columns]
        for criterion in self.criteria:
            # A copy, as from plain `generate`: it may be kept, and is contiguous.
            verdict = criterion(ids.clone(), given)  # pyright: ignore[reportArgumentType]
            # Plain `generate` takes numbers for verdicts too.
            stopped |= torch.as_tensor(verdict, device=stopped.device, dtype=torch.bool)
        self.is_running = self.is_running & ~stopped
        if self.streamer is not None:
            # A copy: a streamer may keep the tensor that it gets.
            self.streamer.put(tokens.to("cpu", copy=True))
        return counted


class _ChosenColumns:
    """The columns of a block that is chosen at once."""

    def __init__(self, state: DecodeState, logits_BCV: Tensor, processors: BlockProcessors) -> None:
        self.state = state
        # Nothing that was asked for reads a prefix: criteria and streamers alone keep the rows in step.
        num_accepted = choose_block(state, logits_BCV, processors)
        self.num_accepted = accepted(state, num_accepted)
        self.scores = scores_of_block(state, logits_BCV, processors)

    def choose(self, column: int, num_new: int) -> Tensor:
        """Returns the tokens of a column `[B]`."""
        return self.state.tokens[:, column]

    def go_on(self, column: int, tokens: Tensor) -> Tensor:
        """Returns the rows that continue with their proposal behind a column `[B]`."""
        return self.num_accepted > column


class _ProcessedColumns:
    """The columns of a block of which each is chosen behind the ones before it: processors read the prefix."""

    def __init__(self, state: DecodeState, logits_BCV: Tensor, processors: BlockProcessors) -> None:
        self.state = state
        self.processors = processors
        self.positions = state.decided_positions
        self.scores = logits_BCV.to(torch.float32, copy=True)
        self.walk = walk_of(state, self.scores)

    def choose(self, column: int, num_new: int) -> Tensor:
        """Chooses the tokens of a column `[B]` behind so many new ones, and writes them into `state.tokens`."""
        state = self.state
        prefix = state.ids[:, : state.host.columns + num_new].clone()
        # A copy, because processors may write into the scores that they get while the raw ones may be asked for.
        raw = self.scores[:, column].to(torch.float32, copy=True)
        processed = self.processors.processors(prefix, raw)
        processed = of_vocabulary(processed, *raw.shape)
        # A user processor may make float64 scores of float32 ones.
        self.scores = self.scores.to(torch.promote_types(self.scores.dtype, processed.dtype))
        self.scores[:, column] = processed
        of_column = slice(column, column + 1)
        chosen = choose(self.scores[:, of_column], state.key, self.positions[:, of_column])
        state.tokens[:, column] = chosen[:, 0]
        return state.tokens[:, column]

    def go_on(self, column: int, tokens: Tensor) -> Tensor:
        """Returns the rows that continue with their proposal behind a column `[B]`."""
        self.walk.step(column, tokens, self.scores)
        return tokens == self.state.proposals[:, column]


_Columns = _ChosenColumns | _ProcessedColumns
