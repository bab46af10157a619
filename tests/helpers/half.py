"""Parts of a product of parameters: where every test of it would run the same code as its neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def half(*axes: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Returns a product's parameters, half of them marked `slow`: the others have all combinations of all but one.

    Args:
        axes (mapping or sequence): Values of each parameter, two or more; the keys of a mapping are their names.
    """
    return _marked(
        axes, lambda all_places: {places for places in all_places if not sum(places) % 2}
    )


def pairs(*axes: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Returns a product's parameters, most of them marked `slow`: in the others any two values of two axes meet.

    Args:
        axes (mapping or sequence): As for `half`, three or more.
    """
    assert len(axes) > 2, "all pairs of two axes are their product"
    return _marked(axes, _covering)


def _covering(all_places: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Greedily, the places in which the most new pairs meet, until all have met."""

    def met(places: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(places), 2))

    missing = {pair for places in all_places for pair in met(places)}
    found: set[tuple[int, ...]] = set()
    while missing:
        best = max(all_places, key=lambda places: len(met(places) & missing))
        found.add(best)
        missing -= met(best)
    return found


def _marked(
    axes: Sequence[Mapping[str, Any] | Sequence[Any]],
    choose: Callable[[Sequence[tuple[int, ...]]], set[tuple[int, ...]]],
) -> list[Any]:
    named = [
        axis if isinstance(axis, Mapping) else {str(value): value for value in axis}
        for axis in axes
    ]
    assert all(len(axis) > 1 for axis in named)
    product = list(itertools.product(*(range(len(axis)) for axis in named)))
    kept = choose(product)
    found: list[Any] = []
    for places in product:
        names = [list(axis)[place] for axis, place in zip(named, places, strict=True)]
        values = [axis[name] for axis, name in zip(named, names, strict=True)]
        marks = [] if places in kept else [pytest.mark.slow]
        found.append(pytest.param(*values, id="-".join(names), marks=marks))
    return found
