"""This module writes and reads the folder of a run, and decides which of the answers in it count.

A batch is asked as a whole, and its answers are written as a whole. So an answer counts only if all answers of its
batch are there and none is an error. Otherwise, the whole batch is asked again. Each process appends to its own files.
The first process merges them, in the order of the questions, when a run begins and when it ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer, Which
from dflash_hf.bench.cells import Cell
from dflash_hf.bench.questions import Key, Question, has_type
from dflash_hf.data.row_files import (
    line_of,
    parsed,
    read_object,
    unwritten,
    write_rows,
    write_whole,
)
from dflash_hf.errors import is_a, listed, one_line, require, shown

logger = logging.getLogger(__name__)

RUN = "run.json"
QUESTIONS = "questions.jsonl"
MARGINS = "margins.jsonl"
# Files that are computed from the answers at the end of a run.
COUNTED = (MARGINS, "summary.json", "acceptance.csv", "scores.jsonl", "report.html")
SECONDS_BETWEEN_SYNCS = 1.0
# The contents of `run.json` beside the methods.
PARTS = {
    "settings": dict[str, Any],
    "provenance": dict[str, Any],
    "sessions": list[dict[str, float]],
}
# How often the questions had been asked before, and the questions that are asked together.
Batch = tuple[int, Sequence[Question]]


class RunFolder:
    """The folder of a run, as one of its processes sees it."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        self._synced: dict[str, float] = {}

    def check(self, resume: bool, what_matters: Mapping[str, Any]) -> bool:
        """Refuses a folder that does not belong to this run, without changing it. Returns whether to continue.

        Raises:
            ValueError: If the folder has files and `resume` is False, or if it belongs to no run or to another run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"expected a folder as --out, got the file {self.path}; name another")
        found: list[str] = []
        if self.path.is_dir():
            found = sorted(file.name for file in self.path.iterdir())
        # A run that was killed before it wrote its settings has left only its questions.
        if not found or (
            resume and all(name == QUESTIONS or name.startswith(".") for name in found)
        ):
            return False
        if not resume:
            hint = "name another"
            if RUN in found:
                hint = "pass --resume to go on with the run in it, or name another"
            raise ValueError(
                f"expected a new or empty folder as --out, got {self.path} with files in it; {hint}"
            )
        if RUN not in found:
            raise ValueError(
                f"expected the folder of a run as --out, got {self.path} without {RUN}; name another"
            )
        before = self.read_run().get("settings")
        if not isinstance(before, dict):
            raise ValueError(
                f"expected the settings of a run in {self.path / RUN}, got none; name another --out"
            )
        now = json.loads(json.dumps(what_matters))
        differing = sorted(name for name in now if before.get(name) != now[name])
        if differing:
            differences = [
                f"{name} was {shown(before.get(name))} and is {shown(now[name])}"
                for name in differing
            ]
            raise ValueError(
                f"expected the run of {self.path} as it was begun, got another, whose {listed(differences, '; ')}; "
                "give what it was begun with, or another --out"
            )
        return True

    def read_run(self) -> dict[str, Any]:
        """Returns the content of `run.json`."""
        path = self.path / RUN
        record = read_object(path, "name another --out")
        try:
            json.dumps(record, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"expected finite numbers in {path}, got NaN or infinity; name another --out"
            ) from error
        return record

    def write_run(
        self,
        settings: Mapping[str, Any],
        cells: Sequence[Cell],
        provenance: Any,
        sessions: Sequence[Any],
    ) -> None:
        """Writes `run.json`, whole or not at all."""
        methods = [asdict(cell) for cell in cells]
        run = {
            "settings": settings,
            "methods": methods,
            "provenance": provenance,
            "sessions": sessions,
        }
        write_whole(self.path / RUN, json.dumps(run, indent=2) + "\n")

    def write_questions(self, questions: Iterable[Question]) -> None:
        """Writes `questions.jsonl`, and creates the folder."""
        write_rows(self.path / QUESTIONS, (question.to_dict() for question in questions))

    def read_questions(self) -> list[Question]:
        """Returns the run's questions, in their order."""
        return [question for _, question in _read(self.path / QUESTIONS, Question)]

    def answers_file(self, model_id: str) -> Path:
        """Returns the file of a cell's answers that this process appends to."""
        part = f"part{self.rank}-" if self.rank else ""
        return self.path / f"{part}answers-{_safe(model_id)}.jsonl"

    def append(self, model_id: str, answers: Sequence[Answer]) -> None:
        """Writes a batch's answers, so that they are kept if the process is killed.

        If the machine itself fails, the answers of the last second may be lost and are asked again. Waiting for the
        disk at each batch would take milliseconds.

        Raises:
            ValueError: If the disk is full. Answers that were written before still count.
        """
        path = self.answers_file(model_id)
        try:
            with path.open("ab") as file:
                file.write("".join(line_of(answer.to_dict()) for answer in answers).encode())
                file.flush()
                if time.monotonic() - self._synced.get(model_id, 0.0) >= SECONDS_BETWEEN_SYNCS:
                    os.fsync(file.fileno())
                    self._synced[model_id] = time.monotonic()
        except OSError as error:
            raise unwritten(path, error) from error

    def read(self, model_id: str) -> dict[Which, Answer]:
        """Returns all readable answers of a cell, from all processes."""
        answers: dict[Which, Answer] = {}
        for path in (self.answers_file(model_id), *self._parts(model_id)):
            if not path.is_file():
                continue
            for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
                if not line:
                    continue
                try:
                    answer = Answer.from_dict(json.loads(line))
                except (ValueError, LookupError, TypeError, AttributeError):
                    logger.warning(
                        "line %d of %s was not written to its end: its batch is asked again",
                        number,
                        path,
                    )
                    continue
                answers[answer.which] = answer
        return answers

    def merge(self, model_id: str, answers: Iterable[Answer]) -> None:
        """Writes a cell's answers into one file, and removes the files of other processes."""
        write_rows(self.answers_file(model_id), (answer.to_dict() for answer in answers))
        for part in self._parts(model_id):
            part.unlink()

    def drop_counts(self) -> None:
        """Removes the files that are computed from answers, because more answers will come."""
        for name in COUNTED:
            (self.path / name).unlink(missing_ok=True)

    def _parts(self, model_id: str) -> list[Path]:
        return sorted(self.path.glob(f"part*-answers-{_safe(model_id)}.jsonl"))


