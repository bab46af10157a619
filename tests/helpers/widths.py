"""Choosers of verify widths: one whose clock is steady, and one that draws at random from step to step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from dflash_hf.generation import options
from dflash_hf.generation.widths import CHAIN, WidthChooser


class SteadyWidths(WidthChooser):
    """The package's own, on a machine where every step takes as long as every other one."""

    def observe(
        self,
        width: int,
        accepted: Sequence[int],
        clock: float,
        nodes: Sequence[Sequence[int]] = (),
        chains: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Takes in what a step did; `clock` is not looked at."""
        super().observe(width, accepted, self._clock + 1.0, nodes, chains)


class RandomWidths(WidthChooser):
    """Any width, and the chain where that may stand in a tree's place; among captured ones any of these."""

    def __init__(
        self,
        widest: int,
        seed: int,
        is_tree: bool = False,
        first: int = 0,
        chain: int = 0,
    ) -> None:
        super().__init__(widest, is_tree, first, chain)
        self.random = random.Random(seed)
        # What is captured: few, and none of those that the package would choose.
        self.widths = sorted({widest, max(widest * 2 // 3, 2), 1}, reverse=True)
        # Runs without a draft now and then.
        self.among = [*range(1, widest + 1), *[1] * (widest // 3)]
        self.among += [CHAIN] * (widest // 2 if chain else 0)
        self.left = 0

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """The keys are what has been captured."""
        self.among = list(costs)

    def next_width(self) -> int:
        """Draws one; on the way some that last for longer than the draft's context has room."""
        if self.left:
            self.left -= 1
        else:
            self.current = self.random.choice(self.among)
            self.left = self.random.choice([0, 0, 3, 9]) if self.current == 1 else 0
        return self.current or self.chain or 1


def use_random_widths(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Makes `verify_width="auto"` mean random widths."""

    class Seeded(RandomWidths):
        def __init__(
            self, widest: int, is_tree: bool = False, first: int = 0, chain: int = 0
        ) -> None:
            super().__init__(widest, seed, is_tree, first, chain)

    monkeypatch.setattr(options, "WidthChooser", Seeded)
