"""`step.py` runs all its paths on tiny doubles, and its arithmetic is right: bytes, experts, lengths, floors."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import plot
import pytest
import step
import torch
from harness.pair import Pair
from harness.plots import conditions, step_figure, step_points
from harness.roofline import (
    derived_speeds,
    expected_experts,
    forward_work,
    geometric_probability,
    length_at,
    mean_length,
    memory_needed,
    step_work,
)
from harness.shapes import SHAPES, build_pair, tiny
from harness.stages import ENDS, measure_stages
from harness.step_rows import floor_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_hf.bench.cells import Options
from dflash_hf.block.positions import build_target_layer_ids
from dflash_hf.generation import step as step_module
from dflash_hf.target_model.parts import find_target
from helpers.scripts import record_of, run_script

HAS_ZLAB = importlib.util.find_spec("dflash") is not None
CPU = torch.device("cpu")
QUICK = ("--tiny", "--device", "cpu", "--repeats", "1", "--samples", "2", "--new-tokens", "4")


run = partial(run_script, step.main)


def tiny_pair(name: str) -> Pair:
    """A tiny double with random weights, in float32."""
    return build_pair(name, tiny(SHAPES[name]), torch.float32, CPU, lengths=(9, 9))


def published(name: str) -> Pair:
    """A pair of the published shape, without memory."""
    return build_pair(name, SHAPES[name], torch.bfloat16, torch.device("meta"))


# ---- every path, on tiny doubles


def test_all_methods_and_parts_of_one_shape(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    result = run(*QUICK, "--cells", "1x24,8x24", "--ours-tokens", "6", "--out", str(out))
    assert result.exit_code == 0, result.output
    record = record_of(result)
    assert json.loads(out.read_text()) == record
    assert not results.exists(), "tiny shapes are never a record"
    more = [
        "ours/eager",
        "ours/sampled",
        "ours/qwen3-sampling",
        "plain/qwen3-sampling",
        "plain/static",
    ]
    alone = ["ours/default", "ours", "plain", *(["zlab"] if HAS_ZLAB else []), "stock", *more]
    found = {
        batch: [row["method"] for row in record["rows"] if row["batch"] == batch]
        for batch in (1, 8)
    }
    assert found == {1: alone, 8: ["ours/default", "ours", "ours/w4", "plain", *more]}
    for row in record["rows"]:
        assert "tokens_per_second" not in row, "with random weights they are derived"
        speeds, ms = row["derived_tokens_per_second"], row["step_ms"]["p50"]
        assert speeds["at_1"] == pytest.approx(row["batch"] / ms * 1e3, abs=0.1)
        assert speeds.keys() == (
            {"at_1"} if row["method"].startswith("plain") else {"at_1", "at_3", "at_4.5", "at_6.5"}
        )
        assert row["new_tokens"] == (6 if row["method"].startswith("ours") else 4) * row["batch"]
        assert (row["verify_width"] is None) == row["method"].startswith("plain")
    left_out = {(row["batch"], row["what"]) for row in record["not_run"]}
    assert left_out == {(8, "stock"), (8, "zlab"), *([] if HAS_ZLAB else [(1, "zlab")])}
    steps = [(row["batch"], row["verify_width"], row["is_tree"]) for row in record["stages"]]
    assert steps == [(1, 8, True), (1, 8, False), (8, 8, True), (8, 8, False), (8, 4, False)]
    for row in record["stages"]:
        assert row["is_default"] == row["is_tree"]
        assert (row["derived_tokens_per_second"] == {}) == row["is_tree"]
        assert row["gaps"] is None, "there is no device that could stand idle"
        assert row["engine"] == "static"
        assert row["host_reads"] is None
        assert row["capture_seconds"] is None, "nothing is captured on a CPU"
        slowest = [kernel["microseconds"] for kernel in row["kernels"]]
        assert slowest == sorted(slowest, reverse=True)
        assert any(
            kernel["name"] == "aten::addmm" or "mm" in kernel["name"] for kernel in row["kernels"]
        )
        # The middle of two samples is no sample, and percentiles are samples.
        assert sum(row["parts_ms"].values()) == pytest.approx(
            row["step_over_floor"] * row["floor_ms"], rel=1e-3
        )
        wanted = row["bytes"]["total"] / record["provenance"]["copy_bytes_per_second"] * 1e3
        assert row["floor_ms"] == pytest.approx(wanted, rel=1e-4)
    assert {floor["verdict"] for floor in record["floors"]} == {"unmeasured"}
    assert record["provenance"]["is_complete"]
    assert "4.5" in result.stdout
    assert "DERIVED" in result.stdout


def test_every_shape_runs(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    result = run(
        *QUICK,
        "--models",
        "all",
        "--cells",
        "2x12",
        "--methods",
        "ours,plain/static,stock",
        "--out",
        str(out),
    )
    assert result.exit_code == 0, result.output
    record = record_of(result)
    assert [(row["model"], row["method"]) for row in record["rows"]] == [
        (name, method) for name in SHAPES for method in ("ours", "plain/static")
    ]
    assert [row["model"] for row in record["stages"]] == [
        name for name in SHAPES for _ in ("the defaults", "a chain")
    ]
    assert record["provenance"]["weight_bytes"].keys() == SHAPES.keys()
    assert {row["why"] for row in record["not_run"] if row["model"] == "qwen3-vl-8b"} == {
        "it takes no vision target"
    }


def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def counted(
        name: str, shape: Any, dtype: torch.dtype, device: torch.device, **rest: Any
    ) -> Pair:
        built.append(device.type)
        return build_pair(name, shape, dtype, device, **rest)

    monkeypatch.setattr(step, "build_pair", counted)
    plan = build_pair("qwen3-8b", tiny(SHAPES["qwen3-8b"]), torch.float32, torch.device("meta"))
    fits, needs = memory_needed(plan, 1, 24, 4), memory_needed(plan, 64, 64, 4)
    out = ("--out", str(tmp_path / "step.json"), "--methods", "plain")
    record = record_of(
        run(*QUICK, "--cells", "1x24,64x64", "--memory-gib", str(fits / 2**30), *out)
    )
    assert [row["batch"] for row in record["rows"]] == [1]
    (row,) = record["not_run"]
    assert (row["batch"], row["context"], row["bytes_needed"]) == (64, 64, needs)
    assert row["bytes_available"] < needs
    assert f"{needs:,} needed" in row["why"]
    built.clear()
    record = record_of(run(*QUICK, "--cells", "1x24", "--memory-gib", "0.0001", *out))
    assert built == ["meta"]
    assert (record["rows"], record["stages"], record["not_run"][0]["what"]) == ([], [], "weights")


def test_nothing_is_begun_when_time_is_up(results: Path, tmp_path: Path) -> None:
    record = record_of(run(*QUICK, "--budget", "0", "--out", str(tmp_path / "step.json")))
    assert (record["rows"], record["stages"]) == ([], [])
    assert [row["why"] for row in record["not_run"]] == ["no time left"]


def test_what_breaks_off_costs_only_itself(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step.measure

    def measure(pair: Pair, method: Any, *rest: Any) -> Any:
        if method.name == "ours/eager":
            raise AttributeError("it broke")
        return whole(pair, method, *rest)

    monkeypatch.setattr(step, "measure", measure)
    out = tmp_path / "step.json"
    result = run(*QUICK, "--cells", "1x24", "--methods", "ours,ours/eager,plain", "--out", str(out))
    assert result.exit_code == 1
    record = json.loads(out.read_text())
    assert [row["method"] for row in record["rows"]] == ["ours", "plain"]
    assert [(row["what"], row["why"]) for row in record["not_run"]] == [
        ("ours/eager", "AttributeError: it broke")
    ]


def test_memory_that_cannot_be_measured_costs_only_itself(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "step.json"
    written: list[int] = []
    whole = step.run_model

    def pretended(bench: step.Bench, *rest: Any) -> None:
        bench.device = torch.device("cuda")
        whole(bench, *rest)

    def on_cpu(name: str, shape: Any, dtype: torch.dtype, device: Any, **rest: Any) -> Pair:
        is_plan = device.type == "meta"
        return build_pair(name, shape, dtype, device if is_plan else CPU, **rest)

    def broken(*args: Any) -> Any:
        written.append(len(json.loads(out.read_text())["rows"]))
        raise AttributeError("it broke")

    monkeypatch.setattr(step, "run_model", pretended)
    monkeypatch.setattr(step, "build_pair", on_cpu)
    monkeypatch.setattr(step, "graph_memory", broken)
    monkeypatch.setattr(step, "SHORT", 24)
    result = run(*QUICK, "--cells", "1x24", "--methods", "plain", "--out", str(out))
    assert result.exit_code == 1
    assert written == [1], "the cell is written before"
    record = json.loads(out.read_text())
    assert [(row["what"], row["why"]) for row in record["not_run"]] == [
        ("memory of graphs", "AttributeError: it broke")
    ]


def test_an_interrupted_run_leaves_what_it_had(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step.measure

    def measure(pair: Pair, method: Any, *rest: Any) -> Any:
        if method.name == "plain":
            raise KeyboardInterrupt
        return whole(pair, method, *rest)

    monkeypatch.setattr(step, "measure", measure)
    out = tmp_path / "step.json"
    result = run(*QUICK, "--cells", "1x24", "--methods", "ours,plain", "--out", str(out))
    assert result.exit_code == 130
    record = json.loads(out.read_text())
    assert [row["method"] for row in record["rows"]] == ["ours"]
    assert not record["provenance"]["is_complete"]


def test_a_changed_step_says_the_same(results: Path, tmp_path: Path) -> None:
    chosen = ("--methods", "none", "--widths", "4", "--experiments", "forked,prefetch,stacked")
    result = run(*QUICK, "--cells", "2x24", *chosen, "--out", str(tmp_path / "step.json"))
    assert result.exit_code == 0, result.output
    record = record_of(result)
    assert record["rows"] == []
    assert [row["verify_width"] for row in record["stages"]] == [8, 4]
    # Two layers of the draft and six of the target: five products of each are forked. Six stand before or behind a
    # weight that is read early, but for the first of each model.
    found = [(row["experiment"], row["changed"], row["same_text"]) for row in record["experiments"]]
    assert found == [
        ("unchanged", 0, True),
        ("forked", 40, True),
        ("prefetch", 46, True),
        ("stacked", 24, True),
    ]
    assert all(row["step_ms"]["p50"] > 0 and row["is_default"] for row in record["experiments"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cells", "2048"), "expected cells such as 1x2048"),
        (("--cells", "0x16"), "expected cells such as 1x2048"),
        (("--models", "qwen9"), "expected names among qwen3-4b"),
        (("--methods", "fast"), "expected names among ours"),
        (("--experiments", "luck"), "expected names among unchanged"),
    ],
)
def test_options_that_cannot_be_honoured(arguments: tuple[str, str], message: str) -> None:
    result = run("--tiny", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_published_shapes_ask_for_a_gpu() -> None:
    result = run("--device", "cpu")
    assert result.exit_code == 2
    assert "CUDA" in result.stderr


# ---- the parts of a step


def test_parts_are_timed_over_rows_that_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair("qwen3-8b")
    inputs, options = pair.inputs("random", 0, 3), Options(max_new_tokens=4)
    ran: Counter[str] = Counter()
    owners: list[tuple[Any, str]] = [*ENDS.values(), (step_module, "commit")]
    for owner, name in owners:
        whole = getattr(owner, name)

        def counted(*args: Any, name: str = name, whole: Any = whole, **kwargs: Any) -> Any:
            ran[name] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    before = {name: getattr(owner, name) for owner, name in ENDS.values()}
    stages = measure_stages(pair, inputs, options, 5, samples=2)
    assert {name: len(values) for name, values in stages.until_ms.items()} == {
        "draft": 2,
        "verify": 2,
        "step": 2,
    }
    assert stages.context == 3 * 9
    # Four runs of each body, one that looks for reads on the host, one profiled; accept also ends the prefill.
    assert (ran["propose"], ran["verify"]) == (14, 10)
    assert ran["commit"] - 6 in (0, 1)
    assert all(getattr(owner, name) is before[name] for owner, name in ENDS.values())
    assert pair.draft.generation_config.engine == "auto"
    assert pair.draft.generation_config.verify_width is None
    # The pair decodes as it did.
    again = pair.target.generate(**inputs, **options.arguments(), assistant_model=pair.draft)
    assert torch.equal(again, pair.target.generate(**inputs, **options.arguments()))


# ---- what a step has to read


class ReadWeights(TorchDispatchMode):
    """Adds up the bytes of weights that operations read, looking tables up left aside."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        weights = [w for model in (pair.target, pair.draft) for w in model.parameters()]
        self.storages = {w.untyped_storage().data_ptr() for w in weights}
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        is_view = isinstance(out, Tensor) and any(
            isinstance(arg, Tensor)
            and out.untyped_storage().data_ptr() == arg.untyped_storage().data_ptr()
            for arg in args
        )
        if name != "embedding" and not is_view:
            read = [arg for arg in args if isinstance(arg, Tensor)]
            read = [arg for arg in read if arg.untyped_storage().data_ptr() in self.storages]
            self.num_bytes += sum(arg.numel() * arg.element_size() for arg in read)
        return out


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b", "llama-3.1-8b", "qwen3-vl-8b"])
@torch.no_grad()
def test_weights_of_a_step_are_those_that_a_step_reads(name: str) -> None:
    pair = tiny_pair(name)
    found: list[int] = []

    def counted(launch: Any, run: Any) -> None:
        with ReadWeights(pair) as reads:
            launch()
        found.append(reads.num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.stages._host_reads", counted)
        measure_stages(pair, pair.inputs("random", 0, 2), Options(max_new_tokens=4), 8, samples=1)
    work = step_work(pair, 18, 2, 8)
    assert found == [work.target_weights + work.draft_weights + work.draft_head]


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_step_by_hand(name: str) -> None:
    pair, shape = tiny_pair(name), tiny(SHAPES[name])
    batch, width, context = 3, 5, 40
    target = 0.0
    head = find_target(pair.target).head.weight
    for parameter_name, weight in pair.target.named_parameters():
        if "visual" in parameter_name or ("embed_tokens" in parameter_name and weight is not head):
            continue
        share = 1.0
        if weight.dim() == 3 and shape.experts:
            assert weight.shape[0] == shape.experts
            share = expected_experts(shape.experts, shape.chosen, batch * width) / shape.experts
        target += 4 * weight.numel() * share
    work = step_work(pair, context, batch, width)
    assert work.target_weights == pytest.approx(target)
    assert work.draft_weights == 4 * sum(w.numel() for w in pair.draft.parameters())
    assert work.draft_head == 4 * shape.vocab * shape.hidden
    per_token = 2 * shape.groups * shape.size * 4
    # Of the hybrid's six layers the fourth is one of attention; the others' states, 4 heads of 8 x 8, in and out.
    layers, states = (1, 5 * 2 * 4 * 8 * 8 * 4) if shape.family == "qwen3_5" else (shape.layers, 0)
    assert work.target_cache == layers * per_token * (context + batch * width) + batch * states
    assert work.draft_cache == shape.draft_layers * per_token * (context + batch * shape.block)
    total = target + work.draft_weights + work.draft_head + work.target_cache + work.draft_cache
    assert work.bytes == pytest.approx(total)
    assert work.to_dict()["total"] == round(work.bytes)
    plain = forward_work(pair, context, batch, 1)
    assert plain.target_cache == layers * per_token * (context + batch) + batch * states
    assert plain.bytes < work.bytes


def test_the_8b_floor_is_the_one_that_is_asked_about() -> None:
    pair = published("qwen3-8b")
    work = step_work(pair, 2048, 1, 16)
    assert 4.3 < work.bytes / 4.3e12 * 1e3 < 4.45, "about 4.4 ms at 4.3 TB/s"
    assert sum(w.numel() for w in pair.draft.parameters()) == pytest.approx(1.049e9, rel=1e-3)
    # Two operations per weight and token; 64 per byte of cache: 16 tokens, 4 heads, 2 operations, over bfloat16's 2.
    products = 16 * 2 * (8.19e9 - 151936 * 4096) + 2 * 16 * 1.049e9 + 2 * 15 * 151936 * 4096
    assert work.flops == pytest.approx(
        products + 64 * (work.target_cache + work.draft_cache), rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.53),
        ("llama-3.1-8b", 8.03),
        ("qwen3-vl-8b", 8.19),
        ("qwen3.5-9b", 8.95),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    pair, shape = published(name), SHAPES[name]
    count = sum(w.numel() for n, w in pair.target.named_parameters() if "visual" not in n)
    assert count / 1e9 == pytest.approx(billions, abs=0.006)
    assert list(shape.taps) == build_target_layer_ids(shape.layers, len(shape.taps))
    assert tiny(shape).family == shape.family


def test_expected_experts_by_drawing() -> None:
    generator = torch.Generator().manual_seed(0)
    for experts, chosen, tokens in [(8, 2, 1), (8, 2, 5), (128, 8, 16)]:
        drawn = torch.rand(2000, tokens, experts, generator=generator).topk(chosen, dim=-1).indices
        seen = torch.zeros(2000, experts).scatter_(1, drawn.flatten(1), 1.0).sum(1).mean()
        assert expected_experts(experts, chosen, tokens) == pytest.approx(float(seen), rel=0.02)
    assert expected_experts(8, 2, 1) == pytest.approx(2)


# ---- derived figures


def test_lengths_at_other_widths_follow_geometric_acceptance() -> None:
    for length in (1.0, 3.0, 4.5, 6.5, 16.0):
        chance = geometric_probability(length)
        assert length_at(length, 16) == pytest.approx(length)
        for width in (1, 6, 16):
            # P(at least n proposals stand) = p^n; a verify commits one more than stand, at most its width.
            wanted = 1 + sum(chance**n for n in range(1, width))
            assert mean_length(chance, width) == pytest.approx(wanted)
            assert length_at(length, width) == pytest.approx(wanted)
    assert length_at(4.5, 6) == pytest.approx(3.539, abs=1e-3)
    for wrong in (0.5, 16.1):
        with pytest.raises(ValueError, match="expected a mean length between 1 and 16"):
            geometric_probability(wrong)


def test_derived_speeds() -> None:
    assert derived_speeds(1, 16, 5.0) == {"at_3": 600.0, "at_4.5": 900.0, "at_6.5": 1300.0}
    assert derived_speeds(8, 6, 10.0)["at_4.5"] == pytest.approx(8 * 3.539 * 100, abs=1)


def measured(
    method: str, batch: int, context: int, ms: float, width: int | None = 16
) -> dict[str, Any]:
    """A row with the keys that floors look at."""
    engine = "cuda_graph" if method.startswith("ours") else None
    row = {
        "model": "qwen3-8b",
        "method": method,
        "batch": batch,
        "context": context,
        "engine": engine,
    }
    return {**row, "step_ms": {"p50": ms}, "verify_width": width}


def test_floors_are_compared_with_what_was_measured() -> None:
    rows = [
        *(
            measured(name, 1, 2048, ms)
            for name, ms in (("ours", 6.0), ("zlab", 30.0), ("stock", 20.0))
        ),
        measured("ours", 8, 2048, 8.0),
        measured("ours/w8", 8, 2048, 6.0, 8),
        measured("plain/static", 8, 2048, 5.0, None),
        measured("ours", 1, 32768, 9.0),
    ]
    stages: list[dict[str, Any]] = [
        {
            "model": "qwen3-8b",
            "batch": 1,
            "context": 2048,
            "verify_width": 16,
            "block": 16,
            "floor_ms": 4.4,
        }
        | {
            "host_reads": None,
            "is_default": False,
            "step_ms": {"p50": 5.5},
            "step_over_floor": 1.25,
        }
    ]
    stages.append(
        {
            **stages[0],
            "context": 32768,
            "floor_ms": 6.0,
            "step_ms": {"p50": 8.8},
            "step_over_floor": 1.4667,
        }
    )
    stages.append({**stages[0], "is_default": True, "step_over_floor": 1.3})
    memory: dict[str, Any] = {"qwen3-8b": {"eager": 20e9, "cuda_graph": 20.5e9}}
    floors = floor_rows(rows, stages, memory, {"qwen3-8b": 17_000_000_000}, judged=True)
    values = [
        (round(floor["value"], 3) if floor["value"] is not None else None, floor["verdict"])
        for floor in floors
    ]
    assert values == [
        (1.25, "pass"),
        (1.467, "pass"),
        (None, "unmeasured"),
        (0.2, "pass"),
        (0.3, "FAIL"),
        (round(3.9472 / 6 * 5, 3), "pass"),
        (None, "unmeasured"),
        (1.6, "FAIL"),
        (0, "pass"),
        (0.029, "pass"),
    ]
    # Judged by replays; beside them what whole calls took, and the defaults.
    assert (floors[0]["call_value"], floors[0]["default_value"]) == (pytest.approx(6.0 / 4.4), 1.3)
    assert (floors[7]["call_value"], floors[7]["default_value"]) == (1.5, None)
    unjudged = floor_rows(rows, stages, memory, {"qwen3-8b": 17_000_000_000}, judged=False)
    assert {floor["verdict"] for floor in unjudged} == {"unmeasured"}
    assert [floor["value"] for floor in unjudged] == [floor["value"] for floor in floors]


# ---- figures


def synthetic() -> dict[str, Any]:
    """A record as of a GPU, with numbers nobody measured."""
    facts = {
        "benchmark": "step",
        "dtype": "bfloat16",
        "is_tiny": False,
        "is_complete": True,
        "commit": "0123456789",
    }
    facts |= {"device": "cuda", "machine": {"gpus": ["A GPU"]}, "versions": {"torch": "2.11"}}
    facts |= {"copy_bytes_per_second": 4e12, "product_flops_per_second": 8e14}
    work = {"total": 2e10, "flops": 4e11}
    stage = {
        "model": "m",
        "batch": 1,
        "context": 2048,
        "block": 16,
        "verify_width": 16,
        "floor_ms": 5.0,
    }
    stage |= {"step_ms": {"p50": 8.0}, "bytes": work, "plain_bytes": {"total": 1e10, "flops": 1e10}}
    stage |= {"parts_ms": {"draft": 2.0, "verify": 6.1, "accept": -0.1}}
    plain = {"model": "m", "method": "plain", "batch": 1, "context": 2048, "step_ms": {"p50": 5.0}}
    return {"provenance": facts, "rows": [plain], "stages": [stage]}


def test_a_figure_is_drawn_from_the_record_alone(tmp_path: Path) -> None:
    record = synthetic()
    points = {point["name"]: point for point in step_points(record)}
    assert points["m, width 16"]["intensity"] == 20
    assert points["m, width 16"]["flops_per_second"] == pytest.approx(5e13)
    assert points["m, plain"]["flops_per_second"] == pytest.approx(2e12)
    # No step stands above the roof of the copy.
    for point in points.values():
        assert (
            point["flops_per_second"]
            <= point["intensity"] * record["provenance"]["copy_bytes_per_second"]
        )
    path = tmp_path / "step.json"
    path.write_text(json.dumps(record))
    assert run_script(plot.main, str(path)).exit_code == 0
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    path.write_text("{}")
    result = run_script(plot.main, str(path))
    assert result.exit_code == 2
    assert "expected a record" in " ".join(result.stderr.split())


def test_titles_say_what_a_trial_is() -> None:
    record = synthetic()
    assert conditions(record) == "A GPU, bfloat16, torch 2.11, 012345678"
    for change in ({"is_tiny": True}, {"interpreted": True}, {"device": "cpu"}):
        trial = {**record, "provenance": {**record["provenance"], **change}}
        assert conditions(trial).startswith("TRIAL RUN, TIMES MEAN NOTHING")
        assert "TRIAL RUN" in step_figure(trial)._suptitle.get_text()
    part = {**record, "provenance": {**record["provenance"], "is_complete": False}}
    assert conditions(part).startswith("INCOMPLETE")
    assert step_figure({**record, "rows": [], "stages": []}) is not None
