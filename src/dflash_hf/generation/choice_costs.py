"""This module says what a step costs for each choice of a width, or of the chain instead of a tree.

There are three sources of costs. The host's clock times the run's own steps ([`StepTimes`]). Captured steps are
replayed and timed before the first step ([`ReplayCosts`]). Measured tables and models are known before the run
([`KnownCosts`]). All of them have one interface for the chooser of widths ([`ChoiceCosts`]). It gives the cost of each
choice for the current number of running rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

# A choice is a number of verified tokens, or this value for the chain of all proposals instead of a tree. The value is
# the same as in `num_tree_nodes=0`.
CHAIN = 0
# The fastest of this many last steps of a choice counts, because the clock also measures other work of the machine.
NUM_TIMES = 4
# A narrower verify must save at least this share of the cost to be worth its own graphs.
MIN_SAVING = 0.05


def candidate_widths(widest: int) -> list[int]:
    """Returns the widths to choose from, widest first: 1, 2, 3, 4, 6, 8, 12 ... below `widest`, and `widest` itself.

    There are few widths, because kernels are compiled and steps are captured for each. They are close enough that the
    best width is within a quarter of one of them.
    """
    found = {1, widest}
    power = 2
    while power < widest:
        found |= {power, power * 3 // 2}
        power *= 2
    return sorted((width for width in found if width <= widest), reverse=True)


def useful_widths(costs: Mapping[int, float]) -> list[int]:
    """Returns the useful widths, widest first. Each costs at least `MIN_SAVING` less than the next wider one."""
    found: list[int] = []
    for width in sorted(costs, reverse=True):
        if not found or costs[width] <= (1.0 - MIN_SAVING) * costs[found[-1]]:
            found.append(width)
    return found


class ChoiceCosts:
    """Says what a step of each choice costs, in any unit. Without an override, costs do not change during the run."""

    # Whether a clock has measured the costs. Such costs are noisy, and differ from run to run.
    by_clock = False

    def of_choices(self) -> Mapping[int, float]:
        """Returns the cost of a step for each available choice. Costs are above 0."""
        raise NotImplementedError

    def use_rows(self, rows: int) -> None:
        """Switches to the costs of steps with `rows` rows. It does nothing here.

        Captured steps always have all their rows.
        """

    def book(self, choice: int, seconds: float) -> None:
        """Records how long a step of a choice has taken. It does nothing here."""

    def is_guess(self, choice: int) -> bool:
        """Returns True if the cost of a step of a choice is not reliably known."""
        return False


class StepTimes(ChoiceCosts):
    """Holds costs by the clock: the seconds that the run's own steps take.

    Args:
        widest (`int`): The largest number of verified tokens, the anchor included. It is at least 2.
        chain (`int`): The number of tokens of the chain that may be verified instead of a tree. It is 0 if there is no
            such chain.
    """

    by_clock = True

    def __init__(self, widest: int, chain: int = 0) -> None:
        self.widths = candidate_widths(widest)
        self.chain = chain
        # The width of the smallest tree that has at least as many tokens as the chain.
        self._tree_like_chain = min(width for width in self.widths if width >= chain)
        # The last times of steps of each choice: for the current number of rows, and for every number of rows.
        self._rows = 1
        self._times = dict[int, deque[float]]()
        self._times_of = dict[int, dict[int, deque[float]]]()

    def use_rows(self, rows: int) -> None:
        """Switches to the times of steps with `rows` rows."""
        # The entry may be empty, because this may be called before any step.
        if not self._times_of.get(rows):
            # If the times are not known, the cost of a step is assumed to be proportional to its rows.
            share = rows / self._rows
            scaled: dict[int, deque[float]] = {}
            for choice, times in self._times.items():
                scaled[choice] = deque((share * time for time in times), NUM_TIMES)
            self._times_of[rows] = scaled
        self._rows = rows
        self._times = self._times_of[rows]

    def book(self, choice: int, seconds: float) -> None:
        """Records how long a step of a choice has taken."""
        times = self._times.setdefault(choice, deque(maxlen=NUM_TIMES))
        times.append(max(seconds, 1e-9))

    def of_choices(self) -> dict[int, float]:
        """Returns the seconds of a step for each choice. For choices that were not timed, the seconds are guesses."""
        known: dict[int, float] = {}
        sure: dict[int, float] = {}
        for choice, times in self._times.items():
            if choice == CHAIN:
                continue
            known[choice] = min(times)
            if choice == 1 or len(times) > 1:
                sure[choice] = known[choice]
        # A single time may be that of a slow step, such as a run's first. So the other times give an upper limit.
        most = fitted_costs(sure, self.widths)
        for width, cost in known.items():
            known[width] = min(cost, most[width])
        costs = fitted_costs(known, self.widths)
        if self.chain:
            # A chain costs at most as much as a tree of as many tokens, because no tree is built.
            as_tree = costs[self._tree_like_chain]
            costs[CHAIN] = min([as_tree, *self._times.get(CHAIN, ())])
            if 1 not in known:
                costs[1] = min(costs[1], costs[CHAIN] / 2)
        return costs

    def is_guess(self, choice: int) -> bool:
        """Returns True if fewer than two steps of a choice were timed, because a single step may have been slow."""
        return len(self._times.get(choice, ())) < 2


class ReplayCosts(ChoiceCosts):
    """Holds costs of captured steps: the seconds of replays before the first step. Only captured choices have a cost.

    Args:
        costs (`dict[int, float]`): The seconds of a step of each choice.
    """

    by_clock = True

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._costs = dict(costs)

    def of_choices(self) -> dict[int, float]:
        """Returns the seconds of a step of each choice."""
        return self._costs


class CostsOfSteps(Protocol):
    """Gives the costs of steps, in any unit. They were measured before the run, or are modelled."""

    def of_step(self, width: int, rows: int) -> float:
        """Returns the cost of a step that verifies `width` tokens in each of `rows` rows."""
        ...

    def of_chain(self, num_tokens: int, rows: int) -> float:
        """Returns the cost of a step that verifies a chain of `num_tokens` tokens in a run with trees."""
        ...


class KnownCosts(ChoiceCosts):
    """Holds costs that are known before the run and do not depend on the clock.

    With such costs, each choice depends only on the tokens that the run has accepted. So two runs of one call make the
    same choices, whatever else the machine does.

    Args:
        costs ([`CostsOfSteps`]): The costs, which were measured before the run or are modelled.
        widest, chain (`int`): As in [`StepTimes`].
    """

    def __init__(self, costs: CostsOfSteps, widest: int, chain: int = 0) -> None:
        self.widths = candidate_widths(widest)
        self.chain = chain
        self._source = costs
        self.use_rows(1)

    def use_rows(self, rows: int) -> None:
        """Switches to the costs of steps with `rows` rows."""
        self._costs = {width: self._source.of_step(width, rows) for width in self.widths}
        if self.chain:
            self._costs[CHAIN] = self._source.of_chain(self.chain, rows)

    def of_choices(self) -> dict[int, float]:
        """Returns the cost of a step of each choice."""
        return self._costs


def fitted_costs(known: Mapping[int, float], widths: Sequence[int]) -> dict[int, float]:
    """Returns a cost for every width. Unknown costs get a guess that makes these widths worth a try.

    The guesses for steps with a draft are on a line over the width, which is fitted to the known costs. If only one of
    these costs is known, half of the widest step's cost is assumed to grow with the width. The guess for a step
    without a draft is half of the line's value at width 1. No width costs more than a wider one, so that one slow step
    does not rule out a width.

    Args:
        known (mapping of `int` to `float`): The known costs by width. They are above 0. It may be empty.
        widths (sequence of `int`): All widths, widest first.
    """
    widest = widths[0]
    drafted = dict(known)
    plain = drafted.pop(1, 1.0)
    if not drafted:
        drafted = {widest: 4.0 * plain}
    middle = sum(drafted) / len(drafted)
    mean = sum(drafted.values()) / len(drafted)
    slope = mean / (middle + widest)
    # The line is fitted by least squares over the known widths.
    spread = 0.0
    rise = 0.0
    for width, cost in drafted.items():
        spread += (width - middle) ** 2
        rise += (width - middle) * cost
    if spread:
        # The slope is not negative: if a wider step was faster, this was noise of the clock.
        slope = max(rise / spread, 0.0)
    costs: dict[int, float] = {}
    for width in widths:
        guess = max(mean + slope * (width - middle), 1e-9)
        if width == 1:
            guess = guess / 2
        costs[width] = known.get(width, guess)
        costs[width] = min(costs.values())
    return costs
