"""A call, the run that it becomes, what the host knows of it, and how many new tokens its buffers have room for.

A limit says little about how long an answer gets, and plain `generate` allocates nothing for it. So a run begins with
room for some tokens of its limit, and doubles that when a step could need more. The host knows from the last step how
much there is, so that nothing is read for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.recurrent import noting
from dflash_hf.devices import Inventory, plain_tensors
from dflash_hf.generation.accept import Accept, SynchronizedRows
from dflash_hf.generation.buffers import FixedBuffers, else_freed
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import Recorder, SpeculativeStats, Stopwatch
from dflash_hf.generation.user_cache import UserCache
from dflash_hf.generation.widths import WidthChooser
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.formulas import is_untouched
from dflash_hf.target.fused import fused_modules, runs_whole
from dflash_hf.target.hidden_states import Taps
from dflash_hf.target.parts import Target
from dflash_hf.target.reentry import KEYWORD, ragged_attention
from dflash_hf.target.support import changing_ropes

# Criteria that the commit itself decides.
LENGTH_AND_END = (EosTokenCriteria, MaxLengthCriteria)


@dataclass(kw_only=True)
class Call:
    """A call of `generate` with a draft: what it was given, and what Transformers has made of that.

    It stands in place of Transformers' own sampling loop, as `custom_generate`.
    """

    # What is asked for before every call, and takes its time to be found out.
    __signature__: ClassVar[inspect.Signature] = inspect.signature(cast(Any, GenerationMixin)._sample)

    target: Target
    draft: DFlashDraftModel
    draft_parts: Inventory  # the modules of the draft
    ranks: Ranks
    answer: Callable[[Call], Any]  # what is done once everything is prepared
    streamer: BaseStreamer | None  # gets every accepted run; `generate` puts the prompt
    cache: Cache | None  # that the caller passed
    started: float  # `time.perf_counter()` at the user's call
    # As `generate` prepared them.
    input_ids: torch.LongTensor = field(init=False)  # [B, S], left-padded, on the target's device
    given_on: torch.device = field(init=False)  # where they were
    processors: BlockProcessors = field(init=False)
    criteria: StoppingCriteriaList = field(init=False)
    config: GenerationConfig = field(init=False)
    inputs: dict[str, Any] = field(init=False)  # keywords for the target's prefill

    def __call__(
        self,
        model: Any,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        """Takes what `generate` has prepared, and answers."""
        self.given_on = input_ids.device
        self.input_ids = cast(torch.LongTensor, input_ids.to(self.target.device))
        self.criteria = stopping_criteria
        self.config = generation_config
        self.inputs = inputs
        pad: Any = generation_config._pad_token_tensor
        self.processors = BlockProcessors(logits_processor, 0 if pad is None else int(pad))
        return self.answer(self)

    @functools.cached_property
    def own_criteria(self) -> list[StoppingCriteria]:
        """Criteria besides length and end of sequence."""
        return [criterion for criterion in self.criteria if type(criterion) not in LENGTH_AND_END]

    @property
    def calls_out(self) -> bool:
        """Whether code of the user's runs between two forwards, which may want to use the target itself."""
        return bool(self.own_criteria) or self.streamer is not None or not self.processors.is_stateless


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one run, after its prefill."""

    call: Call  # that it answers
    generator: DFlashCandidateGenerator
    buffers: FixedBuffers
    cache: RaggedCache  # the target's
    synchronized: SynchronizedRows | None  # where something of the user's has to see all rows
    recorder: Recorder
    stats: SpeculativeStats
    watch: Stopwatch
    chooser: WidthChooser | None
    kept: UserCache | None  # the cache that was passed in or asked for
    extra: dict[str, Any]  # keywords of the caller's own for the target's forward
    reach: list[int] | None  # per row the length at which a target with a table of positions has used all
    prompt: int  # tokens in the caches of the longest row, at first
    longest: int  # and now
    room: int  # new tokens that the buffers are made for
    keeps_buffers: bool  # whether they go back for the next call when the run has ended well
    rows: list[int]  # which of the call's rows each row of the state is
    accept: Accept | None = None  # a rule of the user's
    num_new: int = 0  # tokens that the longest answer has
    # The first five rows of the last step's `state.outcome`.
    reported: list[list[int]] = field(default_factory=list[list[int]])
    # Prompt and answer of each of the call's rows that was dropped.
    ended: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    taps: Taps | None = None  # those that are open, see `tapped`

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.reported[3])

    @property
    def state(self) -> DecodeState:
        """What the steps change."""
        return self.buffers.state

    @property
    def ends_at_next(self) -> bool:
        """Whether every row ends with the step behind the last one that was read: each commits a token at least."""
        _, _, _, done, filled = self.reported
        last = self.state.columns + self.state.limit - 1
        return all(has_ended or length >= last for has_ended, length in zip(done, filled, strict=True))

    def note_longest(self) -> None:
        """Notes what follows from `reported`."""
        self.longest = max(self.reported[2])
        self.num_new = max(self.reported[4]) - self.state.columns

    def decides(self) -> bool:
        """Returns True if nothing of the user's has to look at a step before it is committed or after it."""
        return self.call.processors.is_stateless and not (
            self.call.own_criteria or self.synchronized is not None or self.recorder.is_on or self.accept is not None
        )


