"""A run that is killed at any moment goes on without a question lost or asked twice, and as no other run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_hf.bench import run as run_module
from dflash_hf.bench.cells import RunSettings
from dflash_hf.bench.methods import Models
from dflash_hf.bench.provenance import provenance
from dflash_hf.bench.run import run
from dflash_hf.pair.answers import changed
from helpers.bench_runs import TOY, Asked, answers_in, counts_in, settings_in, write_set

Pretend = Callable[..., Asked]


class Killed(BaseException):
    """What no method is expected to raise."""


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_killed_anywhere_and_resumed_is_one_run(tmp_path: Path, pretend: Pretend) -> None:
    """The process ends at random calls, and files lose random pieces of what was not yet written to the disk."""
    draw = random.Random(0)
    (tmp_path / "whole").mkdir()
    whole = settings_in(tmp_path / "whole", batch=(1, 2), repeats=2, temperature=(0.7,))
    num_calls = len(pretend(whole))
    for trial in range(10):
        folder = tmp_path / str(trial)
        folder.mkdir()
        settings = settings_in(folder, batch=(1, 2), repeats=2, temperature=(0.7,))
        done = False
        while not done:
            calls_left = draw.randint(0, num_calls)

            def before(name: str, texts: list[str]) -> None:
                nonlocal calls_left
                calls_left -= 1
                if calls_left < 0:
                    raise Killed

            try:
                pretend(replace(settings, resume=(settings.out / "run.json").exists()), before)
                done = True
            except Killed:
                path = draw.choice(sorted(settings.out.glob("answers-*.jsonl")))
                content = path.read_bytes()
                path.write_bytes(content[: draw.randint(max(0, len(content) - 900), len(content))])
        assert counts_in(settings.out) == counts_in(whole.out)


def test_nothing_is_asked_twice(tmp_path: Path, pretend: Pretend) -> None:
    settings = settings_in(tmp_path, methods=("plain",))
    done: list[str] = []

    def before(name: str, texts: list[str]) -> None:
        if len(done) == 4:
            raise Killed
        done.append(texts[0])

    with pytest.raises(Killed):
        pretend(settings, before)
    assert done == [f"one {number}" for number in range(4)]
    asked = pretend(replace(settings, resume=True))
    assert [texts[0] for _, texts in asked if texts != ["and then?"]] == [
        "one 4",
        "two 0",
        "two 1",
        "two 2",
    ]
    assert pretend(replace(settings, resume=True)) == []


def test_a_continuation_drops_the_numbers_of_before(tmp_path: Path, pretend: Pretend) -> None:
    """Failed answers are asked again: their scores and their summary are of answers that are not there any more."""
    settings = settings_in(tmp_path, methods=("plain",))

    def fail(name: str, texts: list[str]) -> None:
        if texts == ["one 1"]:
            raise RuntimeError("no room")

    pretend(settings, fail)
    (settings.out / "margins.jsonl").write_text("")
    assert json.loads((settings.out / "summary.json").read_text())["methods"][0]["all"]["failures"]

    def kill(name: str, texts: list[str]) -> None:
        raise Killed

    with pytest.raises(Killed):
        pretend(replace(settings, resume=True), kill)
    left = {path.name for path in settings.out.iterdir()}
    assert left == {"run.json", "questions.jsonl", "answers-plain.jsonl"}


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path, pretend: Pretend) -> None:
    """A piece of the batch that had no room stands there; it is asked again."""
    whole = settings_in(tmp_path, methods=("plain",), out=tmp_path / "whole")
    pretend(whole)
    settings = settings_in(tmp_path, methods=("plain",))
    size = (whole.out / "answers-plain.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(name: str, texts: list[str]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))

    sentence = r"^expected to write to .*answers-plain\.jsonl, got File too large; make room"
    try:
        with pytest.raises(ValueError, match=sentence):
            pretend(settings, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    asked = pretend(replace(settings, resume=True))
    assert 0 < len([texts for _, texts in asked if texts != ["and then?"]]) < 8
    assert counts_in(settings.out) == counts_in(whole.out)


def test_a_batch_that_is_there_in_part_is_asked_again_as_a_whole(
    tmp_path: Path, pretend: Pretend
) -> None:
    settings = settings_in(tmp_path, methods=("plain",), batch=(3,), temperature=(1.0,))
    pretend(settings)
    before = counts_in(settings.out)
    path = settings.out / "answers-plain.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    assert pretend(replace(settings, resume=True)) == [("plain", ["one 0", "one 1", "one 2"])]
    assert counts_in(settings.out) == before


def test_what_failed_is_asked_again(tmp_path: Path, pretend: Pretend) -> None:
    def before(name: str, texts: list[str]) -> None:
        if texts[0] in ("one 1", "two 0", "two 1", "two 2"):
            raise RuntimeError("the server is not up yet")

    settings = settings_in(tmp_path, methods=("plain", "dflash"))
    pretend(settings, before)
    failed = json.loads((settings.out / "run.json").read_text())["methods"][0]["failed"]
    assert failed is None, "all are there, if only with an error"
    asked = pretend(replace(settings, resume=True))
    assert Counter(texts[0] for _, texts in asked) == {
        "one 1": 2,
        "two 0": 2,
        "two 1": 2,
        "two 2": 2,
        "and then?": 6,
    }
    assert all(
        answer.error is None for rows in answers_in(settings.out).values() for answer in rows
    )
    other = settings_in(tmp_path, methods=("plain", "dflash"), out=tmp_path / "other")
    pretend(other)
    assert counts_in(other.out) == counts_in(settings.out)


OTHERS = {
    "seed": ({"seed": 1}, "seed was 0 and is 1"),
    "several": ({"seed": 1, "repeats": 2}, "repeats was 1 and is 2; seed was 0 and is 1"),
    "temperature": ({"temperature": (0.5,)}, "temperature was [0.0] and is [0.5]"),
    "methods": ({"methods": ("plain",)}, "methods was ['plain', 'dflash'] and is ['plain']"),
    "draft": ({"draft": str(TOY / "target")}, "draft was"),
    "template": (
        {"template_options": {"enable_thinking": False}},
        "template_options was {} and is {'enable_",
    ),
    "system": ({"system": "Be brief."}, "system was None and is 'Be brief.'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused(name: str, tmp_path: Path, pretend: Pretend) -> None:
    settings = settings_in(tmp_path)
    pretend(settings)
    before = snapshot(settings.out)
    changes, sentence = OTHERS[name]
    with pytest.raises(
        ValueError, match=r"^expected the run of .* as it was begun, got another, whose "
    ) as raised:
        pretend(replace(settings, resume=True, **changes))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert snapshot(settings.out) == before


def test_another_training_of_the_draft_is_refused(
    tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders are the same: what is in them is not."""
    loaded = {"target": {"weights": "a"}, "chat_template": "c"}

    def told(models: Any, num_processes: int) -> dict[str, Any]:
        described = {"dtype": "float32", "device": "cpu", "attention": "sdpa", **loaded}
        return {**provenance({}, num_processes), "models": {"auto": described}}

    monkeypatch.setattr(run_module, "provenance", told)
    settings = settings_in(tmp_path)
    pretend(settings)
    # An older version said nothing of drafts.
    loaded["draft"] = {"weights": "b"}
    assert pretend(replace(settings, resume=True)) == []
    begun = replace(settings, out=tmp_path / "begun")
    pretend(begun)
    before = snapshot(begun.out)
    loaded["draft"] = {"weights": "other"}
    with pytest.raises(
        ValueError, match=r"^expected the draft with which .*'b'.* got another .*'other'"
    ):
        pretend(replace(begun, resume=True))
    assert snapshot(begun.out) == before


