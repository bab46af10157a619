"""The benchmark scripts run, say what they promise, and record nothing that was measured on a busy machine."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import decode
import pytest
from harness.machine import CpuTimes, LoadWatch, busy_cores, parse_cpu_times
from harness.rows import percentiles
from transformers.cache_utils import StaticLayer

from helpers.scripts import record_of, run_script

HAS_ZLAB = importlib.util.find_spec("dflash") is not None
TINY = [
    "--random",
    "tiny",
    "--dtype",
    "float64",
    "--prompts",
    "1",
    "--repeats",
    "1",
    "--max-new-tokens",
    "10",
]


run = partial(run_script, decode.main)


def test_decode_compares_the_methods(results: Path) -> None:
    result = run(*TINY, "--batch", "1,2", "--force")
    assert result.exit_code == 0, result.output
    record = record_of(result)
    # Transformers' own assisted decoding
    takes_static = getattr(StaticLayer, "is_croppable", False)
    alone = ["plain", "ours", "stock", *(["zlab"] if HAS_ZLAB else []), "lookup"]
    alone += ["stock/static"] if takes_static else []
    rows = {(row["method"], row["batch"]): row for row in record["rows"]}
    assert rows.keys() == {*((name, 1) for name in alone), ("plain", 2), ("ours", 2)}
    for row in rows.values():
        assert row["identical"], row
        assert row["busy"]
        assert (row["kind"], row["dtype"]) == ("all", "float64")
        assert row["new_tokens"] == 10 * row["batch"]
        assert row["step_ms"]["p20"] <= row["step_ms"]["p50"] <= row["step_ms"]["p80"]
        assert row["tokens_per_second"] > 0
        assert row["context_tokens"] >= 24
    assert rows["plain", 1]["acceptance_length"] == rows["plain", 2]["acceptance_length"] == 1
    assert rows["plain", 1]["block"] is None
    assert rows["ours", 1]["block"] == 8
    # The same draft over the same text: stock's forwards and our verifies are as many.
    assert rows["ours", 1]["acceptance_length"] == rows["stock", 1]["acceptance_length"]
    if takes_static:
        assert rows["stock/static", 1]["acceptance_length"] == rows["stock", 1]["acceptance_length"]
    assert {floor["batch"] for floor in record["floors"]} == {1, 2}
    floor = record["floors"][0]
    assert floor["share_of_ideal"] == pytest.approx(
        floor["speedup"] / floor["ideal_speedup"], rel=1e-3
    )
    assert floor["step_time_against"].keys() == set(alone) & {"stock", "stock/static", "zlab"}
    assert record["provenance"].keys() >= {
        "machine",
        "threads",
        "versions",
        "commit",
        "date",
        "command",
        "load",
    }
    assert not results.exists(), "nothing is recorded under --force"


def test_batches_that_no_method_takes_are_left_out(
    results: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(*TINY, "--methods", "lookup", "--batch", "1,2", "--force")
    assert result.exit_code == 0, result.output
    assert [(row["method"], row["batch"]) for row in record_of(result)["rows"]] == [("lookup", 1)]
    assert "leaving out batch 2" in caplog.text


def test_force_still_writes_where_it_is_told_to(
    results: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "decode.json"
    result = run(
        *TINY,
        "--methods",
        "plain,ours",
        "--batch",
        "1",
        "--force",
        "--out",
        str(elsewhere),
    )
    assert json.loads(elsewhere.read_text()) == record_of(result)
    assert not results.exists()


def test_sampling_compares_the_proposal_rules(results: Path) -> None:
    record = record_of(
        run(*TINY, "--sampling", "--temperatures", "0.6", "--repeats", "2", "--force")
    )
    assert [row["method"] for row in record["rows"]] == [
        "ours/shared_noise",
        "ours/argmax",
        "ours/sample",
        "stock",
    ]
    for row in record["rows"]:
        assert row["temperature"] == 0.6
        assert row["new_tokens"] == 2 * 10
        assert row["ci95"][0] <= row["acceptance_length"] <= row["ci95"][1]
    assert not results.exists()


def loads(monkeypatch: pytest.MonkeyPatch, before: float, during: float) -> None:
    """Simulates other processes on the machine."""

    def sample(watch: LoadWatch) -> float:
        watch.before = before
        return before

    def stop(watch: LoadWatch) -> float:
        watch.during = during
        return during

    monkeypatch.setattr(LoadWatch, "sample", sample)
    monkeypatch.setattr(LoadWatch, "stop", stop)


def test_a_busy_machine_is_refused(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, before=1.4, during=0.0)
    result = run(*TINY)
    assert result.exit_code == decode.BUSY_EXIT
    assert "expected a quiet machine" in result.output
    assert not results.exists()


@pytest.mark.parametrize("during", [0.0, 0.9])
def test_only_a_quiet_run_is_recorded(
    results: Path, monkeypatch: pytest.MonkeyPatch, during: float
) -> None:
    loads(monkeypatch, before=0.05, during=during)
    record = record_of(run(*TINY, "--methods", "plain,ours", "--batch", "1"))
    assert all(row["busy"] == (during > 0) for row in record["rows"])
    written = results / "decode.json"
    assert written.exists() == (during == 0)
    if during == 0:
        assert json.loads(written.read_text()) == record


def test_load_is_read_from_the_kernels_counters() -> None:
    before = parse_cpu_times("cpu  100 0 20 800 30 0 0 50 0 0\ncpu0 1 2 3 4\n")
    assert before == CpuTimes(170, 1000)
    # 100 ticks later, on four cores: 25 of them busy, so one core was.
    assert busy_cores(before, CpuTimes(195, 1100), 4) == pytest.approx(1.0)
    assert busy_cores(before, before, 4) is None
    assert parse_cpu_times("no such line") == CpuTimes(0, 0)


def test_summaries() -> None:
    assert percentiles([5, 1, 4, 2, 3]) == {"p20": 2, "p50": 3, "p80": 5}
    assert percentiles([]) == {"p20": None, "p50": None, "p80": None}
