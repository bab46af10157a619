"""The run that answers a request, and how many new tokens its buffers have room for.

A limit says little about how long an answer gets, and plain `generate` allocates nothing for it. So a run begins with
room for some tokens of its limit, and doubles that when a step could need more. The host knows from the last step how
much there is, so that nothing is read for it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.devices import Inventory, plain_tensors
from dflash_hf.generation.accept import AcceptanceRule
from dflash_hf.generation.buffers import FixedBuffers, else_freed
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.graphs import Graphs
from dflash_hf.generation.request import Request
from dflash_hf.generation.state import DecodeState, Reported
from dflash_hf.generation.stats import Recorder, SpeculativeStats, Stopwatch
from dflash_hf.generation.user_cache import NoUserCache, UserCache
from dflash_hf.generation.widths import FixedWidth, WidthChooser
from dflash_hf.packed_weights import PackedWeights
from dflash_hf.target_model.fast_layers import fast_layers, in_whole_run
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.reentry import KEYWORD, ragged_attention
from dflash_hf.undo import hooked


@dataclass(slots=True, kw_only=True)
class Rows:
    """What the host knows of the rows of the state, and the texts of the request's rows that have left it."""

    numbers: list[int]  # the number in the request of each row of the state
    # Per row the length at which a target with a table of positions has used all; else empty
    reach: list[int]
    reported: Reported  # of the last step that was read
    # Prompt and answer of each row that has ended and was dropped, by its number.
    ended: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def keep(self, places: Sequence[int]) -> None:
        """Keeps the rows of these places alone, in this order."""
        self.numbers = [self.numbers[place] for place in places]
        kept = ([numbers[place] for place in places] for numbers in self.reported)
        self.reported = Reported(*kept)
        # Few targets have a table of positions.
        if self.reach:
            self.reach = [self.reach[place] for place in places]


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one run, after its prefill."""

    generator: DFlashCandidateGenerator
    rule: AcceptanceRule
    recorder: Recorder
    watch: Stopwatch
    chooser: WidthChooser | FixedWidth  # a fixed width in the prefill
    packed: PackedWeights  # copies of both models' weights that are laid out for a CPU
    user_cache: UserCache | NoUserCache  # the one that was passed in or asked for
    taps: Taps  # of the verifies: they record what the target runs over the run's cache
    extra: dict[str, Any]  # keywords of the caller's own for the target's forward
    room: int  # new tokens that the buffers are made for
    keeps_buffers: bool  # whether they go back for the next call when the run has ended well
    rows: Rows
    # Parts of the parts above.
    buffers: FixedBuffers = field(init=False)  # the tensors that steps read and write
    cache: RaggedCache = field(init=False)  # the target's
    state: DecodeState = field(init=False)  # what the steps change
    stats: SpeculativeStats = field(init=False)  # whose seconds the watch books

    def __post_init__(self) -> None:
        self.buffers = self.generator.buffers
        self.cache = self.buffers.cache
        self.state = self.buffers.state
        self.stats = self.watch.stats

    @property
    def request(self) -> Request:
        """What is asked for; once rows have joined, with the processors of all."""
        return self.generator.request

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.rows.reported.done)

    @property
    def longest(self) -> int:
        """Tokens in the caches of the longest row."""
        return max(self.rows.reported.lengths)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, padding not counted."""
        # Caches and ids grow by the same tokens, but for the anchor, which is in no cache yet.
        pairs = zip(self.rows.reported.lengths, self.rows.reported.filled, strict=True)
        num_padding = min(filled - length for length, filled in pairs) - 1
        return self.state.host.columns - num_padding

    @property
    def num_new(self) -> int:
        """Tokens that the longest answer has."""
        return max(self.rows.reported.filled) - self.state.host.columns

    @property
    def ends_at_next(self) -> bool:
        """Whether every row ends with the step behind the last one that was read: each commits a token at least."""
        host = self.state.host
        last = host.columns + host.limit - 1
        rows = zip(self.rows.reported.done, self.rows.reported.filled, strict=True)
        return all(has_ended or filled >= last for has_ended, filled in rows)

    def check_reach(self) -> None:
        """Raises `ValueError` if a row needs more positions than the target has.

        At the forward that plain decoding would fail in: nothing is made of positions that do not exist.
        """
        reported = self.rows.reported
        for row, reach in enumerate(self.rows.reach):
            # A row that goes on feeds its anchor to the next forward.
            num_needed = 0 if reported.done[row] else 1
            if reported.lengths[row] + num_needed > reach:
                num = self.request.target.facts.num_positions
                raise ValueError(
                    f"expected rows of at most {reach + 1} tokens (the target has {num} "
                    "learned positions), got a row that is longer or goes on; lower max_new_tokens"
                )


