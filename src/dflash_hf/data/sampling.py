"""Options of sampling: which values they may have, and those with which they leave out no token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from dflash_hf.errors import require

# Option -> a test of a value, what it tests in words, and what to do about another value.
ALLOWED: Final[dict[str, tuple[Callable[[float], bool], str, str]]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "0 or more", "0 is greedy"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1", "1 is the whole vocabulary"),
    "top_k": (lambda value: value >= 0, "0 or more", "0 is the whole vocabulary"),
    "min_p": (lambda value: 0 <= value < 1, "0 or more and below 1", "0 is the whole vocabulary"),
}
# What a checkpoint may say beside temperature, top-p and top-k, set so that it leaves out no token. The command line,
# the chat and the benchmark sample as they are asked to, whatever the target's own config says.
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
        called (callable): Gives what a sentence calls an option, such as its flag; by default its name.

    Raises:
        ValueError: On the first of them.
    """
    for name, value in values.items():
        is_allowed, what, action = ALLOWED[name]
        require(is_allowed(value), f"{what} as {called(name)}", value, action)