@contextmanager
def tapped(run: Run) -> Generator[Taps]:
    """The target with its attention switched, kernels in its modules, its layers tapped and its recurrences noted.

    Where it is so already, for several verifies, nothing is done.
    """
    if run.taps is not None:
        yield run.taps
        return
    ids = run.generator.draft.config.target_layer_ids
    taps = Taps(run.call.target.layers, ids, counts=lambda kwargs: kwargs.get(KEYWORD) is run.cache)
    with ragged_attention(run.call.target), fused_modules(run.call.target), noting(run.cache.layers), taps.open():
        run.taps = taps
        try:
            yield taps
        finally:
            run.taps = None


# New tokens that there is room for at the beginning, at most; fixed buffers do not grow, see `make_room`.
FIRST_ROOM = 512
FIXED_ROOM = 32768


def first_room(limit: int, affordable: int | None) -> int:
    """Returns how many of `limit` new tokens to begin with room for.

    `affordable` is for how many fixed buffers can be kept between calls: for more than that they have a quarter of the
    room that they could have. `None` is for buffers that grow.
    """
    if affordable is None:
        return min(limit, FIRST_ROOM)
    room = min(limit, FIXED_ROOM)
    return room if room <= affordable else min(limit, FIXED_ROOM // 4)


def has_room(run: Run, num_unread: int = 0) -> bool:
    """Returns True if another step surely fits in, with `num_unread` steps begun that the host has not read."""
    return run.room >= run.state.limit or run.num_new + num_unread * run.generator.verify_width <= run.room


def drops_rows(run: Run) -> bool:
    """Whether a run goes on without rows that have ended: nobody has to see the whole batch, or has states of it.

    To be asked before the run's own taps are on the target: they look like a user's hooks.
    """
    if len(run.rows) == 1 or not run.decides() or run.keeps_buffers or run.kept or run.extra or run.cache.groups:
        return False
    target = run.call.target
    # Such a RoPE goes by the longest row of the batch, also where that has ended.
    if run.call.ranks.size > 1 or changing_ropes(target):
        return False
    return runs_whole(target) or is_untouched(target.parts)


def drop_finished(run: Run) -> None:
    """Goes on without the rows that have ended: eagerly, a forward costs what its rows do.

    The last rows go where they were.
    """
    _, _, _, done, filled = run.reported
    if not any(done):
        return
    running = [row for row, has_ended in enumerate(done) if not has_ended]
    moved = [row for row in running if row >= len(running)]
    kept = [moved.pop() if done[row] else row for row in range(len(running))]
    for row in set(range(len(done))).difference(kept):
        run.ended[run.rows[row]] = run.state.ids[row, : filled[row]].clone()
    for notes in (run.rows, *run.reported, *([] if run.reach is None else [run.reach])):
        notes[:] = [notes[row] for row in kept]
    run.buffers.keep_rows(kept)
    run.note_longest()
    if run.chooser is not None:
        run.chooser.use_rows(len(kept))


def make_room(run: Run) -> None:
    """Lets both caches and the ids grow where the next step could need it; what is in them stays.

    Fixed buffers that grow are no longer: the run goes on without them, and they are not kept for the next call.
    Raises `OutOfRoomError` if there is no memory even for the next few tokens.
    """
    if has_room(run):
        return
    least = min(run.state.limit, run.num_new + run.generator.verify_width)
    else_freed(run.generator.draft, partial(_grow, run), min(run.state.limit, max(2 * run.room, least)), least)


def _grow(run: Run, room: int) -> None:
    generator = run.generator
    state = run.state
    length = run.prompt + room + max(generator.block_size, generator.verify_width)
    for cache in (generator.cache, run.cache):
        cache.grow(length)
    with plain_tensors():
        ids = state.ids.new_zeros(state.ids.shape[0], state.columns + room + state.whole_block.shape[1])
        num = min(ids.shape[1], state.ids.shape[1])
        ids[:, :num] = state.ids[:, :num]
    state.ids = ids
    run.room = room
    run.keeps_buffers = False
    run.stats.cache_bytes = run.cache.num_bytes() + generator.cache.num_bytes()
