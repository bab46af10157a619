"""The rows of a tree's accepted path go to where a chain would have written them, in all buffers at once."""

# No `from __future__ import annotations`: torch.library reads the annotations.

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch import has_triton, interprets
from ..operation import Given, Sizes, check_dtype, operation


def covers(path_BN: Tensor, *_: object) -> bool:
    """Returns True if the kernel, not the reference, would move what the path names."""
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
    """Moves what a path through a tree has in the cache, in place; no host sync.

    For a buffer of `R` slots, every row `b` and depth `d` from 1 on, all of it read before any is written:

        buffer[b, (lengths[b] + d) mod R] = buffer[b, (lengths[b] + path[b, d]) mod R]

    Args:
        path_BN (`torch.Tensor` of shape `[B, N]`, int64): The node at each depth, the anchor first; rising up to the
            path's end and 0 behind it, where what is written does not count.
        lengths_B (`torch.Tensor` of shape `[B]`, int64): Where each row's anchor stands.
        buffers (sequence of `torch.Tensor` of shape `[B, R, G, E]`): Contiguous; sizes, rings and dtypes may differ.

    Raises:
        ValueError: If shapes, dtypes or strides are not as said.
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
