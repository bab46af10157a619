"""Keys and values of the path that was accepted of a tree go to where a chain would have written them."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf import ops
from dflash_hf.cache.ragged import RaggedCache


def is_in_place(path: Tensor) -> bool:
    """Returns True if the nodes of a path `[B, n]` stand as a chain would: nothing has to move. Reads on the host.

    Often the target goes on as the draft thinks most likely, by the first nodes.
    """
    return all(node in (0, depth) for row in path.tolist() for depth, node in enumerate(row))


def keep_path(cache: RaggedCache, path: Tensor, lengths: Tensor) -> None:
    """Moves the keys and values of a path through the verified tree, in every layer, in place.

    Args:
        cache (`RaggedCache`): The target's; its layers are of attention alone.
        path (`torch.Tensor` of shape `[B, n]`, int64): The node at each depth, the anchor first, 0 behind its end.
        lengths (`torch.Tensor` of shape `[B]`, int64): Where the anchors stand; before the commit.
    """
    of_device: dict[torch.device, list[Tensor]] = {}
    for buffer in cache.buffers():
        of_device.setdefault(buffer.device, []).append(buffer)
    for device, buffers in of_device.items():
        ops.move_path(path.to(device), lengths.to(device), buffers)