@pytest.mark.parametrize("part", ["draft_options", "target_options", "dtype", "attention"])
def test_other_settings_of_the_models_are_refused(
    part: str, tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch, models: Models
) -> None:
    """Their files may have been edited, and the command be the same."""
    # Keys of a table are texts in JSON.
    tuned: Any = models.loaded_draft.generation_config
    with changed(tuned, verify_width={2: 4}):
        described = provenance({"auto": models}, 1)
    monkeypatch.setattr(run_module, "provenance", lambda *args: described)
    settings = settings_in(tmp_path)
    pretend(settings)
    assert pretend(replace(settings, resume=True)) == []
    before = snapshot(settings.out)
    described["models"]["auto"][part] = "other"
    with pytest.raises(ValueError, match=rf"^expected the {part} with which .* another .*'other'"):
        pretend(replace(settings, resume=True))
    assert snapshot(settings.out) == before


def test_the_release_of_transformers_is_no_option_of_a_draft(models: Models) -> None:
    described = provenance({"auto": models}, 1)["models"]["auto"]
    assert "transformers_version" not in described["draft_options"]
    assert described["target_options"]["eos_token_id"] is not None


def test_another_machine_is_told(
    tmp_path: Path,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = settings_in(tmp_path)
    pretend(settings)
    first = json.loads((settings.out / "run.json").read_text())["provenance"]
    pretend(replace(settings, resume=True))
    assert json.loads((settings.out / "run.json").read_text())["provenance"] == first
    other = {**first["versions"], "torch": "9.9"}
    monkeypatch.setattr("dflash_hf.bench.provenance.versions", lambda: other)
    pretend(replace(settings, resume=True))
    assert "other conditions than it was begun under (versions)" in caplog.text
    monkeypatch.setattr(run_module, "provenance", lambda models, size: provenance(models, size + 1))
    pretend(replace(settings, resume=True))
    assert "other conditions than it was begun under (versions, processes)" in caplog.text
    provenance_now = json.loads((settings.out / "run.json").read_text())["provenance"]
    continued, with_processes = provenance_now.pop("continued")
    assert with_processes["processes"] == 2
    assert provenance_now == first
    assert continued["versions"] == other
    assert "machine" not in continued
    assert "9.9" in (settings.out / "report.html").read_text()


def test_where_the_files_are_and_what_happens_at_the_end_makes_no_other_run(
    tmp_path: Path, pretend: Pretend
) -> None:
    settings = settings_in(tmp_path)
    pretend(settings)
    moved = tmp_path / "moved"
    shutil.move(settings.out, moved)
    assert (
        pretend(replace(settings, out=moved, resume=True, run_code=True, data_dir=tmp_path)) == []
    )


@pytest.mark.parametrize("name", ["made-up.jsonl", "sets/made-up.jsonl"])
def test_a_run_goes_on_from_another_working_folder(
    name: str, tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files are named by other relative paths there; a set's name is no path in either."""
    settings = settings_in(tmp_path)
    (tmp_path / "sets").mkdir()
    shutil.copy(settings.data[0], tmp_path / "sets")
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.chdir(tmp_path)
    here = {"target": os.path.relpath(TOY / "target"), "draft": os.path.relpath(TOY / "draft")}
    begun = replace(settings, out=Path("out"), data=(name,), **here)
    pretend(begun)
    known = replace(begun, data=("gsm8k",)).what_matters()["data"]
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    there = {"target": os.path.relpath(TOY / "target"), "draft": os.path.relpath(TOY / "draft")}
    gone_on = replace(begun, out=Path("../../out"), data=(f"../../{name}",), resume=True, **there)
    assert pretend(gone_on) == []
    assert known == replace(gone_on, data=("gsm8k",)).what_matters()["data"] == ["gsm8k"]
    assert replace(gone_on, data=("GSM-8K",)).what_matters()["data"] == ["gsm8k"]
    # A file that is gone since is still the same one
    (tmp_path / name).unlink()
    assert pretend(gone_on) == []
    with pytest.raises(ValueError, match=r"got another, whose data was .* and is "):
        pretend(replace(gone_on, data=("../made-up.jsonl",)))


def test_a_folder_with_files_is_refused_and_left_as_it_was(
    tmp_path: Path, pretend: Pretend
) -> None:
    settings = settings_in(tmp_path)
    settings.out.mkdir()
    (settings.out / "thesis.txt").write_text("mine")
    for resume, sentence in ((False, "new or empty folder"), (True, r"without run\.json")):
        with pytest.raises(ValueError, match=sentence):
            pretend(replace(settings, resume=resume))
    assert snapshot(settings.out) == {"thesis.txt": b"mine"}
    with pytest.raises(ValueError, match="got the file"):
        pretend(replace(settings, out=settings.out / "thesis.txt"))
    done = settings_in(tmp_path, out=tmp_path / "done")
    pretend(done)
    before = snapshot(done.out)
    with pytest.raises(ValueError, match="pass --resume to go on"):
        pretend(done)
    assert snapshot(done.out) == before
    for text, sentence in (
        ("{", "expected JSON in "),
        ("{}", "expected the settings of a run in "),
    ):
        (done.out / "run.json").write_text(text)
        with pytest.raises(ValueError, match=rf"{sentence}.*run\.json"):
            pretend(replace(done, resume=True))


def test_resuming_what_was_not_begun_begins_it(tmp_path: Path, pretend: Pretend) -> None:
    settings = settings_in(tmp_path, resume=True)
    assert len(pretend(settings)) > 0
    # Killed between the two files that are written first.
    early = settings_in(tmp_path, resume=True, out=tmp_path / "early")
    early.out.mkdir()
    shutil.copy(settings.out / "questions.jsonl", early.out)
    pretend(early)
    assert counts_in(early.out) == counts_in(settings.out)


def run_forked(settings: RunSettings) -> None:
    """Is a forked process: torch makes its threads anew, which must not begin in several threads that load weights."""
    torch.set_num_threads(1)
    run(settings)


def kill_and_resume(tmp_path: Path, rows: list[tuple[str, ...]], num_kills: int) -> None:
    """Kills processes of one run as soon as they have answered something, at a random moment, and compares.

    Widths are fixed: counts of ones that follow the clock would differ between any two runs.
    """
    settings = RunSettings(
        out=tmp_path / "whole",
        data=(str(write_set(tmp_path / "held-out.jsonl", rows)),),
        target=str(TOY / "target"),
        draft=str(TOY / "draft"),
        batch=(1, 2),
        max_new_tokens=(16,),
        temperature=(2.0,),
        verify_width=(8,),
    )
    run(settings)
    settings, draw = replace(settings, out=tmp_path / "killed", resume=True), random.Random(1)
    for _ in range(num_kills):
        # Forked, so that a process need not load torch anew.
        process = multiprocessing.get_context("fork").Process(target=run_forked, args=(settings,))
        size = written(settings.out)
        process.start()
        while process.is_alive() and written(settings.out) <= size:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)
        assert process.is_alive(), "it was quicker: give it more to do"
        process.kill()
        process.join()
    run(settings)
    assert counts_in(settings.out) == counts_in(tmp_path / "whole")
    assert not list(settings.out.glob("part*"))
    assert not list(settings.out.glob(".*"))


def written(out: Path) -> int:
    return sum(path.stat().st_size for path in out.glob("answers-*.jsonl"))


def test_killed_processes(tmp_path: Path, held_out: list[str]) -> None:
    kill_and_resume(
        tmp_path, [(held_out[0],), (held_out[1],), (held_out[0], "Thanks. Again?")], num_kills=2
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_processes_twenty_times(tmp_path: Path, held_out: list[str]) -> None:
    rows = [(text,) for text in held_out]
    kill_and_resume(
        tmp_path, [*rows * 7, *((text, "Thanks. Again?") for text in held_out)], num_kills=20
    )
