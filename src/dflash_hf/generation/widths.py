"""How many tokens the target verifies, and whether as a tree, where that follows the run.

Before each step the width is chosen whose expected number of committed tokens per second is the greatest, by the share
of verifies that accepted each proposal (`acceptance_counts.py`), and by what steps of each width cost
(`choice_costs.py`). Width 1 is plain decoding, without a draft. Where trees are verified, the chain of all proposals
is one more choice: it costs less, and a draft that is sure of itself needs no branches. A choice that is never left
learns nothing about the others: the second best is tried now and then. The rule, and why it keeps text and
distribution, is in docs/widths.md.

Nothing here touches a tensor or waits for a device: counts come from the report that the host reads of every step.
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

# Steps at one width before another one is tried: at first without a draft, at first with one, and at most.
FIRST_PAUSE = 2
FIRST_HOLD = 16
LONGEST_HOLD = 128
# With several rows plain decoding is timed after so many steps with a draft: a guess may be twice what it costs.
UNTIL_PLAIN = 2
# A width that has been held for so many steps is looked at only once in so many: choosing takes time, too.
SETTLED = 4
# Without a draft, this share of the time may go into trying one: the less a try would lose, the sooner it comes. A try
# is judged as if each position had been accepted `OPTIMISM` times more than it was.
TRYING = 0.005
OPTIMISM = 0.5
# A batch ends with its slowest row, for which a draft is right less often than on average: that row has this share of
# what a verify brings the mean of several rows. Chosen over recorded answers of SmolLM2 (docs/log.md).
SLOWEST_ROW = 0.7
# By the clock the chain is compared with trees at this share of its cost, so that a tree has to be clearly faster:
# trees are judged by few times and few tokens, and noise of the clock must not choose them (docs/log.md).
CHAIN_CHARGE = 0.95
# Steps with a draft that show whether it pays.
ENOUGH_DRAFTED = 3


def choose_width(tokens: Mapping[int, float], costs: Mapping[int, float]) -> int:
    """Returns the width with the most expected tokens per cost of a step (above 0); of equal ones the widest."""
    best = (0.0, 0)
    for width, cost in costs.items():
        best = max(best, (tokens[width] / cost, width))
    return best[1]


class FixedWidth:
    """Stands for a [`WidthChooser`] where the width follows no run: every verify is as wide as the others.

    Args:
        width (`int`): Tokens of each verify, the anchor included.
        is_chain (`bool`): Verify the chain of all proposals, also where the run has trees.
    """

    def __init__(self, width: int, is_chain: bool = False) -> None:
        self.widths = [width]
        self.is_chain = is_chain

    def next_choice(self) -> tuple[int, bool]:
        """Returns how many tokens the next step verifies, and whether as a chain although the run has trees."""
        return self.widths[0], self.is_chain

    def use_rows(self, rows: int) -> None:
        """Does nothing: the width follows no rows."""

    def observe(self, *args: Any) -> None:
        """Does nothing: the width follows no step."""

    def verdict(self) -> str:
        """Returns that there is nothing to be said."""
        return ""


class WidthChooser:
    """Follows a run and chooses how wide its next verify is.

    Args:
        costs ([`StepTimes`] or [`KnownCosts`]): What a step of each choice costs, and which widths there are.
        is_tree (`bool`): Whether trees are verified, whose nodes are no proposals one behind the other.
        first (`int`): Tokens of the first verify where the clock decides and has not seen a step; 0 for the widest.
    """

    def __init__(
        self, costs: StepTimes | KnownCosts, is_tree: bool = False, first: int = 0
    ) -> None:
        self.costs: ChoiceCosts = costs
        self.widths = list(costs.widths)
        widest = self.widths[0]
        self.is_tree = is_tree
        self.first = first or widest
        # Tokens of the chain that is one of the choices, beside trees; 0 where it is none.
        self.chain = costs.chain
        self.may_choose_chain = self.chain > 0
        # The choice for the step that was launched last: a width of `widths`, or `CHAIN`.
        self.current = widest
        # What was accepted, of trees and of chains; where trees are verified, of the chain that stands beside them.
        self.nodes = NodeCounts(widest)
        self.chains = ChainCounts(self.chain or widest)
        # The choice that is held, for how many steps it has been, and after how many another one is tried.
        self._held = widest
        self._steps = 0
        self._hold = FIRST_HOLD
        # Whether the last verify brought more than steps without a draft had in its time.
        self._pays = False
        # Rows that are running, 0 before that is said, and seconds that steps have taken so far.
        self._rows = 0
        self._clock = 0.0
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
        """Goes on with so many rows, and with the costs of steps of as many."""
        if rows == self._rows:
            return
        self._rows = rows
        self.costs.use_rows(rows)
        # Other costs may make another width the best: it is looked at from the next step on.
        self._steps = 0

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """Gives the costs of captured steps, and with them the only widths that may be chosen from now on."""
        self.costs = ReplayCosts(costs)
        # In a running batch, graphs of other settings may have other widths.
        if self._held not in costs:
            self._hold_on_to(max(costs))

    def next_choice(self) -> tuple[int, bool]:
        """Returns as [`FixedWidth.next_choice`], and keeps the choice in `current`."""
        self._steps += 1
        is_held = self._steps <= self._hold
        # Nothing is asked then, so that a step costs no more than one of plain decoding.
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
        """Sets `current` to the best choice, or to another one for this step alone, as a try."""
        costs = self.costs.of_choices()
        best = self._best(costs)
        has_paid = best == 1 and self._pays
        has_other = len(costs) > 1
        self.current = best
        if best != self._held:
            self._hold_on_to(best)
        elif has_other and (has_paid or not is_held):
            self._try_another(best, costs)
            # A choice that stays the best is left ever more rarely.
            if not has_paid:
                self._hold = min(2 * self._hold, LONGEST_HOLD)
        self._pays = False

    def _best(self, costs: Mapping[int, float]) -> int:
        """Returns the choice with the most expected tokens for its cost."""
        if self.costs.by_clock and self._num_steps == 0:
            # The first verify is as wide as may be: it shows the most.
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
            # Many rows show in one verify as much as one row in many, and trying them costs as much more.
            self._hold = min(FIRST_PAUSE * max(self._rows, 1), FIRST_HOLD)

    def _try_another(self, best: int, costs: Mapping[int, float]) -> None:
        """Sets `current` to the best of the other choices, for one step."""
        optimism = OPTIMISM if best == 1 else 0.0
        others = dict(costs)
        del others[best]
        self.current = choose_width(self._tokens(optimism), others)
        self._steps = 0

    def _tokens(self, optimism: float = 0.0) -> dict[int, float]:
        """Returns the expected tokens of a verify of each choice, of several rows those of the slowest one.

        At equal rates [`choose_width`] takes a tree, not the chain. What is verified is taken to have been accepted
        `optimism` times more than it was.
        """
        counts = self.nodes if self.is_tree else self.chains
        tokens = expected_tokens(counts.shares(optimism))
        if self.may_choose_chain:
            tokens[CHAIN] = expected_tokens(self.chains.shares(optimism))[self.chain]
        for choice, mean in tokens.items():
            tokens[choice] = self._of_slowest(mean)
        return tokens

    def _of_slowest(self, mean: float) -> float:
        """Returns how many tokens a verify commits in the slowest row where the mean of the rows is `mean`."""
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
        """Takes in a step that verified `width` tokens in `running` rows, of a tree or of a chain (`None`).

        `clock` and `nodes` are as of [`learn`].
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
        """Takes in what a step has shown, which may be a step of recorded answers.

        Args:
            width (`int`): Tokens that it verified.
            accepted (`list[int]`): Proposals accepted in each row that was running.
            clock (`float`): Seconds that steps have taken so far; those since the last call are booked on `current`,
                the step that was launched last.
            nodes (`list[list[int]]`): Where a tree was verified, the nodes accepted in each of these rows.
            chains (`list[tuple[int, int]]`): Where a tree was verified, [`along_chain`] of each of these rows.
        """
        self._num_steps += 1
        self.costs.book(self.current, clock - self._clock)
        self._clock = clock
        # A step without proposals shows what it costs and nothing about the draft.
        if width == 1 or not accepted:
            return
        choice = width
        if nodes:
            self.nodes.add(width, nodes)
        else:
            chains = []
            for num in accepted:
                # The proposal behind the accepted ones was tried as well, where the block had one.
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
        """Decides from a try that gave so many tokens a row when the next one comes."""
        others = dict(self.costs.of_choices())
        plain = others.pop(1, None)
        if plain is None:
            return
        # In the time of the verify, steps without a draft commit so many tokens.
        self._pays = self._of_slowest(num_tokens) > others[tried] / plain
        tokens = self._tokens(OPTIMISM)
        best = choose_width(tokens, others)
        loss = others[best] / plain - tokens[best]
        self._hold = max(min(self._hold, int(loss / TRYING)), FIRST_PAUSE)

    def verdict(self) -> str:
        """Returns a sentence for the log if the run has shown that its draft does not pay, else an empty one."""
        others = dict(self.costs.of_choices())
        plain = others.pop(1, None)
        if self._num_drafted < ENOUGH_DRAFTED or plain is None or not others:
            return ""
        mean = self._num_tokens / self._num_verifies
        # The time of its tokens one by one is more than that of the cheapest verify: the draft pays.
        if mean * plain > min(others.values()):
            return ""
        return (
            f"{mean:.1f} tokens per verify: the draft does not pay here, so most tokens were decoded without it; "
            "dflash-hf doctor checks its settings"
        )


# ---- between two runs


# Rows, tokens verified at most, whether trees, and tokens of the chain beside them (0 for none).
_Kind = tuple[int, int, bool, int]
# Per draft and target, the choosers that no run has at the moment.
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
    """Returns the chooser that a run of this pair, of as many rows and as wide verifies, has left, or `None`.

    Answers may be a few steps long, and counts and times of one answer say much about the next.
    """
    of_pair = _kept_choosers.get(draft, {}).get(target, {})
    chooser = of_pair.pop((rows, widest, is_tree, chain), None)
    if chooser is not None:
        chooser.begin()
    return chooser


def give_chooser(chooser: WidthChooser, draft: nn.Module, target: nn.Module, rows: int) -> None:
    """Leaves a chooser for the next run."""
    of_draft = _kept_choosers.setdefault(draft, weakref.WeakKeyDictionary())
    kept = of_draft.setdefault(target, {})
    kept[rows, chooser.widths[0], chooser.is_tree, chooser.chain] = chooser
