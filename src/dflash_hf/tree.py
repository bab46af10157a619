"""Trees of proposals: several continuations of the anchor that one verify looks at.

One forward of the draft gives a distribution for every position of the block. A chain takes one token of each; a tree
takes the most likely paths, as many as there are nodes for, and branches where the draft is unsure. Node 0 is the
anchor. The others stand in the order of their paths' probability, so that a parent stands before its children and the
first `n` nodes are the best tree of `n`: a chain is a tree too, the one whose every node follows the one before.

Shapes: `B` rows, `N` nodes, `D` positions of the block that propose, `R` ranks, `V` vocabulary.

Source: DDTree, arXiv 2604.12989.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

# Ancestors are bits of an int64.
MAX_NODES = 64
# What every level of a path costs beside its probability, so that no child ranks with its parent where the draft is
# sure of it; and the least log-probability that counts, below which float32 would lose that difference.
LEVEL, LEAST = 1e-4, -20.0
# How likely a text goes on as it did before, by how many of its last tokens are the same, and then token by token. A
# little less than in SmolLM2's answers to GSM8K and MT-Bench (docs/log.md), which repeat themselves.
FOLLOWS, GOES_ON = (0.0, 0.2, 0.5, 0.6, 0.8), (0.0, 0.6, 0.7, 0.75, 0.9)
MAX_MATCHING = len(FOLLOWS) - 1
# How much it counts against such a text that the draft is sure of another token: the exponent of what it leaves open.
DOUBT = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A tree of proposals, on the target's device.

    Args:
        parents (`torch.Tensor` of shape `[B, N]`, int64): The node that each one follows; the anchor's is itself.
        depths (`torch.Tensor` of shape `[B, N]`, int64): Tokens between the anchor and each node, its own included:
            its position is the anchor's plus that.
        ancestors (`torch.Tensor` of shape `[B, N]`, int64): Bit `i` says that node `i` is on the path from the anchor
            to this one, both included.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor

    def on(self, device: torch.device) -> DraftTree:
        """Returns the tree on another device."""
        return DraftTree(self.parents.to(device), self.depths.to(device), self.ancestors.to(device))

    def follow(self, block_BN: Tensor, tokens_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the path that the target goes: from the anchor on, always the child that it says. No host sync.

        Args:
            block_BN (`torch.Tensor` of shape `[B, N]`, int64): The nodes' tokens; siblings differ.
            tokens_BN (`torch.Tensor` of shape `[B, N]`, int64): What the target says after each node.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: The path `[B, N]`, the node at each depth and 0 behind its end; and
            how many nodes beside the anchor it has `[B]`.
        """
        return self.path_of(self._standing(block_BN == tokens_BN.gather(1, self.parents)))

    def path_of(self, stands_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the nodes that stand `[B, N]` into the order of their depths; returns as [`follow`]."""
        nodes = torch.arange(stands_BN.shape[1], device=stands_BN.device)
        # Nodes that do not stand all say that the anchor is at depth 0.
        depths = self.depths * stands_BN
        path = torch.zeros_like(depths).scatter_(1, depths, nodes * stands_BN)
        return path, depths.amax(dim=1)

    def ranks(self) -> Tensor:
        """Counts the siblings that stand before each node: `[B, N]`, int64."""
        nodes = torch.arange(self.parents.shape[1], device=self.parents.device)
        is_sibling = self.parents[:, :, None] == self.parents[:, None]
        # The anchor is its own parent, and no child.
        return (is_sibling & (nodes < nodes[:, None]) & (nodes > 0)).sum(dim=-1)

    def agree(self, block_BN: Tensor, text_BD: Tensor) -> Tensor:
        """Counts how far a text `[B, D]` behind the anchor goes along the tree: `[B]`."""
        stands = self._standing(block_BN == text_BD.gather(1, (self.depths - 1).clamp_min(0)))
        return (self.depths * stands).amax(dim=1)

    def _standing(self, matches_BN: Tensor) -> Tensor:
        """Which nodes match with all their ancestors, as the anchor does."""
        nodes = torch.arange(matches_BN.shape[1], device=matches_BN.device)
        matched = ((matches_BN | (nodes == 0)).to(torch.long) << nodes).sum(dim=1, keepdim=True)
        return (self.ancestors & ~matched) == 0

    def child(self, block_BN: Tensor, node_B: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the child of a node that has a token: its index `[B]`, 0 where there is none, and whether there is."""
        nodes = torch.arange(block_BN.shape[1], device=block_BN.device)
        is_child = (self.parents == node_B[:, None]) & (block_BN == tokens_B[:, None]) & (nodes > 0)
        return (is_child * nodes).amax(dim=1), is_child.any(dim=1)


def along(path_BN: Tensor, values: Tensor) -> Tensor:
    """Returns values of nodes `[B, N, ...]` in the order of a path `[B, n]`: `[B, n, ...]`."""
    index = path_BN.view(*path_BN.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


@functools.cache
def _candidates(num_nodes: int, depth: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Every path, as the rank of its token at each level, that can be among the best `num_nodes - 1`.

    One path is never below another one if it is shorter or ranks higher at some levels and nowhere lower or longer. So
    a path of ranks `r_1 ... r_d` has `(r_1 + 1) + (r_1 + 1)(r_2 + 1) + ...` paths at least as likely, itself included:
    where these are too many it has no place. Parents stand before their children.
    """
    found: list[tuple[int, ...]] = []
    level: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]
    for _ in range(depth):
        longer = [
            ((*path, rank), paths * (rank + 1), total + paths * (rank + 1))
            for path, paths, total in level
            for rank in range(min(num_ranks, (num_nodes - 1 - total) // paths))
        ]
        found += [path for path, _, _ in longer]
        level = longer
    return found


@functools.lru_cache(maxsize=16)
def tree_table(num_nodes: int, depth: int, vocab_size: int, device: torch.device) -> TreeTable:
    """Returns the same [`TreeTable`] for the same arguments: a large one takes milliseconds to make."""
    return TreeTable(num_nodes, depth, vocab_size, device)


def along_last(values_BCD: Tensor, index_C: Tensor) -> Tensor:
    """Returns `values[b, c, index[c]]`, `[B, C]`."""
    return values_BCD.gather(2, index_C[:, None].expand(len(values_BCD), -1, 1))[..., 0]


def _at_level(log_probs: Tensor) -> Tensor:
    """What a level of a path costs."""
    return log_probs.clamp_min(LEAST) - LEVEL


class TreeTable:
    """The paths among which a best-first tree chooses, the same at every step, as tensors of their device.

    The best `num_nodes - 1` of the `C` paths are found by a gather, a sum and a `topk`, however many levels there are.

    Args:
        num_nodes (`int`): Nodes, the anchor included, from 2 to `MAX_NODES`.
        depth (`int`): `D`.
        vocab_size (`int`): Tokens that the draft chooses among.
        device (`torch.device`): Where trees are built.

    Raises:
        ValueError: If there are not so many paths.
    """

    # Whether a run whose `num_tree_nodes` is left out verifies trees where it may. Tests see to it that it verifies
    # chains: what they look at is said of those.
    by_default: ClassVar[bool] = True

    def __init__(self, num_nodes: int, depth: int, vocab_size: int, device: torch.device) -> None:
        paths = _candidates(num_nodes, depth, vocab_size)
        if len(paths) < num_nodes - 1:
            raise ValueError(
                f"expected num_tree_nodes of at most {len(paths) + 1} (a draft that chooses among {vocab_size} tokens "
                f"at {depth} positions), got {num_nodes}; lower it"
            )
        self.num_nodes, self.num_ranks = num_nodes, max(path[-1] for path in paths) + 1
        # A continuation may have one more at each depth; what is beyond all of them is the anchor.
        self.num_paths = len(paths) + depth
        place, levels = {path: index for index, path in enumerate(paths)}, range(1, depth + 1)
        nothing = depth * self.num_ranks

        def tensor(values: object) -> Tensor:
            return torch.tensor(values, device="cpu").to(device)

        # The flat index of each level's token among `[D, R]`, one beyond them behind a path's end.
        self.choices = tensor(
            [
                [(level - 1) * self.num_ranks + path[level - 1] if level <= len(path) else nothing for level in levels]
                for path in paths
            ]
        )
        # The path itself and those that it begins with, level by level; the anchor behind its end.
        self.prefixes = tensor(
            [[place[path[:end]] if end <= len(path) else self.num_paths for end in levels] for path in paths]
        )
        self.depths = tensor([len(path) for path in paths])
        # The draft's first choices alone, as far as they can be in the tree.
        self.first_choices = tensor([place[(0,) * level] for level in levels if (0,) * level in place])
        self.follows = tensor((FOLLOWS, GOES_ON))
        self.powers = tensor([1 << index if index < 63 else -(1 << 63) for index in range(num_nodes)])

    def build(
        self, scores_BDV: Tensor, nodes: Tensor, block_BN: Tensor, continuation: Continuation | None = None
    ) -> None:
        """Builds the best tree of each row. No host sync.

        Args:
            scores_BDV (`torch.Tensor` of shape `[B, D, V]`): Log-probabilities of the next tokens, up to a constant a
                position.
            nodes (`torch.Tensor` of shape `[3, B, num_nodes]`, int64): Gets parents, depths and ancestors.
            block_BN (`torch.Tensor` of shape `[B, num_nodes]`, int64): Gets the proposals, behind the anchor.
            continuation (`Continuation`, *optional*): Another path that is to be considered.
        """
        best, ids = scores_BDV.topk(self.num_ranks, dim=-1)
        norm = torch.logsumexp(scores_BDV.to(torch.float32), dim=-1, keepdim=True)
        costs = _at_level(best.to(torch.float32) - norm)
        chosen = self.choices.flatten()
        shape = (len(costs), *self.choices.shape)
        totals = nn.functional.pad(costs.flatten(1), (0, 1)).index_select(1, chosen).view(shape).sum(dim=-1)
        tokens = nn.functional.pad(ids.flatten(1), (0, 1), value=-1).index_select(1, chosen).view(shape)
        self._select(totals, tokens, nodes, block_BN, continuation)

    def build_behind(
        self,
        candidates_BDC: Tensor,
        scores_BDCC: Tensor,
        nodes: Tensor,
        block_BN: Tensor,
        continuation: Continuation | None = None,
    ) -> None:
        """Builds a tree of each row where what is likely depends on the token before, as in DFlash 2. No host sync.

        The best of the paths that could be the best if it did not: a path's ranks are those behind its own tokens.

        Args:
            candidates_BDC (`torch.Tensor` of shape `[B, D, C]`, int64): Tokens that each position chooses among.
            scores_BDCC (`torch.Tensor` of shape `[B, D, C, C]`): As a [`CandidateSelector`] returns them.
            nodes, block_BN, continuation: As in [`build`].
        """
        num = candidates_BDC.shape[-1]
        values, order = torch.log_softmax(scores_BDCC.to(torch.float32), dim=-1).sort(dim=-1, descending=True)
        values = _at_level(values)
        at = candidates_BDC.new_zeros(len(values), len(self.depths))
        totals, tokens = values.new_zeros(at.shape), list[Tensor]()
        for level in range(values.shape[1]):
            is_longer = self.depths > level
            pair = at * num + torch.where(is_longer, self.choices[:, level] - level * self.num_ranks, 0)
            totals = totals + values[:, level].flatten(1).gather(1, pair) * is_longer
            at = torch.where(is_longer, order[:, level].flatten(1).gather(1, pair), at)
            tokens.append(torch.where(is_longer, candidates_BDC[:, level].gather(1, at), -1))
        self._select(totals, torch.stack(tokens, dim=-1), nodes, block_BN, continuation)

    def _select(
        self,
        totals_BC: Tensor,
        tokens_BCD: Tensor,
        nodes: Tensor,
        block_BN: Tensor,
        continuation: Continuation | None,
    ) -> None:
        """Makes a tree of the best paths, whose tokens are given, -1 behind their ends."""
        batch, num = totals_BC.shape[0], self.num_nodes - 1
        root = self.num_paths
        prefixes, last = self.prefixes.expand(batch, -1, -1), along_last(tokens_BCD, self.depths - 1)
        depths = self.depths.expand(batch, -1)
        if continuation is not None:
            totals_BC, more, its_depths = self._with_continuation(totals_BC, tokens_BCD, continuation)
            prefixes, last = torch.cat([prefixes, more], dim=1), torch.cat([last, continuation.tokens], dim=1)
            depths = torch.cat([depths, its_depths.expand(batch, -1)], dim=1)
        chosen = totals_BC.topk(num, dim=1).indices
        # Where in the tree each path stands; the anchor is what is beyond all paths.
        place = totals_BC.new_zeros(batch, root + 1, dtype=torch.long)
        order = torch.arange(1, num + 1, device=chosen.device).expand(batch, -1)
        place.scatter_(1, chosen, order)
        depths, prefixes = depths.gather(1, chosen), along(chosen, prefixes)
        on_path = place.gather(1, prefixes.flatten(1)).view_as(prefixes)
        parents = on_path.gather(2, (depths - 2).clamp_min(0)[..., None])[..., 0]
        nodes[0].zero_()[:, 1:] = parents * (depths > 1)
        nodes[1].zero_()[:, 1:] = depths
        nodes[2].fill_(1)[:, 1:] = (self.powers[on_path] * (prefixes < root)).sum(dim=-1) + 1
        block_BN[:, 1:] = last.gather(1, chosen)

    def _with_continuation(
        self, totals_BC: Tensor, tokens_BCD: Tensor, continuation: Continuation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Puts a continuation's paths behind the others: totals `[B, C + D]`, and their prefixes and depths.

        A path that the draft has too is that of the draft, as likely as the one that thinks more of it. The others
        hang on the last one that it has.
        """
        batch, num, depth = tokens_BCD.shape
        wanted, levels = continuation.tokens, torch.arange(1, depth + 1, device=tokens_BCD.device)
        is_same = ((tokens_BCD == wanted[:, None]) | (tokens_BCD < 0)).all(dim=-1)  # [B, C]
        # At most one path of each length is the same.
        same = (is_same[:, :, None] & (self.depths[:, None] == levels)).to(torch.long)  # [B, C, D]
        has_same, index = same.amax(dim=1).bool(), same.argmax(dim=1)
        scores = continuation.scores.to(totals_BC.dtype) + DOUBT * self._doubt(totals_BC, tokens_BCD, wanted)
        raised = torch.where(is_same, scores.gather(1, (self.depths - 1).expand(batch, -1)), -torch.inf)
        own = scores.masked_fill(has_same, -torch.inf)
        path = torch.where(has_same, index, num + levels - 1)
        prefixes = torch.where(levels <= levels[:, None], path[:, None], self.num_paths)
        return torch.cat([torch.maximum(totals_BC, raised), own], dim=1), prefixes, levels

    def _doubt(self, totals_BC: Tensor, tokens_BCD: Tensor, wanted_BD: Tensor) -> Tensor:
        """How likely the draft's first choice is wrong where a continuation first leaves it: log, `[B, D]`."""
        num, missing = len(self.first_choices), wanted_BD.shape[1] - len(self.first_choices)
        totals = totals_BC.index_select(1, self.first_choices)
        log_probs = totals - nn.functional.pad(totals, (1, -1))
        longest = tokens_BCD.index_select(1, self.first_choices[-1:])[:, 0, :num]
        differs = wanted_BD[:, :num] != longest
        leaves = differs & (differs.cumsum(dim=1) == 1)
        doubt = torch.where(leaves, torch.log1p(-log_probs.exp()), 0.0).cumsum(dim=1)
        return nn.functional.pad(doubt[:, None], (0, missing), mode="replicate")[:, 0] if missing else doubt


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """What followed the last tokens of each row when they stood in it before.

    Args:
        tokens (`torch.Tensor` of shape `[B, D]`, int64): The tokens.
        scores (`torch.Tensor` of shape `[B, D]`): Log-probability that the text goes on like that up to each of them,
            falling; `-inf` where there is nothing.
    """

    tokens: Tensor
    scores: Tensor

    @classmethod
    def of(cls, ids_BT: Tensor, cursor_B: Tensor, depth: int, follows: Tensor) -> Continuation:
        """Finds it: behind the latest of those places that share the most last tokens with the end. No host sync.

        Args:
            ids_BT (`torch.Tensor` of shape `[B, T]`, int64): The rows' tokens.
            cursor_B (`torch.Tensor` of shape `[B]`, int64): The column behind each row's last token.
            depth (`int`): Tokens that are wanted.
            follows (`torch.Tensor` of shape `[2, n + 1]`): How likely the text goes on as it did before, with one
                token and with each further one, by how many of its last tokens are the same; `n` are compared at most.
        """
        columns, last = torch.arange(ids_BT.shape[1], device=ids_BT.device), cursor_B[:, None] - 1
        num_same = torch.zeros_like(ids_BT)
        goes_on = columns < last  # what is compared ends before the row's last token
        for back in range(min(follows.shape[1] - 1, ids_BT.shape[1])):
            ending = ids_BT.gather(1, (last - back).clamp_min(0))
            earlier = nn.functional.pad(ids_BT, (back, 0), value=-1)[:, : ids_BT.shape[1]]
            goes_on = goes_on & (earlier == ending) & (last >= back)
            num_same = num_same + goes_on
        # The latest of the longest: a later column counts for less than one more token.
        best = (num_same * ids_BT.shape[1] + columns).masked_fill(num_same == 0, -1).argmax(dim=1, keepdim=True)
        where = best + 1 + torch.arange(depth, device=ids_BT.device)
        share, further = follows[:, num_same.gather(1, best)]
        levels = torch.arange(1, depth + 1, device=ids_BT.device)
        scores = torch.log(share) + torch.log(further) * (levels - 1) - LEVEL * levels
        scores = scores.masked_fill((where > last) | (share == 0), -torch.inf)
        return cls(ids_BT.gather(1, where.clamp_max(ids_BT.shape[1] - 1)), scores)


__all__ = ["MAX_MATCHING", "MAX_NODES", "Continuation", "DraftTree", "TreeTable", "along", "tree_table"]
