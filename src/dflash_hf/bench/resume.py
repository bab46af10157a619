"""The folder of a run: what is written when, what is found there again, and what of it counts.

A batch is the unit: it is asked as a whole, and its answers are written as a whole. So an answer counts when those of
its batch are all there and none is an error; the others of the batch are asked again with it. Each process appends to
files of its own, and the first one puts them together, in the order of the questions, when a run begins and ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.questions import Key, Question
from dflash_hf.errors import listed, shown
from dflash_hf.evaluation.row_files import line_of, write_whole

logger = logging.getLogger(__name__)

RUN, QUESTIONS = "run.json", "questions.jsonl"
SECONDS_BETWEEN_SYNCS = 1.0
Asked = tuple[Key, int]  # a question, and how often it had been asked before
Batch = tuple[int, Sequence[Question]]  # the same of a batch


class RunFolder:
    """A run's folder, seen from one of its processes.

    Args:
        path (`Path`): Where it is.
        rank (`int`): Of the process.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.rank = path, rank
        self._synced: dict[str, float] = {}

    def check(self, resume: bool, what_matters: Mapping[str, Any]) -> bool:
        """Refuses a folder that is not this run's, and leaves it as it was.

        Args:
            resume (`bool`): Whether the user asked to go on with it.
            what_matters (mapping): What the run is asked for.

        Returns:
            `bool`: Whether there is a run to go on with.

        Raises:
            ValueError: If it has files and is not to be gone on with, or is no run's, or that of another run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"expected a folder as --out, got the file {self.path}; name another")
        found = sorted(file.name for file in self.path.iterdir()) if self.path.is_dir() else []
        # Killed before its settings were written, a run has left no more than its questions.
        if not found or (resume and all(name == QUESTIONS or name.startswith(".") for name in found)):
            return False
        if not resume:
            hint = "pass --resume to go on with the run in it, or name another" if RUN in found else "name another"
            raise ValueError(f"expected a new or empty folder as --out, got {self.path} with files in it; {hint}")
        if RUN not in found:
            raise ValueError(f"expected the folder of a run as --out, got {self.path} without {RUN}; name another")
        before, now = self.read_run()["settings"], json.loads(json.dumps(what_matters))
        differing = sorted(name for name in now if before.get(name) != now[name])
        if differing:
            differences = [f"{name} was {shown(before.get(name))} and is {shown(now[name])}" for name in differing]
            raise ValueError(
                f"expected the run of {self.path} as it was begun, got another, whose {listed(differences, '; ')}; "
                "give what it was begun with, or another --out"
            )
        return True

    def read_run(self) -> dict[str, Any]:
        """Returns what `run.json` says."""
        try:
            run: dict[str, Any] = json.loads((self.path / RUN).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"expected JSON in {self.path / RUN}, got something else; name another --out") from error
        return run

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Writes `run.json`, whole or not at all."""
        write_whole(self.path / RUN, json.dumps(run, indent=2) + "\n")

    def write_questions(self, questions: Iterable[Question]) -> None:
        """Writes `questions.jsonl`, and the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / QUESTIONS, "".join(line_of(question.to_dict()) for question in questions))

    def read_questions(self) -> list[Question]:
        """Returns the run's questions, in their order."""
        lines = (self.path / QUESTIONS).read_text(encoding="utf-8").split("\n")
        return [Question.from_dict(json.loads(line)) for line in lines if line]

    def answers_file(self, model_id: str) -> Path:
        """Returns the file of a cell's answers that this process appends to."""
        part = f"part{self.rank}-" if self.rank else ""
        return self.path / f"{part}answers-{_safe(model_id)}.jsonl"

    def append(self, model_id: str, answers: Sequence[Answer]) -> None:
        """Writes a batch's answers, so that they are there whatever happens to the process next.

        Where the machine may fail, those of the last second are asked again: waiting for the disk takes milliseconds.
        """
        with self.answers_file(model_id).open("ab") as file:
            file.write("".join(line_of(answer.to_dict()) for answer in answers).encode())
            file.flush()
            if time.monotonic() - self._synced.get(model_id, 0.0) >= SECONDS_BETWEEN_SYNCS:
                os.fsync(file.fileno())
                self._synced[model_id] = time.monotonic()

    def read(self, model_id: str) -> dict[Asked, Answer]:
        """Returns all answers of a cell that can be read, of whatever process."""
        answers: dict[Asked, Answer] = {}
        for path in (self.answers_file(model_id), *self._parts(model_id)):
            for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else (), 1):
                try:
                    answer = Answer.from_dict(json.loads(line)) if line else None
                except (ValueError, LookupError, TypeError, AttributeError):
                    logger.warning("line %d of %s was not written to its end: its batch is asked again", number, path)
                    continue
                if answer is not None:
                    answers[answer.key, answer.repeat] = answer
        return answers

    def merge(self, model_id: str, answers: Iterable[Answer]) -> None:
        """Puts a cell's answers into one file, and removes those of other processes."""
        write_whole(self.answers_file(model_id), "".join(line_of(answer.to_dict()) for answer in answers))
        for part in self._parts(model_id):
            part.unlink()

    def _parts(self, model_id: str) -> list[Path]:
        return sorted(self.path.glob(f"part*-answers-{_safe(model_id)}.jsonl"))


def whole_batches(answers: Mapping[Asked, Answer], batches: Iterable[Batch]) -> dict[Asked, Answer]:
    """Returns the answers that count: those of batches that are all there, without an error, in the batches' order.

    Args:
        answers (mapping): All that there are.
        batches (iterable): The cell's, as the run asks them.
    """
    counting: dict[Asked, Answer] = {}
    for repeat, questions in batches:
        found = [(question.key, repeat) for question in questions]
        if all(asked in answers and answers[asked].error is None for asked in found):
            counting.update((asked, answers[asked]) for asked in found)
    return counting


def _safe(model_id: str) -> str:
    return re.sub(r"[^\w.-]", "_", model_id)


__all__ = ["Asked", "Batch", "RunFolder", "whole_batches"]
