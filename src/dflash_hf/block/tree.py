"""Trees of proposals: several continuations of the anchor that one verify looks at.

One forward of the draft gives a distribution for every position of the block. A chain takes one token of each; a tree
takes the most likely paths, as many as its nodes can hold, and branches where the draft is unsure. Node 0 is the
anchor. The others are sorted by the probability of their paths, so that a parent stands before its children and the
first `n` nodes are the best tree of `n` nodes. A chain is the tree in which every node follows the one before it.

The definition of the most likely paths stands beside the kernel that finds them, `dflash_kernels.build_tree`.

Shapes: `B` rows, `N` nodes, `A` words of 64 bits that say which nodes are a node's ancestors, `D` positions of the
block that propose, `V` vocabulary.

Source: DDTree, arXiv 2604.12989.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_hf import ops

# The probabilities that a text goes on as it did before, by the number of its last tokens that are the same: that of
# the first token, then that of each further one. They are a little lower than measured in SmolLM2's answers to GSM8K
# and MT-Bench (docs/log-archive.md), which repeat themselves.
FOLLOWS = (0.0, 0.2, 0.5, 0.6, 0.8)
GOES_ON = (0.0, 0.6, 0.7, 0.75, 0.9)
MAX_MATCHING = len(FOLLOWS) - 1


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A tree of proposals, on the target's device."""

    # [B, N], int64: the node that each one follows; the anchor follows itself.
    parents: Tensor
    # [B, N], int64: the tokens from the anchor to each node, the node included. A node's position is the anchor's
    # plus its depth.
    depths: Tensor
    # [B, N, A], int64: bits of the nodes on the path from the anchor to each node, both included. `are_ancestors`
    # reads them.
    ancestors: Tensor

    @classmethod
    def of(cls, nodes_XBN: Tensor) -> DraftTree:
        """Returns a view of nodes `[3 + A, B, N]` as [`TreeBuilder`] writes them."""
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
        """Writes the path that the target takes; `dflash_kernels.follow_tree` defines it and the arguments."""
        follow = ops.implementation(ops.follow_tree, self.parents)
        tree = (self.parents, self.depths, self.ancestors)
        follow(*tree, block_BN, tokens_BN, node_ids_BN, path_BN)

    def are_ancestors(self, nodes_BM: Tensor) -> Tensor:
        """Returns which nodes of `[B, M]` or `[1, M]` are ancestors of each node, or it itself: `[B, N, M]`, bool."""
        return ops.are_ancestors(self.ancestors, nodes_BM)

    def agree(self, block_BN: Tensor, text_BD: Tensor) -> Tensor:
        """Returns how many tokens of a text `[B, D]` behind the anchor are a path of the tree: `[B]`."""
        # The target's answer at a node is the text's next token. Nodes of the last depth have none; any will do.
        last = text_BD.shape[1] - 1
        next_tokens = text_BD.gather(1, self.depths.clamp_max(last))
        path = torch.empty_like(block_BN)
        node_ids = torch.empty_like(block_BN)
        # The call sorts the block by the path, so it gets a copy.
        self.follow(block_BN.clone(), next_tokens, node_ids, path)
        # Behind its end a path holds zeros.
        return (path > 0).sum(dim=1)

    def child(self, block_BN: Tensor, node_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the child `[B]` of a node that holds a token, or 0, and whether there is such a child `[B]`."""
        num_nodes = block_BN.shape[1]
        nodes = torch.arange(num_nodes, device=block_BN.device)
        follows_node = self.parents == node_B[:, None]
        has_token = block_BN == tokens_B[:, None]
        # The anchor is its own parent, but no child.
        is_child = follows_node & has_token & (nodes > 0)
        # Children of one node hold different tokens: there is one at most, and the maximum is its number.
        child = (is_child * nodes).amax(dim=1)
        return child, is_child.any(dim=1)


def along(path_BN: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns values of nodes `[B, N, ...]` in the order of a path `[B, n]`: `[B, n, ...]`, in `out` if given."""
    inner = values.shape[2:]
    ones = [1] * len(inner)
    index = path_BN.view(*path_BN.shape, *ones)
    # An index of every number, as `gather` wants it; a view without memory of its own.
    index = index.expand(-1, -1, *inner)
    return torch.gather(values, 1, index, out=out)


def is_in_place(path_BN: Tensor) -> bool:
    """Returns True if the nodes of a path `[B, n]` stand where a chain's would: nothing has to move.

    That is common: the target often takes the draft's most likely path. Reads on the host.
    """
    for row in path_BN.tolist():
        for depth, node in enumerate(row):
            # Behind its end a path holds zeros.
            if node not in (0, depth):
                return False
    return True


def new_nodes(batch: int, num_nodes: int, device: torch.device) -> Tensor:
    """Returns the zeros `[3 + A, B, N]` int64 that [`TreeBuilder`] writes trees of so many nodes into."""
    num_parts = ops.NODE_PARTS + ops.num_words(num_nodes)
    return torch.zeros(num_parts, batch, num_nodes, dtype=torch.long, device=device)


def max_nodes(depth: int, num_choices: int) -> int:
    """Returns how many nodes a tree may have whose paths are up to `depth` of so many tokens long."""
    num_ranks = min(num_choices, ops.MAX_NUM)
    # Each path ends in a node of its own, and the anchor is one more.
    return min(ops.num_paths(depth, num_ranks) + 1, ops.MAX_NODES)


class TreeBuilder:
    """Builds trees of one size from the draft's probabilities and from repetitions in the text.

    Args:
        num_nodes (`int`): Nodes, the anchor included, from 2 to `ops.MAX_NODES`.
        depth (`int`): Positions of the block that propose, `D`.
        vocab_size (`int`): Tokens that the draft chooses among.
        device (`torch.device`): Device of the trees.

    Raises:
        ValueError: If there are fewer paths than nodes.
    """

    def __init__(self, num_nodes: int, depth: int, vocab_size: int, device: torch.device) -> None:
        # The likeliest tokens of each position that paths are made of. Up to 64 nodes, no path of the tree has others.
        self.num_ranks = min(vocab_size, num_nodes - 1, ops.MAX_NUM)
        most = max_nodes(depth, vocab_size)
        if num_nodes > most:
            raise ValueError(
                f"expected num_tree_nodes of at most {most} (a draft that proposes at {depth} positions, of which the "
                f"{min(vocab_size, ops.MAX_NUM)} likeliest tokens count), got {num_nodes}; lower it"
            )
        self.num_nodes = num_nodes
        # The logarithm is taken on the CPU, so that trees are the same on every device.
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
        """Writes the best tree of each row, as `dflash_kernels.build_tree` defines it, with the other arguments.

        Args:
            scores (`torch.Tensor` of shape `[B, D, V]` or `[B, D, C, C]`): Log-probabilities of the next tokens, up to
                a constant at each position; with candidates, as a [`CandidateSelector`] returns them.
            text (`tuple`, *optional*): `ids_BT`, `cursor_B` and `follows_FM`.
        """
        if candidates_BDC is None:
            # Without candidates a position has one state, whatever token stands before it.
            scores = scores[:, :, None]
        likeliest = ops.implementation(ops.top_tokens, scores)
        # Of each position the likeliest tokens and their log-probabilities, whatever the vocabulary: [B, D, C, ranks].
        best, order = likeliest(scores, self.num_ranks)
        build = ops.implementation(ops.build_tree, order)
        build(best, order, nodes, block_BN, candidates_BDC, *text)
