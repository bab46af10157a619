"""Fixed buffers for the step that is captured: everything it reads or writes from one step to the next, kept between
calls of the same shape.

A draft keeps a few sets of them, up to a share of the device's memory. A call takes a set out and gives it back when
it has ended well, so that calls in several threads never share one, and nothing that an error has left half-written is
used again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_hf.cache import RaggedCache
from dflash_hf.cache_size import OutOfRoomError, check_memory
from dflash_hf.devices import total_memory
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.state import DecodeState
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.new_context import ContextWeights
from dflash_hf.target import Target

MAX_KEPT = 4
KEPT_SHARE = 0.25  # of a device's memory
# Lengths that steps are captured for: multiples of the smallest, four to an octave.
SMALLEST_BUCKET = 128
# End-of-sequence ids are padded to a multiple of this.
EOS_IDS = 8
NUM_REPORTED = 5  # rows of `steps.report`


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """What buffers have to have in common with a call, besides room.

    Args:
        batch (`int`): Rows.
        block_size, width (`int`): Widths of the draft's block and of the widest verify.
        num_eos (`int`): End-of-sequence ids, rounded up.
        position_delta (`tuple[int, ...]`): Shape of the target's position deltas.
        device (`torch.device`): The target's.
        draft_device (`torch.device`): The draft's.
        draft_dtype (`torch.dtype`): The draft's.
    """

    batch: int
    block_size: int
    width: int
    num_eos: int
    position_delta: tuple[int, ...]
    device: torch.device
    draft_device: torch.device
    draft_dtype: torch.dtype


@dataclass(slots=True, kw_only=True, eq=False)
class FixedBuffers:
    """One set of buffers. `B` rows, `W` verified tokens at most, `L` taps, `D` hidden; addresses and shapes never
    change. A narrower verify uses the first columns.

    Args:
        shape (`BufferShape`): What it is for.
        capacity (`int`): Longest row in tokens, a block included; also columns of `state.ids`.
        target (weak reference to a model): The target that the caches are of.
        state (`DecodeState`): Restarted by every run.
        draft_cache (`RaggedCache`): The draft's context.
        block_ids (`torch.Tensor` of shape `[B, K]`, int64): The draft's.
        context_states (`torch.Tensor` of shape `[B, W, L * D]`): Tapped states of the newest verify; behind a narrower
            one those of earlier ones, which count as rejected.
        context_lengths (`torch.Tensor` of shape `[B]`, int64): Where that stood, as the draft counts.
        outcome (`torch.Tensor` of shape `[5 + W, B]`, int64): `steps.report`, then as many tokens as were verified.
            The state's `num_committed` and `num_accepted` are its first two rows.
        positions (`torch.Tensor` of shape `[B, max(K, W)]`, int64): Where the next block's tokens stand, and as many
            after them as the wider of draft and verify has; kept by steps that a kernel ends.
        context_weights (`ContextWeights`, *optional*): Copies for the kernel that writes context, made anew by a run.
        position_delta, eos_ids, key, offset (`torch.Tensor`): Of the current run, see [`DecodeState`] and
            [`DFlashCandidateGenerator`].
        cache (`RaggedCache`, *optional*): The target's; known after the first prefill.
        graphs (*optional*): What has been captured over these buffers.
        idle (`torch.cuda.Event`, *optional*): When the last call's work is done: the next may be on another stream.
    """

    shape: BufferShape
    capacity: int
    target: weakref.ref[Any]
    state: DecodeState
    draft_cache: RaggedCache
    block_ids: Tensor
    context_states: Tensor
    context_lengths: Tensor
    outcome: Tensor
    positions: Tensor
    position_delta: Tensor
    eos_ids: Tensor
    key: Tensor
    offset: Tensor
    context_weights: ContextWeights | None = None
    cache: RaggedCache | None = None
    graphs: Any = None
    idle: torch.cuda.Event | None = None

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, target: Target, draft: DFlashDraftModel, shape: BufferShape, capacity: int) -> FixedBuffers:
        """Allocates buffers for rows of up to `capacity` tokens, a block included; the target's K/V come later.

        Outside inference mode, like the caches: the next call may be.
        """
        batch, width, device = shape.batch, shape.width, shape.device

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.long, device=device)

        state, outcome = DecodeState.allocate(batch, capacity, width, device), zeros(NUM_REPORTED + width, batch)
        state.num_committed, state.num_accepted = outcome[0], outcome[1]
        return cls(
            shape=shape,
            capacity=capacity,
            target=weakref.ref(target.model),
            state=state,
            draft_cache=RaggedCache(
                draft.cache_shapes(),
                batch=batch,
                max_length=capacity,
                block=max(shape.block_size, width),
                dtype=shape.draft_dtype,
                device=shape.draft_device,
            ),
            block_ids=torch.zeros(batch, shape.block_size, dtype=torch.long, device=shape.draft_device),
            context_states=torch.zeros(
                batch, width, draft.fc.in_features, dtype=shape.draft_dtype, device=shape.draft_device
            ),
            context_lengths=torch.zeros(batch, dtype=torch.long, device=shape.draft_device),
            outcome=outcome,
            positions=zeros(batch, max(shape.block_size, width)),
            position_delta=zeros(*shape.position_delta),
            eos_ids=zeros(shape.num_eos),
            key=zeros(),
            offset=zeros(batch),
        )

    def reopen(self) -> None:
        """Waits on the device, not on the host, for the call before, and empties the caches in place."""
        if self.idle is not None:
            torch.cuda.current_stream(self.shape.device).wait_event(self.idle)
        self.draft_cache.clear()
        if self.cache is not None:
            self.cache.clear()

    def hold(self, generator: DFlashCandidateGenerator) -> None:
        """Moves what a run has of its own into the buffers; its prompts are in the caches and `state` is restarted.

        Its generator keeps the newest context in them from then on.
        """
        state = self.state
        state.position_delta = self.position_delta.copy_(state.position_delta)
        if state.eos_ids is not None:
            given = state.eos_ids
            state.eos_ids = self.eos_ids.fill_(-1)
            state.eos_ids[: given.shape[0]] = given
        if state.key is not None:
            state.key = self.key.copy_(state.key)
        lengths = state.lengths
        if generator.offset is not None:
            generator.offset = self.offset.copy_(generator.offset)
            lengths = lengths - self.offset
        self.context_lengths.copy_(lengths)
        generator.hold_context(self.context_states.zero_(), self.context_lengths)
        with torch.inference_mode(False):
            self.context_weights = generator.hold_weights(self.context_weights)

    def begin_block(self) -> None:
        """Says where the run's next block stands and what it begins with, as a step that a kernel ends says it."""
        state, width = self.state, self.positions.shape[1]
        self.positions.copy_(state.lengths[:, None] + torch.arange(width, device=state.lengths.device))
        self.block_ids[:, 0] = state.anchor

    def take_cache(self, cache: RaggedCache) -> None:
        """Keeps the target's cache; what was captured over another one is dropped."""
        if cache is not self.cache:
            self.cache, self.graphs = cache, None

    def num_bytes(self) -> int:
        """Returns the size of everything in bytes, without what is private to graphs."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.owned())

    def owned(self) -> list[Tensor]:
        """Returns every tensor that must stay where it is."""
        state = self.state
        caches = [self.draft_cache, *([] if self.cache is None else [self.cache])]
        return [
            *(state.ids, state.cursor, state.remaining, state.lengths, state.whole_block, state.done),
            *(state.whole_tokens, self.outcome, self.positions),
            *(self.block_ids, self.context_states, self.context_lengths),
            *(self.position_delta, self.eos_ids, self.key, self.offset),
            *(() if self.context_weights is None else self.context_weights),
            *(buffer for cache in caches for buffer in cache.buffers()),
        ]


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


class _Store:
    """The sets of buffers of one draft, least recently used first."""

    def __init__(self) -> None:
        self.kept: list[FixedBuffers] = []
        # A target's end may be noticed while the lock is held.
        self.lock = threading.RLock()

    def forget_dead(self, _: object = None) -> None:
        """Drops what belongs to a target that is no more."""
        with self.lock:
            self.kept = [buffers for buffers in self.kept if buffers.target() is not None]


_stores: weakref.WeakKeyDictionary[DFlashDraftModel, _Store] = weakref.WeakKeyDictionary()


def take_buffers(target: Target, draft: DFlashDraftModel, shape: BufferShape, length: int) -> FixedBuffers:
    """Returns cleared buffers for rows of up to `length` tokens, a block included: kept ones, else new ones.

    They are the caller's until [`give_buffers`]. Kept ones that are too short are freed first, and those of other
    shapes where there is no room beside them.

    Raises:
        OutOfRoomError: If the draft's context is larger than what is free of the device's memory.
    """
    store = _stores.setdefault(draft, _Store())
    with store.lock:
        alike = [kept for kept in store.kept if kept.shape == shape and kept.target() is target.model]
        found = next((kept for kept in alike if kept.capacity >= length), None)
        gone = alike if found is None else [found]
        store.kept = [kept for kept in store.kept if not any(kept is other for other in gone)]
    if found is not None:
        found.reopen()
        return found
    del alike, gone, store
    try:
        _check_draft(draft, shape, length)
    except OutOfRoomError:
        free_buffers(draft)
        _check_draft(draft, shape, length)
    return FixedBuffers.allocate(target, draft, shape, round_up(length))


def _check_draft(draft: DFlashDraftModel, shape: BufferShape, length: int) -> None:
    """Refuses rows whose draft context has no room."""
    itemsize = shape.draft_dtype.itemsize
    shapes = [(layer, itemsize, itemsize) for layer in draft.cache_shapes()]
    check_memory(shapes, shape.draft_device, shape.batch, length, max(shape.block_size, shape.width))


def give_buffers(draft: DFlashDraftModel, buffers: FixedBuffers) -> None:
    """Keeps buffers for the next call of their shape, instead of the least recently used ones if they are too many."""
    store = _stores.setdefault(draft, _Store())
    if buffers.shape.device.type == "cuda":
        buffers.idle = torch.cuda.Event()
        buffers.idle.record(torch.cuda.current_stream(buffers.shape.device))
    total = total_memory(buffers.shape.device)
    with store.lock:
        buffers.target = weakref.ref(buffers.target(), store.forget_dead)
        store.kept = [*store.kept, buffers][-MAX_KEPT:]
        while store.kept and total is not None and sum(b.num_bytes() for b in store.kept) > total * KEPT_SHARE:
            del store.kept[0]


def kept_buffers(draft: DFlashDraftModel) -> Sequence[FixedBuffers]:
    """Returns the buffers that a draft keeps between calls."""
    store = _stores.get(draft)
    return () if store is None else tuple(store.kept)


def free_buffers(draft: DFlashDraftModel) -> None:
    """Frees the buffers and CUDA graphs that calls with this draft have left for the next call.

    Later calls allocate and capture again. Buffers of a call that is running in another thread stay.

    Args:
        draft (`DFlashDraftModel`): The draft.
    """
    _stores.pop(draft, None)


__all__ = [
    "EOS_IDS",
    "NUM_REPORTED",
    "BufferShape",
    "FixedBuffers",
    "buckets_between",
    "free_buffers",
    "give_buffers",
    "kept_buffers",
    "round_up",
    "take_buffers",
]
