"""This module holds the buffers that the steps of a run read and write, and a pool of them for later calls.

The pool keeps a few sets of buffers per draft and target, up to a share of the device's memory. A call takes a set out
of the pool, and gives it back if it ends without an error. So calls in several threads never share a set, and a set
that an error has left half-written is never used again.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from dflash_hf import ops
from dflash_hf.block.tree import TreeBuilder
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import OutOfRoomError, check_memory
from dflash_hf.devices import free_memory, total_memory
from dflash_hf.generation.float8 import free_float8
from dflash_hf.generation.graphs import Graphs
from dflash_hf.generation.newest_context import NewestContext
from dflash_hf.generation.state import BufferShape, DecodeState
from dflash_hf.layer_configs import attention_sizes
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.packed_weights import forget_packed
from dflash_hf.target_model.parts import Target

T = TypeVar("T")
logger: Any = logging.get_logger(__name__)
# The number of sets that the pool keeps for a draft and target, and the share of a device's memory that they may take.
MAX_KEPT = 4
KEPT_SHARE = 0.25
# The smallest length that steps are captured for. The other lengths are multiples of it, four to an octave.
SMALLEST_BUCKET = 128


def num_choices(target: Target, draft: DFlashDraftModel) -> int:
    """Returns how many tokens a tree can choose from at each slot: the candidates, or the draft's vocabulary."""
    return draft.config.num_candidates or draft.config.draft_vocab_size or target.vocab_size


