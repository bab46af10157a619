"""How many tokens of a block the target verifies, where `verify_width` is `"auto"`.

Verifying one token more is free while a step is bound by reading weights, and costs its share once the rows of all
sequences together keep the device computing. What it brings is the chance that the proposal is reached and right,
which falls with each position. So before each step the width is chosen whose expected number of committed tokens per
second is the greatest:

    rate(w) = (1 + p_1 + p_1 p_2 + ... + p_1 ... p_{w-1}) / seconds(w)

where `p_i` is the share of verifies that accepted proposal `i` among those that accepted all before it and were wide
enough to try it, and `seconds(w)` is what a step of width `w` takes. The text is the same at any width. A width
follows from tokens that have been committed and from the clock, never from those it is about, so that rejection keeps
its distribution too; which text it gives may then depend on the clock.

Nothing here touches a tensor or waits for a device: counts come from what the host reads of a step anyhow, times from
its clock or, for captured steps, from replays before the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

# What a step has shown counts for half after 14 further ones: a text changes its nature within a few sentences.
FORGETTING = 0.95
# Before anything was seen: a block of 16 that commits 4.5 tokens on average accepts 0.8 of those it reaches.
PRIOR_SHARE = 0.8
PRIOR_WEIGHT = 2.0
# Of each width the quickest of so many steps counts: the clock also sees whatever else the machine does.
NUM_TIMES = 4
# A narrower verify that is no cheaper than this is not worth graphs of its own.
MIN_SAVING = 0.05


def candidate_widths(widest: int) -> list[int]:
    """Returns the widths to choose among, widest first: 4, 6, 8, 12, 16, 24 ... below `widest`, and it.

    Few, because each is a shape that is captured, and close enough that the best lies within a quarter of one.
    """
    found, power = [widest], 4
    while power < widest:
        found.extend(width for width in (power, power * 3 // 2) if width < widest)
        power *= 2
    return sorted(found, reverse=True)


def expected_tokens(conditional_acceptance: Sequence[float], width: int) -> float:
    """Returns the mean number of tokens that a verify commits per row, its bonus token included.

    Args:
        conditional_acceptance (sequence of `float`): Probability that each proposal is accepted if all before it are.
        width (`int`): Tokens verified, the anchor included: `width - 1` proposals.
    """
    total = reached = 1.0
    for share in conditional_acceptance[: width - 1]:
        reached *= share
        total += reached
    return total


def choose_width(conditional_acceptance: Sequence[float], costs: Mapping[int, float]) -> int:
    """Returns the width with the most expected tokens per unit of cost; of equal ones the widest.

    Args:
        conditional_acceptance (sequence of `float`): As in `expected_tokens`, for the widest one.
        costs (mapping of `int` to `float`): Cost of a step of each width to choose among, in any unit, above 0.
    """
    return max(costs, key=lambda width: (expected_tokens(conditional_acceptance, width) / costs[width], width))


def useful_widths(costs: Mapping[int, float]) -> list[int]:
    """Returns those widths, widest first, that cost at least `MIN_SAVING` less than the next wider one of them."""
    found: list[int] = []
    for width in sorted(costs, reverse=True):
        if not found or costs[width] <= (1.0 - MIN_SAVING) * costs[found[-1]]:
            found.append(width)
    return found


def interpolate(known: Mapping[int, float], widths: Sequence[int]) -> dict[int, float]:
    """Returns a cost for every width: the known ones, and on straight lines between their neighbours.

    Args:
        known (mapping of `int` to `float`): Costs, among them of the narrowest and the widest.
        widths (sequence of `int`): Widths to return costs of.
    """
    found: dict[int, float] = {}
    for width in widths:
        low = max(seen for seen in known if seen <= width)
        high = min(seen for seen in known if seen >= width)
        share = 0.0 if high == low else (width - low) / (high - low)
        found[width] = known[low] + share * (known[high] - known[low])
    return found


class WidthChooser:
    """Follows a run and says how wide its next verify is.

    Without costs from outside it times the steps themselves: to begin with a few of the widest and of the narrowest;
    between those it interpolates until it has used a width. The first step of each width also does what is done once
    (compiling, choosing kernels), and is not counted.

    Args:
        widest (`int`): Widest verify, the anchor included; at least 2.
    """

    def __init__(self, widest: int) -> None:
        self.widths = candidate_widths(widest)
        self.current = widest
        self._costs: dict[int, float] | None = None
        self._to_try = [widest] * NUM_TIMES + [self.widths[-1]] * NUM_TIMES
        self._times: dict[int, deque[float]] = {}
        self._used: set[int] = set()
        self._clock: float | None = None
        # Per proposal, exponentially forgotten: verifies that reached and tried it, and those that accepted it.
        self._tried = [0.0] * (widest - 1)
        self._accepted = [0.0] * (widest - 1)

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """Gives the costs of the only widths that may be chosen from now on; the run's own times count no more."""
        self._costs = dict(costs)

    def next_width(self) -> int:
        """Returns the width of the next step, and keeps it in `current`."""
        if self._costs is not None:
            self.current = choose_width(self.conditional_acceptance(), self._costs)
        elif self._to_try:
            self.current = self._to_try.pop(0)
        else:
            known = {width: max(min(times), 1e-9) for width, times in self._times.items()}
            self.current = choose_width(self.conditional_acceptance(), interpolate(known, self.widths))
        return self.current

    def observe(self, width: int, accepted: Sequence[int], clock: float) -> None:
        """Takes in what a step did.

        Args:
            width (`int`): Tokens that it verified.
            accepted (sequence of `int`): Proposals accepted in each row that was running.
            clock (`float`): Seconds that steps have taken so far. What has been added since the last call is booked
                on `current`, the step that was launched last.
        """
        for index in range(len(self._tried)):
            reached = sum(count >= index for count in accepted) if index < width - 1 else 0
            self._tried[index] = self._tried[index] * FORGETTING + reached
            self._accepted[index] = self._accepted[index] * FORGETTING + sum(count > index for count in accepted)
        if self._clock is not None and self.current in self._used:
            self._times.setdefault(self.current, deque(maxlen=NUM_TIMES)).append(clock - self._clock)
        self._used.add(self.current)
        self._clock = clock

    def conditional_acceptance(self) -> list[float]:
        """Returns the share of each proposal that is accepted where all before it are.

        The less a position was tried lately, the nearer to the share of all positions together, so that a wider
        verify is tried again in time.
        """
        all_tried, all_accepted = sum(self._tried), sum(self._accepted)
        pooled = (all_accepted + PRIOR_WEIGHT * PRIOR_SHARE) / (all_tried + PRIOR_WEIGHT)
        return [
            (accepted + PRIOR_WEIGHT * pooled) / (tried + PRIOR_WEIGHT)
            for accepted, tried in zip(self._accepted, self._tried, strict=True)
        ]


__all__ = [
    "WidthChooser",
    "candidate_widths",
    "choose_width",
    "expected_tokens",
    "interpolate",
    "useful_widths",
]
