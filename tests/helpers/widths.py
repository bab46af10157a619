"""Verify widths that change at random from step to step, in place of chosen ones."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from dflash_hf import DFlashDraftModel
from dflash_hf.generation import prefill
from dflash_hf.generation.widths import WidthChooser


class RandomWidths(WidthChooser):
    """Any width from 2 on; among captured ones any of these."""

    def __init__(self, widest: int, seed: int) -> None:
        super().__init__(widest)
        self.random = random.Random(seed)
        # What is captured: few, and none of those that the package would choose.
        self.widths = sorted({widest, max(widest * 2 // 3, 2), 2}, reverse=True)
        self.among = list(range(2, widest + 1))

    def set_costs(self, costs: Mapping[int, float]) -> None:
        """The keys are what has been captured."""
        self.among = list(costs)

    def next_width(self) -> int:
        """Draws one."""
        self.current = self.random.choice(self.among)
        return self.current


def use_random_widths(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Makes `verify_width="auto"` mean random widths."""

    def chooser(draft: DFlashDraftModel, widest: int) -> WidthChooser | None:
        if draft.generation_config.verify_width != "auto" or widest < 2:
            return None
        return RandomWidths(widest, seed)

    monkeypatch.setattr(prefill, "_chooser", chooser)


__all__ = ["RandomWidths", "use_random_widths"]
