"""The ragged static cache: fixed buffers, one length per row, nothing to crop.

A block is written at `lengths[b] .. lengths[b] + width - 1`. Accepting `n` tokens means `lengths[b] += n`; the next
block overwrites every stale slot before anything reads it. Full layers hold the whole row, sliding layers a ring of
window + block slots. The target and the draft use the same class. A target's recurrent layers, which keep a state
instead of keys and values, are in `recurrent`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from dflash_hf import ops
from dflash_hf.attention import RaggedBlock
from dflash_hf.cache.prompts import PromptSlots
from dflash_hf.cache.recurrence import Recurrence
from dflash_hf.cache.recurrent import Members, RecurrentGroup, RecurrentLayer, plan_groups
from dflash_hf.cache.size import LayerShape, check_memory
from dflash_hf.devices import plain_tensors
from dflash_hf.errors import require


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, token-major: `[B, R, G, E]`, handed out as `[B, G, R, E]` views.

    Token-major makes a block's write one `index_copy_` whatever the batch size. Zeros to begin with: a masked slot
    still enters `weight * value`, and 0 * NaN is NaN.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, shape: LayerShape, batch: int, max_length: int, block: int) -> None:
        super().__init__()
        self.shape = shape
        self.ring = shape.ring(max_length, block)
        rows = (batch, self.ring, shape.num_heads)
        where = shape.device
        with plain_tensors():
            keys = torch.zeros(*rows, shape.key_size, dtype=shape.dtype, device=where)
            values = torch.zeros(*rows, shape.value_size, dtype=shape.value_dtype, device=where)
        self._hold(keys, values)
        self.is_initialized = True

    def _hold(self, key_buffer: Tensor, value_buffer: Tensor) -> None:
        """Takes these for its buffers."""
        self.key_buffer = key_buffer
        self.value_buffer = value_buffer
        # Views, made once, where they are needed, and not for every write and read.
        self._rows: list[Tensor] = []
        self._all: list[Tensor] = []
        self._views: tuple[Tensor, Tensor] | None = None

    def grow(self, ring: int) -> None:
        """Moves what is held into buffers of `ring` slots; the old ones must never have wrapped."""

        def longer(old: Tensor) -> Tensor:
            with plain_tensors():
                new = old.new_zeros(old.shape[0], ring, *old.shape[2:])
                new[:, : self.ring] = old
            return new

        self._hold(longer(self.key_buffer), longer(self.value_buffer))
        self.ring = ring

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows alone; see [`kept_rows`]."""
        self._hold(kept_rows(self.key_buffer, rows), kept_rows(self.value_buffer, rows))

    def write(self, key_BKGE: Tensor, value_BKGE: Tensor, block: RaggedBlock) -> None:
        """Writes a block in place at each row's length; no host sync."""
        if block.is_exact and block.bound is not None and block.bound <= self.ring:
            # The host knows where the one row ends: two copies, and nothing looked up.
            first = block.bound - block.width
            self.key_buffer.narrow(1, first, block.width).copy_(key_BKGE)
            self.value_buffer.narrow(1, first, block.width).copy_(value_BKGE)
            return
        if not self._rows:
            with plain_tensors():
                self._rows = [buffer.flatten(0, 1) for buffer in self.buffers()]
        keys, values = self._rows
        slots = block.on(keys.device).slots(self.ring)
        if key_BKGE.dtype != keys.dtype or value_BKGE.dtype != values.dtype:
            # Under autocast keys and values need not have the dtypes they had in the prefill.
            key_BKGE = key_BKGE.to(keys.dtype)
            value_BKGE = value_BKGE.to(values.dtype)
        keys.index_copy_(0, slots, key_BKGE.flatten(0, 1))
        values.index_copy_(0, slots, value_BKGE.flatten(0, 1))

    def write_rows(self, key_BSGE: Tensor, value_BSGE: Tensor, prompts: PromptSlots) -> None:
        """Writes whole prompts in place, or their newest `S` columns; for prefill."""
        destination = prompts.of(self.ring, key_BSGE.shape[1], self.key_buffer.device)
        destination.write(self.key_buffer, key_BSGE)
        destination.write(self.value_buffer, value_BSGE)

    def read(self, block: RaggedBlock) -> tuple[Tensor, Tensor]:
        """Returns views of the keys and values that a block has to read: `[B, G, extent, E]`."""
        extent = block.extent(self.ring)
        if self._views is None or self._views[0].shape[2] != extent:
            self._all = self._all or [buffer.transpose(1, 2) for buffer in self.buffers()]
            keys, values = self._all
            self._views = (keys.narrow(2, 0, extent), values.narrow(2, 0, extent))
        return self._views

    def read_rows(self, positions_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of the keys and values at indices `[B, C]` int64 that were written: `[B, G, C, E]`.

        Zeros at negative indices, and in a ring where the row's newest given index no longer sees one.
        """
        positions = positions_BC.to(self.key_buffer.device)
        missing = positions < 0
        if self.shape.window is not None:
            missing = missing | (positions <= positions.amax(dim=1, keepdim=True) - self.shape.window)
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        slots = positions.clamp_min(0) % self.ring
        keys, values = (
            buffer[rows, slots].masked_fill_(missing[:, :, None, None], 0).transpose(1, 2)
            for buffer in (self.key_buffer, self.value_buffer)
        )
        return keys, values

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values, `[B, R, G, E]` each."""
        return self.key_buffer, self.value_buffer

    def clear(self) -> None:
        """Empties the buffers in place: what a masked slot holds must be finite."""
        self.key_buffer.zero_()
        self.value_buffer.zero_()

    def release(self) -> None:
        """Drops the buffers; nothing can be read or written afterwards."""
        self._hold(self.key_buffer.new_empty(0), self.value_buffer.new_empty(0))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Is not used: `RaggedCache.update` writes, because it knows where the rows stand."""
        raise NotImplementedError("expected RaggedCache.update, got a call on its layer; call it on the cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the buffer's size: masks are never built from it."""
        return self.ring, 0

    def get_seq_length(self) -> int:
        """Returns 0: rows have lengths of their own, on the device, and positions are always passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Returns the number of slots."""
        return self.ring


class RaggedCache(Cache):
    """One [`RaggedLayer`] or [`RecurrentLayer`] per layer, and the block that is being written.

    Args:
        shapes (`list[LayerShape]`): One per layer.
        batch (`int`): Rows.
        max_length (`int`): Longest row in tokens, a rejected block at its end included.
        block (`int`): Longest block that will be written at once.
    """

    def __init__(self, shapes: list[LayerShape], *, batch: int, max_length: int, block: int) -> None:
        self.attention = {i: RaggedLayer(shape, batch, max_length, block) for i, shape in enumerate(shapes)}
        super().__init__(layers=[*self.attention.values()])
        self.longest_block = block
        self.block: RaggedBlock | None = None
        # What was handed out last, for attention to run over, and the layers over which it has run since `begin`.
        self._layer = 0
        self._num_slots = 0
        self._attended: set[int] = set()
        self.groups: list[RecurrentGroup] = []

    @classmethod
    def take_prefill(
        cls,
        prefill: Cache,
        positions_BS: Tensor,
        max_length: int,
        block: int,
        keep: bool = False,
        into: RaggedCache | None = None,
        recurrences: Mapping[int, Recurrence] | None = None,
    ) -> RaggedCache:
        """Moves an ordinary prefill cache in, row by row without its padding, emptying it layer by layer.

        Args:
            prefill (`Cache`): What the target filled, left-padded; each layer is released once it is copied.
            positions_BS (`torch.Tensor` of shape `[B, S]`, int64): Index of each prompt token, negative for padding.
            max_length, block: See the class.
            keep (`bool`): Copy only: `prefill` stays as it is.
            into (`RaggedCache`, *optional*): Cleared buffers for rows of `max_length` tokens, used if they have the
                prefill's shapes and dtypes; the result is another cache if they do not.
            recurrences (`dict[int, Recurrence]`, *optional*): The target's recurrent layers by index.

        Raises `ValueError` if a layer has no keys and values and is none of `recurrences`, or there is no room.
        """
        recurrent = plan_groups(prefill, recurrences or {}, block)
        batch = positions_BS.shape[0]
        shapes = dict[int, LayerShape]()
        freed = defaultdict[torch.device, int](int)
        for index, layer in enumerate(list[Any](prefill.layers)):
            if index not in (recurrences or {}):
                shape = _shape_of(layer, index, positions_BS.shape[1])
                shapes[index] = shape
                freed[shape.device] += 0 if keep else layer.keys.nbytes + layer.values.nbytes
        if not shapes:
            raise ValueError(
                "expected a prefill cache with attention layers, got none; does the target use its cache?"
            )
        cache = into if into is not None and into.has_shapes(shapes, recurrent, batch) else None
        if cache is None:
            for plan, members in recurrent:
                freed[plan.device] -= plan.num_bytes() * len(members)
            check_memory([*shapes.values()], batch, max_length, block, freed)
            cache = cls([], batch=batch, max_length=0, block=block)
            cache.groups = [RecurrentGroup(*members) for members in recurrent]
        prompts = PromptSlots(positions_BS)
        states = dict[int, RecurrentLayer]()
        for group in cache.groups:
            group.take(prefill.layers, (positions_BS[:, -1] + 1).to(group.plan.device), keep)
            states |= group.layers()
        for index, source in enumerate(list[Any](prefill.layers)):
            if cache is not into and index in shapes:
                cache.attention[index] = RaggedLayer(shapes[index], batch, max_length, block)
            if cache is not into:
                cache.layers.append(cache.attention[index] if index in shapes else states[index])
            if index not in shapes:
                continue
            # A sliding layer kept only its newest columns: they are the last ones of the prompt.
            keys, values = stored_columns(source)
            cache.attention[index].write_rows(keys.transpose(1, 2), values.transpose(1, 2), prompts)
            if not keep:
                source.keys = None
                source.values = None
                source.is_initialized = False
            del keys, values
        return cache

    def has_shapes(self, shapes: Mapping[int, LayerShape], recurrent: Sequence[Members], batch: int) -> bool:
        """Returns True if the layers are what would be allocated for these, whatever their length."""
        return (
            {index: layer.shape for index, layer in self.attention.items()} == shapes
            and all(layer.key_buffer.shape[0] == batch for layer in self.attention.values())
            and len(self.groups) == len(recurrent)
            and all(group.is_for(*members) for group, members in zip(self.groups, recurrent, strict=True))
        )

    def begin(self, block: RaggedBlock) -> None:
        """Says where the next writes go; recurrent states follow to where the block begins."""
        self.block = block
        self._attended.clear()
        self._num_slots = 0
        self.advance(block)
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.begin(block.width)

    def advance(self, block: RaggedBlock) -> None:
        """Takes recurrent states on to where a block begins: by what the last one has kept."""
        for group in self.groups:
            group.replay(block.on(group.plan.device).lengths)

    def grow(self, max_length: int) -> None:
        """Makes room for rows of `max_length` tokens, a block included; or raises `OutOfRoomError`, nothing changed.

        Rows must have fitted in until now. A ring that holds its window and a block needs no more.
        """
        block = self.longest_block
        freed = defaultdict[torch.device, int](int)
        longer = [layer for layer in self.attention.values() if layer.ring < layer.shape.ring(max_length, block)]
        for layer in longer:
            freed[layer.shape.device] += layer.key_buffer.nbytes + layer.value_buffer.nbytes
        batch = len(longer[0].key_buffer) if longer else 0
        check_memory([layer.shape for layer in longer], batch, max_length, block, freed)
        for layer in longer:
            layer.grow(layer.shape.ring(max_length, block))

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows alone, where all layers are of attention; see [`kept_rows`]."""
        for layer in self.attention.values():
            layer.keep_rows(rows)

    def keep_path(self, path_BN: Tensor, lengths: Tensor) -> None:
        """Moves keys and values of the path accepted of a tree to where a chain would have written them, in place.

        All layers are of attention.

        Args:
            path_BN (`torch.Tensor` of shape `[B, n]`, int64): The node at each depth, the anchor first, 0 behind its
                end.
            lengths (`torch.Tensor` of shape `[B]`, int64): Where the anchors stand; before the commit.
        """
        of_device = defaultdict[torch.device, list[Tensor]](list)
        for buffer in self.buffers():
            of_device[buffer.device].append(buffer)
        for device, buffers in of_device.items():
            path = path_BN.to(device)
            ops.either(ops.keep_path, path)(path, lengths.to(device), buffers)

    def attend(self, keys: Tensor) -> tuple[RaggedBlock, int | None]:
        """Notes that attention runs over `keys`; returns the block that was begun and the window of their layer.

        A layer counts as passed only over as many slots as were handed out for it: one that has a cache of its own
        attends to others. They need not be the same keys: DeepSeek's are expanded in between. The window is the
        cache's: Moshi's slides there alone, not in its attention.
        """
        assert self.block is not None
        if keys.shape[2] == self._num_slots:
            self._attended.add(self._layer)
        return self.block, self.attention[self._layer].shape.window

    def check_passed(self) -> None:
        """Raises `RuntimeError` unless a forward over the block that was begun went through every layer as it must.

        Attention went over this cache, and recurrent layers handed over what they made of the block.
        """
        layers = enumerate(self.layers)
        passed_by = [index for index, layer in layers if isinstance(layer, RecurrentLayer) and layer.waiting]
        if passed_by:
            raise RuntimeError(
                f"expected the inputs of the recurrences in layers {passed_by}, got none; a compiled or replaced "
                "module runs no hooks, use the model as it was before"
            )
        missing = self.attention.keys() - self._attended
        if missing:
            raise RuntimeError(
                f"expected attention over the ragged cache in every layer, got none in layers {sorted(missing)}; the "
                "target's forward does not write to and read from the cache that it is given, drop assistant_model"
            )

    def extend(self, layer_idx: int, key_BKGE: Tensor, value_BKGE: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of the block that was begun and returns the `[B, G, extent, E]` to attend to."""
        assert self.block is not None
        self.attention[layer_idx].write(key_BKGE, value_BKGE, self.block)
        return self.read(layer_idx)

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Returns the `[B, G, extent, E]` to attend to, with the block that was begun, whose own have been written."""
        assert self.block is not None
        keys, values = self.attention[layer_idx].read(self.block)
        self._layer = layer_idx
        self._num_slots = keys.shape[2]
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes `[B, G, K, E]` keys and values, as Transformers' attention layers hand them over."""
        return self.extend(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))

    def buffers(self) -> list[Tensor]:
        """Returns all buffers, keys and values of one layer after the other, then the recurrent ones."""
        return [buffer for part in (*self.attention.values(), *self.groups) for buffer in part.buffers()]

    def num_bytes(self) -> int:
        """Returns the size of all buffers in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers())


def kept_rows(buffer: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
    """Puts these rows of a buffer, in place, at its beginning and returns a view of them: nothing else is copied.

    Row `rows[i]` of dimension `dim` goes to place `i`; one that moves must come from behind the last place.
    """
    for place, row in enumerate(rows):
        if place != row:
            buffer.select(dim, place).copy_(buffer.select(dim, row))
    return buffer.narrow(dim, 0, len(rows))


def _shape_of(source: Any, index: int, num_columns: int) -> LayerShape:
    """What a filled layer will be moved into; refuses one without keys and values of the prompt's columns."""
    keys = getattr(source, "keys", None)
    values = getattr(source, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
        raise ValueError(
            f"expected keys and values in every layer of the prefill cache, got {type(source).__name__} in "
            f"layer {index}; this target has a layer without its own K/V and is not supported"
        )
    num_filled = int(source.get_seq_length())
    what = f"keys of {num_columns} prompt tokens in layer {index} of the prefill cache"
    reason = "adds tokens to the prompt" if num_filled > num_columns else "does not keep the whole prompt in it"
    require(num_filled == num_columns, what, num_filled, f"the target {reason}, drop assistant_model")
    keys, values = stored_columns(source)
    # One that records its past wants all of it back.
    window = None if getattr(source, "record_past", False) else layer_window(source)
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], window, keys.dtype, values.dtype, keys.device)


def stored_columns(layer: Any) -> tuple[Tensor, Tensor]:
    """Returns the columns that an initialised layer of an ordinary cache holds: `[B, G, n, E]`, the newest `n`.

    A static layer's buffer may be longer than what it holds. Reads its length on the host.
    """
    if not isinstance(layer, StaticLayer):
        return layer.keys, layer.values
    assert layer.keys is not None
    assert layer.values is not None
    num = min(int(layer.get_seq_length()), layer.max_cache_len)
    return layer.keys[:, :, :num], layer.values[:, :, :num]


def layer_window(layer: Any) -> int | None:
    """Returns how many tokens, the query included, a layer of an ordinary cache is for; `None` is all of them."""
    if not layer.is_sliding:
        return None
    return layer.max_cache_len if isinstance(layer, StaticLayer) else getattr(layer, "sliding_window", None)
