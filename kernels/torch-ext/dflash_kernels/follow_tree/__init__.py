"""The path that the target goes through a tree, in one launch, and block and tokens in its order."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from ..operation import Given, Sizes, check_dtype, operation

INTEGERS = ("parents_BN", "depths_BN", "ancestors_BN", "block_BN", "tokens_BN", "node_ids_BN", "path_BN")


def _check(given: Given, size: Sizes) -> None:
    check_dtype(given, (torch.int64,), *INTEGERS)
    if not 1 <= size["N"] <= 64:
        raise ValueError(f"expected 1 to 64 nodes, got {size['N']}; ancestors are bits of an int64")
    for name in INTEGERS[:-1]:
        if given[name].stride(1) != 1:
            raise ValueError(
                f"expected {name} with unit stride in its last dimension, got {given[name].stride()}; copy it"
            )


@operation(check=_check, mutates=("block_BN", "tokens_BN", "node_ids_BN", "path_BN"), covers=lambda *_: True)
def follow_tree(
    parents_BN: Tensor,
    depths_BN: Tensor,
    ancestors_BN: Tensor,
    block_BN: Tensor,
    tokens_BN: Tensor,
    node_ids_BN: Tensor,
    path_BN: Tensor,
) -> None:
    """Goes from the anchor on always to the child that the target says, in place; no host sync.

    A node stands if it and all its ancestors but the anchor are what the target says after their parents. Per row:

        node_ids  = block
        path[d]   = the node of depth d that stands, 0 behind the deepest one
        tokens[d] = tokens[path[d]]
        block[d]  = block[path[d]], -1 behind the deepest one

    so that block and tokens are what a chain would have had, had it been that path.

    Args:
        parents_BN, depths_BN, ancestors_BN (`torch.Tensor` of shape `[B, N]`, int64): The tree, as
            [`build_tree`] makes it.
        block_BN (`torch.Tensor` of shape `[B, N]`, int64): The nodes' tokens; siblings differ. Written.
        tokens_BN (`torch.Tensor` of shape `[B, N]`, int64): What the target says after each node. Written.
        node_ids_BN, path_BN (`torch.Tensor` of shape `[B, N]`, int64): Written; the path of any strides.

    Raises:
        ValueError: If shapes or dtypes are not as said.
    """
    nodes = torch.arange(block_BN.shape[1], device=block_BN.device)
    matches = (block_BN == tokens_BN.gather(1, parents_BN)) | (nodes == 0)
    matched = (matches.to(torch.long) << nodes).sum(dim=1, keepdim=True)
    stands = (ancestors_BN & ~matched) == 0
    # Nodes that do not stand all say that the anchor is at depth 0.
    depths = depths_BN * stands
    path_BN.zero_().scatter_(1, depths, nodes * stands)
    node_ids_BN.copy_(block_BN)
    block_BN.copy_(block_BN.gather(1, path_BN).masked_fill_(nodes > depths.amax(dim=1, keepdim=True), -1))
    tokens_BN.copy_(tokens_BN.gather(1, path_BN))


__all__ = ["follow_tree"]
