"""Questions of a benchmark: what every set is turned into, and the JSONL form in which a user may give their own.

A line of such a file is `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`, as Spec-Bench and
SPEED-Bench have it, with `"images"`, `"history"`, `"reference"`, `"score"` and `"subcategory"` where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Score = Literal["math", "code", "letter", "exact"]
Key = tuple[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question of a set, of one or more turns.

    Args:
        dataset (`str`): Name of the set it is in.
        question_id (`int` or `str`): What it is called in that set; no other question there has it.
        category (`str`): What it counts under in tables.
        turns (`tuple[str, ...]`): What the user says, turn by turn, as the target is asked it; between two turns
            stands what the target has answered.
        subcategory (`str`): A finer one, where the set has it.
        images (`tuple[str, ...]`): Paths of images, shown before the text of the first turn.
        history (`tuple[dict, ...]`): Messages that stand before the first turn, in Transformers' form.
        reference: What [`dflash_hf.bench.scores`] compares the answer with; plain JSON.
        score (`str`, *optional*): How, `"math"`, `"code"`, `"letter"` or `"exact"`; `None` where nothing is right.
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
        """What the question is found by in the files of a run: its set and its id there."""
        return self.dataset, self.question_id

    def messages(self, answers: Sequence[str] = (), system: str | None = None) -> list[dict[str, Any]]:
        """Returns the conversation up to the turn that comes behind some answers, as chat templates read it.

        Args:
            answers (sequence of `str`): The target's answers so far; one turn less than is asked.
            system (`str`, *optional*): What the conversation begins with.
        """
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        messages += [dict(message) for message in self.history]
        for number, turn in enumerate(self.turns[: len(answers) + 1]):
            images = [{"type": "image", "path": path} for path in self.images] if number == 0 else []
            content = [*images, {"type": "text", "text": turn}] if images else turn
            messages.append({"role": "user", "content": content})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        return messages

    def to_dict(self) -> dict[str, Any]:
        """Returns the question as a line of its JSONL form, its set with it."""
        row: dict[str, Any] = {
            "dataset": self.dataset,
            "question_id": self.question_id,
            "category": self.category,
            "turns": list(self.turns),
        }
        if self.subcategory:
            row["subcategory"] = self.subcategory
        if self.images:
            row["images"] = list(self.images)
        if self.history:
            row["history"] = [dict(message) for message in self.history]
        if self.reference is not None:
            row["reference"] = self.reference
        if self.score is not None:
            row["score"] = self.score
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], dataset: str | None = None) -> Question:
        """Reads what `to_dict` returned. Of a user's file use [`read_questions`], which checks every line."""
        return cls(
            dataset=dataset or row["dataset"],
            question_id=row["question_id"],
            category=row["category"],
            turns=tuple(row["turns"]),
            subcategory=row.get("subcategory", ""),
            images=tuple(row.get("images", ())),
            history=tuple(row.get("history", ())),
            reference=row.get("reference"),
            score=row.get("score"),
        )


__all__ = ["Key", "Question", "Score"]
