"""What the steps of a run read and write, and sets of it that are kept between calls of the same shape.

A draft keeps a few sets of them, up to a share of the device's memory. A call takes a set out and gives it back when
it has ended well, so that calls in several threads never share one, and nothing that an error has left half-written is
used again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from dflash_hf import ops
from dflash_hf.cache.context import ContextWeights
from dflash_hf.cache.ragged import RaggedCache, kept_rows
from dflash_hf.cache.size import OutOfRoomError, check_memory
from dflash_hf.devices import free_memory, total_memory
from dflash_hf.generation.float8 import free_float8
from dflash_hf.generation.state import BufferShape, DecodeState
from dflash_hf.layer_configs import attention_sizes
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target
from dflash_hf.tree import TreeBuilder

T = TypeVar("T")
logger: Any = logging.get_logger(__name__)
MAX_KEPT = 4
KEPT_SHARE = 0.25  # of a device's memory
# Lengths that steps are captured for: multiples of the smallest, four to an octave.
SMALLEST_BUCKET = 128


def num_choices(target: Target, draft: DFlashDraftModel) -> int:
    """Returns how many tokens a draft chooses among: a selector's candidates, or its vocabulary."""
    return draft.config.selector_top_k or draft.config.draft_vocab_size or target.vocab_size


@dataclass(slots=True, kw_only=True, eq=False)
class FixedBuffers:
    """All that the steps of a run read or write. `B` rows, `W` verified tokens at most, `L` taps, `D` hidden.

    Addresses and shapes never change from step to step. A narrower verify uses the first columns.
    """

    shape: BufferShape  # what it is for
    capacity: int  # longest row in tokens, a block included; also columns of `state.ids`
    state: DecodeState  # begun again by every run
    draft_cache: RaggedCache  # the draft's context
    # [B, W, L * D]: tapped states of the newest verify; behind a narrower one those of earlier ones, which count as
    # rejected. Of a tree, those of the path that was accepted: as many as that can be long.
    context_states: Tensor
    context_lengths: Tensor  # [B], int64: where that stood, as the draft counts
    offset: Tensor  # [B], int64: see `DFlashCandidateGenerator`
    node_states: Tensor | None = None  # [B, W, L * D]: those of all nodes of a tree
    trees: TreeBuilder | None = None  # builds what is verified, where that is trees
    context_weights: ContextWeights | None = None  # copies for the kernel that writes context, made anew by a run
    cache: RaggedCache | None = None  # the target's; known after the first prefill
    graphs: Any = None  # what has been captured over these buffers
    idle: torch.cuda.Event | None = None  # when the last call's work is done: the next may be on another stream
    stream: torch.cuda.Stream | None = None  # of the call that allocated them, once it has ended

    @classmethod
    @torch.inference_mode(False)
    def allocate(
        cls, target: Target, draft: DFlashDraftModel, shape: BufferShape, capacity: int, num_columns: int
    ) -> FixedBuffers:
        """Allocates buffers for rows of up to `capacity` tokens, a block included; the target's K/V come later.

        Outside inference mode, like the caches: the next call may be. Raises `OutOfRoomError` if the draft's context
        is larger than what is free of the device's memory.
        """
        batch = shape.batch
        layers = list(shape.draft_layers)
        trees = None
        check_memory(layers, batch, capacity, shape.block)
        if shape.is_tree:
            longest = draft.config.num_proposals(shape.block_size)
            choices = num_choices(target, draft)
            trees = TreeBuilder(shape.width, longest, choices, shape.device)

        def states(width: int) -> Tensor:
            return torch.zeros(batch, width, draft.fc.in_features, dtype=draft.dtype, device=layers[0].device)

        return cls(
            shape=shape,
            capacity=capacity,
            state=DecodeState.allocate(shape, num_columns),
            draft_cache=RaggedCache(layers, batch=batch, max_length=capacity, block=shape.block),
            context_states=states(shape.path),
            node_states=states(shape.width) if shape.is_tree else None,
            trees=trees,
            context_lengths=torch.zeros(batch, dtype=torch.long, device=layers[0].device),
            offset=torch.zeros(batch, dtype=torch.long, device=shape.device),
        )

    def reopen(self) -> None:
        """Waits on the device, not on the host, for the call before, and empties the caches in place.

        But for those of full layers where nothing reads a slot that its run has not written: they may be many
        gigabytes. Rings are emptied: behind a long prompt, slots that are masked have never been written.
        """
        if self.idle is not None:
            torch.cuda.current_stream(self.shape.device).wait_event(self.idle)
        self.context_states.zero_()
        reads_no_stale_slot = reads_lengths_on_device(*self.caches())
        for cache in self.caches():
            for group in cache.groups:
                group.clear()
            for layer in cache.attention.values():
                is_full = layer.shape.window is None
                if not (is_full and reads_no_stale_slot):
                    layer.clear()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows alone, for the rest of a run whose buffers are not kept; see [`kept_rows`]."""
        assert self.cache is not None
        self.shape = replace(self.shape, batch=len(rows))
        for name in ("context_states", "context_lengths", "offset", "node_states"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, kept_rows(tensor, rows))
        for part in (self.state, self.draft_cache, self.cache):
            part.keep_rows(rows)

    def num_bytes(self) -> int:
        """Returns the size of everything in bytes, without what is private to graphs."""
        return sum(tensor.nbytes for tensor in self.owned())

    def owned(self) -> list[Tensor]:
        """Returns every tensor that must stay where it is."""
        found = [*self.state.tensors().values(), self.context_states, self.context_lengths, self.offset]
        if self.node_states is not None:
            found.append(self.node_states)
        found.extend(self.context_weights or ())
        for cache in self.caches():
            found.extend(cache.buffers())
        return found

    def caches(self) -> list[RaggedCache]:
        """Returns the draft's cache, and the target's once there is one."""
        return [cache for cache in (self.draft_cache, self.cache) if cache is not None]


def reads_lengths_on_device(*caches: RaggedCache) -> bool:
    """Returns True if the kernel attends to every layer of these caches: then no slot behind a row's end is ever read.

    It finds that end on the device, so that how many slots it may read costs nothing.
    """
    layers = [layer for cache in caches for layer in cache.attention.values()]
    pairs = [(layer.key_buffer.transpose(1, 2), layer.value_buffer.transpose(1, 2)) for layer in layers]
    return all(ops.attends(keys, keys, values) for keys, values in pairs)


def affordable_length(target: Target, draft: DFlashDraftModel, batch: int) -> int:
    """Returns how long rows may be in a set of buffers that is kept and leaves half of the free memory; 0: not known.

    By the config, as if all layers of the target were of full attention.
    """
    total = total_memory(target.device)
    free = free_memory(target.device)
    layers = attention_sizes(target.config)
    if total is None or free is None or not layers:
        return 0
    token = sum(shape.num_bytes(batch, 1, 0) for shape in draft.cache_shapes())
    numbers = sum(layer.groups * layer.size for layer in layers)
    token += 2 * batch * numbers * target.model.dtype.itemsize
    return int(min(KEPT_SHARE * total, free / 2) / token)


def round_up(length: int) -> int:
    """Returns the smallest length that steps are captured for and that is at least `length`."""
    grain = SMALLEST_BUCKET
    while 8 * grain < length:
        grain *= 2
    return -(-length // grain) * grain


def buckets_between(shortest: int, longest: int, capacity: int) -> list[int]:
    """Returns the lengths to capture for a run that may need from `shortest` to `longest` tokens, longest first."""
    found = [min(round_up(shortest), capacity)]
    while found[-1] < min(longest, capacity):
        found.append(min(round_up(found[-1] + 1), capacity))
    return found[::-1]


# Per draft and target, the sets that no run has at the moment, least recently used first.
_kept = weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, list[FixedBuffers]]]()
_keeping = threading.Lock()


def _kept_of(draft: DFlashDraftModel, target: Target) -> list[FixedBuffers]:
    return _kept.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(target.model, [])


def take_buffers(
    target: Target, draft: DFlashDraftModel, shape: BufferShape, length: int, num_columns: int, keeps: bool
) -> FixedBuffers:
    """Returns cleared buffers for rows of up to `length` tokens and `num_columns` of ids, and a block behind them.

    New ones, or, where they are to be kept between calls, those of an earlier one: they are the caller's until
    [`give_buffers`]. Kept ones that are too short are freed first, and new ones are twice as long where that can be
    kept: a growing conversation is captured anew a few times, not with every turn. Those of other shapes are freed
    where there is no room beside them. Errors as [`FixedBuffers.allocate`].
    """
    if not keeps:
        num_columns += shape.width
        length += shape.block
        return else_freed(draft, lambda n: FixedBuffers.allocate(target, draft, shape, n, num_columns), length, length)
    length = max(length, num_columns) + shape.block
    with _keeping:
        kept = _kept_of(draft, target)
        alike = [buffers for buffers in kept if buffers.shape == shape]
        found = next((buffers for buffers in alike if buffers.capacity >= length), None)
        taken = alike if found is None else [found]
        kept[:] = [buffers for buffers in kept if buffers not in taken]
    if found is not None:
        found.reopen()
        return found
    total = total_memory(shape.device)
    doubled = [2 * b.capacity for b in alike if total is not None and 2 * b.num_bytes() <= total * KEPT_SHARE]
    del alike
    longest = max([round_up(length), *doubled])
    return else_freed(draft, lambda n: FixedBuffers.allocate(target, draft, shape, n, n), longest, length)


def else_freed(draft: DFlashDraftModel, make: Callable[[int], T], length: int, least: int) -> T:
    """Returns what `make` makes for `length` tokens, or, all that is kept being freed, for `least` of them."""
    try:
        return make(length)
    except OutOfRoomError:
        free_buffers(draft)
        return make(least)


def give_buffers(draft: DFlashDraftModel, target: Target, buffers: FixedBuffers) -> None:
    """Keeps buffers for the next call of their shape, instead of the least recently used ones if they are too many."""
    if buffers.shape.device.type == "cuda":
        current = torch.cuda.current_stream(buffers.shape.device)
        buffers.idle = torch.cuda.Event()
        buffers.idle.record(current)
        if buffers.stream is None:
            buffers.stream = current
        if current != buffers.stream:
            # Once freed, their memory is for others on the stream they were made on, which knows nothing of this one.
            for tensor in buffers.owned():
                tensor.record_stream(current)
    total = total_memory(buffers.shape.device)
    with _keeping:
        kept = _kept_of(draft, target)
        kept[:] = [*kept, buffers][-MAX_KEPT:]
        while kept and total is not None and sum(b.num_bytes() for b in kept) > total * KEPT_SHARE:
            del kept[0]
        is_kept = bool(kept)  # another thread may take it behind the lock
    if not is_kept:
        logger.warning_once(
            f"Buffers of a run with a DFlash draft were more than {KEPT_SHARE:.0%} of the memory of "
            f"{buffers.shape.device} and are not kept: such calls allocate and capture every time. Fewer rows "
            "or a lower max_new_tokens need less"
        )


def kept_buffers(draft: DFlashDraftModel) -> Sequence[FixedBuffers]:
    """Returns the buffers that a draft keeps between calls."""
    return [buffers for kept in list(_kept.get(draft, {}).values()) for buffers in kept]


def free_buffers(draft: DFlashDraftModel) -> None:
    """Frees the buffers, CUDA graphs and copies in FP8 that calls with this draft have left for the next call.

    Later calls make and capture them again. Buffers of a call that is running in another thread stay.

    Args:
        draft (`DFlashDraftModel`): The draft.
    """
    _kept.pop(draft, None)
    free_float8(draft)
