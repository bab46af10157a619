"""This module adds rows to a running batch and removes them in place, so that the steps of the batch can be captured.

The fixed buffers have a number of places. A request is prefilled as a run of one row, and then its row moves to a free
place ([`Places.add`]). So no tensor gets another address or shape. A free place holds a row that has ended. A step
over such a row commits nothing, and changes only scratch memory. So one graph serves all combinations of rows.

Everything that differs from row to row is in tensors, except the warpers, which are fixed in a graph. A free place
keeps the warpers of its last row. A new row moves to a place with its own warpers if there is one, so that no new
graph is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import EtaLogitsWarper
from transformers.utils import logging

from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.devices import plain_tensors
from dflash_hf.generation.buffers import FixedBuffers, affordable_length, else_freed
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.cuda_graph import EAGER, start_engine
from dflash_hf.generation.graphs import Graphs
from dflash_hf.generation.joining import RowSettings, check_alike, go_by, is_alike
from dflash_hf.generation.options import choose_engine, choose_widths
from dflash_hf.generation.request import Request
from dflash_hf.generation.run import (
    Rows,
    Run,
    grow,
    has_room,
    look_at_models,
    make_room,
    taps_of_verifies,
)
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.state import EOS_IDS, NUM_REPORTED, DecodeState, Reported
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation.step import begin, report

logger: Any = logging.get_logger(__name__)
NOT_ASKED = (
    "rows that join and leave are captured with draft.generation_config.engine = 'cuda_graph' only"
)
# Number of tokens of a row that the buffers have room for at the beginning, if there is memory for it.
FIRST_LENGTH = 4096
# The numbers of a free place on the host, in the order of `Reported`: a text of one token that has ended.
FREE = (0, 0, 0, 1, 1)


def choose_num_places(request: Request, max_rows: int, max_tokens: int | None) -> int:
    """Returns the number of places for a running batch that begins with a request; 0 if its steps are eager.

    `max_rows` and `max_tokens` are those of the batch.
    """
    if choose_engine(request.target, request.draft) == "eager":
        return 0
    # No GPU has run this yet, so captured steps have to be asked for.
    if request.draft.generation_config.engine != "cuda_graph":
        logger.warning_once(EAGER.format(reason=NOT_ASKED))
        return 0
    if max_tokens is not None:
        logger.warning_once(EAGER.format(reason="max_tokens is for buffers that grow by rows"))
        return 0
    return max_rows


class Places:
    """Fixed buffers with places for the rows of a running batch, and the run over all of them.

    Args:
        first (`Run`): The run of the first row that is to be added, after its prefill.
        num_places (`int`): Number of places.

    Raises:
        OutOfRoomError: If there is no memory for the buffers.
    """

    def __init__(self, first: Run, num_places: int) -> None:
        draft = first.request.draft
        target = first.request.target
        self.num_places = num_places
        least = first.room + first.state.host.columns
        affordable = affordable_length(target, draft, num_places)
        wanted = max(least, min(FIRST_LENGTH, affordable))
        allocate = partial(FixedBuffers.of_places, target, draft, first.buffers, num_places)
        self.buffers = else_freed(draft, allocate, wanted, least)
        self._nobody = DecodeState.of_nobody(self.buffers.shape)
        # The settings of each row, by its place.
        self._rows: dict[int, RowSettings] = {}
        # The settings of each place while it is free: the warpers of its last row.
        nothing = BlockProcessors(LogitsProcessorList())
        self._free = [RowSettings(nothing, [], None, 1)] * num_places
        # [places, N], int64: end tokens of each row, -1 for none.
        self._end_ids = self._no_ends(EOS_IDS)
        self._captured: StaticStep | None = None
        self._is_looked_up = False  # whether `_captured` is up to date for the present rows
        self._is_capturable = True  # as far as this is known without a step
        self.begin(first)

    def begin(self, first: Run) -> None:
        """Begins a run over the places, which are all free. `first` is the run of the row that is to be added."""
        num = self.num_places
        generator = DFlashCandidateGenerator(
            first.request, self.buffers, first.generator.proposal, first.generator.drafter
        )
        self.buffers.state.width = generator.verify_width
        rows = Rows(
            numbers=list(range(num)),
            reach=first.rows.reach * num,
            reported=Reported(*([number] * num for number in FREE)),
        )
        self.run = replace(
            first,
            generator=generator,
            chooser=choose_widths(generator, self.buffers.state, is_captured=True),
            taps=taps_of_verifies(first.request, self.buffers.cache),
            room=self.buffers.capacity - self.buffers.shape.block,
            # The buffers are kept for further rows.
            keeps_buffers=True,
            rows=rows,
        )

    def fits(self, other: Run, num_places: int) -> bool:
        """Returns True if there are `num_places` places, for rows like the row of another run."""
        has_same_layers = _layers_of(self.buffers.cache) == _layers_of(other.cache)
        # The draft and the proposal rule are not a part of the buffers: a new run brings its own.
        is_same = has_same_layers and is_alike(self.buffers.shape, other.buffers.shape)
        return is_same and self.num_places == num_places

    # ---- rows that come and leave

    def add(self, other: Run, row: RowSettings) -> int:
        """Moves the single row of another run to a free place. There must be at least one.

        Args:
            other (`Run`): The row's run, after its prefill. It cannot be used afterwards.
            row (`RowSettings`): The settings of this row.

        Returns:
            `int`: The place.

        Raises:
            ValueError: If the two runs draft or verify in other sizes.
            OutOfRoomError: If there is no memory for the row. The other rows have not changed then.
        """
        run = self.run
        check_alike(run, other)
        # The run may know the models only as they were when its first row joined.
        look_at_models(run)
        self._is_capturable = choose_engine(run.request.target, run.request.draft) != "eager"
        self.make_room_for(other, row)
        place = self._place_for(row)
        # Context of single tokens gathers in the same columns of all rows, but the new row has none, so it is written.
        run.generator.flush()
        self.buffers.put_row(place, other.buffers, other.longest)
        self._put_settings(place, row)
        for numbers, of_row in zip(run.rows.reported, other.rows.reported, strict=True):
            numbers[place] = of_row[0]
        if run.rows.reach:
            run.rows.reach[place] = other.rows.reach[0]
        self.buffers.stack_weights(run.request.draft)
        # If one request has user code, no row may use copies of weights.
        if run.packed.is_on:
            run.packed = other.packed
        run.packed.look_again()
        self._use_rows()
        return place

    def free(self, places: list[int]) -> None:
        """Frees the places of rows that have ended."""
        for place in places:
            del self._rows[place]
            self.buffers.free_row(place, self._nobody)
            for numbers, number in zip(self.run.rows.reported, FREE, strict=True):
                numbers[place] = number
        self._use_rows()

    def make_room_for(self, other: Run, row: RowSettings) -> None:
        """Grows the buffers if the row of another run does not fit; arguments and errors as of [`add`]."""
        run = self.run
        num_tokens = other.num_new + other.state.host.columns
        if num_tokens <= run.room:
            return
        longest = max(each.length for each in (*self._rows.values(), row))
        # The room is doubled, so that rows are copied and steps are captured again only a few times.
        wanted = min(longest, max(2 * run.room, num_tokens))
        self._grow(partial(else_freed, run.request.draft, partial(grow, run), wanted, num_tokens))

    def make_room(self) -> None:
        """Grows the buffers if the next step could need more room; errors as of `run.make_room`."""
        if not has_room(self.run):
            self._grow(partial(make_room, self.run))

    def _grow(self, grow_run: Callable[[], None]) -> None:
        """Grows the buffers. Steps are captured again, because the tensors are other ones."""
        self._forget_step()
        try:
            grow_run()
        finally:
            # The longer buffers are kept for further rows.
            self.run.keeps_buffers = True

    def _place_for(self, row: RowSettings) -> int:
        """Returns a free place for a row, if possible a place with the row's own warpers."""
        places = [place for place in range(self.num_places) if place not in self._rows]
        # With such a row, steps are eager. So the place keeps the warpers that it had before.
        if why_not_baked(row.processors):
            return places[-1]
        wanted = _baked(row)
        alike = [place for place in places if _baked(self._free[place]) == wanted]
        if alike:
            return alike[0]
        place = places[0]
        of_row = row._replace(end_ids=[], length=1)
        self._free[place] = of_row
        if not self._rows:
            # Similar rows may follow, and a new graph is needed in any case.
            self._free = [of_row] * self.num_places
        return place

    def _put_settings(self, place: int, row: RowSettings) -> None:
        """Writes the settings of the row at a place into the tensors that steps read."""
        self._rows[place] = row
        # The noise of a greedy row is never read.
        if row.seed is not None:
            self.buffers.state.seed[place] = row.seed
        num_ends = len(row.end_ids)
        num_before = self._end_ids.shape[1]
        if num_ends > num_before:
            # Graphs contain the address of the shorter tensor.
            self.buffers.graphs = Graphs()
            longer = self._no_ends(num_ends)
            longer[:, :num_before] = self._end_ids
            self._end_ids = longer
        self._end_ids[place] = -1
        self._end_ids[place, :num_ends] = torch.tensor(row.end_ids, dtype=torch.long, device="cpu")

    def _no_ends(self, num: int) -> Tensor:
        """Returns a tensor for `num` end tokens of each place, `[places, num]`, int64, filled with -1 for no token."""
        size = (self.num_places, num)
        with plain_tensors():
            return torch.full(size, -1, dtype=torch.long, device=self.buffers.shape.device)

    def _use_rows(self) -> None:
        """Updates the settings of the run for the present rows."""
        rows = [self._rows.get(place, free) for place, free in enumerate(self._free)]
        go_by(self.run, rows, self._end_ids)
        self._forget_step()

    # ---- steps

    def captured(self) -> StaticStep | None:
        """Returns the captured step over the present rows; `None` if it cannot be captured, with the reason logged."""
        if self._is_looked_up:
            return self._captured
        # Looked up only once until rows join or leave, even if the capture was refused.
        self._is_looked_up = True
        if self._is_capturable:
            # A capture runs on the device of the ids.
            with torch.cuda.device_of(self.buffers.state.ids):
                self._captured = start_engine(self.run)
        return self._captured

    def _forget_step(self) -> None:
        """Forgets the captured step. The next one is an existing graph or a new capture."""
        self._captured = None
        self._is_looked_up = False


