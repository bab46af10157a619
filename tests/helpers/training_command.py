"""`dflash-hf train` on a part of the bundled target, as small as it goes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner, Result

from dflash_hf.cli.main import app
from helpers.source_tree import ROOT

TOY = ROOT / "demos" / "toy"
# The bundled target with four of its twelve layers: what a stage does does not depend on their number. It is written
# once (tests/training/conftest.py), into the cache folder of this process, with which it goes.
SHALLOW = Path(os.environ["HF_HOME"]) / "shallow-target"
SMALL: list[object] = [
    *("--target", SHALLOW, "--threads", 1, "--license", "apache-2.0"),
    *("--num-eval", 2, "--max-new-tokens", 12, "--num_hidden_layers", 1, "--block-size", 4),
    *("--draft-options", '{"num_taps": 2}', "--bench-prompts", 1, "--disable-tqdm", "true"),
    *("--max_steps", 4, "--per_device_train_batch_size", 2, "--num_anchors", 4, "--save-steps", 2),
]


def train(*words: object) -> Result:
    """Runs the command."""
    return CliRunner().invoke(app, ["train", *map(str, words)])


def said(result: Result) -> str:
    """What was written, as one line."""
    return " ".join(result.output.split())


def write_shallow_target(folder: Path) -> Path:
    """Writes the bundled target with four of its twelve layers, and returns its folder."""
    whole = TOY / "target"
    config = AutoConfig.from_pretrained(whole, num_hidden_layers=4)
    config.layer_types = config.layer_types[:4]
    shutil.copytree(whole, folder)
    AutoModelForCausalLM.from_pretrained(whole, config=config).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int = 10) -> Path:
    """Writes conversations of the bundled target's."""
    lines = (TOY / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    path.write_text(
        "".join(f"{json.dumps({'messages': json.loads(line)['messages']})}\n" for line in lines)
    )
    return path


def killed(runner: Any) -> Any:
    """The stage, interrupted behind its second step."""

    def run(*args: Any) -> Any:
        import dflash_hf.training.trainer as trainer

        name = (
            "_save_checkpoint"
            if hasattr(trainer.DFlashTrainer, "_save_checkpoint")
            else "save_checkpoint"
        )
        saved = getattr(trainer.DFlashTrainer, name)

        def save_and_stop(self: Any, *rest: Any, **named: Any) -> None:
            saved(self, *rest, **named)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.DFlashTrainer, name, save_and_stop)
            return runner(*args)

    return run
