"""Choosers of verify widths: one whose clock is steady, and one that draws at random from step to step."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.generation import cost_table, options
from dflash_hf.generation.choice_costs import CHAIN, KnownCosts, StepTimes
from dflash_hf.generation.widths import WidthChooser

# The package's own, whatever a test has put in its place.
known_costs = options._known_costs


def known_in_half(generator: Any, may_be_modelled: bool) -> Any:
    """Returns the known costs of a pair's steps, modelled ones in half precision alone."""
    is_half = options.computes_in_half(generator.request.target)
    return known_costs(generator, may_be_modelled and is_half)


def use_tables_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has tables of measured costs be in a folder, which need not exist."""
    monkeypatch.setattr(cost_table, "TABLES", folder)


class SteadyTimes(StepTimes):
    """The package's own, on a machine where every step takes as long as every other one."""

    def book(self, choice: int, seconds: float) -> None:
        """Takes in that a step was made; `seconds` is not looked at."""
        super().book(choice, 1.0)


class RandomWidths(WidthChooser):
    """Any width, and the chain where that may stand in a tree's place; among captured ones any of these."""

    def __init__(
        self, costs: StepTimes | KnownCosts, seed: int, is_tree: bool = False, first: int = 0
    ) -> None:
        super().__init__(costs, is_tree, first)
        widest = self.widths[0]
        # Every width has a cost, as every one may be drawn.
        costs.widths = list(range(widest, 0, -1))
        costs.use_rows(1)
        self.random = random.Random(seed)
        # What is captured: few, and none of those that the package would choose.
        self.widths = sorted({widest, max(widest * 2 // 3, 2), 1}, reverse=True)
        # Runs without a draft now and then.
        self.among = [*range(1, widest + 1), *[1] * (widest // 3)]
        self.among += [CHAIN] * (widest // 2 if self.chain else 0)
        self.left = 0

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """The keys are what has been captured."""
        self.among = list(costs)

    def next_choice(self) -> tuple[int, bool]:
        """Draws one; on the way some that last for longer than the draft's context has room."""
        if self.left:
            self.left -= 1
        else:
            self.current = self.random.choice(self.among)
            self.left = self.random.choice([0, 0, 3, 9]) if self.current == 1 else 0
        return self.current or self.chain or 1, self.current == CHAIN


def use_random_widths(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Makes every width that follows a run a random one."""

    def chooser(
        costs: StepTimes | KnownCosts, is_tree: bool = False, first: int = 0
    ) -> WidthChooser:
        return RandomWidths(costs, seed, is_tree, first)

    monkeypatch.setattr(options, "WidthChooser", chooser)
