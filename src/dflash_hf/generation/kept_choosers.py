"""Choosers of widths between two runs: what one has seen is there for the next run of the same pair.

Answers may be a few steps long, and counts and times of one answer say much about the next.
"""

from __future__ import annotations

import weakref

from torch import nn

from dflash_hf.generation.widths import WidthChooser

# Rows, tokens verified at most, whether trees, and tokens of the chain beside them (0 for none).
_Kind = tuple[int, int, bool, int]
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
