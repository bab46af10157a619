"""`train_steps.py` trains a tiny double of a published shape, and fails where the loss does not fall."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import train_steps

from dflash_hf.training import DFlashTrainer
from helpers.scripts import run_script

run = partial(run_script, train_steps.main)
OTHERS = ("--tiny", "--device", "cpu", "--rows", "2", "--steps", "4")


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3.5-9b"])
def test_a_tiny_pair_learns(tmp_path: Path, model: str) -> None:
    out = tmp_path / "train.json"
    result = run(*OTHERS, "--model", model, "--out", str(out))
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["loss_falls"]
    assert row["last_loss"] < row["first_loss"]
    assert row["steps"] == 4
    assert row["step_ms"] > 0


def test_a_loss_that_is_not_finite_is_said_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = DFlashTrainer.training_step

    def broken(self: DFlashTrainer, *args: Any) -> object:
        for weight in self.draft.parameters():
            weight.data.fill_(torch.nan)
        return whole(self, *args)

    monkeypatch.setattr(DFlashTrainer, "training_step", broken)
    result = run(*OTHERS, "--out", str(tmp_path / "train.json"))
    assert result.exit_code == 1
    assert "expected a loss that falls" in result.output


def test_bad_input_is_a_sentence() -> None:
    result = run("--model", "qwen9")
    assert result.exit_code == 2
    assert "expected a model among" in " ".join(result.output.replace("│", " ").split())