def whole_batches(answers: Mapping[Which, Answer], batches: Iterable[Batch]) -> dict[Which, Answer]:
    """Returns the answers that count, in order: those of batches that are complete and without an error."""
    counting: dict[Which, Answer] = {}
    for repeat, questions in batches:
        found = [(question.key, repeat) for question in questions]
        if all(asked in answers and not answers[asked].has_failed for asked in found):
            counting.update((asked, answers[asked]) for asked in found)
    return counting


def _safe(model_id: str) -> str:
    return re.sub(r"[^\w.-]", "_", model_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The content of a run's folder.

    Args:
        settings, provenance (`dict`): Parts of its `run.json`.
        sessions (`list[dict]`): For each time that it was begun or continued: seconds in total, in methods, beside
            them.
        cells (`list[Cell]`): Its methods, in the order of `run.json`.
        questions (`dict`): Its questions by key, in the order of `questions.jsonl`.
        answers (`dict`): Its answers per `model_id`, by question and repeat, including failed ones.
        margins (`dict`): Rows of `margins.jsonl`, if the run has written it, by `model_id`, question and repeat. A row
            says where a text first differs from the baseline's, and by how much (`turn`, `token`, `margin`).
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
    """Reads a run's folder. An answers file may end in the middle of a line if the run was killed.

    Args:
        folder: The folder, with `run.json`, `questions.jsonl` and any number of `answers-*.jsonl`.

    Raises:
        ValueError: If it is not the folder of a run, if a line is not one that a run writes, or if answers belong to
            unknown questions or methods or occur twice.
    """
    folder = Path(folder)
    for name in (RUN, QUESTIONS):
        require(
            (folder / name).is_file(),
            f"the folder of a run, with {name}",
            str(folder),
            "give the folder that `dflash-hf bench` had as --out",
        )
    written = RunFolder(folder)
    record = written.read_run()
    try:
        cells = [Cell.from_dict(row) for row in record["methods"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected the methods of a run in {folder / RUN}, got something else ({type(error).__name__}: "
            f"{one_line(error)}); give the folder that `dflash-hf bench` had as --out"
        ) from error
    for name, hint in PARTS.items():
        is_good = has_type(record.get(name, hint()), hint)
        require(is_good, f"{name} of a run in {folder / RUN}", record.get(name), "correct it")
    repeats = record.get("settings", {}).get("repeats", 1)
    require(is_a(repeats, int), f"repeats of a run in {folder / RUN}", repeats, "correct it")
    questions = {question.key: question for question in written.read_questions()}
    answers: dict[str, dict[Which, Answer]] = {cell.model_id: {} for cell in cells}
    for path in sorted(folder.glob("answers-*.jsonl")):
        for place, answer in _read(path, Answer):
            require(
                answer.model_id in answers,
                f"a method of {RUN} at {place}",
                answer.model_id,
                "remove the file",
            )
            require(
                answer.key in questions,
                f"a question of {QUESTIONS} at {place}",
                answer.key,
                "remove the line",
            )
            num_turns = len(questions[answer.key].turns)
            is_to_question = len(answer.turns) <= num_turns
            what = f"an answer to {num_turns} turns at {place}"
            require(is_to_question, what, len(answer.turns), "remove the line")
            known = answers[answer.model_id]
            which = answer.which
            require(
                which not in known,
                f"one answer to a question and repeat, at {place}",
                which,
                "remove one of them",
            )
            known[which] = answer
    return Run(
        folder=folder,
        settings=record.get("settings", {}),
        provenance=record.get("provenance", {}),
        sessions=record.get("sessions", []),
        cells=cells,
        questions=questions,
        answers=answers,
        margins=by_answer(folder / MARGINS, "margin"),
    )


def by_answer(path: Path, number: str) -> dict[tuple[str, Which], dict[str, Any]]:
    """Returns the rows of a file about a run's answers by `model_id`, question and repeat; none without the file.

    Args:
        path (`Path`): The file.
        number (`str`): The field of each row that must be a number or `None`.

    Raises:
        ValueError: If a line is not one that a run writes.
    """
    found: dict[tuple[str, Which], dict[str, Any]] = {}
    if not path.exists():
        return found
    for place, row in _lines(path):
        try:
            if not has_type(row[number], float | None):
                raise TypeError(f"{shown(row[number])} as {number}")
            which = ((row["dataset"], row["question_id"]), row["repeat"])
            found[row["model_id"], which] = row
        except (KeyError, TypeError) as error:
            raise _not_a_runs(place, error) from error
    return found


def _read(path: Path, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yields every line of a file as a question or an answer, with its place."""
    for place, row in _lines(path):
        try:
            yield place, kind.from_dict(row)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise _not_a_runs(place, error) from error


def _not_a_runs(place: str, error: Exception) -> ValueError:
    """Returns the error for a line that no run writes."""
    what = f"{type(error).__name__} {one_line(error)}"
    return ValueError(f"expected a line of a run's files at {place}, got {what}; remove it")


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every line of a JSONL file, except a last one that was not written to its end."""
    require(path.is_file(), f"a file at {path}", "a folder", "remove it")
    # The file is read as bytes and each line is decoded on its own, so that an error names the line.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        place = f"line {number} of {path}"
        yield place, parsed(line, place, "remove the line")
