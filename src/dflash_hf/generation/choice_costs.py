"""What a step costs with each choice of what is verified: by the clock, by replays, or known before the run.

The clock is the host's, and it times the run's own steps ([`StepTimes`]). Captured steps are replayed once before the
first one ([`ReplayCosts`]). Measured tables and models are known before the run ([`KnownCosts`]). A chooser of widths
asks all of them for the same: the costs of the choices, with the rows that are running ([`ChoiceCosts`]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

# Among choices, which else are the tokens that are verified: not a tree, but the chain of all proposals; as
# `num_tree_nodes=0` says it.
CHAIN = 0
# Of each choice the quickest of so many steps counts: the clock also sees whatever else the machine does.
NUM_TIMES = 4
# A narrower verify that is no cheaper than this is not worth graphs of its own.
MIN_SAVING = 0.05


def candidate_widths(widest: int) -> list[int]:
    """Returns the widths to choose among, widest first: 1, 2, 3, 4, 6, 8, 12 ... below `widest`, and it.

    Few, because kernels are compiled and steps captured for each, and close enough that the best lies within a
    quarter of one.
    """
    found = {1, widest}
    power = 2
    while power < widest:
        found |= {power, power * 3 // 2}
        power *= 2
    return sorted((width for width in found if width <= widest), reverse=True)


def useful_widths(costs: Mapping[int, float]) -> list[int]:
    """Returns those widths, widest first, that cost at least `MIN_SAVING` less than the next wider one of them."""
    found: list[int] = []
    for width in sorted(costs, reverse=True):
        if not found or costs[width] <= (1.0 - MIN_SAVING) * costs[found[-1]]:
            found.append(width)
    return found


class ChoiceCosts:
    """What a step of each choice costs, in any unit: here for costs that stay as they were before the first step."""

    # Whether a clock has measured them: they are noisy then, and others in every run.
    by_clock = False

    def of_choices(self) -> Mapping[int, float]:
        """Returns the cost of a step of each choice there is, above 0."""
        raise NotImplementedError

    def use_rows(self, rows: int) -> None:
        """Does nothing here; else goes on with the costs of steps of so many rows.

        Captured steps always have all their rows.
        """

    def book(self, choice: int, seconds: float) -> None:
        """Does nothing here; else takes in how long a step of a choice has taken."""

    def is_guess(self, choice: int) -> bool:
        """Returns True if nothing sure has told what a step of a choice costs."""
        return False


class StepTimes(ChoiceCosts):
    """Costs by the clock: the seconds that the run's own steps take.

    Args:
        widest (`int`): Tokens that are verified at most, the anchor included; at least 2.
        chain (`int`): Tokens of the chain that may be verified instead of a tree; 0 where none may be.
    """

    by_clock = True

    def __init__(self, widest: int, chain: int = 0) -> None:
        self.widths = candidate_widths(widest)
        self.chain = chain
        # Tokens of the smallest tree that has as many as the chain.
        self._tree_like_chain = min(width for width in self.widths if width >= chain)
        # The last times of steps of each choice, with the rows that are running, and with every number of rows.
        self._rows = 1
        self._times = dict[int, deque[float]]()
        self._times_of = dict[int, dict[int, deque[float]]]()

    def use_rows(self, rows: int) -> None:
        """Goes on with the times of steps of so many rows."""
        # Rows may have been named before any step.
        if not self._times_of.get(rows):
            # Where these are not known, steps are taken to cost in proportion to their rows.
            share = rows / self._rows
            scaled: dict[int, deque[float]] = {}
            for choice, times in self._times.items():
                scaled[choice] = deque((share * time for time in times), NUM_TIMES)
            self._times_of[rows] = scaled
        self._rows = rows
        self._times = self._times_of[rows]

    def book(self, choice: int, seconds: float) -> None:
        """Takes in how long a step of a choice has taken."""
        times = self._times.setdefault(choice, deque(maxlen=NUM_TIMES))
        times.append(max(seconds, 1e-9))

    def of_choices(self) -> dict[int, float]:
        """Returns the seconds of a step of each choice; guesses for those that were not timed."""
        known: dict[int, float] = {}
        sure: dict[int, float] = {}
        for choice, times in self._times.items():
            if choice == CHAIN:
                continue
            known[choice] = min(times)
            if choice == 1 or len(times) > 1:
                sure[choice] = known[choice]
        # One slow step, such as a run's first, is no cost: the others say what it may be at most.
        most = fitted_costs(sure, self.widths)
        for width, cost in known.items():
            known[width] = min(cost, most[width])
        costs = fitted_costs(known, self.widths)
        if self.chain:
            # A chain costs no more than a tree of as many tokens: nothing is built.
            as_tree = costs[self._tree_like_chain]
            costs[CHAIN] = min([as_tree, *self._times.get(CHAIN, ())])
            if 1 not in known:
                costs[1] = min(costs[1], costs[CHAIN] / 2)
        return costs

    def is_guess(self, choice: int) -> bool:
        """Returns True if fewer than two steps of a choice were timed: a single one may have been slow."""
        return len(self._times.get(choice, ())) < 2


class ReplayCosts(ChoiceCosts):
    """Costs of captured steps: the seconds of replays before the first one, and of no choice that was not captured.

    Args:
        costs (`dict[int, float]`): Seconds of a step of each choice.
    """

    by_clock = True

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._costs = dict(costs)

    def of_choices(self) -> dict[int, float]:
        """Returns the seconds of a step of each choice."""
        return self._costs


class CostsOfSteps(Protocol):
    """What a step costs, in any unit: measured before the run, or modelled."""

    def of_step(self, width: int, rows: int) -> float:
        """Returns the cost of a step that verifies `width` tokens in each of `rows` rows."""
        ...

    def of_chain(self, num_tokens: int, rows: int) -> float:
        """Returns the cost of a step that verifies a chain of so many tokens where others verify trees."""
        ...


class KnownCosts(ChoiceCosts):
    """Costs that are known before the run, and do not follow the clock.

    Each choice is then a function of what the run has accepted: two runs of a call choose alike, whatever else the
    machine does.

    Args:
        costs ([`CostsOfSteps`]): The costs, measured before or modelled.
        widest, chain (`int`): As for [`StepTimes`].
    """

    def __init__(self, costs: CostsOfSteps, widest: int, chain: int = 0) -> None:
        self.widths = candidate_widths(widest)
        self.chain = chain
        self._source = costs
        self.use_rows(1)

    def use_rows(self, rows: int) -> None:
        """Goes on with the costs of steps of so many rows."""
        self._costs = {width: self._source.of_step(width, rows) for width in self.widths}
        if self.chain:
            self._costs[CHAIN] = self._source.of_chain(self.chain, rows)

    def of_choices(self) -> dict[int, float]:
        """Returns the cost of a step of each choice."""
        return self._costs


def fitted_costs(known: Mapping[int, float], widths: Sequence[int]) -> dict[int, float]:
    """Returns a cost for every width: the known ones, and for the others a cost that makes them worth a try.

    Steps with a draft lie on a line over their width, fitted to the known ones. With one of them known, half of the
    widest one's cost is taken to be the width's; a step without a draft is taken for half of the line's at 1. None
    costs more than a wider one: a hiccup in the only time of a width does not rule it out. Known costs are above 0,
    and there may be none; `widths` are widest first.
    """
    widest = widths[0]
    drafted = dict(known)
    plain = drafted.pop(1, 1.0)
    if not drafted:
        drafted = {widest: 4.0 * plain}
    middle = sum(drafted) / len(drafted)
    mean = sum(drafted.values()) / len(drafted)
    slope = mean / (middle + widest)
    # Least squares over the known widths.
    spread = 0.0
    rise = 0.0
    for width, cost in drafted.items():
        spread += (width - middle) ** 2
        rise += (width - middle) * cost
    if spread:
        # A wider step that was quicker is a hiccup of the clock.
        slope = max(rise / spread, 0.0)
    costs: dict[int, float] = {}
    for width in widths:
        guess = max(mean + slope * (width - middle), 1e-9)
        if width == 1:
            guess = guess / 2
        costs[width] = known.get(width, guess)
        costs[width] = min(costs.values())
    return costs
