"""This module defines how the ancestors of a tree's nodes are stored: as bits of 64-bit words.

Bit `j % 64` of word `j // 64` of node `i` is set if node `j` is on the path from the anchor to node `i`, both
included. [`are_ancestors`] is the definition that masks and kernels share.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The largest number of nodes of a tree. A program of the kernel that builds trees holds all of them.
MAX_NODES = 256
# Number of bits of an int64. The last bit is its sign.
WORD_BITS = 64


def num_words(num_nodes: int) -> int:
    """Returns the number of words for the ancestors of one node, in a tree of `num_nodes` nodes."""
    return -(-num_nodes // WORD_BITS)


def word_with(bit: int) -> int:
    """Returns the int64 in which only this bit is set, from 0 to 63."""
    if bit == WORD_BITS - 1:
        return -(1 << bit)
    return 1 << bit


def are_ancestors(ancestors_BNA: Tensor, nodes_BM: Tensor) -> Tensor:
    """Returns whether each of the given nodes is an ancestor of each node of a tree, or that node itself.

    Args:
        ancestors_BNA (`torch.Tensor` of shape `[B, N, A]`, int64): Words of each node's ancestors.
        nodes_BM (`torch.Tensor` of shape `[B, M]` or `[1, M]`, int64): Indices of nodes, below `64 A`.

    Returns:
        `torch.Tensor`: Boolean, `[B, N, M]`.
    """
    batch, num_nodes, words = ancestors_BNA.shape
    nodes = nodes_BM[:, None]
    bits = nodes
    words_of_nodes = ancestors_BNA
    # With one word, a node's index is its bit, and no word has to be looked up.
    if words > 1:
        bits = nodes % WORD_BITS
        index = (nodes // WORD_BITS).expand(batch, num_nodes, -1)
        words_of_nodes = torch.gather(ancestors_BNA, 2, index)
    return ((words_of_nodes >> bits) & 1).bool()


__all__ = ["MAX_NODES", "WORD_BITS", "are_ancestors", "num_words", "word_with"]
