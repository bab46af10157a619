"""This module builds trees of proposals: several continuations of the anchor that one verify checks.

One forward of the draft gives a distribution for each position of the block. A chain takes one token from each of
them. A tree takes as many of the most likely paths as its nodes can hold, so it branches where the draft is unsure.
Node 0 is the anchor. The other nodes are sorted by the probability of their paths. So a parent stands before its
children, and the first `n` nodes are the best tree of `n` nodes. A chain is the tree in which every node follows the
node before it.

`dflash_kernels.build_tree` defines the most likely paths, beside the kernel that finds them.

Shapes: `B` rows, `N` nodes, `A` words of 64 bits that hold the ancestors of a node, `D` positions of the block that
propose a token, `V` vocabulary.

Source: DDTree, arXiv 2604.12989.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_hf import ops

# The probability that a text continues as it did before depends on the number of its last tokens that are the same.
# FOLLOWS is the probability of the first token, and GOES_ON that of each further token. The numbers are a little lower
# than those measured in SmolLM2's answers to GSM8K and MT-Bench (docs/log-archive.md), which repeat themselves.
FOLLOWS = (0.0, 0.2, 0.5, 0.6, 0.8)
GOES_ON = (0.0, 0.6, 0.7, 0.75, 0.9)
MAX_MATCHING = len(FOLLOWS) - 1


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """An instance is a tree of proposals for each row. Its tensors are on the target's device."""

    # [B, N], int64: the parent of each node. The anchor is its own parent.
    parents: Tensor
    # [B, N], int64: the number of tokens from the anchor to each node, the node included and the anchor not. A node's
    # position is the anchor's position plus its depth.
    depths: Tensor
    # [B, N, A], int64: one bit for each node on the path from the anchor to a node, both included. `are_ancestors`
    # reads these bits.
    ancestors: Tensor

    @classmethod
    def of(cls, nodes_XBN: Tensor) -> DraftTree:
        """Returns a tree whose tensors are views of nodes `[3 + A, B, N]`, as [`TreeBuilder`] writes them."""
        parents, _, depths = nodes_XBN[: ops.NODE_PARTS]
        ancestors = nodes_XBN[ops.NODE_PARTS :].permute(1, 2, 0)
        return cls(parents, depths, ancestors)

    def on(self, device: torch.device) -> DraftTree:
        """Returns the tree on another device."""
        parents = self.parents.to(device)
        depths = self.depths.to(device)
        ancestors = self.ancestors.to(device)
        return DraftTree(parents, depths, ancestors)

    def follow(
        self, block_BN: Tensor, tokens_BN: Tensor, node_ids_BN: Tensor, path_BN: Tensor
    ) -> None:
        """Writes the path that the target takes. `dflash_kernels.follow_tree` defines the path and the arguments."""
        follow = ops.implementation(ops.follow_tree, self.parents)
        tree = (self.parents, self.depths, self.ancestors)
        follow(*tree, block_BN, tokens_BN, node_ids_BN, path_BN)

    def are_ancestors(self, nodes_BM: Tensor) -> Tensor:
        """Returns whether the nodes `[B, M]` or `[1, M]` are ancestors of each node or the node itself: `[B, N, M]`,
        bool.
        """
        return ops.are_ancestors(self.ancestors, nodes_BM)

    def agree(self, block_BN: Tensor, text_BD: Tensor) -> Tensor:
        """Returns how many tokens of a text `[B, D]` after the anchor are a path of the tree: `[B]`, int64."""
        # The target's token at a node is the text's next token. Nodes of the last depth have no next token, so any
        # token will do.
        last = text_BD.shape[1] - 1
        next_tokens = text_BD.gather(1, self.depths.clamp_max(last))
        path = torch.empty_like(block_BN)
        node_ids = torch.empty_like(block_BN)
        # The call reorders the block along the path, so it gets a copy.
        self.follow(block_BN.clone(), next_tokens, node_ids, path)
        # Behind its end a path holds zeros.
        return (path > 0).sum(dim=1)

    def child(self, block_BN: Tensor, node_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the child `[B]` of a node that holds the given token, or 0, and whether there is
        such a child `[B]`.
        """
        num_nodes = block_BN.shape[1]
        nodes = torch.arange(num_nodes, device=block_BN.device)
        follows_node = self.parents == node_B[:, None]
        has_token = block_BN == tokens_B[:, None]
        # The anchor is its own parent, but it is not a child.
        is_child = follows_node & has_token & (nodes > 0)
        # The children of a node hold different tokens. So at most one child matches, and the maximum is its number.
        child = (is_child * nodes).amax(dim=1)
        return child, is_child.any(dim=1)


def along(path_BN: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns values of nodes `[B, N, ...]` in the order of a path `[B, n]`, as `[B, n, ...]` and
    in `out` if given.
    """
    inner = values.shape[2:]
    ones = [1] * len(inner)
    index = path_BN.view(*path_BN.shape, *ones)
    # `gather` needs an index for every number. The expanded view needs no memory of its own.
    index = index.expand(-1, -1, *inner)
    return torch.gather(values, 1, index, out=out)


def is_in_place(path_BN: Tensor) -> bool:
    """Returns True if the nodes of a path `[B, n]` are in the same places as in a chain, so that
    nothing has to move.

    This is common, because the target often takes the draft's most likely path. The function reads on the host.
    """
    for row in path_BN.tolist():
        for depth, node in enumerate(row):
            # Behind its end a path holds zeros.
            if node not in (0, depth):
                return False
    return True


def new_nodes(batch: int, num_nodes: int, device: torch.device) -> Tensor:
    """Returns zeros `[3 + A, B, N]` int64, into which [`TreeBuilder`] writes trees of this number of nodes."""
    num_parts = ops.NODE_PARTS + ops.num_words(num_nodes)
    return torch.zeros(num_parts, batch, num_nodes, dtype=torch.long, device=device)


def max_nodes(depth: int, num_choices: int) -> int:
    """Returns the largest number of nodes of a tree whose paths have up to `depth` tokens, each out
    of `num_choices`.
    """
    num_ranks = min(num_choices, ops.MAX_NUM)
    # Each path ends in a node of its own, and the anchor is one more node.
    return min(ops.num_paths(depth, num_ranks) + 1, ops.MAX_NODES)


class TreeBuilder:
    """A tree builder builds trees of one size from the draft's probabilities and from repetitions in the text.

    Args:
        num_nodes (`int`): Number of nodes, the anchor included, from 2 to `ops.MAX_NODES`.
        depth (`int`): Number of positions of the block that propose a token, `D`.
        vocab_size (`int`): Number of tokens that the draft chooses among.
        device (`torch.device`): Device of the trees.

    Raises:
        ValueError: If there are fewer paths than nodes.
    """

    def __init__(self, num_nodes: int, depth: int, vocab_size: int, device: torch.device) -> None:
        # Paths are made of this number of the likeliest tokens of each position. Up to 64 nodes, no path of the best
        # tree has other tokens.
        self.num_ranks = min(vocab_size, num_nodes - 1, ops.MAX_NUM)
        most = max_nodes(depth, vocab_size)
        if num_nodes > most:
            raise ValueError(
                f"expected num_tree_nodes of at most {most} (a draft that proposes at {depth} positions, of which the "
                f"{min(vocab_size, ops.MAX_NUM)} likeliest tokens count), got {num_nodes}; lower it"
            )
        self.num_nodes = num_nodes
        # The logarithm is computed on the CPU, so that trees are the same on every device.
        follows = torch.tensor((FOLLOWS, GOES_ON), dtype=torch.float32, device="cpu")
        self.follows = follows.log().to(device)

    def build(
        self,
        scores: Tensor,
        nodes: Tensor,
        block_BN: Tensor,
        candidates_BDC: Tensor | None = None,
        text: tuple[Tensor, ...] = (),
    ) -> None:
        """Writes the best tree of each row. `dflash_kernels.build_tree` defines this tree and the other arguments.

        Args:
            scores (`torch.Tensor` of shape `[B, D, V]` or `[B, D, C, C]`): Log-probabilities of the next tokens, up to
                a constant at each position. With candidates, the scores `[B, D, C, C]` of a [`CandidateSelector`].
            text (`tuple`, *optional*): The arguments `ids_BT`, `cursor_B` and `follows_FM`.
        """
        if candidates_BDC is None:
            # Without candidates, a position has only one state, which does not depend on the token before it.
            scores = scores[:, :, None]
        likeliest = ops.implementation(ops.top_tokens, scores)
        # These are the likeliest tokens of each position and their log-probabilities, whatever the size of the
        # vocabulary: [B, D, C, ranks].
        best, order = likeliest(scores, self.num_ranks)
        build = ops.implementation(ops.build_tree, order)
        build(best, order, nodes, block_BN, candidates_BDC, *text)
