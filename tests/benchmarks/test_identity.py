"""`identity.py` finds where texts part and measures by how much, and fails where it is by too much."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import identity
import pytest
import torch
from harness.methods import Outcome
from harness.pair import Pair

from dflash_hf.pair.agreement import Agreement
from helpers.scripts import run_script

CPU = torch.device("cpu")


run = partial(run_script, identity.main)
QUICK = (
    "--random",
    "tiny",
    "--device",
    "cpu",
    "--prompts",
    "3",
    "--batch",
    "1,3",
    "--max-new-tokens",
    "12",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_engine_is_compared(results: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "identity.json"
    result = run(*QUICK, "--dtype", dtype, "--out", str(out))
    record = json.loads(out.read_text())
    assert [(row["engine"], row["batch"]) for row in record["rows"]] == [
        (engine, batch) for batch in (1, 3) for engine in ("static", "eager")
    ]
    for row in record["rows"]:
        assert row["ran_on"] == row["engine"]
        assert row["num_texts"] == 3
        assert row["num_identical"] == 3 - len(row["divergences"])
        kept = [found["is_tie"] and found["margin"] < 0.25 for found in row["divergences"]]
        assert row["margins_kept"] == all(kept)
        if dtype == "float32":
            assert row["identity_rate"] == 1.0
    assert result.exit_code == (0 if all(row["margins_kept"] for row in record["rows"]) else 1)
    assert not results.exists(), "random weights are never a record"


def test_a_wrong_text_fails_with_its_margin(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = identity.measure

    def wrong(pair: Pair, method: Any, inputs: Any, settings: Any) -> Outcome:
        outcome = whole(pair, method, inputs, settings)
        if method.name != "ours/eager":
            return outcome
        answers = [list(answer) for answer in outcome.answers]
        answers[0][5] = (answers[0][5] + 7) % 60
        return replace(outcome, answers=answers)

    monkeypatch.setattr(identity, "measure", wrong)
    out = tmp_path / "identity.json"
    result = run(*QUICK, "--batch", "3", "--dtype", "float32", "--out", str(out))
    assert result.exit_code == 1
    static, eager = json.loads(out.read_text())["rows"]
    assert static["divergences"] == []
    (found,) = eager["divergences"]
    assert (found["text"], found["token"]) == (0, 5)
    assert found["margin"] > 0.25
    assert "FAIL: eager, batch 3" in result.stderr


def test_only_narrow_ties_are_let_through() -> None:
    said: dict[str, Any] = {"sentence": "", "token": 3}
    assert identity.keeps(Agreement(sentence="identical"))
    assert identity.keeps(Agreement(**said, margin=0.2, is_tie=True))
    for wrong in (
        {"margin": 0.3, "is_tie": True},
        {"margin": 0.2, "is_tie": False},
        {"is_tie": False},
    ):
        assert not identity.keeps(Agreement(**said, **wrong))
