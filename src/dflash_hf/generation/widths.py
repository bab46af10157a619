"""This module chooses how many tokens a verify has, and whether they are a tree, from the steps of the run so far.

Before each step, a chooser takes the width with the largest expected number of committed tokens per second. This
number depends on the share of verifies that accepted each proposal (`acceptance_counts.py`) and on the cost of a step
of each width (`choice_costs.py`). Width 1 is plain decoding, without a draft. In a run with trees, the chain of all
proposals is one more choice. A chain costs less than a tree, and a confident draft needs no branches. Steps of one
width show nothing about the other widths, so the second best choice is tried now and then. docs/widths.md describes
the rule, and why it changes neither the text nor its distribution.

This module touches no tensor and waits for no device. The counts come from the report that the host reads after each
step.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dflash_hf.generation.acceptance_counts import (
    ChainCounts,
    NodeCounts,
    along_chain,
    expected_tokens,
)
from dflash_hf.generation.choice_costs import (
    CHAIN,
    ChoiceCosts,
    KnownCosts,
    ReplayCosts,
    StepTimes,
)
from dflash_hf.generation.state import Reported, ReportedTree

# Number of steps at one width before another width is tried: at first without a draft, at first with one, and at most.
FIRST_PAUSE = 2
FIRST_HOLD = 16
LONGEST_HOLD = 128
# With several rows, plain decoding is timed after this many steps with a draft, because a guess may be twice its cost.
UNTIL_PLAIN = 2
# After this many steps at one width, choices are compared only once in as many steps, because comparing takes time.
SETTLED = 4
# Without a draft, trying a draft may take this share of the time. So a try comes sooner if it can lose less. For a
# try, each position counts as if it had been accepted `OPTIMISM` times more.
TRYING = 0.005
OPTIMISM = 0.5
# A batch ends with its slowest row, in which the draft is right less often than on average. That row is expected to
# get this share of the mean number of accepted proposals. Chosen over recorded answers of SmolLM2 (docs/log.md).
# what a verify brings the mean of several rows. Chosen over recorded answers of SmolLM2 (docs/log.md).
SLOWEST_ROW = 0.7
# If the clock measures the costs, the chain counts with only this share of its cost, so a tree has to be clearly
# faster to be chosen. Trees are judged by few times and few tokens, and noise of the clock must not choose them
# (docs/log.md).
CHAIN_CHARGE = 0.95
# Number of steps with a draft after which the run can tell whether the draft pays.
ENOUGH_DRAFTED = 3


def choose_width(tokens: Mapping[int, float], costs: Mapping[int, float]) -> int:
    """Returns the width with the most expected tokens per cost of a step (above 0); the widest of equal widths."""
    best = (0.0, 0)
    for width, cost in costs.items():
        best = max(best, (tokens[width] / cost, width))
    return best[1]


class FixedWidth:
    """Takes the place of a [`WidthChooser`] if the width is constant: every verify has the same width.

    Args:
        width (`int`): Number of tokens of each verify, the anchor included.
        is_chain (`bool`): Whether to verify the chain of all proposals even if the run has trees.
    """

    def __init__(self, width: int, is_chain: bool = False) -> None:
        self.widths = [width]
        self.is_chain = is_chain

    def next_choice(self) -> tuple[int, bool]:
        """Returns the width of the next verify, and whether it is a chain although the run has trees."""
        return self.widths[0], self.is_chain

    def use_rows(self, rows: int) -> None:
        """Does nothing, because the width does not depend on the number of rows."""

    def observe(self, *args: Any) -> None:
        """Does nothing, because the width does not depend on the steps."""

    def verdict(self) -> str:
        """Returns an empty string, because a constant width shows nothing about the draft."""
        return ""


class WidthChooser:
    """Follows a run and chooses the width of its next verify.

    Args:
        costs ([`StepTimes`] or [`KnownCosts`]): The possible widths, and the cost of a step of each choice.
        is_tree (`bool`): Whether trees are verified. The nodes of a tree are not proposals that follow one another.
        first (`int`): Number of tokens of the first verify, if the clock measures the costs and no step was timed yet.
            0 for the widest.
    """

    def __init__(
        self, costs: StepTimes | KnownCosts, is_tree: bool = False, first: int = 0
    ) -> None:
        self.costs: ChoiceCosts = costs
        self.widths = list(costs.widths)
        widest = self.widths[0]
        self.is_tree = is_tree
        self.first = first or widest
        # Number of tokens of the chain that may be chosen instead of a tree; 0 if it may not.
        self.chain = costs.chain
        self.may_choose_chain = self.chain > 0
        # The choice for the step that was launched last: a width of `widths`, or `CHAIN`.
        self.current = widest
        # Counts of accepted nodes of trees, and of accepted proposals of chains. A tree counts for its chain, too.
        self.nodes = NodeCounts(widest)
        self.chains = ChainCounts(self.chain or widest)
        # The choice that is held, its number of steps so far, and its number of steps until another one is tried.
        self._held = widest
        self._steps = 0
        self._hold = FIRST_HOLD
        # Whether the last verify gave more tokens than steps without a draft would have given in the same time.
        self._pays = False
        # Number of running rows (0 before it is known), and the seconds of all steps so far.
        self._rows = 0
        self._clock = 0.0
        # Number of steps, of steps with a draft, and of the rows and committed tokens of steps with a draft.
        self._num_steps = 0
        self._num_drafted = 0
        self._num_verifies = 0
        self._num_tokens = 0

    def begin(self) -> None:
        """Begins another run with the counts of earlier runs; the new text may soon contradict them.

        The number of steps at the held width is not reset, because many answers are shorter than a hold.
        """
        self._clock = 0.0
        self._pays = False
        # Steps without a draft show nothing about the draft, so it is tried soon.
        if self._held == 1:
            self._hold = min(self._hold, FIRST_HOLD)

    def use_rows(self, rows: int) -> None:
        """Changes the number of running rows, and uses the costs of steps with this number."""
        if rows == self._rows:
            return
        self._rows = rows
        self.costs.use_rows(rows)
        # With other costs, another width may be the best, so the choices are compared again from the next step on.
        self._steps = 0

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """Sets the costs of captured steps. From now on, only widths with such a cost may be chosen."""
        self.costs = ReplayCosts(costs)
        # In a running batch, graphs for other settings may have other widths.
        if self._held not in costs:
            self._hold_on_to(max(costs))

    def next_choice(self) -> tuple[int, bool]:
        """Returns the same as [`FixedWidth.next_choice`], and stores the choice in `current`."""
        self._steps += 1
        is_held = self._steps <= self._hold
        # In these cases nothing is compared, so that a step costs no more than a step of plain decoding.
        is_plain = self._held == 1 and not self._pays
        is_settled = self.current == self._held and self._steps > SETTLED
        is_between_looks = is_settled and self._steps % SETTLED > 0
        asks_plain = self._rows > 1 and self._num_drafted == UNTIL_PLAIN
        if asks_plain and self.costs.is_guess(1):
            self.current = 1
        elif is_held and (is_plain or is_between_looks):
            self.current = self._held
        else:
            self._look(is_held)
        if self.current == CHAIN:
            return self.chain, True
        return self.current, False

    def _look(self, is_held: bool) -> None:
        """Sets `current` to the best choice or, as a try, to another choice for this step only."""
        costs = self.costs.of_choices()
        best = self._best(costs)
        has_paid = best == 1 and self._pays
        has_other = len(costs) > 1
        self.current = best
        if best != self._held:
            self._hold_on_to(best)
        elif has_other and (has_paid or not is_held):
            self._try_another(best, costs)
            # The longer a choice remains the best, the more rarely another choice is tried.
            if not has_paid:
                self._hold = min(2 * self._hold, LONGEST_HOLD)
        self._pays = False

    def _best(self, costs: Mapping[int, float]) -> int:
        """Returns the choice with the most expected tokens for its cost."""
        if self.costs.by_clock and self._num_steps == 0:
            # The first verify is as wide as `first` allows, because a wide verify shows the most.
            allowed = [width for width in costs if width <= self.first]
            return max(allowed or [min(costs)])
        charged = dict(costs)
        if self.costs.by_clock and CHAIN in charged:
            charged[CHAIN] *= CHAIN_CHARGE
        return choose_width(self._tokens(), charged)

    def _hold_on_to(self, best: int) -> None:
        """Begins to hold another choice."""
        self._held = best
        self._steps = 1
        self._hold = FIRST_HOLD
        if best == 1:
            # A verify of many rows shows as much as many verifies of one row, and it costs accordingly more.
            self._hold = min(FIRST_PAUSE * max(self._rows, 1), FIRST_HOLD)

    def _try_another(self, best: int, costs: Mapping[int, float]) -> None:
        """Sets `current` to the best of the other choices, for one step."""
        optimism = OPTIMISM if best == 1 else 0.0
        others = dict(costs)
        del others[best]
        self.current = choose_width(self._tokens(optimism), others)
        self._steps = 0

    def _tokens(self, optimism: float = 0.0) -> dict[int, float]:
        """Returns the expected tokens of a verify of each choice; with several rows, those of the slowest row.

        If a tree and the chain are equal, [`choose_width`] takes the tree. The proposals count as if they had been
        accepted `optimism` times more.
        """
        counts = self.nodes if self.is_tree else self.chains
        tokens = expected_tokens(counts.shares(optimism))
        if self.may_choose_chain:
            tokens[CHAIN] = expected_tokens(self.chains.shares(optimism))[self.chain]
        for choice, mean in tokens.items():
            tokens[choice] = self._of_slowest(mean)
        return tokens

    def _of_slowest(self, mean: float) -> float:
        """Returns the expected tokens of a verify in the slowest row, if the mean over the rows is `mean`."""
        if self._rows <= 1:
            return mean
        return 1.0 + SLOWEST_ROW * (mean - 1.0)

    def observe(
        self,
        width: int,
        reported: Reported,
        running: Sequence[int],
        clock: float,
        tree: ReportedTree | None,
        nodes: Sequence[Sequence[int]],
    ) -> None:
        """Counts a step that verified `width` tokens in the `running` rows: a tree, or a chain if `tree` is `None`.

        `clock` and `nodes` are as in [`learn`].
        """
        accepted = [reported.accepted[row] for row in running]
        chains: list[tuple[int, int]] = []
        if tree is not None and self.may_choose_chain:
            chains = [along_chain(tree.parents[row], tree.path[row]) for row in running]
        self.learn(width, accepted, clock, nodes, chains)

    def learn(
        self,
        width: int,
        accepted: Sequence[int],
        clock: float,
        nodes: Sequence[Sequence[int]] = (),
        chains: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Counts the outcome of a step, which may also be a step over a recorded answer.

        Args:
            width (`int`): Number of tokens that the step verified.
            accepted (`list[int]`): Number of accepted proposals in each running row.
            clock (`float`): Seconds of all steps so far. The seconds since the last call are the cost of `current`,
                the choice for the step that was launched last.
            nodes (`list[list[int]]`): If a tree was verified, the accepted nodes in each of these rows.
            chains (`list[tuple[int, int]]`): If a tree was verified, the result of [`along_chain`] for each of these
                rows.
        """
        self._num_steps += 1
        self.costs.book(self.current, clock - self._clock)
        self._clock = clock
        # A step without proposals shows only its cost, and nothing about the draft.
        if width == 1 or not accepted:
            return
        choice = width
        if nodes:
            self.nodes.add(width, nodes)
        else:
            chains = []
            for num in accepted:
                # The proposal after the accepted proposals was tried as well, if the block had one.
                chains.append((num, min(num + 1, width - 1)))
            if self.is_tree:
                choice = CHAIN
        self.chains.add(chains)
        num_tokens = len(accepted) + sum(accepted)
        self._num_drafted += 1
        self._num_verifies += len(accepted)
        self._num_tokens += num_tokens
        if self._held == 1:
            self._judge(choice, num_tokens / len(accepted))

    def _judge(self, tried: int, num_tokens: float) -> None:
        """Chooses when the next try comes, after a try of choice `tried` that gave `num_tokens` tokens per row."""
        others = dict(self.costs.of_choices())
        plain = others.pop(1, None)
        if plain is None:
            return
        # The quotient is the number of tokens that steps without a draft commit in the time of the verify.
        self._pays = self._of_slowest(num_tokens) > others[tried] / plain
        tokens = self._tokens(OPTIMISM)
        best = choose_width(tokens, others)
        loss = others[best] / plain - tokens[best]
        self._hold = max(min(self._hold, int(loss / TRYING)), FIRST_PAUSE)

    def verdict(self) -> str:
        """Returns a sentence for the log if the run has shown that its draft does not pay, else an empty string."""
        others = dict(self.costs.of_choices())
        plain = others.pop(1, None)
        if self._num_drafted < ENOUGH_DRAFTED or plain is None or not others:
            return ""
        mean = self._num_tokens / self._num_verifies
        # The draft pays if its tokens, one by one, would take longer than the cheapest verify.
        if mean * plain > min(others.values()):
            return ""
        return (
            f"{mean:.1f} tokens per verify: the draft does not pay here, so most tokens were decoded without it; "
            "dflash-hf doctor checks its settings"
        )


# ---- between two runs


# Number of rows, maximum width, whether there are trees, and tokens of the chain beside them (0 for none).
_Kind = tuple[int, int, bool, int]
# For each draft and target, the choosers that no run is using.
_kept_choosers = weakref.WeakKeyDictionary[
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
    """Returns the chooser that an earlier run of this pair, with these rows and widths, has left, or `None`.

    Answers may be only a few steps long, and the counts and times of one answer say much about the next.
    """
    of_pair = _kept_choosers.get(draft, {}).get(target, {})
    chooser = of_pair.pop((rows, widest, is_tree, chain), None)
    if chooser is not None:
        chooser.begin()
    return chooser


def give_chooser(chooser: WidthChooser, draft: nn.Module, target: nn.Module, rows: int) -> None:
    """Stores a chooser for the next run of the same kind."""
    of_draft = _kept_choosers.setdefault(draft, weakref.WeakKeyDictionary())
    kept = of_draft.setdefault(target, {})
    kept[rows, chooser.widths[0], chooser.is_tree, chooser.chain] = chooser
