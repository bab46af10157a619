"""The folder of `dflash-hf train`: what counts as done in it, what a command leaves there, and who may write."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.stub_server import StubServer, behaviour_of
from transformers import AutoTokenizer, Trainer

from dflash_hf.cli import train_stages
from dflash_hf.cli.train_settings import STAGES, TrainSettings
from dflash_hf.cli.train_state import LOCK_FILE, RunState, locked
from dflash_hf.data import sources
from dflash_hf.training import prepare as prepare_module
from helpers import forked_python
from helpers.training_command import SMALL, TOY, said, train, write_rows


def finished(out: Path) -> RunState:
    """The state of a run whose stages are all done, with empty folders."""
    state = RunState(TrainSettings(target="org/x", output_dir=out), STAGES, redo=False)
    for stage in STAGES:
        state.write(stage, {})
        state.folder(stage).mkdir(exist_ok=True)
    return state


def test_training_is_not_done_without_its_draft(tmp_path: Path) -> None:
    """Checkpoints alone are no draft."""
    state = finished(tmp_path / "out")
    assert state.pending() == []
    state.folder("run").rmdir()
    assert (tmp_path / "out" / "run").is_dir()
    assert state.pending() == ["run"]


def test_another_length_beside_the_datas_answers_is_of_the_bench(tmp_path: Path) -> None:
    """Nothing that took long is made of it."""
    begun = TrainSettings(target="org/x", output_dir=tmp_path / "out", answers="data")
    state = RunState(begun, STAGES, redo=False)
    for stage in STAGES:
        state.write(stage, {})
        state.folder(stage).mkdir(exist_ok=True)
    changed = RunState(replace(begun, max_new_tokens=3), STAGES, redo=False)
    changed.check()
    assert changed.outdated == ["bench", "export"]
    assert changed.reason == "max_new_tokens was 1024 and is 3"
    # One that was begun before the bench had it on record
    made = json.loads(state.path.joinpath("stages.json").read_text())
    del made["bench"]["made_from"]["max_new_tokens"]
    state.path.joinpath("stages.json").write_text(json.dumps(made))
    older = RunState(begun, STAGES, redo=False)
    older.check()
    assert older.outdated == []


def test_settings_are_kept_until_a_stage_is_run(tmp_path: Path) -> None:
    """Options with which every stage is done were a look, not another run."""
    words = ["--dataset", write_rows(tmp_path / "rows.jsonl"), *SMALL, "--stages", "prepare"]
    assert train(*words, "--output-dir", tmp_path / "out").exit_code == 0
    settings = tmp_path / "out" / "settings.yaml"
    before = settings.read_text()
    result = train("--output-dir", tmp_path / "out", "--stages", "prepare", "--num-anchors", 3)
    assert result.output.splitlines() == [f"prepare: done before, {tmp_path / 'out' / 'prepared'}"]
    assert settings.read_text() == before
    words = ["--output-dir", tmp_path / "out", "--stages", "prepare", "--num-prompts", 5]
    assert train(*words).exit_code == 0
    assert "num_prompts: 5" in settings.read_text()


def test_an_edited_data_file_is_a_change(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    out = tmp_path / "out"
    words = ["--dataset", data, *SMALL, "--output-dir", out, "--stages"]
    assert train(*words, "prepare").exit_code == 0
    text = data.read_text()
    data.write_text(text)
    os.utime(data, (0, 0))
    result = train(*words, "prepare")
    assert result.output.splitlines() == [f"prepare: done before, {out / 'prepared'}"]
    rows = text.splitlines(keepends=True)
    data.write_text("".join(rows[:-1]))
    result = train(*words, "prepare,regenerate")
    assert result.exit_code == 0, result.output
    again = f"made again: prepare; {data.resolve()} has other contents"
    assert result.output.splitlines()[0] == again
    kept = (out / "prepared" / "train.jsonl").read_text()
    data.write_text(text)
    result = train(*words, "prepare,regenerate")
    assert result.exit_code == 2, result.output
    assert f"got a change: {data.resolve()} has other contents; add --redo" in said(result)
    assert (out / "prepared" / "train.jsonl").read_text() == kept
    assert train(*words, "prepare,regenerate", "--redo").exit_code == 0
    assert len((out / "prepared" / "train.jsonl").read_text()) > len(kept)


HOLD = """
import sys, time
from pathlib import Path
from dflash_hf.cli.train_state import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_in_a_folder_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    """Also where it was killed, at which the kernel releases the folder."""
    pytest.importorskip("fcntl")
    out = tmp_path / "out"
    words = ["--dataset", write_rows(tmp_path / "rows.jsonl"), *SMALL, "--stages", "prepare"]
    words += ["--output-dir", out]
    log = tmp_path / "log"
    first = forked_python.start(["-c", HOLD, out], os.environ, log, log)
    try:
        while not log.read_text():
            assert first.poll() is None
            time.sleep(0.01)
        assert log.read_text() == "held\n"
        result = train(*words)
    finally:
        first.kill()
        first.wait(60)
    assert result.exit_code == 2, result.output
    sentence = f"expected one dflash-hf train at a time in --output-dir, got another one in '{out}'"
    assert f"{sentence}; wait until it ends, or name another folder" in said(result)
    assert [path.name for path in out.iterdir()] == [LOCK_FILE]
    result = train(*words)
    assert result.exit_code == 0, result.output


