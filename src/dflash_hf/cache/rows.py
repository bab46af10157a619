"""Buffers of a batch that goes on with fewer rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def kept_rows(buffer: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
    """Puts these rows of a buffer at its beginning and returns a view of them: nothing else is copied.

    Args:
        buffer (`torch.Tensor`): Changed in place.
        rows (sequence of `int`): Row `i` goes to place `i`. One that moves must come from behind the last place.
        dim (`int`): Which dimension the rows are.
    """
    for place, row in enumerate(rows):
        if place != row:
            buffer.select(dim, place).copy_(buffer.select(dim, row))
    return buffer.narrow(dim, 0, len(rows))
