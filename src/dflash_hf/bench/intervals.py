"""This module computes how much a number depends on the choice of questions: bootstrap, Wilson and McNemar's test.

All intervals are over questions, which are a sample of a set. They do not say what another machine, or the same
machine at another time, would have measured.
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
    """Draws questions of each set with replacement, as many as the set has, many times. Returns the sums.

    All numbers of a question are in one row of `values`, so that a drawn question counts for everything that is
    compared.

    Args:
        values (array of shape `(questions, n)`): The numbers of each question that are summed.
        sets (sequence of `str`): The set of each question. Each set keeps its share in a sum over several sets.

    Returns:
        array of shape `(DRAWS, n)`. It is empty for fewer than two questions, which cannot show the effect of a
        choice.
    """
    if len(values) < 2:
        return np.empty((0, values.shape[1]))
    rng = np.random.default_rng(0)
    names = np.asarray(sets)
    total = np.zeros((DRAWS, values.shape[1]))
    for name in dict.fromkeys(sets):
        part = values[names == name]
        count = len(part)
        step = max(1, 2**15 // count)  # draws at a time, so that memory stays small for any set
        for start in range(0, DRAWS, step):
            size = min(step, DRAWS - start)
            chosen = rng.integers(count, size=(size, count)) + np.arange(size)[:, None] * count
            times = np.bincount(chosen.ravel(), minlength=size * count).reshape(size, count)
            total[start : start + size] += times @ part
    return total


def interval(drawn: Array, share: float = 0.95) -> tuple[float, float] | tuple[None, None]:
    """Returns the ends of the middle `share` of the finite draws; `None` if no draw is finite."""
    finite = drawn[np.isfinite(drawn)]
    if not finite.size:
        return None, None
    low, high = np.quantile(finite, ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share.

    Args:
        mean (`float`): The share, between 0 and 1.
        count (`int`): Number of questions, at least one.
    """
    centre = mean + Z * Z / (2 * count)
    spread = Z * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    # The share lies between the two ends, except for rounding at 0 and 1.
    return max(0.0, min(mean, (centre - spread) / scale)), min(
        1.0, max(mean, (centre + spread) / scale)
    )


def mcnemar(lost: int, won: int) -> float:
    """Returns the exact two-sided p value of McNemar's test, for how one-sided the changes of answers are.

    Args:
        lost (`int`): Questions that were right before and are wrong now.
        won (`int`): Questions that were wrong before and are right now.
    """
    changed = lost + won
    tail = sum(math.comb(changed, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**changed)


def spread(values: list[float]) -> dict[str, float] | None:
    """Returns mean, median and 95th percentile (linear between neighbours); `None` without values."""
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p95": float(np.percentile(values, 95)),
    }
