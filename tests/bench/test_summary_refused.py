"""Folders that are no run, or a run that was damaged: one sentence, and nothing written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.bench.questions import has_type
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


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    """Changes the first object of a file."""

    def damage(folder: Path) -> None:
        path = folder / name
        if path.suffix == ".json":
            first, rest = path.read_text(), ""
        else:
            first, _, rest = path.read_text().partition("\n")
        row = json.loads(first)
        change(row)
        path.write_text(f"{json.dumps(row)}\n{rest}")

    return damage


def in_choice(name: str, value: Any) -> Callable[[Path], Any]:
    return changed(
        "answers-dflash.jsonl", lambda row: row["choices"][0][name].__setitem__(0, value)
    )


NO_LINE = "expected a line of a run's files at line 1 of .*, got "


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (record(""), "expected JSON in .*run.json, got something else"),
        (record("[]"), "expected a JSON object in .*run.json, got "),
        (changed("run.json", lambda row: row.update(sessions=[[]])), "expected sessions of a run"),
        (changed("run.json", lambda row: row.update(settings=1)), "expected settings of a run"),
        (
            changed("run.json", lambda row: row["settings"].update(repeats="x")),
            "expected repeats of a run in .*, got 'x'",
        ),
        (
            changed("run.json", lambda row: row["provenance"].update(threads=float("nan"))),
            "expected finite numbers in .*run.json, got ",
        ),
        (
            changed("run.json", lambda row: row["methods"][0].update(own_baseline=[1])),
            "expected the methods of a run in ",
        ),
        (changed("questions.jsonl", lambda row: row.update(category=-1)), NO_LINE),
        (changed("questions.jsonl", lambda row: row.update(dataset={})), NO_LINE),
        (changed("questions.jsonl", lambda row: row.update(turns=[])), "expected an answer to 0"),
        (changed("answers-dflash.jsonl", lambda row: row.update(model_id={})), NO_LINE),
        (changed("answers-dflash.jsonl", lambda row: row.update(repeat={})), NO_LINE),
        (in_choice("turns", None), NO_LINE),
        (in_choice("wall_time", []), NO_LINE),
        (in_choice("wall_time", float("nan")), NO_LINE),
        (in_choice("ttft", True), NO_LINE),
        (in_choice("committed", [[{}]]), NO_LINE),
        (in_choice("accepted", float("nan")), NO_LINE),
        (in_choice("checked", [1]), NO_LINE),
        (margins('{"model_id": "a", "dataset": "a", "question_id": 1, "repeat": 0}\n'), NO_LINE),
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


@pytest.mark.parametrize("text", ["{}", '{"methods": [{}], "notes": []}', "[]", "\x00", ""])
def test_a_summary_of_another_program_is_refused(text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, questions(1), answers_of(questions(1)))
    (folder / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"^expected .*summary.json.*, got .* to have it"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_scores_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, questions(1), answers_of(questions(1)))
    summarize(folder, simple_score)
    changed("scores.jsonl", lambda row: row.pop("score"))(folder)
    with pytest.raises(ValueError, match=NO_LINE):
        write_report(folder)
    changed("scores.jsonl", lambda row: row.update(score="x"))(folder)
    with pytest.raises(ValueError, match=NO_LINE):
        write_report(folder)


@pytest.mark.parametrize("name", ["answers-dflash.jsonl", "margins.jsonl", "summary.json"])
def test_a_folder_in_the_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, questions(1), answers_of(questions(1)))
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=rf"^expected a file .*{name}, got 'a folder'; remove it"):
        write_report(folder)


def test_a_record_of_another_program_is_refused_by_the_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path, questions(1), answers_of(questions(1)))
    changed("run.json", lambda row: row["provenance"].update(machine=1))(folder)
    with pytest.raises(ValueError, match=r"^expected run.json and summary.json as a run writes"):
        write_report(folder)


def test_tokens_are_whole_numbers_in_a_list() -> None:
    assert has_type([], list[int])
    assert has_type([3, 4], list[int])
    for tokens in ([3, True], [3, 4.0], [3, "4"], [3, None], [[3]], (3, 4), "34", 3, None):
        assert not has_type(tokens, list[int]), tokens
