"""The folder of `dflash-hf train`: what counts as done in it, what a command leaves there, and who may write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from dflash_hf.cli.train_settings import STAGES, TrainSettings
from dflash_hf.cli.train_state import RunState
from helpers.training_command import SMALL, train, write_rows


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
