"""This operation moves the rows of a tree's accepted path to the slots of a chain, in all buffers at once."""

# No `from __future__ import annotations`: torch.library reads the annotations.

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch import has_triton, interprets
from ..operation import Given, Sizes, check_dtype, operation


def covers(path_BN: Tensor, *_: object) -> bool:
    """Returns True if the kernel, and not the reference, would move the rows of a path."""
    return has_triton() and (path_BN.is_cuda or interprets())


def _check(given: Given, size: Sizes) -> None:
    check_dtype(given, (torch.int64,), "path_BN", "lengths_B")
    for buffer in given["buffers"]:
        fits = buffer.dim() == 4 and buffer.shape[0] == size["B"] and buffer.shape[1] >= size["N"]
        if not fits or not buffer.is_contiguous():
            raise ValueError(
                f"expected contiguous buffers of shape [{size['B']}, R, G, E] with R >= {size['N']}, got "
                f"{tuple(buffer.shape)}, strides {buffer.stride()}; pass whole layers of the cache"
            )


@operation(check=_check, mutates=("buffers",), covers=covers)
def keep_path(path_BN: Tensor, lengths_B: Tensor, buffers: Sequence[Tensor]) -> None:
    """Moves the keys and values of a path through a tree to the slots of a chain in the cache, in
    place; no host sync.

    For a buffer of `R` slots, every row `b` and every depth `d` from 1 on, where everything is read before anything is
    written:

        buffer[b, (lengths[b] + d) mod R] = buffer[b, (lengths[b] + path[b, d]) mod R]

    Args:
        path_BN (`torch.Tensor` of shape `[B, N]`, int64): The node at each depth, the anchor first. The nodes rise up
            to the end of the path. Behind the end they are 0, and the slots that are written there do not matter.
        lengths_B (`torch.Tensor` of shape `[B]`, int64): Index of each row's anchor.
        buffers (sequence of `torch.Tensor` of shape `[B, R, G, E]`): Contiguous buffers. Their sizes, rings and dtypes
            may differ.

    Raises:
        ValueError: If shapes, dtypes or strides are not as described.
    """
    batch, num = path_BN.shape
    first, depths = lengths_B[:, None], torch.arange(1, num, device=path_BN.device)
    moves: dict[int, tuple[Tensor, Tensor]] = {}
    for buffer in buffers:
        ring = buffer.shape[1]
        if ring not in moves:
            rows = torch.arange(batch, device=path_BN.device)[:, None] * ring
            source, target = (
                (rows + (first + at) % ring).flatten() for at in (path_BN[:, 1:], depths)
            )
            moves[ring] = source, target
        source, target = moves[ring]
        slots = buffer.flatten(0, 1)
        slots.index_copy_(0, target, slots.index_select(0, source))


__all__ = ["covers", "keep_path"]
