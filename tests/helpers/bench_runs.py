"""Runs of `dflash-hf bench` for tests: sets of made-up questions, methods that make up answers, what of it counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.cells import Options, RunSettings
from dflash_hf.bench.methods import Conversation

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
# The counts of a Turn; its seconds differ from run to run.
COUNTS = (
    "text",
    "token_ids",
    "new_tokens",
    "prompt_tokens",
    "finish_reason",
    "committed",
    "accepted",
    "proposed",
)
Asked = list[tuple[str, list[str]]]  # who was asked what, in order


def write_set(path: Path, rows: Sequence[tuple[str, ...]]) -> Path:
    """Writes questions, given as their turns."""
    lines = [
        json.dumps({"question_id": number, "category": "any", "turns": turns})
        for number, turns in enumerate(rows)
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def settings_in(folder: Path, **changes: Any) -> RunSettings:
    """Settings over a set of five questions of one turn and three of two, with changes."""
    rows = [
        *((f"one {number}",) for number in range(5)),
        *((f"two {number}", "and then?") for number in range(3)),
    ]
    base: dict[str, Any] = {
        "out": folder / "out",
        "data": (str(write_set(folder / "made-up.jsonl", rows)),),
        "target": str(TOY / "target"),
        "draft": str(TOY / "draft"),
    }
    return RunSettings(**{**base, **changes})


def answers_in(folder: Path) -> dict[str, list[Answer]]:
    """All answers in a run's folder, in the order of its files."""
    return {
        path.name: [
            Answer.from_dict(json.loads(line))
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in sorted(folder.glob("answers-*.jsonl"))
    }


def counts_in(folder: Path) -> dict[str, list[Any]]:
    """All in a run's answers that does not depend on the clock."""
    return {
        name: [
            (
                answer.key,
                answer.repeat,
                answer.error,
                [[getattr(turn, name) for name in COUNTS] for turn in answer.turns],
            )
            for answer in answers
        ]
        for name, answers in answers_in(folder).items()
    }


class Pretended:
    """A method that answers by a hash of what it is asked and how, and notes who was asked what.

    Args:
        name (`str`): Its cell's.
        asked (list): Where it notes.
        before (callable, *optional*): Called first, with its name and what it is asked; may raise.
    """

    def __init__(
        self, name: str, asked: Asked, before: Callable[[str, list[str]], None] | None = None
    ) -> None:
        self.name, self.asked, self.before = name, asked, before

    def __call__(
        self, conversations: Sequence[Conversation], options: Options, seed: int
    ) -> list[Turn]:
        """Answers."""
        texts = [str(conversation[-1]["content"]) for conversation in conversations]
        self.asked.append((self.name, texts))
        if self.before is not None:
            self.before(self.name, texts)
        one = Turn(
            text="", token_ids=[], new_tokens=1, prompt_tokens=2, wall_time=1e-6, latency=1e-6
        )
        hashes = [
            hashlib.sha256(repr((row, options, seed)).encode()).hexdigest() for row in conversations
        ]
        return [
            replace(one, text=text, token_ids=[ord(letter) for letter in text[:4]])
            for text in hashes
        ]
