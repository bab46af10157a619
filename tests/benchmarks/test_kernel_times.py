"""The kernel benchmark runs without a GPU on tiny shapes, and reports nothing of a kernel that is wrong."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness.sweep
import kernel_times
import pytest
import torch
from harness import rates
from harness.kernel_cases import FLASH_ATTENTION, Case, all_cases, attention_case, flash_attention
from harness.plots import conditions
from harness.sweep import SHARES, TILES, sweep
from torch import Tensor

import dflash_kernels
from dflash_hf.generation.capture import NotCapturableError
from dflash_hf.generation.host_reads import READING_ON_HOST, HostReadError, NoHostReads
from dflash_kernels.block_attention import kernel
from helpers.scripts import run_script

# Where there is neither CUDA nor FlashAttention.
UNAVAILABLE = {"flex_attention", *FLASH_ATTENTION}


run = partial(run_script, kernel_times.main)


def test_tiny_shapes_run_anywhere(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    result = run("--tiny", "--swept", "1x24", "--out", str(out))
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    assert record["provenance"]["is_complete"]
    assert len(record["sweep"]) == len(TILES) * len(SHARES)
    assert all(row["error"] is None and row["microseconds"]["p50"] > 0 for row in record["sweep"])
    names = [row["kernel"] for row in record["rows"]]
    assert names[:2] == ["block_attention, verify", "block_attention, draft"]
    assert sorted({name.partition(",")[0] for name in names}) == sorted(dflash_kernels.__all__), (
        "no kernel without a row"
    )
    assert len(names) == len(dflash_kernels.__all__) + 1
    libraries = {row["kernel"]: row["best_library"] for row in record["rows"]}
    assert libraries["rms_norm"] == "F.rms_norm"
    assert libraries["silu_mul"] == "reference"
    for row in record["rows"]:
        left_out = row["libraries_left_out"]
        assert left_out.keys() == (
            UNAVAILABLE if row["kernel"].startswith("block_attention") else set()
        )
        assert all(why.startswith("not available") for why in left_out.values())
        assert row["bytes"] > 0
        assert row["microseconds"].keys() >= {"kernel", "reference"}
        rate = row["bytes"] / row["microseconds"]["kernel"]["p50"] / 1e3
        assert row["gigabytes_per_second"] == pytest.approx(rate)
        wanted = rate * 1e9 / record["provenance"]["copy_bytes_per_second"]
        assert row["share_of_copy_bandwidth"] == pytest.approx(wanted)
    assert not results.exists(), "tiny shapes are never a record"
    assert [floor["verdict"] for floor in record["floors"]] == ["unmeasured"] * 2
    assert conditions(record).startswith("TRIAL RUN")


def test_a_wrong_kernel_is_said_and_the_others_are_timed(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = dflash_kernels.argmax

    def wrong(logits: Tensor) -> Tensor:
        return right(logits).add_(1)

    def raising(states: Tensor, *rest: Any) -> Tensor:
        raise TypeError("it takes no such thing")

    monkeypatch.setattr(dflash_kernels, "argmax", wrong)
    monkeypatch.setattr(dflash_kernels, "rms_norm", raising)
    out = tmp_path / "kernels.json"
    result = run("--tiny", "--out", str(out))
    assert result.exit_code == 1
    record = json.loads(out.read_text())
    found = {row["kernel"]: row["why"] for row in record["wrong"]}
    assert found == {
        "argmax": "result 0 differs in 4 places",
        "rms_norm": "TypeError: it takes no such thing",
    }
    assert "left out: kernel for argmax" in result.stderr
    timed = {row["kernel"].partition(",")[0] for row in record["rows"]}
    assert timed == set(dflash_kernels.__all__) - {"argmax", "rms_norm"}


class GivenUp:
    """An operation whose kernel cannot be had, so that its definition runs in its place.

    Args:
        operation: The operation.
        fails (callable): Whether this call's kernel cannot be had.
    """

    def __init__(self, operation: Any, fails: Callable[[], bool] = lambda: True) -> None:
        self.operation = operation
        self.fails = fails
        self.num_tried = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = torch.device("cpu")
        if device not in self.operation.failures and self.fails():
            self.num_tried += 1
            self.operation.failures[device] = "OutOfResources: shared memory"
        return self.operation(*args, **kwargs)


def test_the_definition_of_a_kernel_is_not_timed_as_the_kernel(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash_kernels, "argmax", GivenUp(dflash_kernels.argmax))
    out = tmp_path / "kernels.json"
    result = run("--tiny", "--out", str(out))
    assert result.exit_code == 1
    record = json.loads(out.read_text())
    [wrong] = record["wrong"]
    assert wrong["kernel"] == "argmax"
    assert "argmax on cpu: OutOfResources: shared memory" in wrong["why"].replace("'", "")
    assert "argmax" not in {row["kernel"] for row in record["rows"]}


def test_a_tile_that_does_not_fit_spoils_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_large() -> bool:
        return kernel.tile_sizes(16, 4, 16, 16, 2, 2**20)[1:] == (128, 2, 8)

    attention = GivenUp(dflash_kernels.block_attention, is_large)
    monkeypatch.setattr(dflash_kernels, "block_attention", attention)
    rows = list(sweep(kernel_times.TINY, [(1, 24)], torch.float32, torch.device("cpu")))
    failed = [row["tile"] for row in rows if row["error"] is not None]
    assert failed == [(128, 2, 8)] * len(SHARES)
    assert attention.num_tried == len(SHARES)
    assert not dflash_kernels.block_attention.operation.failures


def test_products_of_more_rows_than_kernels_take_are_no_cases() -> None:
    found = {
        batch: {
            case.kernel
            for case in all_cases(
                kernel_times.TINY, [batch], [24], torch.float32, torch.device("cpu")
            )
        }
        for batch in (8, 16)  # 32 and 64 rows
    }
    assert found[8] - found[16] == {"linears", "gated_linear"}


def test_references_that_read_on_the_host_are_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    captured = rates.milliseconds

    def guarded(calls: Sequence[Callable[[], Any]], *rest: Any) -> list[float]:
        # Torch tells no mode of a `tolist` of a tensor on the host.
        with monkeypatch.context() as patch, NoHostReads():
            patch.setattr(Tensor, "tolist", refused)
            for call in calls:
                call()
        return captured(calls, *rest)

    def refused(tensor: Tensor) -> Any:
        raise HostReadError("tolist")

    def without_kernel(case: Case) -> Case:
        # On a CPU its definition runs in its place.
        return replace(case, ways={"kernel": lambda x: None, "reference": case.ways["reference"]})

    monkeypatch.setattr(kernel_times, "milliseconds", guarded)
    cases = all_cases(kernel_times.TINY, [1], [24], torch.float32, device)
    with torch.inference_mode():
        for case in cases:
            row = kernel_times.measure(without_kernel(case), 1e9, device, 1)
            assert row["microseconds"]["reference"]["p50"] > 0, case.kernel
        by_name = {case.kernel: case for case in cases}
        for name in READING_ON_HOST:
            calls = [partial(by_name[name].ways["reference"], by_name[name].make(0))]
            with pytest.raises(HostReadError):
                guarded(calls, device)


def test_a_capture_goes_by_what_cleans_up_behind_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[torch.device, Any]] = []

    def refuse(warm_up: Any, body: Any, device: torch.device, pool: Any) -> Any:
        asked.append((device, pool))
        raise NotCapturableError("CUDA could not capture it (it reads on the host)")

    monkeypatch.setattr(rates, "capture", refuse)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    with pytest.raises(NotCapturableError):
        rates.milliseconds([lambda: None], torch.device("cuda"))
    # A capture that is refused is ended by the index of its device, and by its pool.
    assert asked == [(torch.device("cuda", 3), (0, 7))]


def test_an_interrupted_sweep_leaves_its_rows_and_the_floors(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_timed = 0

    def interrupted(*args: Any) -> list[float]:
        nonlocal num_timed
        num_timed += 1
        if num_timed > 3:
            raise KeyboardInterrupt
        return [1.0]

    monkeypatch.setattr(harness.sweep, "milliseconds", interrupted)
    monkeypatch.setattr(kernel_times, "all_cases", lambda *args: [])
    out = tmp_path / "kernels.json"
    assert run("--tiny", "--swept", "1x24", "--out", str(out)).exit_code != 0
    record = json.loads(out.read_text())
    assert [row["microseconds"]["p50"] for row in record["sweep"]] == [1000.0] * 3
    assert len(record["floors"]) == 2
    assert record["provenance"]["is_complete"] is False


def test_a_wrong_library_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    case = all_cases(kernel_times.TINY, [1], [24], torch.float32, device)[0]
    assert kernel_times.difference(case, "sdpa") is None
    case.ways["sdpa"] = lambda x: case.ways["kernel"](x) * 1.01
    row = kernel_times.measure(case, 1e9, device, 1)
    assert "differs by" in row["libraries_left_out"]["sdpa"]
    assert row["best_library"] == "reference"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("as_tuple", [True, False])
def test_flash_attention_from_the_hub_is_timed_where_it_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch, as_tuple: bool, causal: bool
) -> None:
    """A stand-in with the library's interface: token-major states, `int32` lengths that count the block."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cache_seqlens: Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> Any:
        assert cache_seqlens.dtype == torch.int32
        out = torch.zeros_like(q)
        for row, length in enumerate(cache_seqlens.tolist()):
            keys, values = (
                t[row, :length].repeat_interleave(q.shape[2] // k.shape[2], dim=1) for t in (k, v)
            )
            scores = torch.einsum("qhe,khe->hqk", q[row], keys) * softmax_scale
            if causal:  # aligned to the end
                seen = torch.ones(q.shape[1], length).tril(length - q.shape[1]).bool()
                scores = scores.masked_fill(~seen, -torch.inf)
            out[row] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), values)
        return (out, None) if as_tuple else out

    asked: list[str] = []

    def get_kernel(name: str) -> Any:
        asked.append(name)
        if name.endswith("2"):
            raise OSError("nothing in the cache")
        return SimpleNamespace(flash_attn_with_kvcache=attention)

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    flash_attention.cache_clear()
    try:
        case = attention_case(kernel_times.TINY, 2, 24, torch.float32, torch.device("cpu"), causal)
    finally:
        flash_attention.cache_clear()
    assert asked == ["kernels-community/flash-attn3", "kernels-community/flash-attn2"]
    assert case.unavailable["hub flash-attn2"] == "not available: OSError: nothing in the cache"
    assert kernel_times.difference(case, "hub flash-attn3") is None
    row = kernel_times.measure(case, 1e9, torch.device("cpu"), 1)
    assert "hub flash-attn3" in row["microseconds"]
    assert "hub flash-attn2" in row["libraries_left_out"]


def test_floors_take_the_worst_row_at_32k() -> None:
    def row(kernel: str, context: int, share: float, us: float) -> dict[str, Any]:
        taken = {"kernel": {"p50": us}}
        return {"kernel": kernel, "context": context, "share_of_copy_bandwidth": share} | {
            "microseconds": taken,
            "best_library_us": 100.0,
        }

    rows = [
        row("block_attention, verify", 32768, 0.8, 90.0),
        row("block_attention, draft", 32768, 0.75, 101.0),
        row("block_attention, draft", 2048, 0.1, 900.0),
        row("argmax", 32768, 0.1, 900.0),
    ]
    found = [
        (floor["value"], floor["verdict"]) for floor in kernel_times.floor_rows(rows, judged=True)
    ]
    assert found == [(0.75, "pass"), (pytest.approx(1.01), "FAIL")]
    assert {floor["verdict"] for floor in kernel_times.floor_rows(rows, judged=False)} == {
        "unmeasured"
    }
    assert {floor["verdict"] for floor in kernel_times.floor_rows([], judged=True)} == {
        "unmeasured"
    }


def test_without_a_gpu_it_says_that_it_needs_one(results: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = run()
    assert result.exit_code == 2
    assert "CUDA" in result.stderr
