"""This module defines `Run`, which holds the parts of one run, and makes room for new tokens in the buffers of a run.

The limit of new tokens says little about the length of an answer, and plain `generate` allocates no memory for it. So
a run begins with room for a part of its limit, and doubles the room if the next step could need more. The host knows
the number of committed tokens from the last step, so this test reads nothing from the device.
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
    """The host's knowledge of the rows in the state, and the texts of the rows that have left the state."""

    numbers: list[int]  # the number in the request of each row of the state
    # For each row, the length at which it has used the target's whole table of positions. Empty without such a table.
    reach: list[int]
    reported: Reported  # the numbers of the last step that the host has read
    # Prompt and answer of each row that has ended and was dropped, by the row's number.
    ended: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def keep(self, places: Sequence[int]) -> None:
        """Keeps only the rows at these places, in this order."""
        self.numbers = [self.numbers[place] for place in places]
        kept = ([numbers[place] for place in places] for numbers in self.reported)
        self.reported = Reported(*kept)
        # Few targets have a table of positions.
        if self.reach:
            self.reach = [self.reach[place] for place in places]


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one run, after its prefill.

    `buffers`, `cache`, `state` and `stats` are parts of `generator` and `watch`.
    """

    generator: DFlashCandidateGenerator
    rule: AcceptanceRule
    recorder: Recorder
    watch: Stopwatch
    chooser: WidthChooser | FixedWidth  # a fixed width in the prefill
    packed: PackedWeights  # copies of both models' weights that are laid out for a CPU
    user_cache: UserCache | NoUserCache  # the cache that the caller has passed or asked for
    taps: Taps  # they record the target's tapped states in forwards over this run's cache
    extra: dict[str, Any]  # further keywords of the caller for the target's forward
    room: int  # new tokens that the buffers have room for
    keeps_buffers: bool  # whether the next call may use the buffers, if this run ends well
    rows: Rows
    # These four are shortcuts to parts of the fields above.
    buffers: FixedBuffers = field(init=False)  # the tensors that steps read and write
    cache: RaggedCache = field(init=False)  # the target's cache
    state: DecodeState = field(init=False)  # what the steps change
    stats: SpeculativeStats = field(init=False)  # the watch adds its seconds to them

    def __post_init__(self) -> None:
        self.buffers = self.generator.buffers
        self.cache = self.buffers.cache
        self.state = self.buffers.state
        self.stats = self.watch.stats

    @property
    def request(self) -> Request:
        """The request of this run. After rows have joined, it has the processors of all rows."""
        return self.generator.request

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.rows.reported.done)

    @property
    def longest(self) -> int:
        """Number of tokens that the longest row has in the caches."""
        return max(self.rows.reported.lengths)

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt, without padding."""
        # A row has as many tokens in the ids as in the caches, plus its anchor, which is in no cache yet.
        pairs = zip(self.rows.reported.lengths, self.rows.reported.filled, strict=True)
        num_padding = min(filled - length for length, filled in pairs) - 1
        return self.state.host.columns - num_padding

    @property
    def num_new(self) -> int:
        """Number of tokens of the longest answer."""
        return max(self.rows.reported.filled) - self.state.host.columns

    @property
    def ends_at_next(self) -> bool:
        """Whether the step after the last read step ends all rows. A running row commits at least one token."""
        host = self.state.host
        last = host.columns + host.limit - 1
        rows = zip(self.rows.reported.done, self.rows.reported.filled, strict=True)
        return all(has_ended or filled >= last for has_ended, filled in rows)

    def check_reach(self) -> None:
        """Raises `ValueError` if a row needs more positions than the target has.

        A row that needs such a position raises at the same forward as in plain decoding.
        """
        reported = self.rows.reported
        for row, reach in enumerate(self.rows.reach):
            # A row that continues feeds its anchor to the next forward.
            num_needed = 0 if reported.done[row] else 1
            if reported.lengths[row] + num_needed > reach:
                num = self.request.target.facts.num_positions
                raise ValueError(
                    f"expected rows of at most {reach + 1} tokens (the target has {num} "
                    "learned positions), got a row that is longer or goes on; lower max_new_tokens"
                )


def taps_of_verifies(request: Request, cache: RaggedCache) -> Taps:
    """Returns taps that record the target's states in forwards over this `cache`, and in no other forward."""

    def counts(kwargs: dict[str, Any]) -> bool:
        # The user's code may run the same layers between two verifies or inside one.
        return kwargs.get(KEYWORD) is cache

    return Taps(request.target.layers, request.draft.config.target_layer_ids, counts=counts)


