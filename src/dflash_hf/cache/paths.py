"""Keys and values of the path that was accepted of a tree go to where a chain would have written them."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf import ops
from dflash_hf.cache.ragged import RaggedCache


def keep_path(cache: RaggedCache, path: Tensor, lengths: Tensor, may_read: bool = False) -> None:
    """Moves the keys and values of a path through the verified tree, in every layer, in place.

    Args:
        cache (`RaggedCache`): The target's; its layers are of attention alone.
        path (`torch.Tensor` of shape `[B, n]`, int64): The node at each depth, the anchor first, 0 behind its end.
        lengths (`torch.Tensor` of shape `[B]`, int64): Where the anchors stand; before the commit.
        may_read (`bool`): Look on the host whether anything has to move, where that waits for no device: often the
            target goes on as the draft thinks most likely, by the first nodes.
    """
    if may_read and path.device.type == "cpu":
        chain = torch.arange(path.shape[1], device=path.device)
        if bool(((path == chain) | (path == 0)).all()):
            return
    of_device: dict[torch.device, list[Tensor]] = {}
    for buffer in cache.buffers():
        of_device.setdefault(buffer.device, []).append(buffer)
    for device, buffers in of_device.items():
        ops.move_path(path.to(device), lengths.to(device), buffers)


__all__ = ["keep_path"]
