"""Rows that join and leave a running batch in place, so that its steps can be captured.

Fixed buffers have a number of places. A request is prefilled as a run of one row, whose row then goes to a free place
([`Places.add`]): no tensor gets another address or shape. A free place holds a row that has ended: a step over it
commits nothing and changes scratch only. So one graph serves whichever rows are there.

What differs from row to row is in tensors, but for the warpers: they are baked in. Each place keeps the warpers of its
last row while it is free, and a row goes to a place with its own ones where there is one: no graph is new then.
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
# Tokens of a row that there is room for at the beginning, if the buffers then take a quarter of the memory at most.
FIRST_LENGTH = 4096
# What the host knows of a free place, in the order of `Reported`: a text of one token that has ended.
FREE = (0, 0, 0, 1, 1)


def choose_num_places(request: Request, max_rows: int, max_tokens: int | None) -> int:
    """Returns how many places a running batch is to have that begins with a request; 0 where its steps are eager.

    `max_rows` and `max_tokens` are those of the batch.
    """
    if choose_engine(request.target, request.draft) == "eager":
        return 0
    # No GPU has run it yet, so nobody gets it who has not asked for it.
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
        first (`Run`): The run of a row that is to be added, behind its prefill.
        num_places (`int`): How many places there are.

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
        # What is said of each row that is there, by its place.
        self._rows: dict[int, RowSettings] = {}
        # What each place goes by while it is free: the warpers of its last row.
        nothing = BlockProcessors(LogitsProcessorList())
        self._free = [RowSettings(nothing, [], None, 1)] * num_places
        # [places, N], int64: end tokens of each row, -1 for none.
        self._end_ids = self._no_ends(EOS_IDS)
        self._captured: StaticStep | None = None
        self._is_looked_up = False  # whether there is one for the rows of now is known
        self._is_capturable = True  # as far as it shows without a step
        self.begin(first)

    def begin(self, first: Run) -> None:
        """Begins a run over the places, none of which is taken; `first` is that of the row that is to be added."""
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
            # For the rows to come.
            keeps_buffers=True,
            rows=rows,
        )

    def fits(self, other: Run, num_places: int) -> bool:
        """Returns True if these are so many places, for rows like that of another run."""
        has_same_layers = _layers_of(self.buffers.cache) == _layers_of(other.cache)
        # How a run drafts is no part of its buffers: the next one brings its own draft and its own rule.
        is_same = has_same_layers and is_alike(self.buffers.shape, other.buffers.shape)
        return is_same and self.num_places == num_places

    # ---- rows that come and leave

    def add(self, other: Run, row: RowSettings) -> int:
        """Puts the one row of another run to a free place, of which there is one at least.

        Args:
            other (`Run`): The row's run, behind its prefill, which is of no use afterwards.
            row (`RowSettings`): What is said of the row alone.

        Returns:
            `int`: The place.

        Raises:
            ValueError: If the two runs draft or verify in other sizes.
            OutOfRoomError: If there is no memory for the row. The others are as they were then.
        """
        run = self.run
        check_alike(run, other)
        # The run's first row has seen earlier weights, modules and hooks.
        look_at_models(run)
        self._is_capturable = choose_engine(run.request.target, run.request.draft) != "eager"
        self.make_room_for(other, row)
        place = self._place_for(row)
        # Tokens that were decoded without a draft gather from one column on in all rows: the new one has none.
        run.generator.flush()
        self.buffers.put_row(place, other.buffers, other.longest)
        self._put_settings(place, row)
        for numbers, of_row in zip(run.rows.reported, other.rows.reported, strict=True):
            numbers[place] = of_row[0]
        if run.rows.reach:
            run.rows.reach[place] = other.rows.reach[0]
        self.buffers.stack_weights(run.request.draft)
        # One request with code of the user's is enough for none of them to have copies.
        if run.packed.is_on:
            run.packed = other.packed
        run.packed.look_again()
        self._use_rows()
        return place

    def free(self, places: list[int]) -> None:
        """Frees places whose rows have ended."""
        for place in places:
            del self._rows[place]
            self.buffers.free_row(place, self._nobody)
            for numbers, number in zip(self.run.rows.reported, FREE, strict=True):
                numbers[place] = number
        self._use_rows()

    def make_room_for(self, other: Run, row: RowSettings) -> None:
        """Lets the buffers grow where the row of another run does not fit in; arguments and errors as of [`add`]."""
        run = self.run
        num_tokens = other.num_new + other.state.host.columns
        if num_tokens <= run.room:
            return
        longest = max(each.length for each in (*self._rows.values(), row))
        # Twice the room, so that rows are copied and steps captured anew a few times only.
        wanted = min(longest, max(2 * run.room, num_tokens))
        self._grow(partial(else_freed, run.request.draft, partial(grow, run), wanted, num_tokens))

    def make_room(self) -> None:
        """Lets the buffers grow where the next step could need it; errors as of `run.make_room`."""
        if not has_room(self.run):
            self._grow(partial(make_room, self.run))

    def _grow(self, grow_run: Callable[[], None]) -> None:
        """Lets the buffers grow; steps are captured anew, over other tensors."""
        self._forget_step()
        try:
            grow_run()
        finally:
            # The longer ones stay for the rows to come.
            self.run.keeps_buffers = True

    def _place_for(self, row: RowSettings) -> int:
        """Returns a free place for a row, with its own warpers where there is one."""
        places = [place for place in range(self.num_places) if place not in self._rows]
        # Steps are eager meanwhile, and the place goes back to what it went by before.
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
            # Others like it may follow, and the graph is a new one in any case.
            self._free = [of_row] * self.num_places
        return place

    def _put_settings(self, place: int, row: RowSettings) -> None:
        """Notes what is said of the row at a place, in the tensors that steps read."""
        self._rows[place] = row
        # A greedy row's noise is never looked at.
        if row.seed is not None:
            self.buffers.state.seed[place] = row.seed
        num_ends = len(row.end_ids)
        num_before = self._end_ids.shape[1]
        if num_ends > num_before:
            # Graphs have the address of the shorter lists.
            self.buffers.graphs = Graphs()
            longer = self._no_ends(num_ends)
            longer[:, :num_before] = self._end_ids
            self._end_ids = longer
        self._end_ids[place] = -1
        self._end_ids[place, :num_ends] = torch.tensor(row.end_ids, dtype=torch.long, device="cpu")

    def _no_ends(self, num: int) -> Tensor:
        """Returns room for so many end tokens of each row `[places, num]`, int64: -1, which is none."""
        size = (self.num_places, num)
        with plain_tensors():
            return torch.full(size, -1, dtype=torch.long, device=self.buffers.shape.device)

    def _use_rows(self) -> None:
        """Has steps go by the rows that are there now."""
        rows = [self._rows.get(place, free) for place, free in enumerate(self._free)]
        go_by(self.run, rows, self._end_ids)
        self._forget_step()

    # ---- steps

    def captured(self) -> StaticStep | None:
        """Returns the captured step over the rows of now; `None` where it cannot be captured, as the log says."""
        if self._is_looked_up:
            return self._captured
        # Once until rows come or leave, also where it is refused.
        self._is_looked_up = True
        if self._is_capturable:
            # A capture goes to the device that ids are on.
            with torch.cuda.device_of(self.buffers.state.ids):
                self._captured = start_engine(self.run)
        return self._captured

    def _forget_step(self) -> None:
        """Has the captured step be looked up anew: among the graphs that there are, or captured."""
        self._captured = None
        self._is_looked_up = False


def run_captured(captured: StaticStep) -> tuple[list[int], list[list[int]]]:
    """Runs one captured step, and waits for it.

    Returns:
        `tuple[list[int], list[list[int]]]`: How many tokens each row has committed, and the chosen tokens of each
        row, of which so many are committed.
    """
    run = captured.run
    begin(run)
    # Eager steps may have gathered the context of single tokens, which this step writes.
    run.generator.newest.end_gathering()
    # Replays go to the stream of the device that ids are on.
    with torch.cuda.device_of(run.state.ids):
        captured.launch(captured.bound(0))
    # The one read of a step, and the only wait.
    outcome = run.state.outcome.to("cpu")
    run.watch.lap("verify")
    width = run.state.width
    committed = report(run, outcome, width)
    tokens = outcome[NUM_REPORTED : NUM_REPORTED + width].T
    return committed, tokens.tolist()


def _layers_of(cache: RaggedCache) -> list[object]:
    """Returns what two caches of a target's layers must have in common for their rows to stand in both."""
    shapes = [(index, layer.shape) for index, layer in cache.attention.items()]
    recurrent = [(group.indices, group.modules) for group in cache.groups]
    return [shapes, recurrent]


def why_not_baked(processors: BlockProcessors) -> str:
    """Returns what of a row's processors no captured step can have, or an empty text."""
    if not processors.is_stateless:
        return "logits processors that read its text"
    # The length is another one for each prompt, and a graph would be of this one alone.
    if processors.hides:
        return "tokens that are hidden up to a length"
    if any(isinstance(warper, EtaLogitsWarper) for warper in processors.warpers):
        return "an eta cutoff, which reads scores on the host"
    return ""


def _baked(row: RowSettings) -> tuple[object, ...]:
    """Returns what a graph has baked in of a row."""
    return row.processors.settings(), row.seed is not None
