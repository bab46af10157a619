"""What classes of modules compute by, and whether that was replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any


def with_wrapped(function: Any) -> list[Any]:
    """Returns a function, what it wraps if it is a decorator's, what that wraps, and so on; nothing of `None`."""
    found = list[Any]()
    while function is not None:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


class Code:
    """What classes of modules compute by: their forwards, and the functions and classes of the files of these.

    Args:
        kinds (iterable of `type`): The classes.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._forwards = {kind: getattr(kind, "forward", None) for kind in kinds}
        # A forward that is inherited, or was replaced, stands in another file than its class.
        names = {getattr(forward, "__module__", None) for forward in self._forwards.values()}
        # A module of Python that was deleted from `sys.modules` cannot be looked at.
        files = [vars(sys.modules[name]) for name in names if name in sys.modules]
        # Nothing else of them is held: a notebook's file has models in it.
        self._files = [(file, _definitions(file)) for file in files]

    def is_same(self) -> bool:
        """Returns True if nothing of it was replaced."""
        for kind, forward in self._forwards.items():
            if getattr(kind, "forward", None) is not forward:
                return False
        # A forward looks its functions up in its file at each call: one that is replaced there counts as well.
        for file, definitions in self._files:
            if any(file.get(name) is not definition for name, definition in definitions.items()):
                return False
        return True


def _definitions(file: dict[str, Any]) -> dict[str, Any]:
    """The functions and classes among a file's names."""
    return {name: value for name, value in file.items() if isinstance(value, FunctionType | type)}
