"""The folder of `dflash-hf train`: what counts as done in it, what a command leaves there, and who may write."""

from __future__ import annotations

from pathlib import Path

from dflash_hf.cli.train_settings import STAGES, TrainSettings
from dflash_hf.cli.train_state import RunState


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
