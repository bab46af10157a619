"""Values of a user's, as sentences show them: whole where they are short, never all of a million."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

MAX_VALUE = 200  # characters of one value

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdict = 32
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_VALUE


def shown(value: object) -> str:
    """Returns `repr` of a value, its middle left out where it is long; only the beginning of a list is looked at."""
    return _cut(_SHORT.repr(value), MAX_VALUE)


def one_line(text: object) -> str:
    """Returns a text as one line."""
    return " ".join(str(text).split())


def listed(names: Iterable[object], separator: str = ", ") -> str:
    """Returns some names, each on one line."""
    return separator.join(one_line(name) for name in names)


def is_a(value: object, *kinds: type) -> bool:
    """Returns True if a value is of one of these types; `True` is no number."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def require(good: bool, what: str, got: object, action: str) -> None:
    """Raises `ValueError("expected <what>, got <got>; <action>")` unless it is good: a long value in part."""
    if not good:
        raise ValueError(f"expected {what}, got {shown(got)}; {action}")


def _cut(text: str, limit: int) -> str:
    """The text, or its beginning and its end."""
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"