def taps_of_verifies(request: Request, cache: RaggedCache) -> Taps:
    """Returns the taps that record the target's states in verifies over a cache, and in no other forward."""

    def counts(kwargs: dict[str, Any]) -> bool:
        # Code of the user's may run the same layers between two verifies, or inside one.
        return kwargs.get(KEYWORD) is cache

    return Taps(request.target.layers, request.draft.config.target_layer_ids, counts=counts)


def look_at_models(run: Run) -> None:
    """Has a run know the models as they are now: the user may have changed modules and hooks since it began."""
    request = run.request
    target = find_target(request.target.model)
    draft_parts = Inventory.of(request.draft)
    run.generator.request = replace(request, target=target, draft_parts=draft_parts)
    run.taps = taps_of_verifies(run.request, run.cache)


@contextmanager
def tapped(run: Run) -> Generator[Taps]:
    """Has the target run by fast layers, with its attention switched, its layers tapped and its blocks recorded.

    Where it is so already, for several verifies, nothing is done.
    """
    if run.taps.is_open:
        yield run.taps
        return
    target = run.request.target
    with (
        fast_layers(target),  # first: hooks on the model would keep them away
        ragged_attention(target),
        hooked(*run.cache.hooks()),
        run.taps.open(),
    ):
        yield run.taps


def has_room(run: Run, num_unread: int = 0) -> bool:
    """Returns True if another step surely fits in, with `num_unread` steps begun that the host has not read."""
    # The ids of a whole answer fit in, and a step commits nothing beyond the limit.
    is_for_all = run.room >= run.state.host.limit
    # A step that was not read may have committed all that it verified.
    most_unread = num_unread * run.generator.verify_width
    return is_for_all or run.num_new + most_unread <= run.room


def drops_rows(run: Run) -> bool:
    """Whether a run goes on without rows that have ended: nobody has to see the whole batch."""
    target = run.request.target
    # Criteria and processors are called with all rows, and a cache that is left behind has all of them.
    is_seen_whole = not run.rule.runs_on_device or run.user_cache.is_kept or bool(run.extra)
    # Graphs have their rows baked in.
    is_bound = run.keeps_buffers
    # Such a RoPE goes by the longest row of the batch, also where that has ended.
    follows_longest = bool(target.facts.ropes)
    is_one = len(run.rows.numbers) == 1
    is_alone = run.request.ranks.is_alone
    if is_one or is_seen_whole or is_bound or follows_longest or not is_alone:
        return False
    # Code of the user's in the model may count rows.
    return in_whole_run(target) or target.is_unmodified


def drop_finished(run: Run) -> None:
    """Goes on without the rows that have ended: eagerly, a forward costs what its rows do.

    The last rows go where they were.
    """
    rows = run.rows
    done = rows.reported.done
    if not any(done):
        return
    running = [row for row, has_ended in enumerate(done) if not has_ended]
    # 1. Which row goes where: the last ones fill the places of those that have ended, and no other row is copied.
    moved = [row for row in running if row >= len(running)]
    left = [moved.pop() if done[row] else row for row in range(len(running))]
    # 2. The texts of the others. Copies, because another row's go to their place.
    for row, has_ended in enumerate(done):
        if has_ended:
            text = run.state.ids[row, : rows.reported.filled[row]]
            rows.ended[rows.numbers[row]] = text.clone()
    # 3. Everything that the host knows by row, then the tensors, then the times of steps of so many rows.
    rows.keep(left)
    run.buffers.keep_rows(left)
    run.chooser.use_rows(len(left))


def make_room(run: Run) -> None:
    """Lets both caches and the ids grow where the next step could need it; what is in them stays.

    Fixed buffers that grow are no longer: the run goes on without them, and they are not kept for the next call.
    Raises `OutOfRoomError` if there is no memory even for the next few tokens.
    """
    if has_room(run):
        return
    limit = run.state.host.limit
    # The next step alone may commit as many as it verifies.
    least = min(limit, run.num_new + run.generator.verify_width)
    # Twice the room, so that a long answer is copied a few times and not at every step.
    wanted = min(limit, max(2 * run.room, least))
    else_freed(run.generator.draft, partial(grow, run), wanted, least)


def grow(run: Run, room: int) -> None:
    """Makes room for so many new tokens of every row."""
    generator = run.generator
    state = run.state
    # Graphs that were captured over the old tensors would write into freed memory.
    run.buffers.graphs = Graphs()
    run.keeps_buffers = False
    longest_block = max(generator.block_size, generator.verify_width)
    length = run.longest_prompt + room + longest_block
    for cache in run.buffers.caches():
        cache.grow(length)
    batch, num_before = state.ids.shape
    # A block of scratch behind the last token, where rules show processors what may follow.
    num_columns = state.host.columns + room + state.whole_block.shape[1]
    with plain_tensors():
        ids = state.ids.new_zeros(batch, num_columns)
        num = min(num_columns, num_before)
        ids[:, :num] = state.ids[:, :num]
    state.ids = ids
    run.room = room
    run.stats.cache_bytes = sum(cache.num_bytes() for cache in run.buffers.caches())
