"""The kernel benchmark runs without a GPU on tiny shapes, and reports nothing of a kernel that is wrong."""

import json
from pathlib import Path
from typing import Any

import kernel_times
import pytest
import typer
from harness import report
from harness.kernel_cases import all_cases
from torch import Tensor
from typer.testing import CliRunner, Result

import dflash_kernels


def run(*arguments: str) -> Result:
    """Runs the script's command in this process."""
    app = typer.Typer()
    app.command()(kernel_times.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for benchmarks/results."""
    for module in (kernel_times, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("OUT", raising=False)
    return tmp_path / "results"


def test_tiny_shapes_run_anywhere(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    result = run("--tiny", "--out", str(out))
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    assert out.with_suffix(".png").stat().st_size > 1000
    names = ["block_attention, verify", "block_attention, draft", "norm_rope_write", "context_kv", "argmax"]
    assert [row["kernel"] for row in record["rows"]] == [*names, "accept_and_prepare"]
    for row in record["rows"]:
        assert row["libraries_left_out"] == {}
        assert row["bytes"] > 0
        assert row["microseconds"].keys() >= {"kernel", "reference"}
        rate = row["bytes"] / row["microseconds"]["kernel"]["p50"] / 1e3
        assert row["gigabytes_per_second"] == pytest.approx(rate)
        wanted = rate * 1e9 / record["provenance"]["copy_bytes_per_second"]
        assert row["share_of_copy_bandwidth"] == pytest.approx(wanted)
    assert not results.exists(), "tiny shapes are never a record"


def test_a_wrong_kernel_is_not_reported(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = dflash_kernels.argmax

    def wrong(logits: Tensor) -> Tensor:
        return right(logits).add_(1)

    monkeypatch.setattr(dflash_kernels, "argmax", wrong)
    result = run("--tiny", "--out", str(tmp_path / "kernels.json"))
    assert result.exit_code == 1
    assert "not measured: argmax" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_library_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = kernel_times.torch.device("cpu")
    case = all_cases(kernel_times.TINY, [1], [24], kernel_times.torch.float32, device)[0]
    assert kernel_times.difference(case, "sdpa") is None
    case.ways["sdpa"] = lambda x: case.ways["kernel"](x) * 1.01
    row = kernel_times.measure(case, 1e9, device, 1)
    assert "differs by" in row["libraries_left_out"]["sdpa"]
    assert row["best_library"] == "reference"


def test_without_a_gpu_it_says_that_it_needs_one(results: Path) -> None:
    if kernel_times.torch.cuda.is_available():
        pytest.skip("there is one")
    result = run()
    assert result.exit_code == 2
    assert "CUDA" in result.stderr
