"""This module counts which proposals of a chain and which nodes of a tree the verifies of a run have accepted.

Old counts lose weight with each step, because a text changes its nature. The counts give probabilities of acceptance.
These probabilities give the number of tokens that a verify of each width is expected to commit.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

# The counts of a step have half their weight after 14 further steps with a draft, because a text changes its nature
# within a few sentences. The weight falls per step and not per row. So rows that run together count as many steps of
# one text.
FORGETTING = 0.95
# The share that is assumed before the first step. A block of 16 that commits 4.5 tokens on average accepts 0.8 of the
# proposals that it reaches.
PRIOR_SHARE = 0.8
PRIOR_WEIGHT = 2.0

# Neighbouring nodes of a tree with a common share: how often they were accepted and tried, and the number of nodes.
_Run = tuple[float, float, int]


class ChainCounts:
    """Holds, for each proposal of a chain, the weighted numbers of verifies that tried it and that accepted it.

    Args:
        num_tokens (`int`): The number of tokens in the longest chain, the anchor included.
    """

    def __init__(self, num_tokens: int) -> None:
        self.tried = [0.0] * (num_tokens - 1)
        self.accepted = [0.0] * (num_tokens - 1)

    def add(self, chains: Sequence[tuple[int, int]]) -> None:
        """Counts a step. `chains` holds, for each row, the numbers of accepted and of tried proposals of the chain."""
        for index in range(len(self.tried)):
            tried = 0
            accepted = 0
            for num_accepted, num_tried in chains:
                # The last proposal that was tried is the rejected one, unless all proposals were accepted.
                tried += index < num_tried
                accepted += index < num_accepted
            self.tried[index] = FORGETTING * self.tried[index] + tried
            self.accepted[index] = FORGETTING * self.accepted[index] + accepted

    def shares(self, optimism: float = 0.0) -> list[float]:
        """Returns, for each proposal, the share that is accepted if all proposals before it are accepted.

        If a proposal was rarely tried lately, its share is close to the share of all proposals together. So a wider
        verify is tried again after some time. Each proposal counts as accepted `optimism` times more than it was.
        """
        # Before the first step only the prior counts. Each count then moves the share towards the observed one.
        pooled = (sum(self.accepted) + PRIOR_WEIGHT * PRIOR_SHARE) / (
            sum(self.tried) + PRIOR_WEIGHT
        )
        shares: list[float] = []
        for accepted, tried in zip(self.accepted, self.tried, strict=True):
            likely = accepted + PRIOR_WEIGHT * pooled + optimism
            shares.append(likely / (tried + PRIOR_WEIGHT + optimism))
        return shares


class NodeCounts:
    """Holds, for each node of a tree, the weighted numbers of verifies that tried it and that accepted it.

    Args:
        num_tokens (`int`): The number of nodes in the largest tree, the anchor included.
    """

    def __init__(self, num_tokens: int) -> None:
        self.tried = [0.0] * (num_tokens - 1)
        self.accepted = [0.0] * (num_tokens - 1)

    def add(self, width: int, nodes: Sequence[Sequence[int]]) -> None:
        """Counts a step that verified a tree of `width` nodes. `nodes` holds the accepted nodes of each row."""
        for index in range(len(self.tried)):
            # Node 0 is the anchor, which is not a proposal.
            node = index + 1
            tried = len(nodes) if node < width else 0
            accepted = 0
            for path in nodes:
                accepted += node in path
            self.tried[index] = FORGETTING * self.tried[index] + tried
            self.accepted[index] = FORGETTING * self.accepted[index] + accepted

    def shares(self, optimism: float = 0.0) -> list[float]:
        """Returns the share of verifies that accept each node, divided by the share of the node before it.

        With these ratios, the result of [`expected_tokens`] is the mean number of accepted nodes plus the bonus token.
        A node counts as accepted up to `optimism` times more than it was.
        """
        runs: list[_Run] = []
        before = 1.0
        for index, (accepted, tried) in enumerate(zip(self.accepted, self.tried, strict=True)):
            # The share that is expected of a node that was not tried lately. Far back it falls as 1 / index.
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
    """Appends the counts of one more node, and returns the share of verifies that accepted it.

    Nodes with higher numbers are accepted less often. So shares must fall from run to run: a node with a higher share
    than the run before it is merged with this run.
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
    """Returns, for each width, the mean number of tokens that a verify commits per row, the bonus token included.

    `conditional_acceptance` holds the probability that each proposal is accepted if all proposals before it are.
    """
    # The probability that each token is committed. It is 1 for the first token, because each verify commits one.
    reached = itertools.accumulate((1.0, *conditional_acceptance), operator.mul)
    totals = itertools.accumulate(reached)
    return dict(enumerate(totals, 1))


def along_chain(parents: Sequence[int], path: Sequence[int]) -> tuple[int, int]:
    """Compares the accepted path of a tree with the draft's most likely chain, which takes each node's first child.

    Args:
        parents (sequence of `int`): The parent of each node. The anchor is its own parent.
        path (sequence of `int`): The accepted node at each depth. It is 0 after the end of the path.

    Returns:
        `tuple[int, int]`: How many proposals of the chain were accepted, and how many were tried. One more was tried
        than accepted if the target left the chain. The numbers are equal if the chain ended in the tree.
    """
    node = 0
    num = 0
    # Nodes are sorted by likelihood, and after their parents. So the first child of a node is its most likely one.
    for child in range(1, len(parents)):
        if parents[child] != node:
            continue
        if num + 1 == len(path) or path[num + 1] != child:
            return num, num + 1
        node = child
        num += 1
    return num, num