def run_captured(captured: StaticStep) -> tuple[list[int], list[list[int]]]:
    """Runs one captured step, and waits for it.

    Returns:
        `tuple[list[int], list[list[int]]]`: The number of tokens that each row has committed, and the chosen tokens of
            each row, which begin with the committed tokens.
    """
    run = captured.run
    begin(run)
    # Eager steps may have gathered the context of single tokens. This step writes it.
    run.generator.newest.end_gathering()
    # Replays run on the stream of the device of the ids.
    with torch.cuda.device_of(run.state.ids):
        captured.launch(captured.bound(0))
    # This is the only copy to the host in a step, and the only wait.
    outcome = run.state.outcome.to("cpu")
    run.watch.lap("verify")
    width = run.state.width
    committed = report(run, outcome, width)
    tokens = outcome[NUM_REPORTED : NUM_REPORTED + width].T
    return committed, tokens.tolist()


def _layers_of(cache: RaggedCache) -> list[object]:
    """Returns everything that two caches of a target's layers must have in common to exchange rows."""
    shapes = [(index, layer.shape) for index, layer in cache.attention.items()]
    recurrent = [(group.indices, group.modules) for group in cache.groups]
    return [shapes, recurrent]


def why_not_baked(processors: BlockProcessors) -> str:
    """Returns why no captured step can have a row's processors, or an empty string if one can."""
    if not processors.is_stateless:
        return "logits processors that read its text"
    # The length differs from prompt to prompt, so each prompt would need its own graph.
    if processors.hides:
        return "tokens that are hidden up to a length"
    if any(isinstance(warper, EtaLogitsWarper) for warper in processors.warpers):
        return "an eta cutoff, which reads scores on the host"
    return ""


def _baked(row: RowSettings) -> tuple[object, ...]:
    """Returns the settings of a row that a graph contains."""
    return row.processors.settings(), row.seed is not None