def test_a_refused_command_leaves_folders_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = ["--dataset", write_rows(tmp_path / "rows.jsonl"), *SMALL, "--report-to", "nobody"]
    for place in ("new/run", "empty", "empty/run"):
        assert train(*words, "--output-dir", tmp_path / place).exit_code == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "rows.jsonl"]


def test_a_disk_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "out"):
        (tmp_path / "out" / "file").touch()
    assert "No locks available" in caplog.text
    assert (tmp_path / "out" / "file").is_file()


def test_a_run_goes_on_from_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the conversations and the end of the stage; relative paths are other ones there."""
    rows = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "sets").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--dataset", "rows.jsonl", *SMALL, "--stages", "prepare", "--output-dir", "out"]
    words += ["--feature-cache", "features", "--bench-data", "rows.jsonl,gsm8k"]
    words += ["--bench-data-dir", "sets"]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_stages, "split_rows", killed)
        assert train(*words).exit_code == 130
    written = tmp_path / "out" / "prepared" / train_stages.EVERY
    before = written.stat().st_mtime_ns
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    result = train("--output-dir", "../../out", "--stages", "prepare")
    assert result.exit_code == 0, said(result)
    assert written.stat().st_mtime_ns == before
    settings = yaml.safe_load((tmp_path / "out" / "settings.yaml").read_text())
    assert settings["dataset"] == [str(rows)]
    assert settings["feature_cache"] == str(tmp_path / "features")
    assert settings["bench_data"] == [str(rows), "gsm8k"]
    assert settings["bench_data_dir"] == str(tmp_path / "sets")
    assert settings["output_dir"] == str(tmp_path / "out")
    # As a --config it means the same run, from any folder
    again = train("--config", "../../out/settings.yaml", "--stages", "prepare")
    assert said(again).startswith("prepare: done before"), said(again)


def test_arguments_may_be_a_long_text_in_json(tmp_path: Path) -> None:
    config = json.dumps({"version": 2, "comment": "x" * 300})
    settings = TrainSettings(target="t", output_dir=tmp_path, arguments={"fsdp_config": config})
    assert settings.plain()["fsdp_config"] == config


def test_parts_of_a_killed_run_count_in_another_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "PART_ROWS", 4)
    words = ["--dataset", "rows.jsonl", *SMALL, "--stages", "prepare", "--output-dir", "out"]
    made: list[int] = []
    real = prepare_module.prepare_row

    def prepare_row(values: Any, number: int, rank: int | None, **options: Any) -> dict[str, Any]:
        made.append(number)
        if made == [0, 1, 2, 3, 4, 5]:
            raise KeyboardInterrupt
        return real(values, number, rank, **options)

    monkeypatch.setattr(prepare_module, "prepare_row", prepare_row)
    assert train(*words).exit_code == 130
    del made[:-1]
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert train("--output-dir", "../out", "--stages", "prepare").exit_code == 0
    assert made == [5, *range(4, 10)]


def test_rows_of_a_stage_that_did_not_end_count_where_bad_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the refusal of a bad row advises."""
    data = write_rows(tmp_path / "rows.jsonl")
    rows = data.read_text().splitlines(keepends=True)
    rows[8] = '{"text": "q"}\n'
    data.write_text("".join(rows))
    monkeypatch.setattr(sources, "PART_ROWS", 4)
    out = tmp_path / "out"
    result = train("--dataset", data, *SMALL, "--stages", "prepare", "--output-dir", out)
    assert result.exit_code == 2, result.output
    assert "or leave such rows out with --skip-bad-rows" in said(result)
    made: list[int] = []
    real = prepare_module.prepare_row

    def prepare_row(values: Any, number: int, rank: int | None, **options: Any) -> dict[str, Any]:
        made.append(number)
        return real(values, number, rank, **options)

    monkeypatch.setattr(prepare_module, "prepare_row", prepare_row)
    result = train("--output-dir", out, "--stages", "prepare", "--skip-bad-rows")
    assert result.exit_code == 0, result.output
    assert "made again" not in result.output
    assert made == [8, 9]


