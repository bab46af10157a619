"""How many tokens the target verifies, and whether as a tree, where that follows the run.

Before each step the width is chosen whose expected number of committed tokens per second is the greatest, by the share
of verifies that accepted each proposal and by the seconds that steps of each width take, or that a model gives them.
Width 1 is plain decoding, without a draft. Where trees are verified, the chain of all proposals is one more choice: it
costs less, and a draft that is sure of itself needs no branches. A choice that is never left learns nothing about the
others: the second best is tried now and then. The rule, and why it keeps text and distribution, is in docs/widths.md.

Nothing here touches a tensor or waits for a device: counts come from the report that the host reads of every step,
times from its clock, for captured steps from replays before the first one, or from a model (`step_costs.py`).
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

# Rows, tokens verified at most, whether trees, and tokens of the chain beside them (0 for none).
_Kind = tuple[int, int, bool, int]
# Of each width the quickest of so many steps counts: the clock also sees whatever else the machine does.
NUM_TIMES = 4
# Steps at one width before another one is tried: at first without a draft, at first with one, and at most.
FIRST_PAUSE = 2
FIRST_HOLD = 16
LONGEST_HOLD = 128
# A width that has been held for so many steps is looked at only once in so many: choosing takes time, too.
SETTLED = 4
# Without a draft, this share of the time may go into trying one: the less a try would lose, the sooner it comes. A try
# is judged as if each position had been accepted `OPTIMISM` times more than it was.
TRYING = 0.005
OPTIMISM = 0.5
# A step's counts weigh half after 14 further ones with a draft: a text changes its nature within a few sentences.
FORGETTING = 0.95
# Shares before anything was seen: a block of 16 that commits 4.5 tokens on average accepts 0.8 of those it reaches.
PRIOR_SHARE = 0.8
PRIOR_WEIGHT = 2.0
# A narrower verify that is no cheaper than this is not worth graphs of its own.
MIN_SAVING = 0.05
# A batch ends with its slowest row, for which a draft is right less often than on average: that row has this share of
# what a verify brings the mean of several rows. Chosen over recorded answers of SmolLM2 (docs/log.md).
SLOWEST_ROW = 0.8
# The chain is compared with trees at this share of its cost, so that a tree has to be clearly faster: trees are judged
# by few times and few tokens, and noise of the clock must not choose them (docs/log.md).
CHAIN_CHARGE = 0.95
# Steps with a draft that show whether it pays.
ENOUGH_DRAFTED = 3
# Among widths: not a tree, but the chain of all proposals; as `num_tree_nodes=0` says it.
CHAIN = 0


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


def expected_tokens(conditional_acceptance: Sequence[float]) -> dict[int, float]:
    """Returns the mean number of tokens that a verify of each width commits per row, its bonus token included, by the
    probability that each proposal is accepted if all before it are.
    """
    # The probabilities that each token is committed, the bonus token of a verify of width 1 for certain.
    reached = itertools.accumulate((1.0, *conditional_acceptance), operator.mul)
    totals = itertools.accumulate(reached)
    return dict(enumerate(totals, 1))


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
    """Returns a cost for every width: the known ones, and for the others a cost that makes them worth a try.

    Steps with a draft lie on a line over their width, fitted to the known ones. With one of them known, half of the
    widest one's cost is taken to be the width's; a step without a draft is taken for half of the line's at 1. None
    costs more than a wider one: a hiccup in the only time of a width does not rule it out. Known costs are above 0,
    and there may be none; `widths` are widest first.
    """
    widest = widths[0]
    drafted = {width: cost for width, cost in known.items() if width > 1}
    if not drafted:
        drafted = {widest: 4.0 * known.get(1, 1.0)}
    # Least squares over the known widths.
    middle = sum(drafted) / len(drafted)
    mean = sum(drafted.values()) / len(drafted)
    slope = mean / (middle + widest)
    spread = sum((width - middle) ** 2 for width in drafted)
    if spread:
        slope = sum((width - middle) * cost for width, cost in drafted.items()) / spread
        # A wider step that was quicker is a hiccup of the clock.
        slope = max(slope, 0.0)
    costs: dict[int, float] = {}
    for width in widths:
        guess = max(mean + slope * (width - middle), 1e-9)
        if width == 1:
            guess = guess / 2
        costs[width] = known.get(width, guess)
        costs[width] = min(costs.values())
    return costs


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


class FixedWidth:
    """Stands for a [`WidthChooser`] where the width follows no run: every verify is as wide as the others.

    Args:
        width (`int`): Tokens of each verify, the anchor included.
    """

    is_chain = False
    may_choose_chain = False
    is_kept = False

    def __init__(self, width: int) -> None:
        self.widths = [width]

    def next_width(self) -> int:
        """Returns the width of the next step."""
        return self.widths[0]

    def use_rows(self, rows: int) -> None:
        """Does nothing: the width follows no rows."""

    def observe(self, *args: Any) -> None:
        """Does nothing: the width follows no step."""

    def verdict(self) -> str:
        """Returns that there is nothing to be said."""
        return ""


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


class WidthChooser:
    """Follows a run and chooses how wide its next verify is.

    Without costs from outside it times the steps themselves. Its counts and times are kept for the next run of the
    same pair and number of rows ([`take_chooser`]): answers may be a few steps long.

    Args:
        widest (`int`): Tokens that are verified at most, the anchor included; at least 2.
        is_tree (`bool`): Whether trees are verified, whose nodes are no proposals one behind the other.
        first (`int`): Tokens of the first verify, before anything is known; 0 for `widest`.
        chain (`int`): Tokens of the chain that may be verified instead of a tree; 0 where none may be.
    """

    # Whether the next run of the pair begins with what this one has seen.
    is_kept = True

    def __init__(self, widest: int, is_tree: bool = False, first: int = 0, chain: int = 0) -> None:
        self.is_tree = is_tree
        self.first = first or widest
        self.chain = chain
        # Whether the chain of all proposals is one of the choices, beside trees.
        self.may_choose_chain = chain > 0
        self.widths = candidate_widths(widest)
        # The choice for the step that was launched last: a width of `widths`, or `CHAIN`.
        self.current = widest
        # Costs from outside; while there are none, the run's own times count.
        self._measured: dict[int, float] = {}
        # Times of steps of each choice, with the rows that are running, and with every number of rows.
        self._rows = 0
        self._times = dict[int, deque[float]]()
        self._times_of = {0: self._times}
        self._clock = 0.0
        # The width that is held, for how many steps it has been, after how many another one is tried, and whether the
        # last verify brought more than steps without a draft had in its time.
        self._held = widest
        self._steps = 0
        self._hold = FIRST_HOLD
        self._pays = False
        # Counts of the nodes of trees, and of chains: beside trees those of the chain's length, else of the widest.
        self._nodes = AcceptanceCounts(widest - 1)
        # Where trees are verified and no chain may be, there is none to count.
        longest_chain = chain
        if not chain and not is_tree:
            longest_chain = widest
        self._chains = AcceptanceCounts(max(longest_chain - 1, 0))
        # Steps, steps with a draft, the rows that these have verified, and the tokens that came of it.
        self._num_steps = 0
        self._num_drafted = 0
        self._num_verifies = 0
        self._num_tokens = 0

    def begin(self) -> None:
        """Begins another run with the counts of earlier ones, which the new text may soon contradict.

        How long a width has been held is counted on: many answers are shorter than a hold.
        """
        self._clock = 0.0
        self._pays = False
        # Nothing is learned without a draft, so one is tried soon.
        if self._held == 1:
            self._hold = min(self._hold, FIRST_HOLD)

    def use_rows(self, rows: int) -> None:
        """Goes on with so many rows, and with the times of steps of as many."""
        if rows == self._rows:
            return
        # Where these are not known, steps are taken to cost in proportion to their rows.
        share = rows / (self._rows or rows)
        scaled: dict[int, deque[float]] = {}
        for width, times in self._times.items():
            scaled[width] = deque((share * time for time in times), NUM_TIMES)
        self._rows = rows
        self._times = self._times_of.setdefault(rows, scaled)
        # Other costs may make another width the best: it is looked at from the next step on.
        self._steps = 0

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """Gives the costs of the only widths that may be chosen from now on; the run's own times count no more."""
        self._measured = dict(costs)
        # In a running batch, graphs of other settings may have other widths.
        if self._held not in costs:
            self._hold_on_to(max(costs))

    def next_width(self) -> int:
        """Returns the width of the next step, and keeps the choice in `current`."""
        self._choose()
        if self.is_chain:
            return self.chain
        return self.current

    @property
    def is_chain(self) -> bool:
        """Whether the step that was launched last verifies the chain instead of a tree."""
        return self.current == CHAIN

    def _choose(self) -> None:
        """Sets `current` for the next step."""
        self._steps += 1
        is_held = self._steps <= self._hold
        if self._held == 1 and is_held and not self._pays:
            # Nothing is asked, so that a step costs no more than one of plain decoding.
            self.current = 1
            return
        is_settled = self.current == self._held and is_held and self._steps > SETTLED
        if is_settled and self._steps % SETTLED:
            return
        costs = self.costs()
        best = self._best(costs)
        # A try, below, takes another one for this step alone.
        self.current = best
        if best != self._held:
            self._hold_on_to(best)
        elif len(costs) > 1 and (not is_held or (best == 1 and self._pays)):
            self._try_another(best, costs)
        self._pays = False

    def _best(self, costs: Mapping[int, float]) -> int:
        """Returns the choice with the most expected tokens per second."""
        if self._num_steps:
            charged = dict(costs)
            if CHAIN in charged:
                charged[CHAIN] *= CHAIN_CHARGE
            return choose_width(self._tokens(), charged)
        # The first verify is as wide as may be: it shows the most.
        allowed = [width for width in costs if width <= self.first]
        return max(allowed or [min(costs)])

    def _hold_on_to(self, best: int) -> None:
        """Begins to hold another choice."""
        self._held = best
        self._steps = 1
        self._hold = FIRST_HOLD
        if best == 1:
            # Many rows show in one verify as much as one row in many, and trying them costs as much more.
            self._hold = min(FIRST_PAUSE * max(self._rows, 1), FIRST_HOLD)

    def _try_another(self, best: int, costs: Mapping[int, float]) -> None:
        """Sets `current` to the best of the other choices, for one step."""
        optimism = 0.0
        if best == 1:
            optimism = OPTIMISM
        others = {width: cost for width, cost in costs.items() if width != best}
        self.current = choose_width(self._tokens(optimism), others)
        self._steps = 0
        # A choice that stays the best is left ever more rarely.
        if not self._pays or best != 1:
            self._hold = min(2 * self._hold, LONGEST_HOLD)

    def _tokens(self, optimism: float = 0.0) -> dict[int, float]:
        """Returns the expected tokens of a verify of each choice, of several rows those of the slowest one.

        At equal rates [`choose_width`] takes a tree, not the chain.
        """
        tokens = expected_tokens(self.conditional_acceptance(optimism))
        if self.may_choose_chain:
            tokens[CHAIN] = expected_tokens(self._chains.shares(optimism))[self.chain]
        return {width: self._of_slowest(mean) for width, mean in tokens.items()}

    def _of_slowest(self, mean: float) -> float:
        """Returns how many tokens a verify commits in the slowest row where the mean of the rows is `mean`."""
        if self._rows <= 1:
            return mean
        return 1.0 + SLOWEST_ROW * (mean - 1.0)

    def observe(
        self,
        width: int,
        accepted: Sequence[int],
        clock: float,
        nodes: Sequence[Sequence[int]] = (),
        chains: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Takes in a step of so many tokens.

        Args:
            width (`int`): Tokens that it verified.
            accepted (`list[int]`): Proposals accepted in each row that was running.
            clock (`float`): Seconds that steps have taken so far; those since the last call are booked on `current`,
                the step that was launched last.
            nodes (`list[list[int]]`): Where a tree was verified, the nodes accepted in each of these rows.
            chains (`list[tuple[int, int]]`): Where a tree was verified, [`along_chain`] of each of these rows.
        """
        self._num_steps += 1
        times = self._times.setdefault(self.current, deque(maxlen=NUM_TIMES))
        times.append(max(clock - self._clock, 1e-9))
        self._clock = clock
        # A step without proposals shows what it costs and nothing about the draft.
        if width == 1 or not accepted:
            return
        has_verified_tree = len(nodes) > 0
        if has_verified_tree:
            self._count_nodes(width, nodes)
        else:
            # The proposal behind the accepted ones was tried as well, where the block had one.
            chains = [(count, min(count + 1, width - 1)) for count in accepted]
        self._chains.add_chains(chains)
        num_tokens = len(accepted) + sum(accepted)
        self._num_drafted += 1
        self._num_verifies += len(accepted)
        self._num_tokens += num_tokens
        if self._held == 1:
            tried = width
            if self.is_tree and not has_verified_tree:
                tried = CHAIN
            self._judge(tried, num_tokens / len(accepted))

    def _count_nodes(self, width: int, nodes: Sequence[Sequence[int]]) -> None:
        """Counts the nodes that a verify of `width` of them tried, and accepted in each row."""
        num_nodes = len(self._nodes.tried)
        tried = [len(nodes)] * (width - 1)
        tried.extend([0] * (num_nodes - len(tried)))
        accepted = [sum(node in row for row in nodes) for node in range(1, num_nodes + 1)]
        self._nodes.add(tried, accepted)

    def _judge(self, tried: int, num_tokens: float) -> None:
        """Decides from a try that gave so many tokens a row when the next one comes."""
        costs = self.costs()
        if 1 not in costs:
            return
        # In the time of the verify, steps without a draft commit so many tokens.
        self._pays = self._of_slowest(num_tokens) > costs[tried] / costs[1]
        tokens = self._tokens(OPTIMISM)
        best = choose_width(tokens, {other: cost for other, cost in costs.items() if other != 1})
        loss = costs[best] / costs[1] - tokens[best]
        self._hold = max(min(self._hold, int(loss / TRYING)), FIRST_PAUSE)

    def costs(self) -> dict[int, float]:
        """Returns the seconds of a step of each width that may be chosen, as far as they are known."""
        if self._measured:
            return self._measured
        known = {width: min(times) for width, times in self._times.items() if width != CHAIN}
        # One slow step, such as a run's first, is no cost: the others say what it may be at most.
        sure = {
            width: cost
            for width, cost in known.items()
            if width == 1 or len(self._times[width]) > 1
        }
        most = fitted_costs(sure, self.widths)
        bounded = {width: min(cost, most.get(width, cost)) for width, cost in known.items()}
        costs = fitted_costs(bounded, self.widths)
        if self.may_choose_chain:
            # A chain costs no more than a tree of as many tokens: nothing is built.
            as_tree = min(cost for width, cost in costs.items() if width >= self.chain)
            costs[CHAIN] = min([as_tree, *self._times.get(CHAIN, ())])
            if 1 not in known:
                costs[1] = min(costs[1], costs[CHAIN] / 2)
        return costs

    def conditional_acceptance(self, optimism: float = 0.0) -> list[float]:
        """Returns the share of each proposal that is accepted where all before it are.

        Of a tree, by how much less often each node is accepted than the one before: the sum that `expected_tokens`
        forms is then the mean number of accepted nodes. Each is taken to have been accepted `optimism` times more
        than it was.
        """
        if not self.is_tree:
            return self._chains.shares(optimism)
        shares = self._node_shares(optimism)
        return [share / earlier for earlier, share in itertools.pairwise([1.0, *shares])]

    def _node_shares(self, optimism: float) -> list[float]:
        """Returns the share of verifies that accept each node of a tree, which falls from node to node."""
        runs = list[tuple[float, float, int]]()  # accepted, tried, and how many nodes are averaged
        before = 1.0
        for index, (accepted, tried) in enumerate(
            zip(self._nodes.accepted, self._nodes.tried, strict=True)
        ):
            # Far back, a node that was not tried lately is taken to be accepted as often as its number is small.
            likely = max(PRIOR_SHARE, index / (index + 1)) * before
            accepted = accepted + PRIOR_WEIGHT * likely + optimism * before
            tried = tried + PRIOR_WEIGHT + optimism
            num = 1
            before = accepted / tried
            # Nodes are accepted the less often the further back they stand: counts that differ are averaged.
            while runs and before > runs[-1][0] / runs[-1][1]:
                earlier = runs.pop()
                accepted = accepted + earlier[0]
                tried = tried + earlier[1]
                num = num + earlier[2]
                before = accepted / tried
            runs.append((accepted, tried, num))
        shares: list[float] = []
        for accepted, tried, num in runs:
            shares.extend([min(accepted / tried, 1.0)] * num)
        return shares

    def verdict(self) -> str:
        """Returns a sentence for the log if the run has shown that its draft does not pay, else an empty one."""
        costs = self.costs()
        if self._num_drafted < ENOUGH_DRAFTED or len(costs) < 2 or 1 not in costs:
            return ""
        mean = self._num_tokens / self._num_verifies
        # The time of its tokens one by one is more than that of the cheapest verify: the draft pays.
        if mean * costs[1] > min(cost for width, cost in costs.items() if width != 1):
            return ""
        return (
            f"{mean:.1f} tokens per verify: the draft does not pay here, so most tokens were decoded without it; "
            "dflash-hf doctor checks its settings"
        )


class CostsOfSteps(Protocol):
    """What a step costs, in any unit: measured before the run, or modelled."""

    def of_step(self, width: int, rows: int) -> float:
        """Returns the cost of a step that verifies `width` tokens in each of `rows` rows."""
        ...

    def of_chain(self, num_tokens: int, rows: int) -> float:
        """Returns the cost of a step that verifies a chain of so many tokens where others verify trees."""
        ...


class KnownCostWidths(WidthChooser):
    """Chooses by costs that are known before the run, and not by the clock.

    Each choice is a function of what the run has accepted: two runs of a call choose alike, whatever else the machine
    does, and neither begins with what another one has seen.

    Args:
        costs ([`CostsOfSteps`]): The costs, measured before or modelled.
        widest, is_tree, chain: As for [`WidthChooser`].
    """

    is_kept = False

    def __init__(
        self, costs: CostsOfSteps, widest: int, is_tree: bool = False, chain: int = 0
    ) -> None:
        super().__init__(widest, is_tree, chain=chain)
        self._known = costs

    def use_rows(self, rows: int) -> None:
        """Goes on with so many rows, and with the costs of steps of as many."""
        super().use_rows(rows)
        costs = {width: self._known.of_step(width, rows) for width in self.widths}
        if self.may_choose_chain:
            costs[CHAIN] = self._known.of_chain(self.chain, rows)
        self.set_costs(costs)

    def _best(self, costs: Mapping[int, float]) -> int:
        """Returns the choice with the most expected tokens for its cost, by guesses before anything was seen."""
        return choose_width(self._tokens(), costs)


# Per draft and target, the choosers that no run has at the moment.
_kept = weakref.WeakKeyDictionary[
    nn.Module, weakref.WeakKeyDictionary[nn.Module, dict[_Kind, WidthChooser]]
]()


def take_chooser(
    draft: nn.Module,
    target: nn.Module,
    rows: int,
    widest: int,
    is_tree: bool = False,
    chain: int = 0,
) -> WidthChooser | None:
    """Returns the chooser that a run of this pair, of as many rows and as wide verifies, has left, or `None`."""
    chooser = _kept.get(draft, {}).get(target, {}).pop((rows, widest, is_tree, chain), None)
    if chooser is not None:
        chooser.begin()
    return chooser


def give_chooser(chooser: WidthChooser, draft: nn.Module, target: nn.Module, rows: int) -> None:
    """Leaves a chooser for the next run."""
    kept = _kept.setdefault(draft, weakref.WeakKeyDictionary()).setdefault(target, {})
    kept[rows, chooser.widths[0], chooser.is_tree, chooser.chain] = chooser
