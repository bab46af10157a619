"""The buffers that a run's steps read and write, and sets of them that are kept between calls of the same shape.

A draft keeps a few sets, up to a share of the device's memory. A call takes a set out and gives it back when it has
ended well, so that calls in several threads never share one, and no set that an error has left half-written is used
again.
"""

from __future__ import annotations

import math
import threading
import weakref
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
# Sets that the pool keeps for a draft and target, and the share of a device's memory that they may take.
MAX_KEPT = 4
KEPT_SHARE = 0.25
# Lengths that steps are captured for: multiples of the smallest, four to an octave.
SMALLEST_BUCKET = 128


def num_choices(target: Target, draft: DFlashDraftModel) -> int:
    """Returns how many tokens trees choose among: the candidates of a slot, or the draft's vocabulary."""
    return draft.config.num_candidates or draft.config.draft_vocab_size or target.vocab_size


@dataclass(slots=True, kw_only=True, eq=False)
class FixedBuffers:
    """Every tensor that the steps of a run read or write. `B` rows.

    Addresses and shapes never change from step to step. A narrower verify uses the first columns.
    """

    shape: BufferShape  # the sizes that a run must have to use these buffers
    state: DecodeState  # begun again by every run
    draft_cache: RaggedCache  # the draft's context
    cache: RaggedCache  # the target's keys and values; it has no layers before the first prefill
    newest: NewestContext  # context that the draft's cache does not hold yet
    trees: TreeBuilder | None  # builds the trees that are verified; none where chains are
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
        """Allocates buffers for rows of up to `capacity` tokens, a block included; the target's K/V come later.

        Outside inference mode, like the caches: the next call may be. Raises `OutOfRoomError` if the draft's context
        is larger than what is free of the device's memory.
        """
        layers = list(shape.draft_layers)
        check_memory(layers, shape.batch, capacity, shape.block)
        trees: TreeBuilder | None = None
        if shape.is_tree:
            longest = draft.config.num_proposals(shape.block_size)
            choices = num_choices(target, draft)
            trees = TreeBuilder(shape.width, longest, choices, shape.device)
        # Both caches are as long; the target's layers show in its prefill.
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
        """Allocates buffers for rows of up to `length` tokens like the one row of a run, with so many free places.

        Raises `OutOfRoomError` if they are larger than what is free of a device's memory.
        """
        position_delta = (*source.shape.position_delta[:-1], num_places)
        shape = replace(source.shape, batch=num_places, position_delta=position_delta)
        capacity = length + shape.block
        buffers = cls.allocate(target, draft, shape, capacity, length + shape.width)
        buffers.cache = RaggedCache.like(source.cache, num_places, capacity, target.recurrences)
        # Each row has end tokens and a seed of its own.
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
                # Full layers may be many gigabytes, and stay as they are where nothing reads a slot that its run has
                # not written. Rings are emptied: behind a long prompt, masked slots have never been written.
                if not (is_full and reads_no_stale_slot):
                    layer.clear()

    def stack_weights(self, draft: DFlashDraftModel) -> None:
        """Copies the draft's weights as they are now, where a kernel is to write context of all layers at once."""
        before = self.newest.weights
        self.newest.weights = draft.stack_weights(self.draft_cache, before)
        if self.newest.weights is not before:
            # Graphs have the addresses of the copies before.
            self.graphs = Graphs()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows alone, for the rest of a run whose buffers are not kept; see [`kept_rows`]."""
        self.shape = replace(self.shape, batch=len(rows))
        for part in (self.state, self.newest, self.draft_cache, self.cache):
            part.keep_rows(rows)

    def add_row(self, source: FixedBuffers, length: int, max_rows: int) -> None:
        """Adds the one row of another run, of `length` tokens in its caches; see [`RaggedCache.add_row`].

        Raises `OutOfRoomError`, and changes nothing then.
        """
        for cache in self.caches():
            cache.check_row(max_rows)
        self.cache.add_row(source.cache, length, max_rows)
        self.draft_cache.add_row(source.draft_cache, length, max_rows)
        self.newest.add_row(source.newest)
        self.state.add_row(source.state)
        self.shape = replace(self.shape, batch=self.shape.batch + 1)

    def put_row(self, place: int, source: FixedBuffers, length: int) -> None:
        """Puts the one row of another run to a place, over the row that is there; addresses stay as they are.

        Args:
            place (`int`): The place.
            source (`FixedBuffers`): The run's, of the same shape but for the number of rows.
            length (`int`): Tokens of the row in its caches, which fit in here.
        """
        self.cache.put_row(place, source.cache, length)
        self.draft_cache.put_row(place, source.draft_cache, length)
        self.newest.put_row(place, source.newest)
        self.state.put_row(place, source.state)

    def free_row(self, place: int, nobody: DecodeState) -> None:
        """Frees a place: a row stands there that has ended, with no tokens in the caches; see `DecodeState.of_nobody`.

        The tokens are gone, so that steps have none of them to read.
        """
        self.state.put_row(place, nobody)
        for cache in self.caches():
            cache.free_row(place)

    def num_bytes(self) -> int:
        """Returns the size of all tensors in bytes; memory that is private to graphs is not counted."""
        return sum(tensor.nbytes for tensor in self.owned())

    def owned(self) -> list[Tensor]:
        """Returns every tensor that must stay where it is."""
        found = [*self.state.tensors().values(), *self.newest.tensors()]
        for cache in self.caches():
            found.extend(cache.buffers())
        return found

    def caches(self) -> list[RaggedCache]:
        """Returns the draft's cache and the target's."""
        return [self.draft_cache, self.cache]


def reads_lengths_on_device(*caches: RaggedCache) -> bool:
    """Returns True if the kernel attends to every layer of these caches: then no slot behind a row's end is ever read.

    The kernel finds that end on the device, so that a step costs no more with a longer buffer.
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
    """Returns how long rows may be in buffers that are kept and leave half of the free memory; 0: not known."""
    total = total_memory(target.device)
    free = free_memory(target.device)
    layers = attention_sizes(target.config)
    # Without these numbers nothing can be promised, and the run begins with the smaller room.
    if total is None or free is None or not layers:
        return 0
    of_draft = sum(shape.num_bytes(batch, 1, 0) for shape in draft.cache_shapes())
    # Keys and values, as if all layers of the target had full attention.
    numbers = 2 * batch * sum(layer.groups * layer.size for layer in layers)
    of_target = numbers * target.model.dtype.itemsize
    affordable = min(KEPT_SHARE * total, free / 2)
    return int(affordable / (of_draft + of_target))


