"""What the task generators share: the raw draw they return and the text comparison they use."""

from collections.abc import Callable
from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A generated conversation prefix with its reference answer, before it is assigned to a split."""

    messages: tuple[Message, ...]
    answer: str
    checker: Callable[[str], bool]


def normalize(text: str) -> str:
    """Collapse runs of white space into one space and strip the ends."""
    return " ".join(text.split())


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": content}


def same_text(reference: str) -> Callable[[str], bool]:
    """Return a checker that accepts a text equal to the reference up to white space."""
    expected = normalize(reference)
    return lambda text: normalize(text) == expected
