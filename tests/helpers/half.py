"""Half of a product of parameters: where every test of it would run the same code as its neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def half(*axes: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Returns a product's parameters, half of them marked `slow`: the others have all combinations of all but one.

    Args:
        axes (mapping or sequence): Values of each parameter, two or more; the keys of a mapping are their names.
    """
    named = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes]
    assert all(len(axis) > 1 for axis in named)
    found: list[Any] = []
    for places in itertools.product(*(range(len(axis)) for axis in named)):
        names = [list(axis)[place] for axis, place in zip(named, places, strict=True)]
        values = [axis[name] for axis, name in zip(named, names, strict=True)]
        marks = [pytest.mark.slow] if sum(places) % 2 else []
        found.append(pytest.param(*values, id="-".join(names), marks=marks))
    return found


__all__ = ["half"]
