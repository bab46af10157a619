"""This module defines the questions of a benchmark, and the JSONL form in which users may give their own questions.

A line of such a file is `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`, as in Spec-Bench and
SPEED-Bench. It may also have `"images"`, `"history"`, `"reference"`, `"score"` and `"subcategory"`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dflash_hf.data.prompt_files import image_paths
from dflash_hf.errors import is_a, shown

# Cached per class, because looking up the types takes longer than checking a value.
_types_of = functools.cache(get_type_hints)
Score = Literal["math", "code", "letter", "exact"]
Key = tuple[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question of a set, with one or more turns.

    Args:
        dataset (`str`): Name of its set.
        question_id (`int` or `str`): Its id, which is unique in the set.
        category (`str`): The category under which tables count it.
        turns (`tuple[str, ...]`): The user's messages. The target's answer comes between two turns.
        subcategory (`str`): A finer category, if the set has one.
        images (`tuple[str, ...]`): Paths of images, shown before the text of the first turn.
        history (`tuple[dict, ...]`): Messages before the first turn, in Transformers' form.
        reference: The value that [`dflash_hf.bench.scores`] compares the answer with, as plain JSON.
        score (`str`, *optional*): The way to score: `"math"`, `"code"`, `"letter"` or `"exact"`; `None` if there is no
            right answer.
    """

    dataset: str
    question_id: int | str
    category: str
    turns: tuple[str, ...]
    subcategory: str = ""
    images: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    reference: Any = None
    score: Score | None = None

    @property
    def key(self) -> Key:
        """Set and id, which identify the question in the files of a run."""
        return self.dataset, self.question_id

    @property
    def image_files(self) -> list[str]:
        """Paths of all its images, including those of the messages before its first turn."""
        return [*image_paths(self.history), *self.images]

    def messages(
        self, answers: Sequence[str] = (), system: str | None = None
    ) -> list[dict[str, Any]]:
        """Returns the conversation up to the turn that follows the given answers, as chat templates read it.

        Args:
            answers (sequence of `str`): The target's answers so far. The conversation has one turn more.
            system (`str`, *optional*): The system prompt.
        """
        messages: list[dict[str, Any]] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        messages += [dict(message) for message in self.history]
        for number, turn in enumerate(self.turns[: len(answers) + 1]):
            content: Any = turn
            if number == 0 and self.images:
                content = [{"type": "image", "path": path} for path in self.images]
                content.append({"type": "text", "text": turn})
            messages.append({"role": "user", "content": content})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        return messages

    def to_dict(self) -> dict[str, Any]:
        """Returns the question as a line of its JSONL form, with its set, but without fields that have the default."""
        every = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, (value, default) in every.items()
            if value != default
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Question:
        """Reads what `to_dict` returned. For a user's file use [`dflash_hf.bench.sets`], which checks every line."""
        tuples = {name: tuple(row[name]) for name in ("turns", "images", "history") if name in row}
        return cls(**fields_in(row, cls, **tuples))


def fields_in(row: Mapping[str, Any], kind: Any, **others: Any) -> dict[str, Any]:
    """Returns a dataclass's fields from a row of a file. `others` replace the row's values.

    The row may have more or fewer fields, because another version may have written it.

    Raises:
        TypeError: If a value is not of its field's type.
    """
    found = {item.name: row[item.name] for item in fields(kind) if item.name in row} | others
    hints = _types_of(kind)
    for name, value in found.items():
        if not has_type(value, hints[name]):
            raise TypeError(f"{shown(value)} as {name}")
    return found


def has_type(value: Any, hint: Any) -> bool:
    """Returns True if a value and all its elements are of a type. Numbers must be finite, and `True` is no number."""
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if kind in (Union, UnionType):
        return any(has_type(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if hint == list[int]:
        # Token ids are most of a file of answers, so they are checked at once. The type of `True` is `bool`.
        return isinstance(value, list) and set(map(type, value)) <= {int}
    if kind in (list, tuple):
        return isinstance(value, kind) and all(has_type(part, parts[0]) for part in value)
    if kind in (dict, Mapping):
        values_type = parts[1] if parts else Any
        return isinstance(value, Mapping) and all(
            has_type(part, values_type) for part in value.values()
        )
    if kind is float:
        return is_a(value, int, float) and isfinite(value)
    return kind is Any or is_a(value, kind)
