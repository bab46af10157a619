"""Counts of the proposals that verifies have accepted, from which `widths.py` expects what the next one will."""

from __future__ import annotations

from collections.abc import Sequence

# A step's counts weigh half after 14 further ones with a draft: a text changes its nature within a few sentences.
FORGETTING = 0.95
# Shares before anything was seen: a block of 16 that commits 4.5 tokens on average accepts 0.8 of those it reaches.
PRIOR_SHARE = 0.8
PRIOR_WEIGHT = 2.0


class AcceptanceCounts:
    """Numbers of verifies that tried each proposal, and that accepted it, exponentially forgotten."""

    def __init__(self, num: int) -> None:
        self.tried = [0.0] * num
        self.accepted = [0.0] * num

    def add(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts a step: of each proposal, in how many rows it was tried and accepted."""
        # Forgotten by steps and not by rows, so that rows that run together count as one text's many steps.
        self.tried = [
            FORGETTING * before + num for before, num in zip(self.tried, tried, strict=True)
        ]
        self.accepted = [
            FORGETTING * before + num for before, num in zip(self.accepted, accepted, strict=True)
        ]

    def add_chains(self, chains: Sequence[tuple[int, int]]) -> None:
        """Counts, per row, how many proposals of a chain were accepted and how many tried."""
        tried = [0] * len(self.tried)
        accepted = [0] * len(self.tried)
        for num_accepted, num_tried in chains:
            for index in range(num_tried):
                # The last one tried is the one that was refused, unless all were accepted.
                tried[index] += 1
                accepted[index] += index < num_accepted
        self.add(tried, accepted)

    def shares(self, optimism: float = 0.0) -> list[float]:
        """Returns the share of each proposal of a chain that is accepted where all before it are.

        The less a position was tried lately, the nearer to the share of all positions together, so that a wider
        verify is tried again in time.
        """
        # The prior alone decides before a first step; each count behind it moves the share towards what was seen.
        pooled = (sum(self.accepted) + PRIOR_WEIGHT * PRIOR_SHARE) / (
            sum(self.tried) + PRIOR_WEIGHT
        )
        return [
            (accepted + PRIOR_WEIGHT * pooled + optimism) / (tried + PRIOR_WEIGHT + optimism)
            for accepted, tried in zip(self.accepted, self.tried, strict=True)
        ]