def test_self_written_prompts_of_a_stage_that_did_not_end_count_for_other_rows(
    tmp_path: Path,
) -> None:
    asked = TrainSettings(target="org/x", output_dir=tmp_path / "out", self_prompts=2)
    begun = RunState(asked, STAGES, redo=False)
    begun.write("prepare")
    (begun.folder("prepare") / train_stages.SELF_PROMPTS).touch()
    others: dict[str, Any] = {
        "skip_bad_rows": True,
        "num_prompts": 3,
        "num_eval": 4,
        "dataset": (str(write_rows(tmp_path / "rows.jsonl")),),
    }
    for name, value in others.items():
        state = RunState(replace(asked, **{name: value}), STAGES, redo=False)
        state.check()
        assert state.outdated == []
    with pytest.raises(ValueError, match="got a change: self_prompts was 2 and is 3; add --redo"):
        RunState(replace(asked, self_prompts=3), STAGES, redo=False).check()
    refusal = "got a change: skip_bad_rows was False and is True; add --redo"
    other = replace(asked, skip_bad_rows=True)
    # What stands behind the stage is of the rows that it was begun with
    begun.write("regenerate")
    with pytest.raises(ValueError, match=refusal):
        RunState(other, STAGES, redo=False).check()
    begun.folder("regenerate").rmdir()
    begun.write("prepare", {})
    with pytest.raises(ValueError, match=refusal):
        RunState(other, STAGES, redo=False).check()


def test_prompts_without_an_answer_are_sent_again_where_their_file_is_removed(
    tmp_path: Path,
) -> None:
    """Also behind the end of the stage, but not once a draft learns from its answers."""
    texts = [f"What is {at}?" for at in range(10)]
    texts[3] = "long " * 200
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    out = tmp_path / "out"
    errors = out / "answered" / "train.errors.jsonl"
    answers = out / "answered" / "train.jsonl"
    tokenizer: Any = AutoTokenizer.from_pretrained(TOY / "target")

    def answered(context: int) -> str:
        server = StubServer(0, behaviour_of(tokenizer, context=context, slots=8))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        words = ["--dataset", data, *SMALL, "--output-dir", out, "--server", server.url]
        result = train(*words, "--stages", "prepare,regenerate")
        server.shutdown()
        server.server_close()
        assert result.exit_code == 0, result.output
        (line,) = (line for line in result.output.splitlines() if line.startswith("regenerate: "))
        return line

    assert "answers 7, " in answered(100)
    told = f"regenerate: done before, {out / 'answered'}"
    assert answered(1000) == told
    first = answers.read_text()
    errors.unlink()
    assert "answers 8, " in answered(1000)
    assert answers.read_text().startswith(first)
    assert not errors.exists()
    assert answered(1000) == told


@pytest.mark.parametrize(
    ("fact", "file"),
    [
        ("in_the_errors_file", "train.errors.jsonl"),
        ("held_out_in_the_errors_file", "held_out.errors.jsonl"),
    ],
)
def test_prompts_are_not_sent_again_behind_a_training_that_has_begun(
    fact: str, file: str, tmp_path: Path
) -> None:
    state = finished(tmp_path / "out")
    state.write("regenerate", {fact: 1})
    assert state.pending() == []
    for folder in ("draft", "run"):
        (state.path / folder).rmdir()
    assert state.pending() == ["regenerate", "run"]
    (state.folder("regenerate") / file).touch()
    assert state.pending() == ["run"]


def test_a_disk_without_a_checkpoint_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's own advice is for Python: the command refuses that option."""
    out = tmp_path / "out"
    words = ["--dataset", write_rows(tmp_path / "rows.jsonl"), "--output-dir", out, *SMALL]
    words += ["--stages", "prepare,regenerate,run"]
    write = Trainer._save_checkpoint

    def refuse(trainer: Any, *rest: Any, **named: Any) -> None:
        if trainer.state.global_step >= first_refused[0]:
            raise OSError(errno.EROFS, "Read-only file system")
        write(trainer, *rest, **named)

    first_refused = [2]
    monkeypatch.setattr(Trainer, "_save_checkpoint", refuse)
    advice = f"make room on the disk or make it writable, and continue with dflash-hf train --output-dir {out}"
    result = train(*words)
    assert result.exit_code == 2, result.output
    assert f"{advice}, which begins the training again and keeps the answers" in said(result)
    assert "resume_from_checkpoint" not in result.output
    first_refused[0] = 4
    result = train(*words)
    assert result.exit_code == 2, result.output
    assert f"{advice}, which goes on from checkpoint-2" in said(result)


def test_a_run_ended_before_its_first_checkpoint_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are lost, and the answers are not; in a stage behind the training nothing is."""
    out = tmp_path / "out"
    settings = TrainSettings(target="org/x", output_dir=out)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_stages, "run_stages", interrupted)
    words = ["--dataset", write_rows(tmp_path / "rows.jsonl"), "--output-dir", out, *SMALL]
    ended = f"Ended; dflash-hf train --output-dir {out} continues the run."
    RunState(settings, STAGES, redo=False).write("run")
    assert said(train(*words)) == f"{ended} It begins the training again and keeps the answers."
    (out / "draft").mkdir()
    assert said(train(*words)) == ended
