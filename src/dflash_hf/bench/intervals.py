"""How far a number may be off by the choice of questions: bootstrap and Wilson intervals, McNemar's test.

All are over questions, which are drawn from a set. What another machine, or another hour of the same one, would have
measured they do not say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DRAWS = 2000
Z = 1.959963984540054  # of the normal distribution, two-sided 95 %


def resample(values: Array, sets: Sequence[str]) -> Array:
    """Draws as many questions of each set as there are, with replacement, many times, and returns the sums.

    What is compared stands in one row of `values`, so that a question that is drawn is drawn for both.

    Args:
        values (array of `(questions, n)`): What is summed of each question.
        sets (sequence of `str`): The set of each: its share of a sum over several sets is no matter of chance.

    Returns:
        array of `(DRAWS, n)`; no draws of fewer than two questions, which say nothing about a choice of them.
    """
    if len(values) < 2:
        return np.empty((0, values.shape[1]))
    rng = np.random.default_rng(0)
    names = np.asarray(sets)
    total = np.zeros((DRAWS, values.shape[1]))
    for name in dict.fromkeys(sets):
        part = values[names == name]
        count = len(part)
        step = max(1, 2**15 // count)  # draws at a time: memory stays small whatever the set
        for start in range(0, DRAWS, step):
            size = min(step, DRAWS - start)
            chosen = rng.integers(count, size=(size, count)) + np.arange(size)[:, None] * count
            times = np.bincount(chosen.ravel(), minlength=size * count).reshape(size, count)
            total[start : start + size] += times @ part
    return total


def interval(drawn: Array, share: float = 0.95) -> tuple[float, float] | tuple[None, None]:
    """Returns what the middle share of the draws lies between, those left out that are not finite; `None` of none."""
    finite = drawn[np.isfinite(drawn)]
    if not finite.size:
        return None, None
    low, high = np.quantile(finite, ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share.

    Args:
        mean (`float`): The share, between 0 and 1.
        count (`int`): Questions that it is of, at least one.
    """
    centre = mean + Z * Z / (2 * count)
    spread = Z * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    # The share lies between both, but for rounding at 0 and 1.
    return max(0.0, min(mean, (centre - spread) / scale)), min(
        1.0, max(mean, (centre + spread) / scale)
    )


def mcnemar(lost: int, won: int) -> float:
    """Returns the exact two-sided p value of McNemar's test: that so many of the changed answers changed one way.

    Args:
        lost (`int`): Questions that were right before and are wrong now.
        won (`int`): Questions that were wrong before and are right now.
    """
    changed = lost + won
    tail = sum(math.comb(changed, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**changed)


def spread(values: list[float]) -> dict[str, float] | None:
    """Returns mean, median and 95th percentile (linear between neighbours), or `None` of nothing."""
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p95": float(np.percentile(values, 95)),
    }
