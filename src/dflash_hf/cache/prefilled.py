"""This module reads the cache that a prefill has filled, and finds the slots of its columns in ragged buffers.

Prompts are left-padded, and the buffers have a ring of slots per row.

Shapes: `B` rows, `S` columns, `R` slots of a row's ring, `G` heads, `E` head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from dflash_hf.cache.recurrence import Recurrence
from dflash_hf.cache.size import LayerShape

# ---- what the ordinary cache holds


def shapes_of(
    prefill: Cache, recurrences: Mapping[int, Recurrence], num_columns: int
) -> dict[int, LayerShape]:
    """Returns the shapes of a filled cache's attention layers by index. Raises `ValueError` if there are none."""
    shapes: dict[int, LayerShape] = {}
    for index, layer in enumerate(prefill.layers):
        if index not in recurrences:
            shapes[index] = _shape_of(layer, index, num_columns)
    if not shapes:
        raise ValueError(
            "expected a prefill cache with attention layers, got none; does the target use its cache?"
        )
    return shapes


def num_bytes_of(
    prefill: Cache, shapes: Mapping[int, LayerShape]
) -> defaultdict[torch.device, int]:
    """Returns the number of bytes of a filled cache's keys and values on each device."""
    sizes = defaultdict[torch.device, int](int)
    for index, shape in shapes.items():
        layer: Any = prefill.layers[index]
        num_bytes = layer.keys.nbytes + layer.values.nbytes
        sizes[shape.device] += num_bytes
    return sizes


def _shape_of(source: Any, index: int, num_columns: int) -> LayerShape:
    """Returns the shape of the ragged layer into which a filled layer is moved.

    Raises `ValueError` if the layer does not have keys and values of all columns of the prompt.
    """
    keys = getattr(source, "keys", None)
    values = getattr(source, "values", None)
    # Keys are `[B, G, S, E]`. Some caches keep compressed keys with three dimensions.
    has_keys = isinstance(keys, Tensor) and keys.dim() == 4
    if not has_keys or not isinstance(values, Tensor):
        raise ValueError(
            f"expected keys and values in every layer of the prefill cache, got {type(source).__name__} in "
            f"layer {index}; this target has a layer without its own K/V and is not supported"
        )
    num_filled = int(source.get_seq_length())
    if num_filled != num_columns:
        reason = "does not keep the whole prompt in it"
        if num_filled > num_columns:
            reason = "adds tokens to the prompt"
        raise ValueError(
            f"expected keys of {num_columns} prompt tokens in layer {index} of the prefill cache, got {num_filled}; "
            f"the target {reason}, drop assistant_model"
        )
    keys, values = stored_columns(source)
    window = layer_window(source)
    if getattr(source, "record_past", False):
        # A cache that records its past needs all tokens back, including those before the window.
        window = None
    return LayerShape(
        num_heads=keys.shape[1],
        key_size=keys.shape[3],
        value_size=values.shape[3],
        window=window,
        dtype=keys.dtype,
        value_dtype=values.dtype,
        device=keys.device,
    )


def stored_columns(layer: Any) -> tuple[Tensor, Tensor]:
    """Returns the newest `n` columns, which are held by an initialised layer of an ordinary cache: `[B, G, n, E]`
    each.

    The host reads the length of a static layer.
    """
    if not isinstance(layer, StaticLayer):
        return layer.keys, layer.values
    # The buffer of a static layer may be longer than the text. The text may be longer than the buffer of a sliding
    # layer.
    assert layer.keys is not None
    assert layer.values is not None
    num_seen = int(layer.get_seq_length())
    num = min(num_seen, layer.max_cache_len)
    keys = layer.keys[:, :, :num]
    values = layer.values[:, :, :num]
    return keys, values


def layer_window(layer: Any) -> int | None:
    """Returns the window of a layer of an ordinary cache in tokens, including the query, or `None` if it has no
    window.
    """
    if not layer.is_sliding:
        return None
    if isinstance(layer, StaticLayer):
        return layer.max_cache_len
    return getattr(layer, "sliding_window", None)


# ---- the slots


@dataclass(frozen=True, slots=True)
class RowRun:
    """A destination in which all columns go to the same contiguous slots of several neighbouring
    rows: a plain copy.
    """

    first_row: int
    first_slot: int

    def write(self, buffer_BRGE: Tensor, states_BSGE: Tensor) -> None:
        """Writes the states of all columns in place."""
        num_rows, num_columns = states_BSGE.shape[:2]
        rows = buffer_BRGE.narrow(0, self.first_row, num_rows)
        slots = rows.narrow(1, self.first_slot, num_columns)
        slots.copy_(states_BSGE)


