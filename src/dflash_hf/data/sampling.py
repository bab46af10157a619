"""This module defines the allowed values of sampling options, and the values with which they remove no token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from dflash_hf.errors import require

# Option -> (test of a value, the allowed values in words, advice for other values).
ALLOWED: Final[dict[str, tuple[Callable[[float], bool], str, str]]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "0 or more", "0 is greedy"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1", "1 is the whole vocabulary"),
    "top_k": (lambda value: value >= 0, "0 or more", "0 is the whole vocabulary"),
    "min_p": (lambda value: 0 <= value < 1, "0 or more and below 1", "0 is the whole vocabulary"),
}
# Other sampling options that a checkpoint's config may set, with values that remove no token. So the command line, the
# chat and the benchmark use only the options that the user gives, and not those of the target's config.
NO_FILTERS: Final[dict[str, Any]] = {
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}


def check_sampling(values: Mapping[str, float], called: Callable[[str], str] = str) -> None:
    """Refuses a value that its option cannot have.

    Args:
        values (mapping): Option of `ALLOWED` -> its value.
        called (callable): Returns the name of an option in messages, such as its flag. By default, it is its own name.

    Raises:
        ValueError: If a value is refused. The message names the first such option.
    """
    for name, value in values.items():
        is_allowed, what, action = ALLOWED[name]
        require(is_allowed(value), f"{what} as {called(name)}", value, action)
