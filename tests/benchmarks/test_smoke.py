"""`smoke.py` tries every engine, says what failed, and goes on behind it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import smoke
from harness.pair import Pair

from helpers.scripts import run_script

run = partial(run_script, smoke.main, "--tiny", "--device", "cpu", "--new-tokens", "6")


def test_every_engine_is_tried(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    result = run("--out", str(out))
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["provenance"]["is_complete"]
    rows = {row["check"]: row for row in record["rows"]}
    cells = [f"{sampling}, batch {batch}" for sampling in ("greedy", "qwen3") for batch in (1, 8)]
    for cell in cells:
        assert rows[f"static, {cell}"]["engine"] == "static"
        assert rows[f"eager, {cell}"]["engine"] == "eager"
        assert rows[f"static, {cell}"]["is_tree"], "the defaults"
        assert "stand for it" in rows[f"cuda_graph, {cell}"]["why"], (
            "nothing is captured without CUDA"
        )
        assert f"not run: cuda_graph, {cell}" in result.stdout
    assert rows["kernels of all operations"]["failures"] == {}
    assert "block_attention" in rows["kernels of all operations"]["operations"]
    assert rows["plain generate with a static cache"]["passed"]
    assert not results.exists(), "tiny sizes are never a record"


def test_what_fails_is_a_row_and_not_the_end(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = smoke.measure

    def measure(pair: Pair, method: Any, *rest: Any) -> Any:
        if method.name == "ours/eager":
            raise KeyError("it broke")
        outcome = whole(pair, method, *rest)
        if method.name == "ours/static":
            outcome.answers[0][2] = (outcome.answers[0][2] + 7) % 60
        return outcome

    monkeypatch.setattr(smoke, "measure", measure)
    monkeypatch.setattr(smoke, "BATCHES", (1,))
    result = run("--out", str(tmp_path / "smoke.json"))
    assert result.exit_code == 1
    rows = {row["check"]: row for row in json.loads((tmp_path / "smoke.json").read_text())["rows"]}
    assert rows["eager, greedy, batch 1"]["why"] == "KeyError: 'it broke'"
    assert "differs from token 3 on" in rows["static, greedy, batch 1"]["why"]
    assert rows["static, qwen3, batch 1"]["passed"], "what is sampled is not compared with plain's"
    assert rows["plain generate with a static cache"]["passed"]


def test_what_was_cut_off_is_an_incomplete_record(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(smoke, "ENGINES", ())
    monkeypatch.setattr(smoke, "kernels", interrupted)
    assert run("--out", str(tmp_path / "smoke.json")).exit_code != 0
    record = json.loads((tmp_path / "smoke.json").read_text())
    assert [row["check"] for row in record["rows"]] == [
        "plain, greedy, batch 1",
        "plain, greedy, batch 8",
    ]
    assert record["provenance"]["is_complete"] is False