def look_at_models(run: Run) -> None:
    """Updates a run's knowledge of target and draft, because the user may have changed modules and hooks."""
    request = run.request
    target = find_target(request.target.model)
    draft_parts = Inventory.of(request.draft)
    run.generator.request = replace(request, target=target, draft_parts=draft_parts)
    run.taps = taps_of_verifies(run.request, run.cache)


@contextmanager
def tapped(run: Run) -> Generator[Taps]:
    """Prepares the target for verifies: fast layers, ragged attention, the cache's hooks and the taps are switched on.

    Does nothing if an outer `tapped` has already switched these parts on, for several verifies.
    """
    if run.taps.is_open:
        yield run.taps
        return
    target = run.request.target
    with (
        fast_layers(target),  # first, because the hooks that follow would switch fast layers off
        ragged_attention(target),
        hooked(*run.cache.hooks()),
        run.taps.open(),
    ):
        yield run.taps


def has_room(run: Run, num_unread: int = 0) -> bool:
    """Returns True if another step certainly fits, after `num_unread` steps that the host has not read yet."""
    # If the room holds a whole answer, every step fits, because no step commits tokens beyond the limit.
    is_for_all = run.room >= run.state.host.limit
    # A step that the host has not read may have committed all the tokens that it verified.
    most_unread = num_unread * run.generator.verify_width
    return is_for_all or run.num_new + most_unread <= run.room


def drops_rows(run: Run) -> bool:
    """Returns True if a run drops rows that have ended, because nothing has to see the whole batch."""
    target = run.request.target
    # Criteria and processors are called with all rows, and a cache that the call leaves behind holds all rows.
    is_seen_whole = not run.rule.runs_on_device or run.user_cache.is_kept or bool(run.extra)
    # A captured graph has a fixed number of rows.
    is_bound = run.keeps_buffers
    # Such a RoPE depends on the longest row of the batch, even if that row has ended.
    follows_longest = bool(target.facts.ropes)
    is_one = len(run.rows.numbers) == 1
    is_alone = run.request.ranks.is_alone
    if is_one or is_seen_whole or is_bound or follows_longest or not is_alone:
        return False
    # The user's code in the model may count rows.
    return in_whole_run(target) or target.is_unmodified


def drop_finished(run: Run) -> None:
    """Drops the rows that have ended, because the cost of an eager forward depends on its number of rows.

    The last running rows move to the places of the rows that have ended.
    """
    rows = run.rows
    done = rows.reported.done
    if not any(done):
        return
    running = [row for row, has_ended in enumerate(done) if not has_ended]
    # 1. Choose the moves. The last rows fill the places of rows that have ended, and no other row is copied.
    moved = [row for row in running if row >= len(running)]
    left = [moved.pop() if done[row] else row for row in range(len(running))]
    # 2. Copy the texts of the rows that have ended, because other rows move to their places.
    for row, has_ended in enumerate(done):
        if has_ended:
            text = run.state.ids[row, : rows.reported.filled[row]]
            rows.ended[rows.numbers[row]] = text.clone()
    # 3. Move the host's numbers of each row, and then the tensors. The chooser uses the times of this number of rows.
    rows.keep(left)
    run.buffers.keep_rows(left)
    run.chooser.use_rows(len(left))


def make_room(run: Run) -> None:
    """Grows both caches and the ids if the next step could need more room; their content stays.

    If fixed buffers have to grow, the run no longer has fixed buffers, and the next call does not get them. Raises
    `OutOfRoomError` if there is no memory even for the tokens of the next step.
    """
    if has_room(run):
        return
    limit = run.state.host.limit
    # The next step alone may commit as many tokens as it verifies.
    least = min(limit, run.num_new + run.generator.verify_width)
    # The room is doubled, so that a long answer is copied only a few times.
    wanted = min(limit, max(2 * run.room, least))
    else_freed(run.generator.draft, partial(grow, run), wanted, least)


def grow(run: Run, room: int) -> None:
    """Grows both caches and the ids to room for `room` new tokens of every row."""
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
    # The last token is followed by a block of scratch memory. Rules show processors possible next tokens there.
    num_columns = state.host.columns + room + state.whole_block.shape[1]
    with plain_tensors():
        ids = state.ids.new_zeros(batch, num_columns)
        num = min(num_columns, num_before)
        ids[:, :num] = state.ids[:, :num]
    state.ids = ids
    run.room = room
    run.stats.cache_bytes = sum(cache.num_bytes() for cache in run.buffers.caches())
