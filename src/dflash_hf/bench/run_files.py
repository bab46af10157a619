"""The files of a run's folder, read: settings, provenance and methods, the questions, and what was answered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.questions import Key, Question
from dflash_hf.errors import one_line, require

Which = tuple[Key, int]  # an answer among a cell's: its question, and how often that had been asked before


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way of decoding with one set of the values that a run compares: a line of its tables.

    Args:
        model_id (`str`): What it is called in this run.
        method (`str`): The way of decoding.
        options (`dict`): How it decodes.
        values (`dict`): Those of the options that vary within the run.
        baseline (`str`, *optional*): `model_id` of the cell that its speed-up is over.
        failed (`str`, *optional*): Why it could not run at all.
    """

    model_id: str
    method: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    baseline: str | None = None
    failed: str | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether it draws its tokens, so that its texts need not be its baseline's."""
        return self.options.get("temperature", 0.0) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run's folder holds.

    Args:
        folder (`Path`): Where it is.
        settings, provenance (`dict`): Of its `run.json`.
        sessions (`list[dict]`): Seconds of each time it was begun or gone on with, in all, in methods, beside them.
        cells (`list[Cell]`): Its methods, in the order of `run.json`.
        questions (`dict`): By their keys, in the order of `questions.jsonl`.
        answers (`dict`): Per `model_id`, by question and repeat; failed ones too.
        margins (`dict`): Of `margins.jsonl`, where the run left one: per `model_id`, question and repeat, where a text
            first differs from the baseline's and by how much (`turn`, `token`, `margin`).
    """

    folder: Path
    settings: dict[str, Any]
    provenance: dict[str, Any]
    sessions: list[dict[str, float]]
    cells: list[Cell]
    questions: dict[Key, Question]
    answers: dict[str, dict[Which, Answer]]
    margins: dict[tuple[str, Which], dict[str, Any]]

    @property
    def datasets(self) -> list[str]:
        """Names of the sets, in the order in which they are asked."""
        return list(dict.fromkeys(question.dataset for question in self.questions.values()))


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads a run's folder; an answers file may end in the middle of a line, where the run was killed.

    Args:
        folder: The folder, with `run.json`, `questions.jsonl` and any number of `answers-*.jsonl`.

    Raises:
        ValueError: If it is no folder of a run, a line is none that a run writes, or answers are to questions or by
            methods that are not there, or there twice.
    """
    folder = Path(folder)
    for name in ("run.json", "questions.jsonl"):
        require(
            (folder / name).is_file(),
            f"the folder of a run, with {name}",
            str(folder),
            "give what `dflash-hf bench` was given as --out",
        )
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    names = [one.name for one in fields(Cell)]
    cells = [Cell(**{name: row[name] for name in names if name in row}) for row in record["methods"]]
    questions = {question.key: question for _, question in _rows(folder / "questions.jsonl", Question)}
    answers: dict[str, dict[Which, Answer]] = {cell.model_id: {} for cell in cells}
    for path in sorted(folder.glob("answers-*.jsonl")):
        for place, answer in _rows(path, Answer):
            require(answer.model_id in answers, f"a method of run.json at {place}", answer.model_id, "remove the file")
            require(
                answer.key in questions, f"a question of questions.jsonl at {place}", answer.key, "remove the line"
            )
            known = answers[answer.model_id]
            which = (answer.key, answer.repeat)
            require(
                which not in known, f"one answer to a question and repeat, at {place}", which, "remove one of them"
            )
            known[which] = answer
    margins: dict[tuple[str, Which], dict[str, Any]] = {}
    if (folder / "margins.jsonl").is_file():
        for _, row in _lines(folder / "margins.jsonl"):
            margins[row["model_id"], ((row["dataset"], row["question_id"]), row["repeat"])] = row
    return Run(
        folder=folder,
        settings=record.get("settings", {}),
        provenance=record.get("provenance", {}),
        sessions=record.get("sessions", []),
        cells=cells,
        questions=questions,
        answers=answers,
        margins=margins,
    )


def _rows(path: Path, kind: Any) -> Iterator[tuple[str, Any]]:
    """Every line of a file as a question or an answer, with where it stands."""
    for place, row in _lines(path):
        try:
            yield place, kind.from_dict(row)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            what = f"{type(error).__name__} {one_line(error)}"
            raise ValueError(f"expected a line of a run's files at {place}, got {what}; remove it") from error


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line of a JSONL file, but a last one that was not written to its end."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        place = f"line {number} of {path}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected JSON in {place}, got {one_line(error)}; remove the line") from error
        yield place, row


__all__ = ["Cell", "Run", "Which", "read_run"]
