"""Where two answers of one target differ: the one definition for all that compare."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What two answers have in common."""

    sentence: str  # all of the following in words; tokens count from 1 there
    token: int | None = None  # index, from 0, of the first token that differs; `None` if the answers are identical

    @property
    def identical(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.token is None

    @property
    def holds(self) -> bool:
        """Whether the answers are the same."""
        return self.identical


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Returns the index at which two answers first differ, `None` if nowhere; one that ends earlier differs there."""
    pairs = enumerate(itertools.zip_longest(first, second))
    return next((index for index, (a, b) in pairs if a != b), None)


def agreement(plain: Sequence[int], drafted: Sequence[int]) -> Agreement:
    """Compares two answers to a prompt: tokens, end tokens included and padding not."""
    index = first_difference(plain, drafted)
    return Agreement(sentence="identical" if index is None else f"differs from token {index + 1} on", token=index)
