"""The path that the target goes through a tree, in one launch, and block and tokens in its order."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from ..ancestors import MAX_NODES, num_words
from ..operation import Given, Sizes, check_dtype, operation

# Those that are read along their nodes, and those of any strides.
DENSE = ("parents_BN", "depths_BN", "block_BN", "tokens_BN")
OTHERS = ("ancestors_BNA", "node_ids_BN", "path_BN")


def _check(given: Given, size: Sizes) -> None:
    check_dtype(given, (torch.int64,), *DENSE, *OTHERS)
    words = num_words(size["N"])
    if not 1 <= size["N"] <= MAX_NODES or size["A"] != words:
        raise ValueError(
            f"expected 1 to {MAX_NODES} nodes with {words} words of ancestors each, got {size['N']} with {size['A']}; "
            "pass a tree as build_tree makes it"
        )
    for name in DENSE:
        if given[name].stride(1) != 1:
            raise ValueError(
                f"expected {name} with unit stride in its last dimension, got {given[name].stride()}; copy it"
            )


@operation(
    check=_check,
    mutates=("block_BN", "tokens_BN", "node_ids_BN", "path_BN"),
    covers=lambda *_: True,
)
def follow_tree(
    parents_BN: Tensor,
    depths_BN: Tensor,
    ancestors_BNA: Tensor,
    block_BN: Tensor,
    tokens_BN: Tensor,
    node_ids_BN: Tensor,
    path_BN: Tensor,
) -> None:
    """Goes from the anchor on always to the child that the target says, in place; the kernel has no host sync.

    A node stands if it and all its ancestors but the anchor are what the target says after their parents. Per row:

        node_ids  = block
        path[d]   = the node of depth d that stands, 0 behind the deepest one
        tokens[d] = tokens[path[d]]
        block[d]  = block[path[d]], -1 behind the deepest one

    so that block and tokens are what a chain would have had, had it been that path.

    Args:
        parents_BN, depths_BN (`torch.Tensor` of shape `[B, N]`, int64): The tree, as [`build_tree`] makes it.
        ancestors_BNA (`torch.Tensor` of shape `[B, N, A]`, int64): Words of its nodes' ancestors; of any strides. See
            `ancestors.py`.
        block_BN (`torch.Tensor` of shape `[B, N]`, int64): The nodes' tokens; siblings differ. Written.
        tokens_BN (`torch.Tensor` of shape `[B, N]`, int64): What the target says after each node. Written.
        node_ids_BN, path_BN (`torch.Tensor` of shape `[B, N]`, int64): Written; of any strides.

    Raises:
        ValueError: If shapes or dtypes are not as said.
    """
    num, rows = block_BN.shape[1], list[list[list[int]]]()
    for parents, block, tokens in zip(
        parents_BN.tolist(), block_BN.tolist(), tokens_BN.tolist(), strict=True
    ):
        children = {(parents[node], block[node]): node for node in range(1, num)}
        path, node = [0], children.get((0, tokens[0]))
        while node is not None:
            path.append(node)
            node = children.get((node, tokens[node]))
        behind = num - len(path)
        said = [tokens[node] for node in path] + [tokens[0]] * behind
        rows.append([path + [0] * behind, [block[node] for node in path] + [-1] * behind, said])
    node_ids_BN.copy_(block_BN)
    found = torch.tensor(rows, device="cpu").to(block_BN.device).unbind(1)
    for written, values in zip((path_BN, block_BN, tokens_BN), found, strict=True):
        written.copy_(values)


__all__ = ["follow_tree"]
