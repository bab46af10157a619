"""`batches.py` compares ways of decoding in batches, on the bundled pair."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import batches
import pytest

from helpers.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "demos" / "toy"
run = partial(run_script, batches.main)


def test_a_batch_that_cannot_be_filled_is_refused() -> None:
    done = run("--rows", "1,8", "--questions", "4")
    assert done.exit_code == 2
    assert "expected at least 8 --questions" in " ".join(done.output.split())


def test_the_command_of_the_head_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*args: object) -> None:
        raise FileNotFoundError("there are no models here")

    monkeypatch.setattr(batches, "load_pair", begun)
    commands = re.findall(r"benchmarks/batches\.py (.*)$", batches.__doc__ or "", re.MULTILINE)
    assert len(commands) == 1
    with pytest.raises(FileNotFoundError):
        run(*commands[0].split())


def test_a_table_of_two_numbers_of_rows(tmp_path: Path) -> None:
    rows = [
        {"question_id": number, "category": "sums", "turns": [f"Compute {number} + 4."]}
        for number in range(3)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "sums.jsonl").write_text(text, encoding="utf-8")
    done = run(
        *("--target", str(TOY / "target"), "--draft", str(TOY / "draft")),
        *("--data", str(tmp_path), "--sets", "sums", "--rows", "1,2", "--questions", "3"),
        *(
            "--rounds",
            "1",
            "--fixed",
            "2,16",
            "--max-new-tokens",
            "6",
            "--out",
            str(tmp_path / "batches.json"),
        ),
    )
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "batches.json").read_text(encoding="utf-8"))
    assert [row["rows"] for row in record["rows"]] == [1, 2]
    for row in record["rows"]:
        assert row["plain_seconds"] > 0
        assert row["default_over_plain"] > 0
        assert row["one_token_over_plain"] > 0
        assert row["tokens_per_verify"] > 1
        best = max(row["one_token_over_plain"], *row["fixed_over_plain"].values())
        ratio = row["default_over_plain"] / best
        # Each of the figures is rounded.
        assert row["default_over_best"] == pytest.approx(ratio, rel=0.01)
    assert record["provenance"]["max_new_tokens"] == 6


def test_a_draft_that_is_never_right(tmp_path: Path) -> None:
    row = {"question_id": 0, "category": "sums", "turns": ["Compute 3 + 4."]}
    (tmp_path / "sums.jsonl").write_text(json.dumps(row), encoding="utf-8")
    done = run(
        *("--target", str(TOY / "target"), "--draft", str(TOY / "draft"), "--never-right"),
        *("--data", str(tmp_path), "--sets", "sums", "--rows", "1", "--questions", "1"),
        *("--rounds", "1", "--max-new-tokens", "12", "--out", str(tmp_path / "batches.json")),
    )
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "batches.json").read_text(encoding="utf-8"))
    assert record["provenance"]["never_right"]
    # A random guess of 512 tokens is right now and then.
    assert record["rows"][0]["tokens_per_verify"] < 1.5
