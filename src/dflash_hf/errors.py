"""This module formats a user's values for messages: short values in full, long values in part, and
each on one line.

Files may contain any value or name. The text that is printed of them stays readable.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import TypeGuard

MAX_VALUE = 200  # characters of one value
MAX_TEXT = 600  # characters of a text from elsewhere, such as another library's message
MAX_NAMED = 8  # names in a list
REFUSED = 2  # exit status of a command that got bad input

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = 32
_SHORT.maxtuple = 32
_SHORT.maxset = 32
_SHORT.maxfrozenset = 32
_SHORT.maxdict = 32
_SHORT.maxstring = MAX_VALUE
_SHORT.maxlong = MAX_VALUE
_SHORT.maxother = MAX_VALUE


def shown(value: object) -> str:
    """Returns the `repr` of a value. The middle of a long one is left out. Only the beginning of a list is read."""
    return _cut(_SHORT.repr(value), MAX_VALUE)


def one_line(text: object) -> str:
    """Returns a text as one line of printable characters. The middle of a long text is left out."""
    line = " ".join(_cut(str(text), 4 * MAX_TEXT).split())
    return _cut(
        "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line), MAX_TEXT
    )


def listed(names: Iterable[object], separator: str = ", ") -> str:
    """Returns the first names of a list, each on one line, and the number of the others."""
    every = list(names)
    parts = [_cut(one_line(name), MAX_VALUE) for name in every[:MAX_NAMED]]
    if len(every) > MAX_NAMED:
        parts.append(f"{len(every) - MAX_NAMED} more")
    return separator.join(parts)


def first_line(error: BaseException) -> str:
    """Returns an error's class and the first line of its message."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def is_a(value: object, *kinds: type) -> bool:
    """Returns True if a value has one of these types. `True` does not count as a number."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def require(good: bool, what: str, got: object, action: str) -> None:
    """Raises `ValueError("expected <what>, got <got>; <action>")` unless `good` is True.

    A long value is shown in part.
    """
    if not good:
        raise ValueError(f"expected {what}, got {shown(got)}; {action}")


def is_ours(error: BaseException) -> TypeGuard[ValueError]:
    """Returns True for a `ValueError` of this package. Its message already says what is expected and what to do."""
    return isinstance(error, ValueError) and str(error).startswith("expected ")


def _cut(text: str, limit: int) -> str:
    """Returns the text, or its beginning and its end if it is longer than the limit."""
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"
