"""Trees of proposals: several continuations of the anchor that one verify looks at.

One forward of the draft gives a distribution for every position of the block. A chain takes one token of each; a tree
takes the most likely paths, as many as there are nodes for, and branches where the draft is unsure. Node 0 is the
anchor. The others stand in the order of their paths' probability, so that a parent stands before its children and the
first `n` nodes are the best tree of `n`: a chain is a tree too, the one whose every node follows the one before.

Which paths those are is defined beside the kernel that finds them, `dflash_kernels.build_tree`.

Shapes: `B` rows, `N` nodes, `D` positions of the block that propose, `V` vocabulary.

Source: DDTree, arXiv 2604.12989.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_hf import ops

# How likely a text goes on as it did before, by how many of its last tokens are the same, and then token by token. A
# little less than in SmolLM2's answers to GSM8K and MT-Bench (docs/log-archive.md), which repeat themselves.
FOLLOWS = (0.0, 0.2, 0.5, 0.6, 0.8)
GOES_ON = (0.0, 0.6, 0.7, 0.75, 0.9)
MAX_MATCHING = len(FOLLOWS) - 1


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A tree of proposals, on the target's device."""

    parents: Tensor  # [B, N], int64: the node that each one follows; the anchor's is itself
    # [B, N], int64: tokens between the anchor and each node, its own included: its position is the anchor's plus that.
    depths: Tensor
    # [B, N], int64: bit `i` says that node `i` is on the path from the anchor to this one, both included.
    ancestors: Tensor

    def on(self, device: torch.device) -> DraftTree:
        """Returns the tree on another device."""
        return DraftTree(self.parents.to(device), self.depths.to(device), self.ancestors.to(device))

    def follow(self, block_BN: Tensor, tokens_BN: Tensor, node_ids_BN: Tensor, path_BN: Tensor) -> None:
        """Finds the path that the target goes: arguments and definition are those of `dflash_kernels.follow_tree`."""
        follow = ops.watched(ops.follow_tree, self.parents)
        follow(self.parents, self.depths, self.ancestors, block_BN, tokens_BN, node_ids_BN, path_BN)

    def agree(self, block_BN: Tensor, text_BD: Tensor) -> Tensor:
        """Counts how far a text `[B, D]` behind the anchor goes along the tree: `[B]`."""
        said = text_BD.gather(1, self.depths.clamp_max(text_BD.shape[1] - 1))
        path = torch.empty_like(block_BN)
        self.follow(block_BN.clone(), said, torch.empty_like(block_BN), path)
        return (path > 0).sum(dim=1)

    def child(self, block_BN: Tensor, node_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the child of a node that has a token: its index `[B]`, 0 where there is none, and whether there is."""
        nodes = torch.arange(block_BN.shape[1], device=block_BN.device)
        is_child = (self.parents == node_B[:, None]) & (block_BN == tokens_B[:, None]) & (nodes > 0)
        return (is_child * nodes).amax(dim=1), is_child.any(dim=1)


def along(path_BN: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns values of nodes `[B, N, ...]` in the order of a path `[B, n]`: `[B, n, ...]`, in `out` if given."""
    index = path_BN.view(*path_BN.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return torch.gather(values, 1, index, out=out)


def is_in_place(path_BN: Tensor) -> bool:
    """Returns True if the nodes of a path `[B, n]` stand as a chain would: nothing has to move. Reads on the host.

    Often the target goes on as the draft thinks most likely, by the first nodes.
    """
    return all(node in (0, depth) for row in path_BN.tolist() for depth, node in enumerate(row))


class TreeBuilder:
    """Builds trees of one size, of what a draft says and what the text has said before.

    Args:
        num_nodes (`int`): Nodes, the anchor included, from 2 to `ops.MAX_NODES`.
        depth (`int`): `D`.
        vocab_size (`int`): Tokens that the draft chooses among.
        device (`torch.device`): Where trees are built.

    Raises:
        ValueError: If there are not so many paths.
    """

    def __init__(self, num_nodes: int, depth: int, vocab_size: int, device: torch.device) -> None:
        if num_nodes > (most := ops.num_paths(depth, vocab_size) + 1):
            raise ValueError(
                f"expected num_tree_nodes of at most {most} (a draft that chooses among {vocab_size} tokens "
                f"at {depth} positions), got {num_nodes}; lower it"
            )
        self.num_nodes = num_nodes
        self.num_ranks = min(vocab_size, num_nodes - 1)
        self.follows = torch.tensor((FOLLOWS, GOES_ON), dtype=torch.float32, device="cpu").log().to(device)

    def build(
        self,
        scores: Tensor,
        nodes: Tensor,
        block_BN: Tensor,
        candidates_BDC: Tensor | None = None,
        text: tuple[Tensor, ...] = (),
    ) -> None:
        """Builds the best tree of each row, as `dflash_kernels.build_tree` defines it; other arguments as there.

        Args:
            scores (`torch.Tensor` of shape `[B, D, V]` or `[B, D, C, C]`): Log-probabilities of the next tokens, up to
                a constant a position; with candidates as a [`CandidateSelector`] returns them.
            text (`tuple`, *optional*): `ids_BT`, `cursor_B` and `follows_FM`.
        """
        likeliest = ops.top_tokens if ops.picks(scores) else ops.top_tokens.reference
        best, order = likeliest(scores[:, :, None] if candidates_BDC is None else scores, self.num_ranks)
        ops.watched(ops.build_tree, order)(best, order, nodes, block_BN, candidates_BDC, *text)
