"""Times each Triton kernel against its reference and the best library, and against the copy bandwidth of the device.

Not called `kernels.py`: Transformers looks for a package `kernels` (Hugging Face's), and would find this script.

    python benchmarks/kernel_times.py            on a GPU; about two minutes
    python benchmarks/kernel_times.py --tiny     anywhere, to try the script; times mean nothing

Definitions are in benchmarks/README.md. A kernel whose result differs from its reference's is not timed, nothing is
recorded and the exit status is 1.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.clock import Marks, synchronize
from harness.kernel_cases import Case, Sizes, all_cases
from harness.machine import RESULTS, provenance
from harness.report import Column, finish, show
from harness.rows import Row, percentiles

from dflash_hf.generation.figures import new_figure

TINY = Sizes(heads=4, groups=2, size=16, width=4, layers=2, vocab=4100)
# Several times what an H200 keeps in its cache.
COLD_BYTES = 256 * 2**20
CALLS, SAMPLES = 20, 11
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


def difference(case: Case, name: str) -> str | None:
    """Says how a way's results differ from the reference's, or nothing if they do not.

    Bounds are a unit in the last place of the greatest value: sums run in another order and weights are rounded.
    """
    ours, wanted = case.make(0), case.make(0)
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


def milliseconds(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Times a list of calls as a whole, several times; on CUDA as one graph, so that no launch waits for the host."""
    for call in calls:
        call()
    synchronize(device)
    run: Callable[[], Any] = lambda: [call() for call in calls]  # noqa: E731
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()
    marks = Marks(device)
    for _ in range(SAMPLES):
        marks.mark()
        run()
    marks.mark()
    return [span / len(calls) for span in marks.intervals()]


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Returns the bytes per second, read and written, of a copy on the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spans = milliseconds([lambda: target.copy_(source)] * 3, device)
    return 2 * num_bytes / (sorted(spans)[len(spans) // 2] / 1e3)


def measure(case: Case, bandwidth: float, device: torch.device, calls: int) -> Row:
    """Times every way of a case over inputs that are cold."""
    copies = min(calls, max(1, -(-COLD_BYTES // case.num_bytes))) if device.type == "cuda" else 1
    inputs = [case.make(seed) for seed in range(copies)]
    microseconds: dict[str, dict[str, float | None]] = {}
    errors: dict[str, str] = {}
    for name, way in case.ways.items():
        if name not in ("kernel", "reference") and (why := _failure(case, name)):
            errors[name] = why
            continue
        # The reference of a long context needs many times the kernel's memory and time.
        turns = itertools.islice(itertools.cycle(inputs), copies if name == "reference" else calls)
        spans = milliseconds([lambda x=x, way=way: way(x) for x in turns], device)
        microseconds[name] = percentiles([span * 1e3 for span in spans])
    ours = microseconds["kernel"]["p50"]
    assert ours is not None
    libraries = {n: t["p50"] for n, t in microseconds.items() if n not in ("kernel", "reference") and t["p50"]}
    best = min(libraries, key=lambda name: libraries[name] or 0.0) if libraries else "reference"
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


def _failure(case: Case, name: str) -> str | None:
    """Why a library is left out of a row: what it raised, or how its result is wrong."""
    try:
        return difference(case, name)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(f"left out: {name} for {case.kernel}, batch {case.batch}: {text[:300]}", file=sys.stderr)
        return text


def plot(rows: list[Row], bandwidth: float, device_name: str, path: Path) -> None:
    """Draws achieved bytes per second over bytes moved, under the roof that a copy reaches."""
    figure = new_figure(9, 6)
    axes = figure.subplots()
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        chosen = sorted((row for row in rows if row["kernel"] == kernel), key=lambda row: row["bytes"])
        sizes = [row["bytes"] for row in chosen]
        (line,) = axes.plot(sizes, [row["gigabytes_per_second"] for row in chosen], "o-", label=kernel)
        library = [row["bytes"] / row["best_library_us"] / 1e3 for row in chosen]
        axes.plot(sizes, library, "x--", color=line.get_color(), alpha=0.6)
    axes.axhline(bandwidth / 1e9, color="black", linewidth=1, label="copy")
    axes.set(xscale="log", yscale="log", xlabel="bytes a call has to move", ylabel="GB/s")
    axes.set_title(f"Kernels (o) and the best library (x) on {device_name}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny shapes, on any device: to try the script.")] = False,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    context: Annotated[str, typer.Option(help="Context lengths, separated by commas.")] = "2048,32768",
    out: Annotated[Path | None, typer.Option(help="The record; kernels.json in $OUT or benchmarks/results.")] = None,
) -> None:
    """Time the kernels at Qwen3-8B's shapes; definitions in benchmarks/README.md."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not tiny and device.type != "cuda":
        raise typer.BadParameter("expected a CUDA device, got none; pass --tiny to try the script without one")
    sizes, dtype = (TINY, torch.float32) if tiny else (Sizes(), torch.bfloat16)
    batches, contexts = ([int(part) for part in text.split(",")] for text in (batch, context))
    if tiny:
        batches, contexts = batches[:1], [24]
    cases = all_cases(sizes, batches, contexts, dtype, device)
    with torch.inference_mode():
        wrong = {
            f"{c.kernel}, batch {c.batch}, context {c.context}": why for c in cases if (why := difference(c, "kernel"))
        }
        if wrong:
            for name, why in wrong.items():
                print(f"not measured: {name}: {why}", file=sys.stderr)
            raise typer.Exit(1)
        bandwidth = copy_bandwidth(device, 2**16 if tiny else 2**30)
        rows = [measure(case, bandwidth, device, 2 if tiny else CALLS) for case in cases]
    facts: dict[str, Any] = {"benchmark": "kernels", "dtype": str(dtype), "copy_bytes_per_second": bandwidth}
    facts |= {"interpreted": os.environ.get("TRITON_INTERPRET") == "1", **provenance(device)}
    show(f"Kernels, {dtype}, copy {bandwidth / 1e9:.0f} GB/s", rows, COLUMNS)
    path = out or Path(os.environ.get("OUT", RESULTS)) / "kernels.json"
    plot(rows, bandwidth, facts["machine"]["gpu"] or "a CPU: these times mean nothing", path.with_suffix(".png"))
    # Tiny shapes are never a record.
    finish({"provenance": facts, "rows": rows}, path, quiet=not tiny)


if __name__ == "__main__":
    typer.run(main)
