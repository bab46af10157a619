"""`objectives.py` trains drafts by recipes behind the same answers, and goes on where it was."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import objectives
import pytest
import yaml

from helpers.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "demos" / "toy"
run = partial(run_script, objectives.main)


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """Two recipes for the bundled target, of a few steps."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    common = {
        "target": str(TOY / "target"),
        "dataset": str(TOY / "held_out.jsonl"),
        "output_dir": "unused",
        "num_prompts": 8,
        "num_eval": 2,
        "max_new_tokens": 16,
        "num_hidden_layers": 1,
        "block_size": 4,
        "per_device_train_batch_size": 4,
        "num_anchors": 4,
        "eval_strategy": "steps",
        "threads": 1,
    }
    for name in ("dflash", "dspark"):
        text = yaml.safe_dump({**common, "algorithm": name})
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def options(tmp_path: Path, recipes: Path) -> list[str]:
    """A comparison of one seed on one small set."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(TOY / "held_out.jsonl", data / "toy.jsonl")
    return [
        *("--folder", str(tmp_path / "runs"), "--data", str(data), "--recipes", str(recipes)),
        *("--seeds", "1", "--sets", "toy", "--questions", "2", "--steps", "2"),
        *("--out", str(tmp_path / "objectives.json")),
    ]


def test_recipes_are_compared_on_the_same_answers(tmp_path: Path, options: list[str]) -> None:
    result = run(*options)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "objectives.json").read_text())
    rows = record["rows"]
    assert [row["recipe"] for row in rows] == ["dflash", "dspark"]
    assert (tmp_path / "objectives.png").is_file()
    answers = {
        (tmp_path / "runs" / name / "answered" / "train.jsonl").read_text()
        for name in ("answers", "dflash-0", "dspark-0")
    }
    assert len(answers) == 1
    for row in rows:
        assert [step for step, _ in row["curve"]] == [1, 2]
        assert row["chain"]["toy"] >= 1
        assert row["tree"]["toy"] >= 1
    # Called again, nothing is trained again, and the record is the same
    drafts = [tmp_path / "runs" / name / "draft" for name in ("dflash-0", "dspark-0")]
    written = [(draft / "model.safetensors").stat().st_mtime_ns for draft in drafts]
    assert run(*options).exit_code == 0
    assert [(draft / "model.safetensors").stat().st_mtime_ns for draft in drafts] == written
    assert json.loads((tmp_path / "objectives.json").read_text())["rows"] == rows


def test_a_command_that_fails_ends_the_comparison(
    tmp_path: Path, options: list[str], recipes: Path
) -> None:
    for file in recipes.glob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        file.write_text(yaml.safe_dump({**content, "target": str(tmp_path / "none")}))
    result = run(*options)
    assert result.exit_code == 2
    assert not (tmp_path / "runs" / "dflash-0").exists()


def test_absent_files_are_a_sentence(tmp_path: Path, options: list[str], recipes: Path) -> None:
    result = run(*options, "--sets", "gsm8k")
    assert result.exit_code == 2
    assert "expected gsm8k.jsonl in" in " ".join(result.output.replace("│", " ").split())
    for file in recipes.glob("*.yaml"):
        file.unlink()
    result = run(*options)
    assert result.exit_code == 2
    assert "expected recipes in" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "runs").exists()