def round_up(length: int) -> int:
    """Returns the smallest length that steps are captured for and that is at least `length`."""
    grain = SMALLEST_BUCKET
    # Four to an octave: of a long row at most a quarter more is read than it has.
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
    """A set of buffers that no run has at the moment."""

    buffers: FixedBuffers
    # On CUDA, when the work of the last call over them is done: the next one may be on another stream.
    idle: torch.cuda.Event | None

    def num_bytes(self) -> int:
        """Returns the size of the buffers in bytes."""
        return self.buffers.num_bytes()


# The pool: per draft and target, the sets that are kept, least recently used first.
_pool = weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, list[_KeptSet]]]()
_pool_lock = threading.Lock()


def _pool_of(draft: DFlashDraftModel, target: Target) -> list[_KeptSet]:
    """Returns the sets of a draft and a target, in a list to be changed under the lock."""
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
    """Returns cleared buffers for rows of up to `length` tokens and `num_columns` of ids, and a block behind them.

    New ones, or, where they are to be kept between calls, a set of the pool: it is the caller's until
    [`give_buffers`]. Errors as [`FixedBuffers.allocate`].
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
    """Returns a set of the pool for rows of up to `length` tokens, a block included, or a new one."""
    with _pool_lock:
        pool = _pool_of(draft, target)
        alike = [kept for kept in pool if kept.buffers.shape == shape]
        fitting = [kept for kept in alike if kept.buffers.capacity >= length]
        # Sets of this shape that are too short leave the pool: they are freed before a longer one is made.
        taken = fitting[:1] or alike
        pool[:] = [kept for kept in pool if kept not in taken]
    if fitting:
        found = fitting[0]
        # The device waits for the call before, and the host does not.
        if found.idle is not None:
            torch.cuda.current_stream(shape.device).wait_event(found.idle)
        found.buffers.reopen()
        return found.buffers
    # A new set is twice as long where that can be kept: a growing conversation is captured anew a few times, not with
    # every turn.
    total = total_memory(shape.device) or 0
    most = total * KEPT_SHARE
    doubled = [2 * kept.buffers.capacity for kept in alike if 2 * kept.num_bytes() <= most]
    longest = max([round_up(length), *doubled])
    # The last references to the short sets: their memory may be what the new one needs.
    alike.clear()
    taken.clear()

    def allocate(capacity: int) -> FixedBuffers:
        return FixedBuffers.allocate(target, draft, shape, capacity, capacity)

    return else_freed(draft, allocate, longest, length)


def else_freed(draft: DFlashDraftModel, make: Callable[[int], T], length: int, least: int) -> T:
    """Returns what `make` makes for `length` tokens or, after a draft's buffers are freed, for `least` of them."""
    try:
        return make(length)
    except OutOfRoomError:
        free_buffers(draft)
        return make(least)


def give_buffers(draft: DFlashDraftModel, target: Target, buffers: FixedBuffers) -> None:
    """Keeps buffers for the next call of their shape, instead of the least recently used ones if they are too many."""
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
        # Looked at under the lock: once it is released another thread may take the set.
        is_kept = bool(pool)
    if not is_kept:
        logger.warning_once(
            f"Buffers of a run with a DFlash draft were more than {KEPT_SHARE:.0%} of the memory of "
            f"{device} and are not kept: such calls allocate and capture every time. Fewer rows "
            "or a lower max_new_tokens need less"
        )


def _mark_idle(buffers: FixedBuffers) -> torch.cuda.Event:
    """Returns an event of the current CUDA stream: the work of a call over these buffers ends there."""
    current = torch.cuda.current_stream(buffers.shape.device)
    idle = torch.cuda.Event()
    idle.record(current)
    # Once freed, their memory is for others on the stream they were made on, which knows nothing of another one. On
    # that stream itself torch does nothing.
    for tensor in buffers.owned():
        tensor.record_stream(current)
    return idle


def kept_buffers(draft: DFlashDraftModel) -> Sequence[FixedBuffers]:
    """Returns the buffers that a draft keeps between calls, with whatever target."""
    # Copied first: another thread may give buffers back meanwhile.
    pools = list(_pool.get(draft, {}).values())
    return [kept.buffers for pool in pools for kept in pool]


def free_buffers(draft: DFlashDraftModel) -> None:
    """Frees the buffers, CUDA graphs and copies in FP8 that calls with this draft have left for the next call.

    It also frees the copies of weights that were laid out for a CPU, of all models. Later calls make and capture all
    of it again. Buffers of a call that is running in another thread stay.

    Args:
        draft (`DFlashDraftModel`): The draft.
    """
    _pool.pop(draft, None)
    free_float8(draft)
    forget_packed()
