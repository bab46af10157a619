"""How large the buffers of the ragged cache are, and whether there is room for them before any is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dflash_hf.devices import free_memory


class LayerShape(NamedTuple):
    """Shape of one layer of the cache.

    Args:
        num_heads (`int`): Key/value heads.
        key_size, value_size (`int`): Head sizes.
        window (`int`, *optional*): Sliding window in tokens, the query included, or without it where the window counts
            from the anchor; `None` for full attention.
    """

    num_heads: int
    key_size: int
    value_size: int
    window: int | None = None

    def ring(self, max_length: int, block: int) -> int:
        """Returns the number of slots that rows of `max_length` tokens need when blocks have `block` tokens.

        A rejected token may have replaced the one `ring` positions before it; with window + block slots that one was
        out of every later query's window.
        """
        return max_length if self.window is None else min(max_length, self.window + block)


class OutOfRoomError(ValueError):
    """K/V buffers would be larger than what is free of a device's memory."""


def buffer_bytes(shapes: Sequence[tuple[LayerShape, int, int]], batch: int, max_length: int, block: int) -> int:
    """Returns the size in bytes of the buffers of layers, each given as shape and bytes per key and value element."""
    return sum(
        batch
        * shape.ring(max_length, block)
        * shape.num_heads
        * (shape.key_size * key_bytes + shape.value_size * value_bytes)
        for shape, key_bytes, value_bytes in shapes
    )


def check_memory(
    shapes: Sequence[tuple[LayerShape, int, int]],
    device: torch.device,
    batch: int,
    max_length: int,
    block: int,
    freed: int = 0,
    fixed: int = 0,
) -> None:
    """Refuses buffers that are larger than what is free of a device's memory, before any is allocated.

    Args:
        shapes: See [`buffer_bytes`].
        device (`torch.device`): Where they will be.
        batch, max_length, block (`int`): See [`RaggedCache`].
        freed (`int`): Bytes that are given back on the way.
        fixed (`int`): Bytes that are needed whatever the length.

    Raises:
        OutOfRoomError: With the bytes that are needed and the greatest length that fits.
    """
    free = free_memory(device)
    needed = buffer_bytes(shapes, batch, max_length, block) + fixed
    if free is None or needed <= free + freed:
        return
    freed -= fixed
    needed -= fixed
    fits, too_long = 0, max_length
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if buffer_bytes(shapes, batch, middle, block) <= free + freed:
            fits = middle
        else:
            too_long = middle
    raise OutOfRoomError(
        f"expected K/V buffers of at most {free + freed:,} bytes (what is free on {device}), got {needed:,} for "
        f"{batch} rows of {max_length:,} tokens, a block included; rows can have at most {fits:,} tokens: lower "
        "max_new_tokens or the number of rows"
    )


__all__ = ["LayerShape", "OutOfRoomError", "buffer_bytes", "check_memory"]