@dataclass(frozen=True, slots=True, eq=False)
class AllColumns:
    """A destination with a slot for every column of every row, because no column is padding and all columns fit."""

    slots: Tensor  # [B * S], int64: places in the buffers of all rows, one row after another

    def write(self, buffer_BRGE: Tensor, states_BSGE: Tensor) -> None:
        """Writes the states of all columns in place."""
        # `index_copy_` needs one dtype, and autocast may have given the states another dtype.
        states = states_BSGE.flatten(0, 1).to(buffer_BRGE.dtype)
        places = buffer_BRGE.flatten(0, 1)
        places.index_copy_(0, self.slots, states)


@dataclass(frozen=True, slots=True, eq=False)
class SomeColumns:
    """A destination with slots for only the columns that are not padding and fit into the ring."""

    columns: Tensor  # [N], int64: columns of all rows, one row after another
    slots: Tensor  # [N], int64: their places in the buffers of all rows

    def write(self, buffer_BRGE: Tensor, states_BSGE: Tensor) -> None:
        """Writes the states of these columns in place."""
        # The columns are selected first, so that padding is not converted.
        all_states = states_BSGE.flatten(0, 1)
        states = all_states.index_select(0, self.columns)
        states = states.to(buffer_BRGE.dtype)
        places = buffer_BRGE.flatten(0, 1)
        places.index_copy_(0, self.slots, states)


Destination = RowRun | AllColumns | SomeColumns


class _Kind(NamedTuple):
    """An instance holds the values on which the destination of a layer depends.

    Layers with equal values are one kind.
    """

    ring: int  # slots of a row
    num_columns: int  # the newest columns that are written
    device: torch.device


class PromptSlots:
    """An instance finds the slots of whole prompts in ring buffers, on the host and once per kind of layer.

    Args:
        positions_BS (`torch.Tensor` of shape `[B, S]`, int64): Index of each token in its row. A column with a
            negative index is padding and is not written.
        rows (`list[int]`, *optional*): The rows of the buffers that belong to these prompts, by default the first
            rows.
    """

    def __init__(self, positions_BS: Tensor, rows: list[int] | None = None) -> None:
        # The device is read once for all layers, because the host decides where tokens go.
        self.positions = positions_BS.cpu()
        self.rows = list(range(len(positions_BS)))
        if rows is not None:
            self.rows = rows
        # Layers on one device with rings of the same size have the same destination.
        self._found: dict[_Kind, Destination] = {}

    def of(self, ring: int, num_columns: int, device: torch.device) -> Destination:
        """Returns the destination of the newest `num_columns` columns in a buffer with `ring` slots per row on
        `device`.

        If a row is longer than the ring, only its newest tokens are written.
        """
        kind = _Kind(ring, num_columns, device)
        if kind not in self._found:
            self._found[kind] = self._find(kind)
        return self._found[kind]

    def _find(self, kind: _Kind) -> Destination:
        """Finds the destination on the host and moves its indices to the device."""
        ring, num_columns, device = kind
        first_column = self.positions.shape[1] - num_columns
        positions = self.positions[:, first_column:]
        first_row = self.rows[0]
        are_side_by_side = self.rows == list(range(first_row, first_row + len(self.rows)))
        if are_side_by_side and _is_run(positions, ring):
            first_position = int(positions[0, 0])
            return RowRun(first_row, first_position % ring)
        is_padding = positions < 0
        # Two tokens of one row must not share a slot, because `index_copy_` writes in no fixed order.
        newest = positions.amax(dim=1, keepdim=True)
        is_newest = positions > newest - ring
        is_kept = ~is_padding & is_newest
        # The buffers of all rows are treated as one buffer, in which row `b` begins at slot `b * ring`.
        rows = torch.tensor(self.rows, device="cpu")
        first_slots = rows[:, None] * ring
        slots = first_slots + positions % ring
        if bool(is_kept.all()):
            return AllColumns(slots.flatten().to(device))
        columns = is_kept.flatten().nonzero()[:, 0]
        kept_slots = slots[is_kept]
        return SomeColumns(columns.to(device), kept_slots.to(device))


def _is_run(positions: Tensor, ring: int) -> bool:
    """Returns True if positions `[B, S]` are the same contiguous slots in every row."""
    num_columns = positions.shape[1]
    if num_columns == 0:
        return False
    first = int(positions[0, 0])
    last = int(positions[0, -1])
    # Positions count up. So a row without padding has as many indices as columns.
    is_whole = first >= 0 and last - first == num_columns - 1
    # Slots that continue past the end of the ring are not contiguous.
    wraps = first // ring != last // ring
    if not is_whole or wraps:
        return False
    is_alike = positions == positions[0]
    return bool(is_alike.all())
