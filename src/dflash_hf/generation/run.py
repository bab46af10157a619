"""A request, the run that answers it, and how many new tokens its buffers have room for.

A limit says little about how long an answer gets, and plain `generate` allocates nothing for it. So a run begins with
room for some tokens of its limit, and doubles that when a step could need more. The host knows from the last step how
much there is, so that nothing is read for it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.recurrent import noting
from dflash_hf.devices import Inventory, plain_tensors
from dflash_hf.generation.accept import AcceptanceRule
from dflash_hf.generation.buffers import FixedBuffers, else_freed
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import Recorder, SpeculativeStats, Stopwatch
from dflash_hf.generation.user_cache import NoUserCache, UserCache
from dflash_hf.generation.widths import FixedWidth, WidthChooser
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.fast_layers import fast_layers, in_whole_run
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.reentry import KEYWORD, ragged_attention
from dflash_hf.target_model.support import changing_ropes
from dflash_hf.target_model.user_code import is_unmodified

# Criteria that the commit itself decides.
LENGTH_AND_END = (EosTokenCriteria, MaxLengthCriteria)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for; nothing of it changes during the run."""

    target: Target
    draft: DFlashDraftModel
    draft_parts: Inventory  # the modules of the draft
    ranks: Ranks
    streamer: BaseStreamer | None  # gets every accepted run; `generate` puts the prompt
    cache: Cache | None  # that the caller passed
    started: float  # `time.perf_counter()` at the user's call
    input_ids: torch.LongTensor  # [B, S], left-padded, on the target's device
    given_on: torch.device  # where they were
    processors: BlockProcessors
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def own_criteria(self) -> list[StoppingCriteria]:
        """Criteria besides length and end of sequence."""
        return [criterion for criterion in self.criteria if type(criterion) not in LENGTH_AND_END]

    @property
    def calls_out(self) -> bool:
        """Whether code of the user's runs between two forwards, which may want to use the target itself."""
        return (
            bool(self.own_criteria) or self.streamer is not None or not self.processors.is_stateless
        )


