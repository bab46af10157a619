"""Folders that are no run, or a run that was damaged: one sentence, and nothing written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.bench.report import write_report
from dflash_hf.bench.run_files import read_run
from dflash_hf.bench.summary import summarize
from helpers.bench_run import answers_of, questions, simple_score, write_run


def cut(folder: Path) -> None:
    path = folder / "answers-dflash.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def twice(folder: Path) -> None:
    path = folder / "answers-dflash.jsonl"
    text = path.read_text()
    path.write_text(text + text.splitlines()[0] + "\n")


def stranger(folder: Path) -> None:
    (folder / "answers-other.jsonl").write_text(
        (folder / "answers-plain.jsonl").read_text().replace("plain", "other")
    )


def broken(folder: Path) -> None:
    path = folder / "answers-plain.jsonl"
    path.write_text('{"question_id": 1}\n' + path.read_text())


def no_json(folder: Path) -> None:
    path = folder / "answers-plain.jsonl"
    path.write_text("nonsense\n" + path.read_text())


def no_utf8(folder: Path) -> None:
    path = folder / "answers-plain.jsonl"
    path.write_bytes(path.read_bytes() + b"\xff\n")


def margins(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "margins.jsonl").write_text(text)


def record(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "run.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (record("{}"), "expected the methods of a run in .*run.json"),
        (record('{"methods": 1}'), "expected the methods of a run in .*run.json"),
        (record('{"methods": [{}]}'), "expected the methods of a run in .*run.json"),
        (record('{"methods": [1]}'), "expected the methods of a run in .*run.json"),
        (twice, "expected one answer to a question and repeat"),
        (stranger, "expected a method of run.json at line 1"),
        (broken, "expected a line of a run's files at line 1"),
        (no_json, "expected JSON in line 1"),
        (no_utf8, r"expected JSON in line \d+ of .*answers-plain.jsonl"),
        (margins("{}\n"), "expected a line of a run's files at line 1 of .*margins.jsonl"),
        (margins("[1]\n"), "expected a line of a run's files at line 1 of .*margins.jsonl"),
        (
            lambda folder: (folder / "run.json").unlink(),
            "expected the folder of a run, with run.json",
        ),
    ],
)
def test_a_folder_that_is_no_run_is_refused_and_left(
    damage: Callable[[Path], Any], sentence: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", questions(2), answers_of(questions(2)))
    damage(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=sentence):
        summarize(folder, simple_score)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_line_that_was_cut_short_is_no_answer_yet(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", questions(2), answers_of(questions(2)))
    whole = len(read_run(folder).answers["dflash"])
    cut(folder)
    assert len(read_run(folder).answers["dflash"]) == whole - 1


def test_a_summary_that_is_no_json_is_refused_by_the_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path, questions(1), answers_of(questions(1)))
    (folder / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected JSON in .*summary.json.*remove it to have it"):
        write_report(folder)
