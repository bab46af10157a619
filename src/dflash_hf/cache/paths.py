"""Keys and values of the path that was accepted of a tree go to where a chain would have written them."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf.cache.ragged import RaggedCache, RaggedLayer


def keep_path(cache: RaggedCache, path: Tensor, positions: Tensor, may_read: bool = False) -> None:
    """Moves the keys and values of a path through the verified tree, in every layer, in place.

    Args:
        cache (`RaggedCache`): The target's; its layers are of attention alone.
        path (`torch.Tensor` of shape `[B, n]`, int64): The node at each depth, the anchor first, 0 behind its end.
        positions (`torch.Tensor` of shape `[B, at least n]`, int64): Where the nodes went; as before the commit.
        may_read (`bool`): Look on the host whether anything has to move, where that waits for no device: often the
            target goes on as the draft thinks most likely, by the first nodes.
    """
    chain = torch.arange(path.shape[1], device=path.device)
    if may_read and path.device.type == "cpu" and bool(((path == chain) | (path == 0)).all()):
        return
    # The anchor stands where it belongs. All that moves is read before anything is written.
    places, wanted = positions[:, :1] + path[:, 1:], positions[:, 1 : path.shape[1]]
    moves: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
    for layer in cache.layers:
        assert isinstance(layer, RaggedLayer)
        ring, device = layer.ring, layer.key_buffer.device
        if (ring, device) not in moves:
            starts = torch.arange(path.shape[0], device=path.device)[:, None] * ring
            source, target = ((starts + slots % ring).flatten().to(device) for slots in (places, wanted))
            moves[ring, device] = source, target
        source, target = moves[ring, device]
        for buffer in (layer.key_buffer, layer.value_buffer):
            rows = buffer.flatten(0, 1)
            rows.index_copy_(0, target, rows.index_select(0, source))


__all__ = ["keep_path"]
