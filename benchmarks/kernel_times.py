"""Times each Triton kernel against its reference and the best library, and against the copy bandwidth of the device.

Not called `kernels.py`: Transformers looks for a package `kernels` (Hugging Face's), and would find this script.

    python benchmarks/kernel_times.py            on a GPU; about two minutes
    python benchmarks/kernel_times.py --tiny     anywhere, to try the script; times mean nothing

Definitions are in benchmarks/README.md. A kernel whose result differs from its reference's, which raises, or which
cannot be had is not timed: it is a row of `wrong`, and the exit status is 1. The others are timed.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.kernel_cases import Case, Sizes, all_cases
from harness.machine import RESULTS, provenance
from harness.operations import no_stand_ins
from harness.rates import milliseconds, uncaptured_milliseconds
from harness.report import Column, finish, may_write, show, write
from harness.roofline import verdict
from harness.rows import Row, percentiles
from harness.sweep import sweep
from harness.trial import bandwidth_of, check_device, device_of, dtype_of

from dflash_hf.generation.host_reads import READING_ON_HOST

TINY = Sizes(heads=4, groups=2, size=16, width=4, layers=2, hidden=48, mlp=80, vocab=4100)
# Several times what an H200 keeps in its cache.
COLD_BYTES = 256 * 2**20
CALLS = 20
COLUMNS: list[Column] = [
    ("kernel", "kernel"),
    ("batch", "batch"),
    ("context", "context"),
    ("kernel us", "microseconds.kernel.p50"),
    ("reference us", "microseconds.reference.p50"),
    ("best library us", "best_library_us"),
    ("library", "best_library"),
    ("GB/s", "gigabytes_per_second"),
    ("of copy", "share_of_copy_bandwidth"),
    ("not slower", "not_slower_than_library"),
]
WRONG_COLUMNS: list[Column] = [
    ("not timed", "kernel"),
    ("batch", "batch"),
    ("context", "context"),
    ("why", "why"),
]
SWEEP_COLUMNS: list[Column] = [
    ("batch", "batch"),
    ("context", "context"),
    ("slots, stages, warps", "tile"),
    ("of the splits", "share_of_splits"),
    ("us", "microseconds.p50"),
    ("error", "error"),
]
FLOOR_COLUMNS: list[Column] = [
    ("asked for", "what"),
    ("value", "value"),
    ("required", "required"),
    ("verdict", "verdict"),
]


def difference(case: Case, name: str) -> str | None:
    """Says how a way's results differ from the reference's, or nothing if they do not.

    Bounds are a unit in the last place of the greatest value: sums run in another order and weights are rounded.
    """
    ours = case.make(0)
    wanted = case.make(0)
    found = case.results(case.ways[name](ours), ours)
    reference = case.results(case.ways["reference"](wanted), wanted)
    for index, (a, b) in enumerate(zip(found, reference, strict=True)):
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return f"result {index} differs in {int((a != b).sum())} places"
            continue
        bound = max(torch.finfo(b.dtype).eps, 1e-5) * float(b.abs().max())
        error = float((a.double() - b.double()).abs().max())
        if not error <= bound:
            return f"result {index} differs by {error:.3g}, more than {bound:.3g}"
    return None


def measure(case: Case, bandwidth: float, device: torch.device, calls: int) -> Row:
    """Times every way of a case over inputs that are cold."""
    copies = 1
    if device.type == "cuda":
        copies = min(calls, max(1, -(-COLD_BYTES // case.num_bytes)))
    inputs = [case.make(seed) for seed in range(copies)]
    microseconds: dict[str, dict[str, float | None]] = {}
    errors = dict(case.unavailable)
    for name, way in case.ways.items():
        why = None
        if name not in ("kernel", "reference"):
            why = _failure(case, name)
        if why is not None:
            errors[name] = why
            continue
        # The reference of a long context needs many times the kernel's memory and time.
        turns = itertools.islice(itertools.cycle(inputs), copies if name == "reference" else calls)
        timed = milliseconds
        # No graph can be captured of a reference that reads on the host.
        if name == "reference" and case.kernel in READING_ON_HOST:
            timed = uncaptured_milliseconds
        spans = timed([lambda x=x, way=way: way(x) for x in turns], device)
        microseconds[name] = percentiles([span * 1e3 for span in spans])
    ours = microseconds["kernel"]["p50"]
    assert ours is not None
    libraries = {
        n: t["p50"]
        for n, t in microseconds.items()
        if n not in ("kernel", "reference") and t["p50"]
    }
    best = "reference"
    if libraries:
        best = min(libraries, key=lambda name: libraries[name] or 0.0)
    best_us = microseconds[best]["p50"]
    assert best_us is not None
    rate = case.num_bytes / (ours / 1e6)
    return {
        "kernel": case.kernel,
        "batch": case.batch,
        "context": case.context,
        "bytes": case.num_bytes,
        "input_sets": copies,
        "microseconds": microseconds,
        "libraries_left_out": errors,
        "best_library": best,
        "best_library_us": best_us,
        "gigabytes_per_second": rate / 1e9,
        "share_of_copy_bandwidth": rate / bandwidth,
        "not_slower_than_library": ours <= best_us,
    }


def floor_rows(rows: list[Row], judged: bool) -> list[Row]:
    """Compares attention at 32k with what is asked of it: its worst row; `judged` on a GPU at full sizes only."""
    long = [
        row
        for row in rows
        if row["kernel"].startswith("block_attention") and row["context"] == 32768
    ]
    share = min((row["share_of_copy_bandwidth"] for row in long), default=None)
    slower = max(
        (row["microseconds"]["kernel"]["p50"] / row["best_library_us"] for row in long),
        default=None,
    )
    found = (
        ("share of the copy bandwidth, block attention at 32k", share, 0.7, False),
        ("time over the best library's, block attention at 32k", slower, 1.0, True),
    )
    return [
        {
            "what": what,
            "value": value,
            "required": f"{'at most' if at_most else 'at least'} {limit:g}",
            "verdict": verdict(value, limit, at_most, judged),
        }
        for what, value, limit, at_most in found
    ]


def _failure(case: Case, name: str) -> str | None:
    """Why a way of computing a case is left out: what it raised, or how its result is wrong."""
    try:
        with no_stand_ins():
            why = difference(case, name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        print(
            f"left out: {name} for {case.kernel}, batch {case.batch}: {why[:300]}", file=sys.stderr
        )
    return why


def row_or_reason(
    case: Case, bandwidth: float, device: torch.device, calls: int
) -> tuple[Row | None, str | None]:
    """Returns the row of a case, or why there is none: the kernel is wrong, or something raised while it was timed."""
    why = _failure(case, "kernel")
    if why is not None:
        return None, why
    try:
        row = measure(case, bandwidth, device, calls)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        print(f"not timed: {case.kernel}, batch {case.batch}: {why[:300]}", file=sys.stderr)
        return None, why
    return row, None


def save(record: dict[str, Any], path: Path) -> None:
    """Writes what there is so far, with its floors: a borrowed machine may be gone before the end."""
    facts = record["provenance"]
    is_tiny = facts["is_tiny"]
    record["floors"] = floor_rows(record["rows"], judged=facts["device"] != "cpu" and not is_tiny)
    # Tiny shapes are never a record.
    if may_write(path, quiet=not is_tiny):
        write(record, path)


def main(
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Tiny shapes, on any device: to try the script.")
    ] = False,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    context: Annotated[
        str, typer.Option(help="Context lengths, separated by commas.")
    ] = "2048,32768",
    swept: Annotated[
        str, typer.Option(help="Cells, BATCHxCONTEXT, of attention under other tiles and splits.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="The record; kernels.json in $OUT or benchmarks/results.")
    ] = None,
) -> None:
    """Time the kernels at Qwen3-8B's shapes; definitions in benchmarks/README.md."""
    device = device_of()
    check_device(device, tiny)
    sizes = Sizes()
    dtype = dtype_of(tiny)
    calls = CALLS
    batches, contexts = ([int(part) for part in text.split(",")] for text in (batch, context))
    if tiny:
        sizes = TINY
        calls = 2
        batches = batches[:1]
        contexts = [24]
    cases = all_cases(sizes, batches, contexts, dtype, device)
    cells = [
        (int(a), int(b)) for a, _, b in (cell.partition("x") for cell in swept.split(",") if cell)
    ]
    path = out or Path(os.environ.get("OUT", RESULTS)) / "kernels.json"
    facts: dict[str, Any] = {
        "benchmark": "kernels",
        "dtype": str(dtype).removeprefix("torch."),
        "is_tiny": tiny,
        "is_complete": False,
    }
    facts |= {"interpreted": os.environ.get("TRITON_INTERPRET") == "1", **provenance(device)}
    rows: list[Row] = []
    wrong: list[Row] = []
    swept_rows: list[Row] = []
    record: dict[str, Any] = {
        "provenance": facts,
        "rows": rows,
        "wrong": wrong,
        "floors": [],
        "sweep": swept_rows,
    }
    with torch.inference_mode():
        bandwidth = bandwidth_of(device, tiny)
        facts["copy_bytes_per_second"] = bandwidth
        for case in cases:
            row, why = row_or_reason(case, bandwidth, device, calls)
            if row is None:
                wrong.append(
                    {
                        "kernel": case.kernel,
                        "batch": case.batch,
                        "context": case.context,
                        "why": why,
                    }
                )
            else:
                rows.append(row)
            save(record, path)
        for row in sweep(sizes, cells, dtype, device):
            swept_rows.append(row)
            save(record, path)
    show(f"Kernels, {dtype}, copy {bandwidth / 1e9:.0f} GB/s", rows, COLUMNS)
    show("Attention under other tiles", swept_rows, SWEEP_COLUMNS)
    show("Floors: one H200", record["floors"], FLOOR_COLUMNS)
    if wrong:
        show("Wrong, or not to be had", wrong, WRONG_COLUMNS)
    facts["is_complete"] = True
    finish(record, path, quiet=not tiny)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
