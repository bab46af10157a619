"""This module defines the ragged cache, which has fixed buffers and one length per row, and is never cropped.

A block is written at `lengths[b] .. lengths[b] + width - 1`. To accept `n` tokens means `lengths[b] += n`. The next
block overwrites every stale slot before any query reads it. Full layers hold the whole row. Sliding layers hold a ring
of window + block slots. Target and draft use the same class. The target's recurrent layers keep a state instead of
keys and values. They are in `recurrent`.

Shapes: `B` rows, `R` slots of a row, `G` key/value heads, `E` head size, `K` block tokens, `S` prompt tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from dflash_hf import ops
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.prefilled import PromptSlots, num_bytes_of, shapes_of, stored_columns
from dflash_hf.cache.recurrence import Recurrence
from dflash_hf.cache.recurrent import Members, RecurrentGroup, RecurrentLayer, plan_groups
from dflash_hf.cache.rows import copy_row, kept_rows, lengthened, with_row
from dflash_hf.cache.size import LayerShape, check_memory
from dflash_hf.devices import plain_tensors
from dflash_hf.undo import Hook


class RaggedLayer(CacheLayerMixin):
    """A layer holds keys and values, token-major `[B, R, G, E]`. It returns them as views `[B, G, R, E]`.

    Args:
        shape (`LayerShape`): The layer's heads, window, dtypes and device.
        batch (`int`): Number of rows.
        max_length (`int`): Longest row in tokens.
        block (`int`): Longest block.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, shape: LayerShape, batch: int, max_length: int, block: int) -> None:
        super().__init__()
        self.shape = shape
        self.ring = shape.ring(max_length, block)
        # In token-major order, a block is written by one `index_copy_` for any batch size.
        rows = (batch, self.ring, shape.num_heads)
        device = shape.device
        # The buffers hold zeros, because a masked slot still enters `weight * value`, and 0 * NaN is NaN.
        with plain_tensors():
            keys = torch.zeros(*rows, shape.key_size, dtype=shape.dtype, device=device)
            values = torch.zeros(*rows, shape.value_size, dtype=shape.value_dtype, device=device)
        # All rows that have memory. After rows have left, the buffers are views of the first of these rows.
        self._allocated = (keys, values)
        self._set_buffers(keys, values)
        self.is_initialized = True

    def _set_buffers(self, key_buffer: Tensor, value_buffer: Tensor) -> None:
        """Sets the buffers and drops the views of earlier buffers."""
        self.key_buffer = key_buffer
        self.value_buffer = value_buffer
        # Views are made at their first use and kept, because every layer uses them in every step to read and write.
        self._flat_views: list[Tensor] = []
        self._head_views: list[Tensor] = []
        self._read_views = (key_buffer, value_buffer)
        self._read_extent = -1  # number of slots of `_read_views`; -1 means that none are made yet

    def grow(self, ring: int) -> None:
        """Moves keys and values into buffers of `ring` slots. The old buffers must never have wrapped."""
        keys = lengthened(self.key_buffer, ring)
        values = lengthened(self.value_buffer, ring)
        # Both new buffers exist before the old ones are dropped, so a failed allocation changes nothing.
        self._allocated = (keys, values)
        self._set_buffers(keys, values)
        self.ring = ring

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps only these rows; see [`kept_rows`]."""
        keys = kept_rows(self.key_buffer, rows)
        values = kept_rows(self.value_buffer, rows)
        self._set_buffers(keys, values)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all rows."""
        return self.key_buffer.nbytes + self.value_buffer.nbytes

    @property
    def has_room_for_row(self) -> bool:
        """Whether there is memory for one more row."""
        allocated_keys, _ = self._allocated
        num_allocated = allocated_keys.shape[0]
        return num_allocated > self.key_buffer.shape[0]

    def add_row(self, source: RaggedLayer, length: int, max_rows: int) -> None:
        """Adds the first row of another layer, of `length` tokens, as a new last row; see [`RaggedCache.add_row`]."""
        place = self.key_buffer.shape[0]
        keys, values = self._allocated
        if not self.has_room_for_row:
            keys = with_row(self.key_buffer, max_rows)
            values = with_row(self.value_buffer, max_rows)
            self._allocated = (keys, values)
        num_rows = place + 1
        self._set_buffers(keys[:num_rows], values[:num_rows])
        self.put_row(place, source, length)

    def put_row(self, place: int, source: RaggedLayer, length: int) -> None:
        """Copies the first row of another layer, of `length` tokens, over the row at `place`."""
        pairs = zip(self.buffers(), source.buffers(), strict=True)
        for buffer, theirs in pairs:
            row = buffer[place]
            copy_row(theirs[0], row, length)

    def write(self, key_BKGE: Tensor, value_BKGE: Tensor, block: RaggedBlock) -> None:
        """Writes a block in place at each row's length, in the dtype of the buffers; no host sync."""
        if block.is_exact and block.bound <= self.ring:
            # The host knows where every row ends, so two plain copies are enough and no slots are computed.
            first = block.bound - block.width
            key_slots = self.key_buffer.narrow(1, first, block.width)
            value_slots = self.value_buffer.narrow(1, first, block.width)
            key_slots.copy_(key_BKGE)
            value_slots.copy_(value_BKGE)
            return
        if not self._flat_views:
            # Outside inference mode, it would not be possible to write to a view that was made inside it.
            with plain_tensors():
                self._flat_views = [buffer.flatten(0, 1) for buffer in self.buffers()]
        # The rows follow each other, `[B * R, G, E]`. The slots of row `b` begin at `b * R`.
        keys, values = self._flat_views
        slots = block.on(keys.device).slots(self.ring)
        has_other_dtype = key_BKGE.dtype != keys.dtype or value_BKGE.dtype != values.dtype
        if has_other_dtype:
            # Under autocast, keys and values may have another dtype than in the prefill.
            key_BKGE = key_BKGE.to(keys.dtype)
            value_BKGE = value_BKGE.to(values.dtype)
        keys.index_copy_(0, slots, key_BKGE.flatten(0, 1))
        values.index_copy_(0, slots, value_BKGE.flatten(0, 1))

    def write_rows(self, key_BSGE: Tensor, value_BSGE: Tensor, prompts: PromptSlots) -> None:
        """Writes whole prompts or their newest `S` columns in place, in the dtype of the buffers; for the prefill."""
        num_columns = key_BSGE.shape[1]
        destination = prompts.of(self.ring, num_columns, self.key_buffer.device)
        destination.write(self.key_buffer, key_BSGE)
        destination.write(self.value_buffer, value_BSGE)

    def read(self, block: RaggedBlock) -> tuple[Tensor, Tensor]:
        """Returns views of the keys and values that a block has to read, `[B, G, extent, E]` each."""
        extent = block.extent(self.ring)
        if extent != self._read_extent:
            if not self._head_views:
                self._head_views = [buffer.transpose(1, 2) for buffer in self.buffers()]
            keys, values = self._head_views
            # Slots behind the longest row are not read. At first, these are most slots of a long buffer.
            keys = keys.narrow(2, 0, extent)
            values = values.narrow(2, 0, extent)
            self._read_views = (keys, values)
            self._read_extent = extent
        return self._read_views

    def read_rows(self, positions_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of the keys and values at written indices `[B, C]` int64: `[B, G, C, E]` each.

        A copy is zero if its index is negative, or outside the window of the newest index that is given for the row.
        """
        positions = positions_BC.to(self.key_buffer.device)
        is_missing = positions < 0
        if self.shape.window is not None:
            # The slot of a token before the window may hold a newer token or a rejected token.
            newest = positions.amax(dim=1, keepdim=True)
            is_missing = is_missing | (positions <= newest - self.shape.window)
        batch = positions.shape[0]
        rows = torch.arange(batch, device=positions.device)
        rows = rows[:, None]
        # A missing token reads any slot. Its content is replaced by zeros below.
        readable = positions.clamp_min(0)
        slots = readable % self.ring
        hidden = is_missing[:, :, None, None]
        # Zeros are finite, as in the unwritten slots of Transformers' caches. Every reader masks these slots.
        keys = self.key_buffer[rows, slots]
        values = self.value_buffer[rows, slots]
        keys.masked_fill_(hidden, 0)
        values.masked_fill_(hidden, 0)
        # Ordinary caches have the heads before the tokens.
        keys_by_head = keys.transpose(1, 2)
        values_by_head = values.transpose(1, 2)
        return keys_by_head, values_by_head

    def take(self, source: Any, prompts: PromptSlots, keep: bool) -> None:
        """Copies a filled layer of an ordinary cache into this layer, and releases it unless `keep` is True."""
        # A sliding layer has kept only the newest columns of the prompt.
        keys, values = stored_columns(source)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        self.write_rows(keys, values, prompts)
        if not keep:
            # The next layer's buffers can use the memory of these keys and values.
            source.keys = None
            source.values = None
            source.is_initialized = False

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values, `[B, R, G, E]` each."""
        return self.key_buffer, self.value_buffer

    def clear(self) -> None:
        """Fills the buffers with zeros, in place, because the content of a masked slot must be finite."""
        self.key_buffer.zero_()
        self.value_buffer.zero_()

    def release(self) -> None:
        """Drops the buffers. Afterwards nothing can be read or written."""
        no_keys = self.key_buffer.new_empty(0)
        no_values = self.value_buffer.new_empty(0)
        self._allocated = (no_keys, no_values)
        self._set_buffers(no_keys, no_values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing, because the buffers exist from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raises `NotImplementedError`. Only `RaggedCache.update` writes, because it knows the rows' lengths."""
        raise NotImplementedError(
            "expected RaggedCache.update, got a call on its layer; call it on the cache"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of slots and 0. No mask is ever built from them."""
        return self.ring, 0

    def get_seq_length(self) -> int:
        """Returns 0. Each row has its own length on the device, and positions are always passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Returns the number of slots."""
        return self.ring


class RaggedCache(Cache):
    """The cache holds one [`RaggedLayer`] or [`RecurrentLayer`] per layer, and the block that is being written.

    Args:
        shapes (`list[LayerShape]`): The shapes of the layers, one per layer.
        batch (`int`): Number of rows.
        max_length (`int`): Longest row in tokens, including a rejected block at its end.
        block (`int`): Longest block that will be written at once.
    """

    def __init__(
        self, shapes: list[LayerShape], *, batch: int, max_length: int, block: int
    ) -> None:
        # These are the layers with keys and values, by index. The other layers are recurrent.
        self.attention = dict[int, RaggedLayer]()
        for index, shape in enumerate(shapes):
            self.attention[index] = RaggedLayer(shape, batch, max_length, block)
        super().__init__(layers=[*self.attention.values()])
        self.max_length = max_length
        self.longest_block = block
        self.groups: list[RecurrentGroup] = []
        self._block: RaggedBlock | None = None
        # The layer whose keys were returned last, and their number of slots. `note_attention` compares with them.
        self._layer = 0
        self._num_slots = 0
        # The layers over whose keys attention has run since `begin`.
        self._attended: set[int] = set()

    @property
    def block(self) -> RaggedBlock:
        """The block of the last `begin`. There is none before the first `begin`."""
        assert self._block is not None, "begin comes before reads and writes"
        return self._block

    @classmethod
    def take_prefill(
        cls,
        prefill: Cache,
        positions_BS: Tensor,
        max_length: int,
        block: int,
        keep: bool = False,
        into: RaggedCache | None = None,
        recurrences: Mapping[int, Recurrence] = MappingProxyType({}),
    ) -> RaggedCache:
        """Moves an ordinary prefill cache into a ragged cache, row by row without padding, and empties the prefill
        cache.

        Args:
            prefill (`Cache`): The left-padded cache that the target filled. Each layer is released once it is copied.
            positions_BS (`torch.Tensor` of shape `[B, S]`, int64): Index of each prompt token, negative for padding.
            max_length, block (`int`): Sizes as in the class.
            keep (`bool`): Whether `prefill` keeps its keys, values and states.
            into (`RaggedCache`, *optional*): A cleared cache for rows of `max_length` tokens. It is used if it has the
                prefill's shapes and dtypes. Otherwise the result is a new cache.
            recurrences (mapping of `int` to `Recurrence`, *optional*): The target's recurrent layers by index.

        Returns:
            `RaggedCache`: The filled cache. It is `into` if that fits.

        Raises:
            ValueError: If a layer without keys and values is not in `recurrences`, or there is no room.
        """
        # 1. Find the layers of the filled cache. A layer of an unknown kind is refused here, before anything moves.
        plans: list[Members] = []
        if recurrences:
            plans = plan_groups(prefill, recurrences, block)
        batch, num_columns = positions_BS.shape
        shapes = shapes_of(prefill, recurrences, num_columns)
        # 2. The buffers of an earlier call are used if they fit, because a graph may have been captured over them.
        fits = into is not None and into.has_shapes(shapes, plans, batch)
        if into is not None and fits:
            cache = into
        else:
            freed = defaultdict[torch.device, int](int)
            if not keep:
                freed = num_bytes_of(prefill, shapes)
            for plan, members in plans:
                num_bytes = plan.num_bytes() * len(members)
                freed[plan.device] -= num_bytes
            new_layers = list(shapes.values())
            check_memory(new_layers, batch, max_length, block, freed)
            # The cache has no layers yet. Each layer is allocated below, when its source is copied.
            cache = cls([], batch=batch, max_length=max_length, block=block)
            cache.groups = [RecurrentGroup(*members) for members in plans]
        # 3. Move the recurrent states. Padding is on the left, so the last column is the last token of every row.
        states: dict[int, RecurrentLayer] = {}
        lengths = positions_BS[:, -1] + 1
        for group in cache.groups:
            seen = lengths.to(group.plan.device)
            group.take(prefill.layers, seen, keep)
            states |= group.layers()
        # 4. Move the keys and values. A layer is allocated after the layer before it has been released, so the memory
        # of one cache is enough for both.
        prompts = PromptSlots(positions_BS)
        for index, source in enumerate(prefill.layers):
            if index not in shapes:
                if not fits:
                    cache.layers.append(states[index])
                continue
            if not fits:
                new = RaggedLayer(shapes[index], batch, max_length, block)
                cache.attention[index] = new
                cache.layers.append(new)
            layer = cache.attention[index]
            layer.take(source, prompts, keep)
        return cache

    @classmethod
    def like(
        cls,
        source: RaggedCache,
        batch: int,
        max_length: int,
        recurrences: Mapping[int, Recurrence],
    ) -> RaggedCache:
        """Returns an empty cache with the same layers, for other rows.

        Args:
            source (`RaggedCache`): The cache whose layers are used.
            batch, max_length (`int`): Sizes as in the class.
            recurrences (mapping of `int` to `Recurrence`): The target's recurrent layers by index.

        Raises:
            OutOfRoomError: If there is no memory for the new cache.
        """
        block = source.longest_block
        shapes = [layer.shape for layer in source.attention.values()]
        # The states need memory too.
        freed = defaultdict[torch.device, int](int)
        for group in source.groups:
            freed[group.plan.device] -= group.num_bytes(batch)
        check_memory(shapes, batch, max_length, block, freed)
        cache = cls([], batch=batch, max_length=max_length, block=block)
        states: dict[int, RecurrentLayer] = {}
        for group in source.groups:
            members = {index: recurrences[index] for index in group.indices}
            new_group = RecurrentGroup(replace(group.plan, batch=batch), members)
            cache.groups.append(new_group)
            states |= new_group.layers()
        for index in range(len(source.layers)):
            if index in states:
                cache.layers.append(states[index])
                continue
            layer = RaggedLayer(source.attention[index].shape, batch, max_length, block)
            cache.attention[index] = layer
            cache.layers.append(layer)
        return cache

    def has_shapes(
        self, shapes: Mapping[int, LayerShape], plans: Sequence[Members], batch: int
    ) -> bool:
        """Returns True if a new cache for these layers would have the same buffers, apart from their length."""
        own_shapes = {index: layer.shape for index, layer in self.attention.items()}
        if own_shapes != shapes or len(self.groups) != len(plans):
            return False
        layers = self.attention.values()
        # The number of rows is not part of a layer's shape.
        if any(layer.key_buffer.shape[0] != batch for layer in layers):
            return False
        pairs = zip(self.groups, plans, strict=True)
        return all(group.is_for(plan, members) for group, (plan, members) in pairs)

    def begin(self, block: RaggedBlock) -> None:
        """Sets the block that is written next, and advances the recurrent states to its beginning."""
        self._block = block
        # The records of the last forward do not apply to this one. No layer has 0 slots.
        self._attended.clear()
        self._num_slots = 0
        self.advance(block)
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.begin(block.width)

    def advance(self, block: RaggedBlock) -> None:
        """Advances recurrent states to the beginning of a block, by the tokens that each row has kept of the last."""
        for group in self.groups:
            group.replay(block.on(group.plan.device).lengths)

    def hooks(self) -> list[Hook]:
        """Returns the hooks that record blocks in the recurrent layers. A cache with attention only has no hooks."""
        found: list[Hook] = []
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                found.extend(layer.hooks(self.layers))
        return found

    def grow(self, max_length: int) -> None:
        """Makes room for rows of `max_length` tokens, including a block.

        All rows must have fitted so far. Raises `OutOfRoomError` before anything is changed.
        """
        block = self.longest_block
        # A ring that holds its window and a block is long enough for any row.
        layers = self.attention.values()
        too_short = [one for one in layers if one.ring < one.shape.ring(max_length, block)]
        if too_short:
            freed = defaultdict[torch.device, int](int)
            for layer in too_short:
                freed[layer.shape.device] += layer.num_bytes
            batch = len(too_short[0].key_buffer)
            shapes = [layer.shape for layer in too_short]
            # All layers are checked before the first one grows, because layers of two lengths would be of no use.
            check_memory(shapes, batch, max_length, block, freed)
        for layer in too_short:
            layer.grow(layer.shape.ring(max_length, block))
        self.max_length = max_length

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps only these rows; see [`kept_rows`]."""
        for layer in self.attention.values():
            layer.keep_rows(rows)
        for group in self.groups:
            group.keep_rows(rows, self.layers)

    def check_row(self, max_rows: int, freed: defaultdict[torch.device, int]) -> None:
        """Raises `OutOfRoomError` if there is no memory for [`add_row`]. `freed` is that of `check_memory`.

        The bytes of the new buffers are subtracted from `freed`, so that other buffers are checked beside them.
        """
        full = [layer for layer in self.attention.values() if not layer.has_room_for_row]
        shapes = [layer.shape for layer in full]
        if not full:
            return
        sizes = (max_rows, self.max_length, self.longest_block)
        # Buffers are replaced one after the other, and the memory of the old ones becomes free. The states need memory
        # too, at any length of the rows.
        for layer in full:
            freed[layer.shape.device] += layer.num_bytes
        for group in self.groups:
            freed[group.plan.device] += group.num_bytes(group.plan.batch)
            freed[group.plan.device] -= group.num_bytes(max_rows)
        check_memory(shapes, *sizes, freed)
        for shape in shapes:
            freed[shape.device] -= shape.num_bytes(*sizes)

    def add_row(self, source: RaggedCache, length: int, max_rows: int) -> None:
        """Adds the first row of another cache behind the last row of this cache, and makes room for it.

        Args:
            source (`RaggedCache`): A cache with the same layers, whose first row has `length` tokens and fits in here.
            length (`int`): Number of tokens of the row. The slots behind them are not copied.
            max_rows (`int`): Number of rows to allocate at once, if no memory is left for one more row.
        """
        for index, layer in self.attention.items():
            layer.add_row(source.attention[index], length, max_rows)
        for group, theirs in zip(self.groups, source.groups, strict=True):
            group.add_row(theirs, max_rows, self.layers)

    def put_row(self, place: int, source: RaggedCache, length: int) -> None:
        """Copies the first row of another cache over the row at `place`. The arguments are those of [`add_row`]."""
        for index, layer in self.attention.items():
            layer.put_row(place, source.attention[index], length)
        for group, theirs in zip(self.groups, source.groups, strict=True):
            group.put_row(place, theirs)

    def free_row(self, place: int) -> None:
        """Sets the row at a place to have no tokens. The content of its slots no longer matters."""
        for group in self.groups:
            group.lengths[place] = 0

    def keep_path(self, path_BN: Tensor, lengths: Tensor) -> None:
        """Moves the keys and values of a tree's accepted path to the slots of a chain, in place.

        All layers must be attention layers.

        Args:
            path_BN (`torch.Tensor` of shape `[B, n]`, int64): The node at each depth, the anchor first, and 0 behind
                the end of the path.
            lengths (`torch.Tensor` of shape `[B]`, int64): The indices of the anchors before the commit.
        """
        # One call moves all the buffers of a device.
        by_device = defaultdict[torch.device, list[Tensor]](list)
        for buffer in self.buffers():
            by_device[buffer.device].append(buffer)
        for device, buffers in by_device.items():
            path = path_BN.to(device)
            anchors = lengths.to(device)
            move = ops.implementation(ops.keep_path, path)
            move(path, anchors, buffers)

    def note_attention(self, keys: Tensor) -> tuple[RaggedBlock, int | None]:
        """Records attention over keys `[B, G, extent, E]`. Returns the current block and the keys' window.

        The window is the window of the cache. Moshi's cache slides, and its attention does not.
        """
        # The number of slots shows whether these keys are the keys that were returned last: a layer with a cache of
        # its own attends to another number. The tensor does not show this, because DeepSeek expands the keys first.
        num_slots = keys.shape[2]
        if num_slots == self._num_slots:
            self._attended.add(self._layer)
        layer = self.attention[self._layer]
        return self.block, layer.shape.window

    def check_passed(self) -> None:
        """Raises `RuntimeError` unless the forward over the current block has used every layer of this cache.

        Each attention layer must have run over the keys and values that it got from this cache, and each recurrent
        layer must have recorded the inputs of its recurrence.
        """
        unused: list[int] = []
        for index, layer in enumerate(self.layers):
            is_recurrent = isinstance(layer, RecurrentLayer)
            if is_recurrent and layer.waiting:
                unused.append(index)
        if unused:
            raise RuntimeError(
                f"expected the inputs of the recurrences in layers {unused}, got none; a compiled or replaced "
                "module runs no hooks, use the model as it was before"
            )
        missing = self.attention.keys() - self._attended
        if missing:
            raise RuntimeError(
                f"expected attention over the ragged cache in every layer, got none in layers {sorted(missing)}; the "
                "target's forward does not write to and read from the cache that it is given, drop assistant_model"
            )

    def extend(self, layer_idx: int, key_BKGE: Tensor, value_BKGE: Tensor) -> tuple[Tensor, Tensor]:
        """Writes keys and values of the current block, and returns all to attend to: `[B, G, extent, E]` each."""
        layer = self.attention[layer_idx]
        layer.write(key_BKGE, value_BKGE, self.block)
        # The block's own keys are read together with the context, because the tokens of a block see each other.
        return self.read(layer_idx)

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Returns all keys and values to attend to, including those of the current block: `[B, G, extent, E]`."""
        layer = self.attention[layer_idx]
        keys, values = layer.read(self.block)
        # `note_attention` needs these values. It is called next, and does not know the layer.
        self._layer = layer_idx
        self._num_slots = keys.shape[2]
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values `[B, G, K, E]`, as Transformers' attention layers pass them."""
        # The buffers are token-major. A transposed view is written directly, without a copy.
        key_BKGE = key_states.transpose(1, 2)
        value_BKGE = value_states.transpose(1, 2)
        return self.extend(layer_idx, key_BKGE, value_BKGE)

    def buffers(self) -> list[Tensor]:
        """Returns all buffers: keys and values of one layer after the other, then the recurrent buffers."""
        buffers: list[Tensor] = []
        for layer in self.attention.values():
            buffers.extend(layer.buffers())
        for group in self.groups:
            buffers.extend(group.buffers())
        return buffers

    def num_bytes(self) -> int:
        """Returns the size of all buffers in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers())
