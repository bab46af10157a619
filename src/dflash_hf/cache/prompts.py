"""Slots for the columns of left-padded prompts, in buffers that have a ring of slots per row.

Shapes: `B` rows, `S` columns, `R` slots of a row's ring, `G` heads, `E` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRun:
    """One run of slots that every row's columns go to: a plain copy."""

    first: int

    def write(self, buffer_BRGE: Tensor, states_BSGE: Tensor) -> None:
        """Writes the states of all columns in place."""
        num_columns = states_BSGE.shape[1]
        slots = buffer_BRGE.narrow(1, self.first, num_columns)
        slots.copy_(states_BSGE)


@dataclass(frozen=True, slots=True, eq=False)
class AllColumns:
    """A slot for every column of every row: none is padding, and all fit in."""

    slots: Tensor  # [B * S], int64: places in the buffers of all rows, one after another

    def write(self, buffer_BRGE: Tensor, states_BSGE: Tensor) -> None:
        """Writes the states of all columns in place."""
        # `index_copy_` takes one dtype; autocast may have given the states another one.
        states = states_BSGE.flatten(0, 1).to(buffer_BRGE.dtype)
        places = buffer_BRGE.flatten(0, 1)
        places.index_copy_(0, self.slots, states)


@dataclass(frozen=True, slots=True, eq=False)
class SomeColumns:
    """Slots for the columns that are no padding and fit into the ring."""

    columns: Tensor  # [N], int64: columns of all rows, one row after another
    slots: Tensor  # [N], int64: their places in the buffers of all rows

    def write(self, buffer_BRGE: Tensor, states_BSGE: Tensor) -> None:
        """Writes the states of these columns in place."""
        # The columns first, so that padding is not converted.
        all_states = states_BSGE.flatten(0, 1)
        states = all_states.index_select(0, self.columns)
        states = states.to(buffer_BRGE.dtype)
        places = buffer_BRGE.flatten(0, 1)
        places.index_copy_(0, self.slots, states)


Destination = RowRun | AllColumns | SomeColumns


class _Kind(NamedTuple):
    """A kind of layer: what its destination depends on."""

    ring: int  # slots of a row
    num_columns: int  # the newest columns that are written
    device: torch.device


class PromptSlots:
    """Where whole prompts go in ring buffers; found on the host, once per kind of layer.

    Args:
        positions_BS (`torch.Tensor` of shape `[B, S]`, int64): Index of each token in its row; a column with a
            negative one is padding and goes nowhere.
    """

    def __init__(self, positions_BS: Tensor) -> None:
        # One read of the device for all layers: where tokens go is decided on the host.
        self.positions = positions_BS.cpu()
        # Layers with rings of one size, on one device, have one destination.
        self._found: dict[_Kind, Destination] = {}

    def of(self, ring: int, num_columns: int, device: torch.device) -> Destination:
        """Returns where the newest `num_columns` columns go in a buffer with `ring` slots a row on `device`.

        Of a row that is longer than the ring, its newest tokens are written.
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
        if _is_run(positions, ring):
            first_position = int(positions[0, 0])
            return RowRun(first_position % ring)
        is_padding = positions < 0
        # Two tokens of one row must not share a slot: `index_copy_` writes in no certain order.
        newest = positions.amax(dim=1, keepdim=True)
        is_newest = positions > newest - ring
        is_kept = ~is_padding & is_newest
        # The buffers of all rows are taken as one: row `b` begins at slot `b * ring`.
        rows = torch.arange(len(positions), device="cpu")
        first_slots = rows[:, None] * ring
        slots = first_slots + positions % ring
        if bool(is_kept.all()):
            return AllColumns(slots.flatten().to(device))
        columns = is_kept.flatten().nonzero()[:, 0]
        kept_slots = slots[is_kept]
        return SomeColumns(columns.to(device), kept_slots.to(device))


def _is_run(positions: Tensor, ring: int) -> bool:
    """Returns True if positions `[B, S]` are the same run of slots in every row."""
    num_columns = positions.shape[1]
    if num_columns == 0:
        return False
    first = int(positions[0, 0])
    last = int(positions[0, -1])
    # Positions count up, so a row of as many indices as columns has no padding.
    is_whole = first >= 0 and last - first == num_columns - 1
    # A run that goes past the ring's end is two runs.
    wraps = first // ring != last // ring
    if not is_whole or wraps:
        return False
    is_alike = positions == positions[0]
    return bool(is_alike.all())