class Reported(NamedTuple):
    """What the host knows of the last step, per row: the first rows of `state.outcome`."""

    committed: list[int]  # tokens
    accepted: list[int]  # proposals
    lengths: list[int]  # tokens in the caches
    done: list[int]  # whether the row has finished
    filled: list[int]  # columns of `state.ids`

    @classmethod
    def before(cls, lengths: list[int], num_columns: int) -> Reported:
        """Returns what is known before the first step of a run, of prompts of these lengths."""
        nothing = [0] * len(lengths)
        return cls(nothing, nothing, lengths, nothing, [num_columns] * len(lengths))


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one run, after its prefill."""

    request: Request
    generator: DFlashCandidateGenerator
    buffers: FixedBuffers
    cache: RaggedCache  # the target's
    rule: AcceptanceRule
    recorder: Recorder
    stats: SpeculativeStats
    watch: Stopwatch
    chooser: WidthChooser | FixedWidth
    user_cache: UserCache | NoUserCache  # the one that was passed in or asked for
    extra: dict[str, Any]  # keywords of the caller's own for the target's forward
    # Per row the length at which a target with a table of positions has used all; else empty
    reach: list[int]
    prompt: int  # tokens in the caches of the longest row, at first
    room: int  # new tokens that the buffers are made for
    keeps_buffers: bool  # whether they go back for the next call when the run has ended well
    rows: list[int]  # which of the request's rows each row of the state is
    reported: Reported  # of the last step
    # Prompt and answer of each of the request's rows that was dropped.
    ended: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    taps: Taps | None = None  # those that are open, see `tapped`

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.reported.done)

    @property
    def state(self) -> DecodeState:
        """What the steps change."""
        return self.buffers.state

    @property
    def longest(self) -> int:
        """Tokens in the caches of the longest row."""
        return max(self.reported.lengths)

    @property
    def num_new(self) -> int:
        """Tokens that the longest answer has."""
        return max(self.reported.filled) - self.state.columns

    @property
    def ends_at_next(self) -> bool:
        """Whether every row ends with the step behind the last one that was read: each commits a token at least."""
        last = self.state.columns + self.state.limit - 1
        rows = zip(self.reported.done, self.reported.filled, strict=True)
        return all(has_ended or filled >= last for has_ended, filled in rows)

    def check_reach(self, reported: Reported) -> None:
        """Raises `ValueError` if a row needs more positions than the target has.

        At the forward that plain decoding would fail in: nothing is made of positions that do not exist.
        """
        for row, reach in enumerate(self.reach):
            num_needed = 0 if reported.done[row] else 1
            if reported.lengths[row] + num_needed > reach:
                num = self.request.target.facts.num_positions
                raise ValueError(
                    f"expected rows of at most {reach + 1} tokens (the target has {num} "
                    "learned positions), got a row that is longer or goes on; lower max_new_tokens"
                )


@contextmanager
def tapped(run: Run) -> Generator[Taps]:
    """Has the target run by fast layers, with its attention switched, its layers tapped and its recurrences noted.

    Where it is so already, for several verifies, nothing is done.
    """
    if run.taps is not None:
        yield run.taps
        return
    ids = run.generator.draft.config.target_layer_ids
    taps = Taps(
        run.request.target.layers, ids, counts=lambda kwargs: kwargs.get(KEYWORD) is run.cache
    )
    with (
        fast_layers(run.request.target),  # first: hooks on the model would keep them away
        ragged_attention(run.request.target),
        noting(run.cache.layers),
        taps.open(),
    ):
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
    return (
        run.room >= run.state.limit
        or run.num_new + num_unread * run.generator.verify_width <= run.room
    )


def drops_rows(run: Run) -> bool:
    """Whether a run goes on without rows that have ended: nobody has to see the whole batch, or has states of it.

    To be asked before the run's own taps are on the target: they look like a user's hooks.
    """
    target = run.request.target
    is_seen_whole = not run.rule.runs_on_device or run.user_cache.is_kept or bool(run.extra)
    has_states = run.keeps_buffers or bool(run.cache.groups)
    # Such a RoPE goes by the longest row of the batch, also where that has ended.
    follows_longest = bool(changing_ropes(target))
    is_one = len(run.rows) == 1
    if is_one or is_seen_whole or has_states or follows_longest or run.request.ranks.size > 1:
        return False
    return in_whole_run(target) or is_unmodified(target.parts)


def drop_finished(run: Run) -> None:
    """Goes on without the rows that have ended: eagerly, a forward costs what its rows do.

    The last rows go where they were.
    """
    done = run.reported.done
    if not any(done):
        return
    running = [row for row, has_ended in enumerate(done) if not has_ended]
    moved = [row for row in running if row >= len(running)]
    kept = [moved.pop() if done[row] else row for row in range(len(running))]
    for row in set(range(len(done))).difference(kept):
        run.ended[run.rows[row]] = run.state.ids[row, : run.reported.filled[row]].clone()
    run.rows = [run.rows[row] for row in kept]
    run.reported = Reported(*([notes[row] for row in kept] for notes in run.reported))
    if run.reach:
        run.reach = [run.reach[row] for row in kept]
    run.buffers.keep_rows(kept)
    run.chooser.use_rows(len(kept))


def make_room(run: Run) -> None:
    """Lets both caches and the ids grow where the next step could need it; what is in them stays.

    Fixed buffers that grow are no longer: the run goes on without them, and they are not kept for the next call.
    Raises `OutOfRoomError` if there is no memory even for the next few tokens.
    """
    if has_room(run):
        return
    least = min(run.state.limit, run.num_new + run.generator.verify_width)
    else_freed(
        run.generator.draft,
        partial(_grow, run),
        min(run.state.limit, max(2 * run.room, least)),
        least,
    )


def _grow(run: Run, room: int) -> None:
    generator = run.generator
    state = run.state
    length = run.prompt + room + max(generator.block_size, generator.verify_width)
    for cache in (generator.cache, run.cache):
        cache.grow(length)
    with plain_tensors():
        ids = state.ids.new_zeros(
            state.ids.shape[0], state.columns + room + state.whole_block.shape[1]
        )
        num = min(ids.shape[1], state.ids.shape[1])
        ids[:, :num] = state.ids[:, :num]
    state.ids = ids
    run.room = room
    run.keeps_buffers = False
    run.stats.cache_bytes = run.cache.num_bytes() + generator.cache.num_bytes()
