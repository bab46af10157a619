"""What verifies have accepted: of the proposals of a chain, and of the nodes of a tree.

A count is forgotten step by step, because a text changes its nature. Out of the counts come probabilities, and out of
these the tokens that a verify of each width is expected to commit.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

# A step's counts weigh half after 14 further ones with a draft: a text changes its nature within a few sentences.
# Forgotten by steps and not by rows, so that rows that run together count as one text's many steps.
FORGETTING = 0.95
# Shares before anything was seen: a block of 16 that commits 4.5 tokens on average accepts 0.8 of those it reaches.
PRIOR_SHARE = 0.8
PRIOR_WEIGHT = 2.0

# Neighbouring nodes of a tree with one share: accepted, tried, and how many nodes they are.
_Run = tuple[float, float, int]


class ChainCounts:
    """Numbers of verifies that tried each proposal of a chain, and that accepted it.

    Args:
        num_tokens (`int`): Tokens of the longest chain, the anchor included.
    """

    def __init__(self, num_tokens: int) -> None:
        self.tried = [0.0] * (num_tokens - 1)
        self.accepted = [0.0] * (num_tokens - 1)

    def add(self, chains: Sequence[tuple[int, int]]) -> None:
        """Counts a step: in each row, how many proposals of the chain were accepted and how many tried."""
        for index in range(len(self.tried)):
            tried = 0
            accepted = 0
            for num_accepted, num_tried in chains:
                # The last one tried is the one that was refused, unless all were accepted.
                tried += index < num_tried
                accepted += index < num_accepted
            self.tried[index] = FORGETTING * self.tried[index] + tried
            self.accepted[index] = FORGETTING * self.accepted[index] + accepted

    def shares(self, optimism: float = 0.0) -> list[float]:
        """Returns the share of each proposal that is accepted where all before it are.

        The less a position was tried lately, the nearer to the share of all positions together, so that a wider
        verify is tried again in time. Each is taken to have been accepted `optimism` times more than it was.
        """
        # The prior alone decides before a first step; each count behind it moves the share towards what was seen.
        pooled = (sum(self.accepted) + PRIOR_WEIGHT * PRIOR_SHARE) / (
            sum(self.tried) + PRIOR_WEIGHT
        )
        shares: list[float] = []
        for accepted, tried in zip(self.accepted, self.tried, strict=True):
            likely = accepted + PRIOR_WEIGHT * pooled + optimism
            shares.append(likely / (tried + PRIOR_WEIGHT + optimism))
        return shares


class NodeCounts:
    """Numbers of verifies that tried each node of a tree, and that accepted it.

    Args:
        num_tokens (`int`): Tokens of the largest tree, the anchor included.
    """

    def __init__(self, num_tokens: int) -> None:
        self.tried = [0.0] * (num_tokens - 1)
        self.accepted = [0.0] * (num_tokens - 1)

    def add(self, width: int, nodes: Sequence[Sequence[int]]) -> None:
        """Counts a step that verified a tree of `width` tokens: the nodes that were accepted in each row."""
        for index in range(len(self.tried)):
            # Node 0 is the anchor, which is no proposal.
            node = index + 1
            tried = len(nodes) if node < width else 0
            accepted = 0
            for path in nodes:
                accepted += node in path
            self.tried[index] = FORGETTING * self.tried[index] + tried
            self.accepted[index] = FORGETTING * self.accepted[index] + accepted

    def shares(self, optimism: float = 0.0) -> list[float]:
        """Returns by how much less often each node is accepted than the one before.

        The sum that [`expected_tokens`] forms is then the mean number of accepted nodes. Each node is taken to have
        been accepted `optimism` times more than it was.
        """
        runs: list[_Run] = []
        before = 1.0
        for index, (accepted, tried) in enumerate(zip(self.accepted, self.tried, strict=True)):
            # Far back, a node that was not tried lately is taken to be accepted as often as its number is small.
            likely = max(PRIOR_SHARE, index / (index + 1)) * before
            likely_accepted = accepted + PRIOR_WEIGHT * likely + optimism * before
            before = append_falling(runs, likely_accepted, tried + PRIOR_WEIGHT + optimism)
        shares: list[float] = []
        before = 1.0
        for accepted, tried, num in runs:
            share = min(accepted / tried, 1.0)
            shares.append(share / before)
            shares.extend([1.0] * (num - 1))
            before = share
        return shares


def append_falling(runs: list[_Run], accepted: float, tried: float) -> float:
    """Appends the counts of one more node, and returns its share of accepted ones.

    Nodes are accepted the less often the further back they stand. So shares have to fall from run to run: counts that
    rise are averaged with those before them.
    """
    num = 1
    while runs and accepted / tried > runs[-1][0] / runs[-1][1]:
        earlier = runs.pop()
        accepted += earlier[0]
        tried += earlier[1]
        num += earlier[2]
    runs.append((accepted, tried, num))
    return accepted / tried


def expected_tokens(conditional_acceptance: Sequence[float]) -> dict[int, float]:
    """Returns the mean number of tokens that a verify of each width commits per row, its bonus token included, by the
    probability that each proposal is accepted if all before it are.
    """
    # The probabilities that each token is committed, the bonus token of a verify of width 1 for certain.
    reached = itertools.accumulate((1.0, *conditional_acceptance), operator.mul)
    totals = itertools.accumulate(reached)
    return dict(enumerate(totals, 1))


def along_chain(parents: Sequence[int], path: Sequence[int]) -> tuple[int, int]:
    """Compares the path that the target went with the chain of the likeliest, each node's first child.

    `parents` are the node that each one of a tree follows, the anchor's is itself; `path` is the node at each depth, 0
    behind its end. Returns how many proposals of the chain were accepted, and how many tried: one more where the
    target left the chain, not where the tree had no more of it.
    """
    node = 0
    num = 0
    # Nodes stand in the order of their likelihood, behind their parents: the first child comes first.
    for child in range(1, len(parents)):
        if parents[child] != node:
            continue
        if num + 1 == len(path) or path[num + 1] != child:
            return num, num + 1
        node = child
        num += 1
    return num, num
