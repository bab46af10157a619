"""Time one decoding step of a Qwen3-8B-shaped pair with random weights in bfloat16, on one GPU.

Random weights accept almost nothing, so what is measured is milliseconds per step (one forward of the target and all
that belongs to it, see `decode.py`) and peak memory, not tokens per second: those are *derived*, for acceptance
lengths that are given, as `batch * acceptance / step`. Methods as in `decode.py`, without prompt lookup, which has
nothing to find in random prompts; all of them run in turn, and a first run of each does not count.

    python benchmarks/step.py --device cuda        # on one GPU
    python benchmarks/step.py --tiny               # the same code on a CPU, in seconds, for tests

Writes `step.json` to `$OUT`, else to benchmarks/results, and prints the record as the last line. With `--tiny` it is
written only to `$OUT` or `--out`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from harness.floors import BareForwards
from harness.machine import RESULTS, LoadWatch, provenance
from harness.methods import OURS, OURS_EAGER, PLAIN, STOCK, Method, Settings, measure
from harness.pair import Pair, random_pair
from harness.report import Column, finish, show
from harness.rows import Group, Row, decode_row, percentiles
from harness.zlab import zlab_method

ACCEPTANCES = (1, 3, 6)
FLOOR_SAMPLES = 20
COLUMNS: list[Column] = [
    ("method", "method"),
    ("batch", "batch"),
    ("context", "context_tokens"),
    ("dtype", "dtype"),
    ("ms/step p20", "step_ms.p20"),
    ("p50", "step_ms.p50"),
    ("p80", "step_ms.p80"),
    ("prefill ms", "prefill_ms"),
    ("peak MiB", "peak_mib"),
    ("derived tok/s at 1", "derived_tokens_per_second.at_1"),
    ("acceptance", "acceptance_length"),
]
BARE_COLUMNS: list[Column] = [
    ("batch", "batch"),
    ("context", "context_tokens"),
    ("draft ms", "bare_draft_ms.p50"),
    ("verify ms", "bare_verify_ms.p50"),
    ("ours ms/step", "ours_step_ms"),
    ("bare / ours", "bare_over_ours"),
    ("ours / eager", "step_time_against.ours/eager"),
    ("ours / stock", "step_time_against.stock"),
    ("ours / zlab", "step_time_against.zlab"),
]


def derived(row: Row) -> Row:
    """Adds what follows from a step's time: tokens/s at given acceptance lengths (plain's is always 1)."""
    step = row["step_ms"]["p50"]
    lengths = (1,) if row["method"] == "plain" else ACCEPTANCES
    speeds = {f"at_{length}": round(row["batch"] * length / step * 1e3, 1) for length in lengths} if step else {}
    peak = row["peak_bytes"]
    return {
        **{key: value for key, value in row.items() if "tokens_per_second" not in key},
        "peak_mib": None if peak is None else round(peak / 2**20, 1),
        "derived_tokens_per_second": speeds,
    }


def run_batch(
    pair: Pair, methods: list[Method], batch: int, repeats: int, settings: Settings
) -> tuple[dict[str, Group], BareForwards]:
    """Measures the methods over one batch of prompts in turn, and the bare forwards between the repeats."""
    groups: dict[str, Group] = defaultdict(Group)
    chosen = [method for method in methods if batch == 1 or method.batches]
    inputs = pair.inputs("random", 0, batch)
    for method in chosen:
        measure(pair, method, inputs, settings)
    bare = BareForwards(pair, batch, pair.random_lengths[1] + settings.max_new_tokens // 2)
    for repeat in range(repeats):
        turn = repeat % len(chosen)
        outcomes = {m.name: measure(pair, m, inputs, settings) for m in [*chosen[turn:], *chosen[:turn]]}
        for name, outcome in outcomes.items():
            groups[name].add(("random", 0), outcome, outcomes.get("plain"))
        bare.sample(FLOOR_SAMPLES)
    return groups, bare


def bare_row(rows: list[Row], bare: BareForwards) -> Row:
    """Compares the step of ours with its bare forwards and with the other implementations, at one batch size."""
    steps = {row["method"]: row["step_ms"]["p50"] for row in rows if row["batch"] == bare.batch}
    draft, verify = percentiles(bare.draft_ms), percentiles(bare.verify_ms)
    assert draft["p50"] is not None
    assert verify["p50"] is not None
    return {
        "batch": bare.batch,
        "context_tokens": bare.context,
        "bare_draft_ms": draft,
        "bare_verify_ms": verify,
        "ours_step_ms": steps["ours"],
        "bare_over_ours": round((draft["p50"] + verify["p50"]) / steps["ours"], 4),
        "step_time_against": {
            n: round(steps["ours"] / steps[n], 4) for n in ("ours/eager", "stock", "zlab") if n in steps
        },
    }


def build(tiny: bool, device: torch.device, context: int, new_tokens: int, block_size: int | None) -> Pair:
    """Returns the pair; the prompts of a batch differ by up to a sixteenth of the context, so that it is ragged."""
    return random_pair(
        "tiny" if tiny else "qwen3-8b",
        torch.float32 if tiny else torch.bfloat16,
        device,
        block_size,
        lengths=(context - context // 16, context),
        max_length=context + new_tokens + 64,
    )


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny pair and short prompts: for tests.")] = False,
    device: Annotated[str | None, typer.Option(help="Where it runs; CUDA if there is any.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8",
    context: Annotated[int | None, typer.Option(help="Longest prompt, in tokens; 2048, tiny 32.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens generated per run; 49, tiny 9.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block; 16, tiny 8.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 3,
    out: Annotated[Path | None, typer.Option(help="The record; step.json in $OUT or benchmarks/results.")] = None,
) -> None:
    """Time decoding steps of a pair with random weights; definitions in benchmarks/README.md."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not tiny and place.type != "cuda":
        raise typer.BadParameter(f"expected a CUDA device for the 8B shapes, got {place}; pass --tiny on a CPU")
    prompt, new = context or (32 if tiny else 2048), new_tokens or (9 if tiny else 49)
    pair = build(tiny, place, prompt, new, block_size)
    zlab = zlab_method(pair)
    methods = [PLAIN, OURS, OURS_EAGER, STOCK, *([] if zlab is None else [zlab])]
    watch = LoadWatch()
    measured: list[tuple[int, dict[str, Group], BareForwards]] = []
    for size in (int(part) for part in batch.replace(",", " ").split()):
        measured.append((size, *run_batch(pair, methods, size, repeats, Settings(max_new_tokens=new))))
        measured[-1][2].free()
    watch.stop()
    busy = not watch.is_quiet()
    rows = [
        derived(decode_row(pair, name, size, "random", group, busy))
        for size, groups, _ in measured
        for name, group in groups.items()
    ]
    floors = [bare_row(rows, bare) for _, _, bare in measured]
    facts: dict[str, Any] = {"benchmark": "step", "pair": pair.name, "max_new_tokens": new, "repeats": repeats}
    facts |= {"load": watch.to_dict(), **provenance(place)}
    facts["weights_mib"] = {
        name: round(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20, 1)
        for name, model in (("target", pair.target), ("draft", pair.draft))
    }
    show("Steps with random weights", rows, COLUMNS)
    show("Ours against its bare forwards and the others (medians of this run)", floors, BARE_COLUMNS)
    path = out or Path(os.environ.get("OUT", RESULTS)) / "step.json"
    # A tiny pair is never a record.
    finish({"provenance": facts, "rows": rows, "floors": floors}, path, quiet=not tiny and not busy)


if __name__ == "__main__":
    typer.run(main)
