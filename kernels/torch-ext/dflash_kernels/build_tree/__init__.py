"""This operation builds the tree of a block's most likely paths and of repetitions in the text, in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import heapq
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..ancestors import MAX_NODES, WORD_BITS, num_words, word_with
from ..operation import Given, Sizes, check_dtype, operation

# Number of rows of `nodes_XBN` before the words of ancestors.
NODE_PARTS = 3
# LEVEL is the cost of every level of a path in addition to its probability, so that a child never has the total of its
# parent, even if the draft is sure of the child. LEAST is the least log-probability that counts. Below it, float32
# would lose the difference that LEVEL makes.
LEVEL, LEAST = 1e-4, -20.0
# DOUBT weakens a repetition where the draft is sure of another token. It is the exponent of the probability that the
# draft's first choice leaves for other tokens.
DOUBT = 0.5
INTEGERS = ("order_BDSR", "nodes_XBN", "block_BN", "candidates_BDC", "ids_BT", "cursor_B")


def num_paths(depth: int, num_ranks: int) -> int:
    """Returns the number of paths of one to `depth` tokens if each token is one of `num_ranks`."""
    return sum(num_ranks**length for length in range(1, depth + 1))


def _check(given: Given, size: Sizes) -> None:
    check_dtype(given, (torch.int64,), *INTEGERS)
    check_dtype(given, (torch.float32,), "log_probs_BDSR", "follows_FM")
    for name in ("log_probs_BDSR", "order_BDSR", "candidates_BDC"):
        if given[name] is not None and not given[name].is_contiguous():
            raise ValueError(
                f"expected {name} to be contiguous, got strides {given[name].stride()}; copy it"
            )
    for name in ("nodes_XBN", "block_BN", "ids_BT", "follows_FM"):
        if given[name] is not None and given[name].stride(-1) != 1:
            strides = given[name].stride()
            raise ValueError(
                f"expected {name} with unit stride in its last dimension, got {strides}; copy it"
            )
    num_parts = NODE_PARTS + num_words(size["N"])
    most = min(MAX_NODES, num_paths(size["D"], size["R"]) + 1)
    if size["X"] != num_parts or not 2 <= size["N"] <= most:
        raise ValueError(
            f"expected nodes_XBN [{num_parts}, B, N] with N from 2 to {MAX_NODES} and to one more than there are "
            f"paths of {size['R']} ranks over {size['D']} levels, got {list(given['nodes_XBN'].shape)}; "
            "pass fewer nodes"
        )
    if size["S"] != size.get("C", 1):
        raise ValueError(
            f"expected a state per candidate, or one without any, got {size['S']} of them; pass candidates_BDC of both"
        )
    is_given = [name for name in ("ids_BT", "cursor_B", "follows_FM") if given[name] is not None]
    if 0 < len(is_given) < 3:
        raise ValueError(
            f"expected ids_BT, cursor_B and follows_FM, got {' and '.join(is_given)}; pass all or none"
        )


@operation(check=_check, mutates=("nodes_XBN", "block_BN"))
def build_tree(
    log_probs_BDSR: Tensor,
    order_BDSR: Tensor,
    nodes_XBN: Tensor,
    block_BN: Tensor,
    candidates_BDC: Tensor | None = None,
    ids_BT: Tensor | None = None,
    cursor_B: Tensor | None = None,
    follows_FM: Tensor | None = None,
) -> None:
    """Builds the tree of each row's `N - 1` most likely paths after the anchor, in place.

    The kernel has no host sync. The definition reads on the host.

    A path consists of a rank at each of its levels. With `cost = max(log_prob, -20) - 1e-4` per level, its total is

        total(r_1 ... r_d) = cost[0, 0, r_1] + cost[1, order[0, 0, r_1], r_2] + ...

    where the state of a level is the candidate before it, or always 0 without candidates. The number of paths, itself
    included, that are no longer than a path and whose ranks are nowhere greater is

        (r_1 + 1) + (r_1 + 1)(r_2 + 1) + ...

    A path is considered only if this number is at most `N - 1`. Without candidates this makes no difference, because
    those other paths are at least as likely.

    The tokens that followed earlier occurrences of a row's last tokens form a path too, as long as possible. Among the
    columns that share the most last tokens with the end of the text, `m` of them, the latest counts. The first `k`
    tokens of this path have the total `follows[0, m] + follows[1, m] (k - 1) - 1e-4 k`. If the same path by ranks is
    considered and has a greater total, that total counts. From the token on at which this path leaves the path of
    first ranks (while the latter is no longer than `N - 1`), `log(1 - exp(cost)) / 2` is added, where `cost` is the
    cost of the path of first ranks at this level.

    Nodes are sorted by their totals, the greatest first. Nodes with equal totals may be in any order. Node 0 is the
    anchor.

    Args:
        log_probs_BDSR (`torch.Tensor` of shape `[B, D, S, R]`, float32): The greatest log-probabilities at each
            position and in each state, in falling order.
        order_BDSR (`torch.Tensor` of shape `[B, D, S, R]`, int64): To which choice each of them belongs: the index of
            a candidate or, without candidates, a token.
        nodes_XBN (`torch.Tensor` of shape `[3 + A, B, N]`, int64): Receives parents, sources, depths and ancestors of
            the nodes. [`num_words`] gives the number `A` of words of ancestors; see `ancestors.py`. The anchor is its
            own parent. The source is 1 if the repetition has the greater total, else 0.
        block_BN (`torch.Tensor` of shape `[B, N]`, int64): Receives the nodes' tokens. The anchor's token stays.
        candidates_BDC (`torch.Tensor` of shape `[B, D, C]`, int64, *optional*): Tokens, with `C = S`, if the
            probabilities depend on the token before.
        ids_BT (`torch.Tensor` of shape `[B, T]`, int64, *optional*): The texts of the rows.
        cursor_B (`torch.Tensor` of shape `[B]`, int64, *optional*): The column after each row's last token.
        follows_FM (`torch.Tensor` of shape `[2, M + 1]`, float32, *optional*): Log-probability that a text repeats
            itself for one token, and for each further token, by the number of its last tokens that are the same. `M`
            tokens are compared.

    Raises:
        ValueError: If shapes, dtypes or strides are not as described, or there are fewer paths than nodes.
    """
    log_probs, order = log_probs_BDSR.tolist(), order_BDSR.tolist()
    candidates = None if candidates_BDC is None else candidates_BDC.tolist()
    likely = [] if follows_FM is None else follows_FM.T.tolist()
    trees = list[Tree]()
    for row in range(len(log_probs)):
        draft = Draft(log_probs[row], order[row], None if candidates is None else candidates[row])
        text, totals = list[int](), list[float]()
        if ids_BT is not None and cursor_B is not None:
            text, num_same = continuation(
                ids_BT[row, : int(cursor_B[row])], len(draft.order), len(likely) - 1
            )
            totals = draft.totals_of(text, *likely[num_same])
        trees.append(draft.grow(text, totals, block_BN.shape[1]))
    parts = [[tree.parents, tree.sources, tree.depths, *tree.ancestors] for tree in trees]
    nodes_XBN.copy_(torch.tensor(parts, device="cpu").transpose(0, 1))
    block_BN[:, 1:] = torch.tensor([tree.tokens[1:] for tree in trees], device="cpu")


class Tree(NamedTuple):
    """An instance holds the nodes of one row's tree in the form in which they are written.

    Ancestors are stored by words.
    """

    parents: list[int]
    sources: list[int]
    depths: list[int]
    ancestors: list[list[int]]
    tokens: list[int]

    @classmethod
    def of_anchor(cls, num_nodes: int) -> "Tree":
        """Returns a tree that has only the anchor so far, with room for `num_nodes` nodes.

        The anchor is its own ancestor.
        """
        ancestors = [[0] for _ in range(num_words(num_nodes))]
        ancestors[0][0] = word_with(0)
        return cls([0], [0], [0], ancestors, [0])

    def place(self, parent: int, token: int, source: int) -> int:
        """Adds a child to a node and returns its index."""
        node = len(self.parents)
        self.parents.append(parent)
        self.sources.append(source)
        self.depths.append(self.depths[parent] + 1)
        for words in self.ancestors:
            words.append(words[parent])
        self.ancestors[node // WORD_BITS][node] |= word_with(node % WORD_BITS)
        self.tokens.append(token)
        return node


class Draft(NamedTuple):
    """An instance holds a draft's scores of one row as nested lists.

    Their shapes are `[D][S][R]`, `[D][S][R]` and `[D][C]`; see [`build_tree`].
    """

    log_probs: list[list[list[float]]]
    order: list[list[list[int]]]
    candidates: list[list[int]] | None

    def choice(self, level: int, state: int, rank: int) -> tuple[int, int]:
        """Returns the token of a rank, and the state after this token."""
        chosen = self.order[level][state][rank]
        return (chosen, 0) if self.candidates is None else (self.candidates[level][chosen], chosen)

    def cost(self, level: int, state: int, rank: int) -> float:
        """Returns the amount that a rank adds to a path's total."""
        return max(self.log_probs[level][state][rank], LEAST) - LEVEL

    def totals_of(self, text: list[int], first: float, further: float) -> list[float]:
        """Returns the total up to each token of a continuation.

        `first` and `further` are its tokens' log-probabilities.
        """
        totals, state, doubt, agrees = list[float](), 0, 0.0, True
        for level, said in enumerate(text):
            token, behind = self.choice(level, state, 0)
            if agrees and token != said:
                agrees, doubt = False, DOUBT * math.log1p(-math.exp(self.cost(level, state, 0)))
            totals.append(first + further * level - LEVEL * (level + 1) + doubt)
            state = behind
        return totals

    def grow(self, text: list[int], its_totals: list[float], num: int) -> Tree:
        """Returns the tree of `num` nodes, by best-first search.

        Every node that the search by ranks has reached offers its best child that it has not reached. The best offer
        becomes the next node. There are two exceptions: the next token of the continuation may have a greater total,
        or the continuation may have added this node already.

        Args:
            text (`list[int]`): The continuation.
            its_totals (`list[float]`): The total up to each token of the continuation.
            num (`int`): Number of nodes, the anchor included.
        """
        tree, on_text = Tree.of_anchor(num), [0]
        num_levels, num_ranks = len(self.order), len(self.order[0][0])
        # For each node that offers a child: its total, the state of its children, and the number of paths whose ranks
        # are nowhere greater, first those of its length and then those of any shorter or equal length.
        reached = {0: (0.0, 0, 1, 0)}
        offers = [(-self.cost(0, 0, 0), 0, 0)]  # minus the child's total, parent, rank
        while len(tree.parents) < num:
            reach = len(on_text) - 1
            if reach < len(text) and its_totals[reach] > -offers[0][0]:
                on_text.append(tree.place(on_text[reach], text[reach], 1))
                continue
            negative, parent, rank = heapq.heappop(offers)
            total, state, alike, before = reached[parent]
            level = tree.depths[parent]
            token, behind = self.choice(level, state, rank)
            continues = (
                level < len(text)
                and on_text[level : level + 1] == [parent]
                and token == text[level]
            )
            node = (
                on_text[level + 1] if continues and level < reach else tree.place(parent, token, 0)
            )
            if continues and level == reach:
                on_text.append(node)
            if rank + 1 < num_ranks and before + alike * (rank + 2) < num:
                heapq.heappush(
                    offers, (-total - self.cost(level, state, rank + 1), parent, rank + 1)
                )
            its_alike = alike * (rank + 1)
            its_before = before + its_alike
            reached[node] = (-negative, behind, its_alike, its_before)
            if level + 1 < num_levels and its_before + its_alike < num:
                heapq.heappush(offers, (negative - self.cost(level + 1, behind, 0), node, 0))
        return tree


def continuation(ids_T: Tensor, depth: int, most: int) -> tuple[list[int], int]:
    """Finds the tokens after the latest column that shares the most last tokens with the end of a text.

    Args:
        ids_T (`torch.Tensor` of shape `[T]`, int64): The text.
        depth (`int`): Number of wanted tokens. There are fewer if the text ends before.
        most (`int`): Number of tokens that are compared at most.

    Returns:
        `tuple[list[int], int]`: The tokens, and the number of last tokens that are shared. Without any, an empty list
        and 0.
    """
    text = ids_T.cpu().numpy()
    latest, num_same = len(text), 0
    columns = (text[:-1] == text[-1:]).nonzero()[0]
    while len(columns) and num_same < most:
        latest, num_same = int(columns[-1]) + 1, num_same + 1
        columns = columns[columns >= num_same]
        columns = columns[text[columns - num_same] == text[-1 - num_same]]
    return text[latest : latest + depth].tolist(), num_same


__all__ = ["NODE_PARTS", "build_tree", "continuation", "num_paths"]
