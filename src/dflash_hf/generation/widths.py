"""How many tokens the target verifies, where that follows the run (`verify_width="auto"`).

Before each step the width is chosen whose expected number of committed tokens per second is the greatest, by the share
of verifies that accepted each proposal and by what steps of each width take. A choice that is never
left learns nothing about the others: the second best is tried now and then. The rule, and why it keeps text and
distribution, is in docs/engines.md.

Nothing here touches a tensor or waits for a device: counts come from what the host reads of a step anyhow, times from
its clock or, for captured steps, from replays before the first one.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Mapping, Sequence

# What a step has shown counts for half after 14 further ones: a text changes its nature within a few sentences.
FORGETTING = 0.95
# Before anything was seen: a block of 16 that commits 4.5 tokens on average accepts 0.8 of those it reaches.
PRIOR_SHARE = 0.8
PRIOR_WEIGHT = 2.0
# Of each width the quickest of so many steps counts: the clock also sees whatever else the machine does.
NUM_TIMES = 4
# Steps at one width before another one is tried: at first, and at most.
FIRST_HOLD, LONGEST_HOLD = 16, 128
# A narrower verify that is no cheaper than this is not worth graphs of its own.
MIN_SAVING = 0.05


def candidate_widths(widest: int) -> list[int]:
    """Returns the widths to choose among, widest first: 4, 6, 8, 12 ... below `widest`, and it.

    Few, because kernels are compiled and steps captured for each, and close enough that the best lies within a
    quarter of one.
    """
    found, power = {widest}, 4
    while power < widest:
        found |= {width for width in (power, power * 3 // 2) if width < widest}
        power *= 2
    return sorted(found, reverse=True)


def expected_tokens(conditional_acceptance: Sequence[float]) -> dict[int, float]:
    """Returns the mean number of tokens that a verify of each width commits per row, its bonus token included, by the
    probability that each proposal is accepted if all before it are.
    """
    reached = itertools.accumulate((1.0, *conditional_acceptance), operator.mul)
    return dict(enumerate(itertools.accumulate(reached), 1))


def choose_width(tokens: Mapping[int, float], costs: Mapping[int, float]) -> int:
    """Returns the width with the most expected tokens per cost of a step (above 0); of equal ones the widest."""
    return max(costs, key=lambda width: (tokens[width] / costs[width], width))


def useful_widths(costs: Mapping[int, float]) -> list[int]:
    """Returns those widths, widest first, that cost at least `MIN_SAVING` less than the next wider one of them."""
    found: list[int] = []
    for width in sorted(costs, reverse=True):
        if not found or costs[width] <= (1.0 - MIN_SAVING) * costs[found[-1]]:
            found.append(width)
    return found


def fitted_costs(known: Mapping[int, float], widths: Sequence[int]) -> dict[int, float]:
    """Returns a cost for every width: the known ones, and for the others what makes them worth a try.

    Steps lie on a line over their width, fitted to those that are known. With one of them known, half of
    the widest one's cost is taken to be the width's.
    None costs more than a wider one: a hiccup in the one time that is known of a width does not rule it out. Known
    costs are above 0, and there may be none; `widths` are widest first.
    """
    widest = widths[0]
    drafted = known or {widest: 1.0}
    middle, mean = sum(drafted) / len(drafted), sum(drafted.values()) / len(drafted)
    slope = mean / (middle + widest)
    if spread := sum((width - middle) ** 2 for width in drafted):
        slope = max(sum((width - middle) * cost for width, cost in drafted.items()) / spread, 0.0)
    costs: dict[int, float] = {}
    for width in widths:
        line = max(mean + slope * (width - middle), 1e-9)
        costs[width] = known.get(width, line)
        costs[width] = min(costs.values())
    return costs


class _Counts:
    """Of each proposal how many verifies tried it and how many accepted it, exponentially forgotten."""

    def __init__(self, num: int) -> None:
        self.tried, self.accepted = [0.0] * num, [0.0] * num

    def add_chains(self, chains: Sequence[tuple[int, int]]) -> None:
        """Counts, per row, how many proposals of a chain were accepted and how many tried."""
        tried, accepted = [0] * len(self.tried), [0] * len(self.tried)
        for num_accepted, num_tried in chains:
            for index in range(num_tried):
                tried[index] += 1
                accepted[index] += index < num_accepted
        self.tried = [FORGETTING * before + num for before, num in zip(self.tried, tried, strict=True)]
        self.accepted = [FORGETTING * before + num for before, num in zip(self.accepted, accepted, strict=True)]

    def shares(self) -> list[float]:
        """Returns the share of each proposal of a chain that is accepted where all before it are.

        The less a position was tried lately, the nearer to the share of all positions together, so that a wider
        verify is tried again in time.
        """
        pooled = (sum(self.accepted) + PRIOR_WEIGHT * PRIOR_SHARE) / (sum(self.tried) + PRIOR_WEIGHT)
        return [
            (accepted + PRIOR_WEIGHT * pooled) / (tried + PRIOR_WEIGHT)
            for accepted, tried in zip(self.accepted, self.tried, strict=True)
        ]


class WidthChooser:
    """Follows a run and says how wide its next verify is.

    Without costs from outside it times the steps themselves.
    """

    def __init__(self, widest: int) -> None:
        self.widths = candidate_widths(widest)  # of verifies, the anchor included; the widest is at least 2
        # What was chosen for the step that was launched last: a width of `widths`.
        self.current = widest
        self._measured: dict[int, float] | None = None
        # What steps of each choice took.
        self._times = dict[int, deque[float]]()
        self._clock = 0.0
        # The width that is held, for how many steps it has been, and after how many another one is tried.
        self._held = widest
        self._steps, self._hold = 0, FIRST_HOLD
        self._chains = _Counts(widest - 1)
        self._num_steps = 0

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """Gives the costs of the only widths that may be chosen from now on; the run's own times count no more."""
        self._measured = dict(costs)

    def next_width(self) -> int:
        """Returns the width of the next step, and keeps what was chosen in `current`."""
        self._steps += 1
        costs = self.costs()
        # The first verify is as wide as may be: it shows the most.
        best = choose_width(self._tokens(), costs) if self._num_steps else max(costs)
        self.current = best
        if best != self._held:
            self._held, self._steps, self._hold = best, 1, FIRST_HOLD
        elif len(costs) > 1 and self._steps > self._hold:
            others = {width: cost for width, cost in costs.items() if width != best}
            self.current = choose_width(self._tokens(), others)
            self._steps = 0
            self._hold = min(2 * self._hold, LONGEST_HOLD)
        return self.current

    def _tokens(self) -> dict[int, float]:
        """Expected tokens of a verify of each choice."""
        return expected_tokens(self.conditional_acceptance())

    def observe(
        self,
        width: int,
        accepted: Sequence[int],
        clock: float,
    ) -> None:
        """Takes in what a step of so many tokens did: the proposals accepted in each row that was running.

        `clock` is the seconds that steps have taken so far; what has been added since the last call is booked on
        `current`, the step that was launched last.
        """
        self._num_steps += 1
        self._times.setdefault(self.current, deque(maxlen=NUM_TIMES)).append(max(clock - self._clock, 1e-9))
        self._clock = clock
        if not accepted:
            return
        chains = [(count, min(count + 1, width - 1)) for count in accepted]
        self._chains.add_chains(chains)

    def costs(self) -> dict[int, float]:
        """Returns what a step of each width costs that may be chosen, as far as it is known."""
        if self._measured is not None:
            return self._measured
        known = {width: min(times) for width, times in self._times.items()}
        # One slow step, such as a run's first, is no cost: the others say what it may be at most.
        sure = {width: cost for width, cost in known.items() if len(self._times[width]) > 1}
        most = fitted_costs(sure, self.widths)
        return fitted_costs({width: min(cost, most.get(width, cost)) for width, cost in known.items()}, self.widths)

    def conditional_acceptance(self) -> list[float]:
        """Returns the share of each proposal that is accepted where all before it are."""
        return self._chains.shares()
