"""How large the buffers of the ragged cache are, and whether there is room for them before any is allocated."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from dflash_hf.devices import free_memory


class LayerShape(NamedTuple):
    """What one layer of the cache is."""

    num_heads: int  # key/value heads
    # Head sizes.
    key_size: int
    value_size: int
    # Sliding window in tokens, the query included, or without it where the window counts from the anchor; `None` for
    # full attention.
    window: int | None
    # Of keys and values.
    dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device  # where they are

    def ring(self, max_length: int, block: int) -> int:
        """Returns the number of slots that rows of `max_length` tokens need when blocks have `block` tokens.

        A rejected token may have replaced the one `ring` positions before it; with window + block slots that one was
        out of every later query's window.
        """
        return max_length if self.window is None else min(max_length, self.window + block)

    def num_bytes(self, batch: int, max_length: int, block: int) -> int:
        """Returns the size of the layer's buffers in bytes."""
        numbers = self.key_size * self.dtype.itemsize + self.value_size * self.value_dtype.itemsize
        return batch * self.ring(max_length, block) * self.num_heads * numbers


class OutOfRoomError(ValueError):
    """K/V buffers would be larger than what is free of a device's memory."""


def check_memory(
    shapes: Sequence[LayerShape],
    batch: int,
    max_length: int,
    block: int,
    freed: Mapping[torch.device, int] = MappingProxyType({}),
) -> None:
    """Raises `OutOfRoomError` if layers' buffers are larger than what is free of their device, and says what fits.

    `freed` are the bytes that are given back on the way, less those that are needed whatever the length; for the
    others see [`RaggedCache`].
    """
    for device in {shape.device for shape in shapes}:
        here = [shape for shape in shapes if shape.device == device]
        free = free_memory(device)

        def needed(length: int, here: Sequence[LayerShape] = here) -> int:
            return sum(shape.num_bytes(batch, length, block) for shape in here)

        if free is None:
            continue
        free += freed.get(device, 0)
        if needed(max_length) <= free:
            continue
        fits = max(bisect.bisect_right(range(max_length), free, key=needed) - 1, 0)
        raise OutOfRoomError(
            f"expected K/V buffers of at most {free:,} bytes (what is free on {device}), got {needed(max_length):,} "
            f"for {batch} rows of {max_length:,} tokens, a block included; rows can have at most {fits:,} tokens: "
            "lower max_new_tokens or the number of rows"
        )
