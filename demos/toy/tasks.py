"""Generated tasks for the toy target: arithmetic, code, structured text and dialogue.

Every sample is a deterministic function of (kind, split, index). Whether a prompt belongs to the training or to the
held-out split is decided by a hash of the prompt text, so that the two splits cannot share a prompt.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tasks_arithmetic import make_arithmetic
from tasks_base import Draw, Message, normalize
from tasks_code import make_code
from tasks_dialogue import make_dialogue
from tasks_structured import make_structured

Kind = Literal["arithmetic", "code", "structured", "dialogue"]
Split = Literal["train", "heldout"]

KINDS: Final[tuple[Kind, ...]] = ("arithmetic", "code", "structured", "dialogue")
SPLITS: Final[tuple[Split, ...]] = ("train", "heldout")
# One prompt in HELDOUT_MODULUS is held out.
HELDOUT_MODULUS: Final = 16
_MAX_DRAWS: Final = 10_000

_MAKERS: Final[dict[Kind, Callable[[random.Random], Draw]]] = {
    "arithmetic": make_arithmetic,
    "code": make_code,
    "structured": make_structured,
    "dialogue": make_dialogue,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One task: a conversation that ends with a user turn, the reference answer and how to judge an answer."""

    kind: Kind
    split: Split
    index: int
    messages: tuple[Message, ...]
    answer: str
    checker: Callable[[str], bool]

    def check(self, answer_text: str) -> bool:
        """Tell whether an answer text (special tokens removed) solves the task."""
        return self.checker(answer_text)

    def conversation(self) -> list[Message]:
        """Return the messages followed by the reference answer, as training text."""
        return [*self.messages, {"role": "assistant", "content": self.answer}]


def prompt_text(messages: tuple[Message, ...] | list[Message]) -> str:
    """Return the text that identifies a prompt: all its turns, with spaces normalized."""
    return "\n".join(f"{message['role']}: {normalize(message['content'])}" for message in messages)


def split_of(messages: tuple[Message, ...] | list[Message]) -> Split:
    """Return the split a prompt belongs to, from a hash of its text."""
    digest = hashlib.blake2b(prompt_text(messages).encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_MODULUS == 0 else "train"


def make_sample(kind: Kind, split: Split, index: int) -> Sample:
    """Generate the sample of a kind and split at an index.

    Args:
        kind (`str`): One of `KINDS`.
        split (`str`): One of `SPLITS`.
        index (`int`): Any non-negative number; there is no end to the stream.
    """
    if kind not in _MAKERS:
        raise ValueError(f"expected a kind among {KINDS}, got {kind!r}; use one of them.")
    if split not in SPLITS:
        raise ValueError(f"expected a split among {SPLITS}, got {split!r}; use one of them.")
    rng = random.Random(f"{kind}/{split}/{index}")
    for _ in range(_MAX_DRAWS):
        draw = _MAKERS[kind](rng)
        if split_of(draw.messages) == split:
            return Sample(
                kind=kind,
                split=split,
                index=index,
                messages=draw.messages,
                answer=draw.answer,
                checker=draw.checker,
            )
    raise RuntimeError(
        f"no {split} prompt of kind {kind} in {_MAX_DRAWS} draws; widen the generator."
    )
