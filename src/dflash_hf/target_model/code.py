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
        self._forwards = [(kind, getattr(kind, "forward", None)) for kind in kinds]
        names = {getattr(forward, "__module__", None) for _, forward in self._forwards}
        files = [sys.modules[name] for name in names if name in sys.modules]
        # Nothing else of them is held: a notebook's file has models in it.
        self._files = [(vars(file), _definitions(vars(file))) for file in files]

    def is_same(self) -> bool:
        """Returns True if nothing of it was replaced."""
        if any(getattr(kind, "forward", None) is not forward for kind, forward in self._forwards):
            return False
        return all(
            file.get(name) is definition
            for file, definitions in self._files
            for name, definition in definitions.items()
        )

    def functions(self) -> tuple[object, ...]:
        """Returns the forwards, and the functions and classes of the files."""
        forwards = [forward for _, forward in self._forwards]
        return *forwards, *(
            value for _, definitions in self._files for value in definitions.values()
        )


def _definitions(file: dict[str, Any]) -> dict[str, Any]:
    """The functions and classes among a file's names."""
    return {name: value for name, value in file.items() if isinstance(value, FunctionType | type)}