@dataclass(slots=True, kw_only=True, eq=False)
class FixedBuffers:
    """Holds every tensor that the steps of a run read or write, for `B` rows.

    No step changes an address or a shape. A verify that is narrower than the buffers uses their first columns.
    """

    shape: BufferShape  # the sizes that a run must have to use these buffers
    state: DecodeState  # each run begins it again
    draft_cache: RaggedCache  # the draft's context
    cache: RaggedCache  # the target's keys and values; it has no layers before the first prefill
    newest: NewestContext  # tapped states whose context is not in the draft's cache yet
    trees: TreeBuilder | None  # builds the verified trees; `None` if chains are verified
    graphs: Graphs  # captured over these buffers

    @classmethod
    @torch.inference_mode(False)
    def allocate(
        cls,
        target: Target,
        draft: DFlashDraftModel,
        shape: BufferShape,
        capacity: int,
        num_columns: int,
    ) -> FixedBuffers:
        """Allocates buffers for rows of up to `capacity` tokens, a block included.

        The prefill adds the target's layers later. The tensors are made outside inference mode, like those of the
        caches, because the next call may run outside inference mode. Raises `OutOfRoomError` if the draft's context is
        larger than the free memory of the device.
        """
        layers = list(shape.draft_layers)
        check_memory(layers, shape.batch, capacity, shape.block)
        trees: TreeBuilder | None = None
        if shape.is_tree:
            longest = draft.config.num_proposals(shape.block_size)
            choices = num_choices(target, draft)
            trees = TreeBuilder(shape.width, longest, choices, shape.device)
        # Both caches have the same length. The target's layers are known after its prefill.
        sizes = {"batch": shape.batch, "max_length": capacity, "block": shape.block}
        return cls(
            shape=shape,
            state=DecodeState.allocate(shape, num_columns),
            draft_cache=RaggedCache(layers, **sizes),
            cache=RaggedCache([], **sizes),
            newest=NewestContext(shape, draft.fc.in_features, draft.dtype),
            trees=trees,
            graphs=Graphs(),
        )

    @classmethod
    @torch.inference_mode(False)
    def of_places(
        cls,
        target: Target,
        draft: DFlashDraftModel,
        source: FixedBuffers,
        num_places: int,
        length: int,
    ) -> FixedBuffers:
        """Allocates buffers with `num_places` free places for rows of up to `length` tokens.

        The sizes are those of `source`, the buffers of a run with one row. Raises `OutOfRoomError` if the new buffers
        are larger than the free memory of a device.
        """
        position_delta = (*source.shape.position_delta[:-1], num_places)
        shape = replace(source.shape, batch=num_places, position_delta=position_delta)
        capacity = length + shape.block
        buffers = cls.allocate(target, draft, shape, capacity, length + shape.width)
        buffers.cache = RaggedCache.like(source.cache, num_places, capacity, target.recurrences)
        # Each row has its own end tokens and its own seed.
        buffers.state.padded_eos_ids.fill_(-1)
        buffers.state.seed = torch.zeros(num_places, 1, dtype=torch.long, device=shape.device)
        nobody = DecodeState.of_nobody(shape)
        for place in range(num_places):
            buffers.free_row(place, nobody)
        return buffers

    @property
    def capacity(self) -> int:
        """The longest row in tokens, a block included."""
        return min(self.draft_cache.max_length, self.cache.max_length)

    def reopen(self) -> None:
        """Empties the caches and the newest context in place, for another run."""
        self.newest.clear()
        reads_no_stale_slot = reads_lengths_on_device(*self.caches())
        for cache in self.caches():
            for group in cache.groups:
                group.clear()
            for layer in cache.attention.values():
                is_full = layer.shape.window is None
                # Layers of full attention may have many gigabytes. They keep their content if no step reads a slot
                # that its run has not written. Ring buffers are emptied, because the masked slots that are read after
                # a long prompt may never have been written.
                if not (is_full and reads_no_stale_slot):
                    layer.clear()

    def stack_weights(self, draft: DFlashDraftModel) -> None:
        """Copies the draft's current weights if a kernel writes the context of all layers at once."""
        before = self.newest.weights
        self.newest.weights = draft.stack_weights(self.draft_cache, before)
        if self.newest.weights is not before:
            # The graphs are dropped, because they have the addresses of the earlier copies.
            self.graphs = Graphs()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows except these, in a run whose buffers are not kept afterwards; see [`kept_rows`]."""
        self.shape = replace(self.shape, batch=len(rows))
        for part in (self.state, self.newest, self.draft_cache, self.cache):
            part.keep_rows(rows)

    def add_row(self, source: FixedBuffers, length: int, max_rows: int) -> None:
        """Adds the row of another run, which has one row with `length` tokens in its caches.

        See [`RaggedCache.add_row`]. If there is no memory, it raises `OutOfRoomError` and changes nothing.
        """
        # The buffers of both caches have to fit at once.
        freed = defaultdict[torch.device, int](int)
        for cache in self.caches():
            cache.check_row(max_rows, freed)
        self.cache.add_row(source.cache, length, max_rows)
        self.draft_cache.add_row(source.draft_cache, length, max_rows)
        self.newest.add_row(source.newest)
        self.state.add_row(source.state)
        self.shape = replace(self.shape, batch=self.shape.batch + 1)

    def put_row(self, place: int, source: FixedBuffers, length: int) -> None:
        """Copies the row of another run to a place, over the row that is there. No address changes.

        Args:
            place (`int`): The place.
            source (`FixedBuffers`): The buffers of the other run. They have the same shape, but one row.
            length (`int`): The number of tokens of the row in its caches. They must fit into these buffers.
        """
        self.cache.put_row(place, source.cache, length)
        self.draft_cache.put_row(place, source.draft_cache, length)
        self.newest.put_row(place, source.newest)
        self.state.put_row(place, source.state)

    def free_row(self, place: int, nobody: DecodeState) -> None:
        """Frees a place: puts a row there that has ended and has no tokens in the caches.

        `nobody` is the state of such a row, from `DecodeState.of_nobody`. Steps then read no tokens of the place.
        """
        self.state.put_row(place, nobody)
        for cache in self.caches():
            cache.free_row(place)

    def num_bytes(self) -> int:
        """Returns the size of all tensors in bytes, without the memory that belongs to graphs."""
        return sum(tensor.nbytes for tensor in self.owned())

    def owned(self) -> list[Tensor]:
        """Returns every tensor whose address must not change."""
        found = [*self.state.tensors().values(), *self.newest.tensors()]
        for cache in self.caches():
            found.extend(cache.buffers())
        return found

    def caches(self) -> list[RaggedCache]:
        """Returns the draft's cache and the target's."""
        return [self.draft_cache, self.cache]


def reads_lengths_on_device(*caches: RaggedCache) -> bool:
    """Returns True if the attention kernel runs over every layer of these caches.

    The kernel finds the end of each row on the device and reads no slot after it. So a step costs no more with a
    longer buffer.
    """
    for cache in caches:
        for layer in cache.attention.values():
            keys = layer.key_buffer.transpose(1, 2)
            values = layer.value_buffer.transpose(1, 2)
            # Queries have the dtype and the device of the keys.
            if not ops.use_kernel(ops.block_attention, keys, keys, values):
                return False
    return True


def affordable_length(target: Target, draft: DFlashDraftModel, batch: int) -> int:
    """Returns the greatest length of rows whose buffers can be kept and leave half of the free memory.

    Returns 0 if the length is not known.
    """
    total = total_memory(target.device)
    free = free_memory(target.device)
    layers = attention_sizes(target.config)
    # Without these numbers the length cannot be computed.
    if total is None or free is None or not layers:
        return 0
    of_draft = sum(shape.num_bytes(batch, 1, 0) for shape in draft.cache_shapes())
    # The keys and values are counted as if all layers of the target had full attention.
    numbers = 2 * batch * sum(layer.groups * layer.size for layer in layers)
    of_target = numbers * target.model.dtype.itemsize
    affordable = min(KEPT_SHARE * total, free / 2)
    return int(affordable / (of_draft + of_target))


def round_up(length: int) -> int:
    """Returns the smallest length that steps are captured for and that is at least `length`."""
    grain = SMALLEST_BUCKET
    # There are four lengths to an octave, so that a step reads at most a quarter more than a long row has.
    while 8 * grain < length:
        grain *= 2
    return math.ceil(length / grain) * grain


def buckets_between(shortest: int, longest: int, capacity: int) -> list[int]:
    """Returns the lengths to capture for a run that may need from `shortest` to `longest` tokens, longest first."""
    found = [min(round_up(shortest), capacity)]
    while found[-1] < min(longest, capacity):
        found.append(min(round_up(found[-1] + 1), capacity))
    return found[::-1]


class _KeptSet(NamedTuple):
    """A set of buffers that no run uses at the moment."""

    buffers: FixedBuffers
    # On CUDA, this event marks the end of the last call's work. The next call may be on another stream.
    idle: torch.cuda.Event | None

    def num_bytes(self) -> int:
        """Returns the size of the buffers in bytes."""
        return self.buffers.num_bytes()


# The pool has, for each draft and target, a list of the sets that are kept, with the least recently used first.
_pool = weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, list[_KeptSet]]]()
_pool_lock = threading.Lock()


def _pool_of(draft: DFlashDraftModel, target: Target) -> list[_KeptSet]:
    """Returns the list of a draft's and a target's sets. The caller must hold the lock while it changes the list."""
    of_draft = _pool.setdefault(draft, weakref.WeakKeyDictionary())
    return of_draft.setdefault(target.model, [])


def take_buffers(
    target: Target,
    draft: DFlashDraftModel,
    shape: BufferShape,
    length: int,
    num_columns: int,
    keeps: bool,
) -> FixedBuffers:
    """Returns cleared buffers for rows of up to `length` tokens and `num_columns` columns of ids, plus one block.

    The buffers are new ones. If `keeps` is true, they may be a set of the pool, which belongs to the caller until
    [`give_buffers`]. Raises `OutOfRoomError` as [`FixedBuffers.allocate`] does.
    """
    if keeps:
        return _take_from_pool(target, draft, shape, max(length, num_columns) + shape.block)
    num_columns += shape.width
    length += shape.block

    def allocate(capacity: int) -> FixedBuffers:
        return FixedBuffers.allocate(target, draft, shape, capacity, num_columns)

    return else_freed(draft, allocate, length, length)


def _take_from_pool(
    target: Target, draft: DFlashDraftModel, shape: BufferShape, length: int
) -> FixedBuffers:
    """Returns a set of the pool, or a new one, for rows of up to `length` tokens, a block included."""
    with _pool_lock:
        pool = _pool_of(draft, target)
        alike = [kept for kept in pool if kept.buffers.shape == shape]
        fitting = [kept for kept in alike if kept.buffers.capacity >= length]
        # Sets of this shape that are too short leave the pool, so that they are freed before a longer set is made.
        taken = fitting[:1] or alike
        pool[:] = [kept for kept in pool if kept not in taken]
    if fitting:
        found = fitting[0]
        # Only the device waits for the earlier call, not the host.
        if found.idle is not None:
            torch.cuda.current_stream(shape.device).wait_event(found.idle)
        found.buffers.reopen()
        return found.buffers
    # A new set is twice as long as the short one, if the pool can keep it. So the steps of a growing conversation are
    # captured again a few times, and not with every turn.
    total = total_memory(shape.device) or 0
    most = total * KEPT_SHARE
    doubled = [2 * kept.buffers.capacity for kept in alike if 2 * kept.num_bytes() <= most]
    longest = max([round_up(length), *doubled])
    # These lists have the last references to the short sets, whose memory the new set may need.
    alike.clear()
    taken.clear()

    def allocate(capacity: int) -> FixedBuffers:
        return FixedBuffers.allocate(target, draft, shape, capacity, capacity)

    return else_freed(draft, allocate, longest, length)


def else_freed(draft: DFlashDraftModel, make: Callable[[int], T], length: int, least: int) -> T:
    """Returns `make(length)`. If there is no memory for it, frees the draft's buffers and returns `make(least)`.

    Raises `OutOfRoomError` if there is no memory for `least` tokens either.
    """
    try:
        return make(length)
    except OutOfRoomError:
        free_buffers(draft)
        return make(least)


def give_buffers(draft: DFlashDraftModel, target: Target, buffers: FixedBuffers) -> None:
    """Puts buffers into the pool, for the next call of their shape.

    If the pool then holds too many sets or bytes, the least recently used sets are dropped.
    """
    device = buffers.shape.device
    idle: torch.cuda.Event | None = None
    if device.type == "cuda":
        idle = _mark_idle(buffers)
    total = total_memory(device)
    with _pool_lock:
        pool = _pool_of(draft, target)
        pool.append(_KeptSet(buffers, idle))
        del pool[:-MAX_KEPT]
        while (
            pool and total is not None and sum(one.num_bytes() for one in pool) > total * KEPT_SHARE
        ):
            del pool[0]
        # This is read under the lock, because another thread may take the set afterwards.
        is_kept = bool(pool)
    if not is_kept:
        logger.warning_once(
            f"Buffers of a run with a DFlash draft were more than {KEPT_SHARE:.0%} of the memory of "
            f"{device} and are not kept: such calls allocate and capture every time. Fewer rows "
            "or a lower max_new_tokens need less"
        )


def _mark_idle(buffers: FixedBuffers) -> torch.cuda.Event:
    """Returns an event on the current CUDA stream that marks the end of a call's work over these buffers."""
    current = torch.cuda.current_stream(buffers.shape.device)
    idle = torch.cuda.Event()
    idle.record(current)
    # Torch would give freed memory to other work on the stream where the tensors were made, without waiting for this
    # stream. So each tensor is recorded on this stream. On its own stream this does nothing.
    for tensor in buffers.owned():
        tensor.record_stream(current)
    return idle


def kept_buffers(draft: DFlashDraftModel) -> Sequence[FixedBuffers]:
    """Returns the buffers that are kept between calls for a draft, with any target."""
    # The list is copied first, because another thread may give buffers back at the same time.
    pools = list(_pool.get(draft, {}).values())
    return [kept.buffers for pool in pools for kept in pool]


def free_buffers(draft: DFlashDraftModel) -> None:
    """Frees the buffers, CUDA graphs and FP8 copies that calls with this draft have left for the next call.

    It also frees the copies of all models' weights that were laid out for a CPU. Later calls make and capture
    everything again. Buffers of a call that runs in another thread are not freed.

    Args:
        draft (`DFlashDraftModel`): The draft.
    """
    _pool.pop(draft, None)
    free_float8(draft)
    forget_packed()
