"""What the GPU's benchmarks measure and change: products, gaps between kernels, and kernels that wait."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import gemm_times
import prepare
import pytest
import torch
from harness.experiments import EXPERIMENTS, WAIT, Streams, with_wait
from harness.gaps import Span, gaps_between
from harness.methods import OURS_DEFAULT, measure
from harness.shapes import SHAPES, build_pair, tiny

from dflash_hf import ops
from dflash_hf.bench.cells import Options
from dflash_hf.cache.context import NewContext
from helpers.scripts import run_script

KERNEL = '''def kernel(
    out,
    BLOCK: tl.constexpr,
):
    """Two lines.

    Of text.
    """
    row = tl.program_id(0)
    tl.store(out + row, BLOCK)
'''


def test_products_with_the_weights_of_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = gemm_times.weight_shapes(SHAPES["qwen3-8b"])
    assert set(shapes.values()) == {
        (4096, 4096),
        (1024, 4096),
        (12288, 4096),
        (4096, 12288),
        (151936, 4096),
        (4096, 20480),
    }
    whole = gemm_times.measure

    def measure(work: gemm_times.Work, *rest: Any) -> list[float]:
        if work.weight == "head":
            raise TypeError("it broke")
        return whole(work, *rest)

    monkeypatch.setattr(gemm_times, "measure", measure)
    out = tmp_path / "gemm.json"
    result = run_script(gemm_times.main, "--tiny", "--rows", "4,64", "--out", str(out))
    assert result.exit_code == 1, "one weight has failed"
    record = json.loads(out.read_text())
    assert record["provenance"]["is_complete"]
    every = record["rows"]
    rows = [row for row in every if row["weight"] in shapes]
    assert len(rows) == 2 * len(shapes), "the others are timed"
    both = [row for row in every if row["weight"] not in shapes]
    assert {row["rows"] for row in both} == {4}, "our kernels take few rows"
    ways = [row["way"] for row in both]
    assert ways == ["torch"] * 5 + ["one launch"] * 5
    assert all(row["error"] is None for row in both)
    failed = [row for row in rows if row["error"] is not None]
    assert [(row["weight"], row["error"]) for row in failed] == [
        ("head", "TypeError: it broke")
    ] * 2
    for row in rows:
        if row["error"] is None:
            many, few = row["out_features"], row["in_features"]
            assert row["bytes"] == 4 * (many * few + row["rows"] * (many + few))
            rate = row["bytes"] / row["microseconds"]["p50"] / 1e3
            assert row["gigabytes_per_second"] == pytest.approx(rate)


def test_products_that_were_cut_off_are_an_incomplete_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = iter([[1.0]])

    def measure(*args: Any) -> list[float]:
        for found in spans:
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm_times, "measure", measure)
    out = tmp_path / "gemm.json"
    result = run_script(gemm_times.main, "--tiny", "--rows", "4", "--out", str(out))
    assert result.exit_code != 0
    record = json.loads(out.read_text())
    assert len(record["rows"]) == 1
    assert record["provenance"]["is_complete"] is False


def test_products_whose_kernel_cannot_be_had_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gemm_times.call_of

    def call_of(work: gemm_times.Work, *rest: Any) -> Any:
        if work.way == "one launch" and work.weight == "down alone":
            ops.linears.failures[torch.device("cpu")] = "OutOfResources: shared memory"
        return whole(work, *rest)

    monkeypatch.setattr(gemm_times, "call_of", call_of)
    out = tmp_path / "gemm.json"
    result = run_script(gemm_times.main, "--tiny", "--rows", "4", "--out", str(out))
    assert result.exit_code == 1
    failed = [row for row in json.loads(out.read_text())["rows"] if row["error"] is not None]
    [row] = failed
    assert (row["weight"], row["way"]) == ("down alone", "one launch")
    assert "linears on cpu" in row["error"]
    assert not ops.linears.failures


def test_gaps_are_between_the_latest_end_and_the_next_begin() -> None:
    assert gaps_between([]) is None
    assert gaps_between([Span("alone", 0, 1)]) is None
    # The third runs beside the second and ends before it; the fourth begins where the second ends.
    spans = [
        Span("c", 5, 6),
        Span("a", 0, 2),
        Span("b", 4, 9),
        Span("d", 9, 10),
        Span("e", 10.5, 12),
    ]
    found = gaps_between(spans)
    assert found is not None
    assert (found["spans"], found["gaps"]) == (5, 2)
    assert (found["span_us"], found["idle_us"], found["busy_us"]) == (12, 2.5, 9.5)
    assert found["longest"] == [
        {"microseconds": 2, "behind": "a", "before": "b"},
        {"microseconds": 0.5, "behind": "d", "before": "e"},
    ]


def test_a_kernel_waits_first_of_all() -> None:
    source = with_wait(KERNEL)
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert ast.get_docstring(function) == "Two lines.\n\nOf text."
    assert ast.unparse(function.body[1]) == WAIT
    assert source.replace(f"    {WAIT}\n", "") == KERNEL
    assert with_wait("def k(a):\n    a += 1\n").splitlines()[1] == f"    {WAIT}"


def test_without_cuda_a_stream_only_calls() -> None:
    streams = Streams(torch.device("cpu"), 2)
    assert streams.on(1, streams.mark(), lambda: 7) == 7
    streams.join()


@pytest.mark.parametrize("name", ["unchanged", "forked", "prefetch", "stacked"])
def test_a_changed_draft_writes_context_as_it_does_unchanged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one product with stacked weights: else an experiment would time another draft."""
    pair = build_pair(
        "qwen3-8b", tiny(SHAPES["qwen3-8b"]), torch.float32, torch.device("cpu"), lengths=(9, 9)
    )
    found: list[bool] = []
    whole = NewContext.write_all_layers

    def noted(context: NewContext, *rest: Any) -> bool:
        found.append(whole(context, *rest))
        return found[-1]

    monkeypatch.setattr(NewContext, "write_all_layers", noted)
    with ops.kernels(True), EXPERIMENTS[name](pair):
        measure(pair, OURS_DEFAULT, pair.inputs("random", 0, 1), Options(max_new_tokens=8))
    assert found
    assert all(found)


def test_a_way_of_preparing_that_fails_ends_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked instead of spawned: it need not import anything."""
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(prepare.multiprocessing, "get_context", lambda method: forked)
    monkeypatch.setattr(prepare, "_measure_here", lambda *args: os._exit(3))
    with pytest.raises(SystemExit, match="map failed with exit code 3"):
        prepare.measure("map", tmp_path, "nowhere")
