"""This module computes the sizes of the ragged cache's buffers, and checks that a device has enough free memory for
them.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from dflash_hf.devices import free_memory


class LayerShape(NamedTuple):
    """An instance holds the sizes, dtypes and device of one layer of the cache."""

    num_heads: int  # number of key and value heads
    key_size: int  # size of a key
    value_size: int  # size of a value
    # The sliding window in tokens, or `None` for full attention. The window includes the query, unless it counts from
    # the anchor.
    window: int | None
    dtype: torch.dtype  # of the keys
    value_dtype: torch.dtype
    device: torch.device

    def ring(self, max_length: int, block: int) -> int:
        """Returns the number of slots that rows of `max_length` tokens need if blocks have `block` tokens."""
        if self.window is None:
            return max_length
        # A rejected token may have replaced the token that is `ring` positions before it. With window + block slots,
        # the replaced token was outside the window of every later query.
        return min(max_length, self.window + block)

    def num_bytes(self, batch: int, max_length: int, block: int) -> int:
        """Returns the size of the layer's buffers in bytes."""
        head_bytes = (
            self.key_size * self.dtype.itemsize + self.value_size * self.value_dtype.itemsize
        )
        return batch * self.ring(max_length, block) * self.num_heads * head_bytes


class OutOfRoomError(ValueError):
    """This error is raised if K/V buffers would be larger than the free memory of a device."""


def check_memory(
    shapes: Sequence[LayerShape],
    batch: int,
    max_length: int,
    block: int,
    freed: Mapping[torch.device, int] = MappingProxyType({}),
) -> None:
    """Raises `OutOfRoomError` if the layers' buffers are larger than the free memory of their device.

    The message contains the largest possible length of rows.

    Args:
        shapes (sequence of `LayerShape`): The layers.
        batch, max_length, block (`int`): Sizes as in [`RaggedCache`].
        freed (mapping of `torch.device` to `int`): Number of bytes that become free while the buffers are filled,
            minus the bytes that are needed for other buffers at any length.
    """
    for device in {shape.device for shape in shapes}:
        free = free_memory(device)
        if free is None:
            continue
        free += freed.get(device, 0)
        layers = [shape for shape in shapes if shape.device == device]
        needed = _needed(layers, batch, max_length, block)
        if needed <= free:
            continue
        fits = _longest_fit(layers, batch, max_length, block, free)
        raise OutOfRoomError(
            f"expected K/V buffers of at most {free:,} bytes (what is free on {device}), got {needed:,} "
            f"for {batch} rows of {max_length:,} tokens, a block included; rows can have at most {fits:,} tokens: "
            "lower max_new_tokens or the number of rows"
        )


def _needed(shapes: Sequence[LayerShape], batch: int, length: int, block: int) -> int:
    """Returns the number of bytes of these layers' buffers for rows of `length` tokens."""
    return sum(shape.num_bytes(batch, length, block) for shape in shapes)


def _longest_fit(
    shapes: Sequence[LayerShape], batch: int, max_length: int, block: int, free: int
) -> int:
    """Returns the greatest length of rows, at most `max_length - 1`, whose buffers fit into `free` bytes."""

    def needed(length: int) -> int:
        return _needed(shapes, batch, length, block)

    # The size grows with the length, so a binary search finds the greatest length.
    num_fitting = bisect.bisect_right(range(max_length), free, key=needed)
    return max(num_fitting - 1, 0)
