"""This operation finds the path of the target through a tree, and puts block and tokens into its
order, in one launch.
"""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from ..ancestors import MAX_NODES, num_words
from ..operation import Given, Sizes, check_dtype, operation

# DENSE arguments are read along their nodes and need unit strides. OTHERS may have any strides.
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
    """Follows the target's tokens from the anchor to child after child, in place; the kernel has no host sync.

    A node stands, which means that it is on the path, if its token and the token of each of its ancestors except the
    anchor is the target's token after the parent. Per row:

        node_ids  = block
        path[d]   = the node of depth d that stands, 0 behind the deepest one
        tokens[d] = tokens[path[d]]
        block[d]  = block[path[d]], -1 behind the deepest one

    So block and tokens are the same as in a chain that consists of this path.

    Args:
        parents_BN, depths_BN (`torch.Tensor` of shape `[B, N]`, int64): Parents and depths of the tree's nodes, as
            [`build_tree`] makes them.
        ancestors_BNA (`torch.Tensor` of shape `[B, N, A]`, int64): Words of the nodes' ancestors, with any strides.
            See `ancestors.py`.
        block_BN (`torch.Tensor` of shape `[B, N]`, int64): The tokens of the nodes. Siblings have different tokens.
            Written.
        tokens_BN (`torch.Tensor` of shape `[B, N]`, int64): The target's token after each node. Written.
        node_ids_BN, path_BN (`torch.Tensor` of shape `[B, N]`, int64): Receive the results above. They may have any
            strides. Written.

    Raises:
        ValueError: If shapes, dtypes or strides are not as described.
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
