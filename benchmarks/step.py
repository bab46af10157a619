"""Time one decoding step of targets of published shapes, with random weights, next to the other ways of decoding.

Random weights accept almost nothing, so what is measured is milliseconds: of a step (one forward of the target and all
that belongs to it, see `decode.py`), of its parts, and against the bytes that it has to read. Tokens per second are
*derived*, for acceptance lengths that are given, and named so. Definitions and formulas are in benchmarks/README.md.

    python benchmarks/step.py                                   # Qwen3-8B's shapes, on one GPU
    python benchmarks/step.py --models all --cells grid         # everything; hours
    python benchmarks/step.py --tiny                            # the same code on a CPU, in seconds, for tests

Writes `step.json` to `$OUT`, else to benchmarks/results, after every cell, and prints
the record as the last line; `plot.py` draws it. With `--tiny` it is written only to `$OUT` or `--out`.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from harness.machine import RESULTS, LoadWatch, provenance
from harness.methods import (
    OURS_COMPILED,
    OURS_EAGER,
    OURS_SAMPLED,
    PLAIN,
    PLAIN_STATIC,
    STOCK,
    Method,
    Settings,
    measure,
    ours_at,
)
from harness.pair import Pair
from harness.rates import copy_bandwidth, product_rate
from harness.report import Column, finish, may_write, show, write
from harness.roofline import memory_needed
from harness.rows import Group, Row
from harness.shapes import SHAPES, build_pair, tiny
from harness.stages import measure_stages
from harness.step_rows import LONG, SHORT, floor_rows, method_row, stage_row
from harness.zlab import zlab_method

from dflash_hf import free_buffers
from dflash_hf.devices import total_memory

Cell = tuple[int, int]
CELLS = [(1, SHORT), (8, SHORT), (32, SHORT), (1, LONG)]
GRID = list(itertools.product((1, 2, 4, 8, 16, 32), (1024, 2048, 4096, 8192, 16384, 32768)))
METHODS = ("ours", "plain", "zlab", "stock", "ours/eager", "ours/sampled", "ours/compiled", "plain/static")
# Share of a device's memory that may be planned with; the rest is the allocator's and the driver's.
USABLE = 0.92
WITHOUT_PICTURES = "it takes no vision target"
METHOD_COLUMNS: list[Column] = [
    ("model", "model"),
    ("method", "method"),
    ("batch", "batch"),
    ("context", "context"),
    ("engine", "engine"),
    ("ms/step p20", "step_ms.p20"),
    ("p50", "step_ms.p50"),
    ("p80", "step_ms.p80"),
    ("prefill ms", "prefill_ms"),
    ("peak MiB", "peak_mib"),
    ("DERIVED tok/s at 1", "derived_tokens_per_second.at_1"),
    ("3", "derived_tokens_per_second.at_3"),
    ("4.5", "derived_tokens_per_second.at_4.5"),
    ("6.5", "derived_tokens_per_second.at_6.5"),
]
STAGE_COLUMNS: list[Column] = [
    ("model", "model"),
    ("batch", "batch"),
    ("context", "context"),
    ("width", "verify_width"),
    ("engine", "engine"),
    ("draft ms", "parts_ms.draft"),
    ("verify", "parts_ms.verify"),
    ("accept", "parts_ms.accept"),
    ("step", "step_ms.p50"),
    ("floor ms", "floor_ms"),
    ("step / floor", "step_over_floor"),
    ("capture s", "capture_seconds"),
    ("host reads", "host_reads"),
]
NOT_RUN_COLUMNS: list[Column] = [
    ("model", "model"),
    ("batch", "batch"),
    ("context", "context"),
    ("what", "what"),
    ("bytes needed", "bytes_needed"),
    ("bytes there are", "bytes_available"),
    ("why", "why"),
]
FLOOR_COLUMNS: list[Column] = [
    ("asked for", "what"),
    ("value", "value"),
    ("required", "required"),
    ("verdict", "verdict"),
]
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Bench:
    """What a run of the script is asked for, and what it has found so far.

    Args:
        device, dtype: Where and in what.
        cells: Batches and contexts.
        methods: Names among `METHODS`.
        widths: Tokens verified per row, or `None` to choose by the batch ([`widths_for`]).
        new_tokens, repeats, samples (`int`): Length of a run, runs of a method, samples of a step's parts.
        block_size (`int`, *optional*): Instead of the shapes'.
        compile_cells: Where plain with a static cache is run.
        memory (`int`, *optional*): Bytes that may be used; `None` if nobody knows.
        deadline (`float`): Nothing is begun after this `time.monotonic()`.
        bandwidth (`float`): Bytes per second of a copy, measured.
    """

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool
    cells: list[Cell]
    methods: list[str]
    widths: list[int] | None
    new_tokens: int
    repeats: int
    samples: int
    block_size: int | None
    compile_cells: list[Cell]
    memory: int | None
    deadline: float
    bandwidth: float
    rows: list[Row] = field(default_factory=list)
    stages: list[Row] = field(default_factory=list)
    not_run: list[Row] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)
    graph_memory: dict[str, Row] = field(default_factory=dict)
    draft_sources: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False

    def fail(self, model: str, cell: Cell, what: str, error: Exception) -> None:
        """Records what broke off: others must not lose their time on a borrowed machine, but the exit status tells."""
        self.has_failed = True
        logger.error("failed: %s, %s", what, cell, exc_info=error)
        self.skip(model, cell, what, f"{type(error).__name__}: {str(error)[:400]}")

    def skip(self, model: str, cell: Cell | None, what: str, why: str, needed: int | None = None) -> None:
        """Records what is not run, and why."""
        batch, context = cell or (None, None)
        row = {"model": model, "batch": batch, "context": context, "what": what, "why": why}
        self.not_run.append({**row, "bytes_needed": needed, "bytes_available": self.memory})
        logger.warning("not run: %s, batch %s, context %s, %s: %s", model, batch, context, what, why)

    def is_late(self) -> bool:
        """Returns True if nothing more is to be begun."""
        return time.monotonic() > self.deadline

    def refuses(self, model: str, cell: Cell | None, what: str, needed: int) -> bool:
        """Returns True if something does not fit into memory; recorded then, before anything is allocated."""
        if self.memory is None or needed <= self.memory:
            return False
        why = f"expected at most {self.memory:,} bytes, got {needed:,} needed; run fewer rows or a shorter context"
        self.skip(model, cell, what, why, needed)
        return True


def widths_for(batch: int, block: int) -> list[int]:
    """Returns the verify widths worth a measurement: narrower ones where a wide verify is bound by compute."""
    shares = (1.0,) if batch < 4 else (1.0, 0.5) if batch < 16 else (1.0, 0.5, 0.375)
    return [max(2, round(block * share)) for share in shares]


def run_model(bench: Bench, model: str, save: Any) -> None:
    """Builds a model and its draft and measures all cells; `save` is called after each."""
    shape = tiny(SHAPES[model]) if bench.is_tiny else SHAPES[model]
    if bench.is_late():
        bench.skip(model, None, "all", "no time left")
        return
    plan = build_pair(model, shape, bench.dtype, torch.device("meta"), block_size=bench.block_size)
    needed = sum(w.numel() * w.element_size() for part in (plan.target, plan.draft) for w in part.parameters())
    if bench.refuses(model, None, "weights", needed):
        return
    fitting = [
        cell
        for cell in bench.cells
        if not bench.refuses(model, cell, "all", memory_needed(plan, *cell, bench.new_tokens))
    ]
    if not fitting:
        return
    pair = build_pair(model, shape, bench.dtype, bench.device, block_size=bench.block_size)
    bench.weights[model], bench.draft_sources[model] = needed, shape.draft_source
    zlab = zlab_method(pair) if "zlab" in bench.methods and not shape.takes_pictures else None
    for index, cell in enumerate(fitting):
        batch, context = cell
        pair.random_lengths = (context if batch == 1 else context - context // 16, context)
        run_methods(bench, model, pair, cell, methods_for(bench, model, pair, cell, zlab))
        run_stages(bench, model, pair, cell)
        if index == 0 and bench.device.type == "cuda" and not bench.is_late():
            bench.graph_memory[model] = graph_memory(pair, pair.inputs("random", context, batch), bench.new_tokens)
        release(pair)
        save()


def methods_for(
    bench: Bench, model: str, pair: Pair, cell: Cell, zlab: Method | None
) -> list[tuple[Method, int | None]]:
    """Returns the methods of a cell, each with the tokens it verifies per row; the rest is recorded as not run."""
    block = pair.block_size
    widths = bench.widths or widths_for(cell[0], block)
    known: dict[str, list[tuple[Method, int | None]]] = {
        "ours": [(ours_at(width, block), width) for width in widths],
        "ours/eager": [(OURS_EAGER, block)],
        "ours/sampled": [(OURS_SAMPLED, block)],
        "ours/compiled": [(OURS_COMPILED, block)],
        "plain": [(PLAIN, None)],
        "stock": [(STOCK, block)],
        "zlab": [] if zlab is None else [(zlab, block)],
        "plain/static": [(PLAIN_STATIC, None)],
    }
    found: list[tuple[Method, int | None]] = []
    for name in bench.methods:
        why = None
        if SHAPES[model].takes_pictures and name in ("stock", "zlab"):
            why = WITHOUT_PICTURES
        elif name in ("stock", "zlab") and cell[0] > 1:
            why = "it takes one prompt at a time"
        elif not known[name]:
            why = "z-lab's package is not installed (pip install --no-deps dflash==0.1.0)"
        elif name in (PLAIN_STATIC.name, OURS_COMPILED.name) and cell not in bench.compile_cells:
            why = "not asked for here (--compile-at)"
        if why is None:
            found += known[name]
        else:
            bench.skip(model, cell, name, why)
    return found


def run_methods(bench: Bench, model: str, pair: Pair, cell: Cell, methods: list[tuple[Method, int | None]]) -> None:
    """Runs each method over one batch of prompts, after a run that does not count.

    One after the other, not in turns: buffers and graphs of several widths at once may be more than are kept between
    calls, and a graph that is captured anew would be in the step's time.
    """
    inputs, settings = pair.inputs("random", cell[1], cell[0]), Settings(max_new_tokens=bench.new_tokens)
    for method, width in methods:
        if bench.is_late():
            bench.skip(model, cell, method.name, "no time left")
            continue
        free_buffers(pair.draft)
        group = Group()
        try:
            if method.marks_tokens and bench.device.type == "cuda":
                torch.compiler.reset()  # what another cell has compiled was for other shapes
            measure(pair, method, inputs, settings)
            for _ in range(bench.repeats):
                group.add(("random", 0), measure(pair, method, inputs, settings), None)
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            bench.fail(model, cell, method.name, error)
            release(pair)
            continue
        engine = pair.draft.last_stats.engine if method.name.startswith("ours") else None
        bench.rows.append(method_row(pair, model, method.name, width, cell, group, engine))


def run_stages(bench: Bench, model: str, pair: Pair, cell: Cell) -> None:
    """Times the parts of a step at every width."""
    inputs, settings = pair.inputs("random", cell[1], cell[0]), Settings(max_new_tokens=bench.new_tokens)
    for width in bench.widths or widths_for(cell[0], pair.block_size):
        if bench.is_late():
            bench.skip(model, cell, f"parts at width {width}", "no time left")
            continue
        try:
            stages = measure_stages(pair, inputs, settings, width, bench.samples)
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            bench.fail(model, cell, f"parts at width {width}", error)
            release(pair)
            continue
        bench.stages.append(stage_row(pair, model, width, cell, stages, bench.bandwidth))


def graph_memory(pair: Pair, inputs: Any, new_tokens: int) -> Row:
    """Returns the greatest memory, in bytes, that a run reserves under each engine, from an empty cache on."""
    found = {}
    for engine in ("eager", "cuda_graph"):
        release(pair)
        torch.cuda.reset_peak_memory_stats(pair.device)
        method = ours_at(pair.block_size, pair.block_size, engine=engine)
        measure(pair, method, inputs, Settings(max_new_tokens=new_tokens))
        found[engine] = torch.cuda.max_memory_reserved(pair.device)
    return found


def release(pair: Pair) -> None:
    """Gives back what calls have left for the next: buffers, graphs, static caches, compiled forwards."""
    free_buffers(pair.draft)
    # Transformers' static caches grow to the longest of all calls, and older releases keep the cache itself.
    for name in ("_cache", "_previous_max_cache_length"):
        if hasattr(pair.target, name):
            delattr(pair.target, name)
    gc.collect()
    if pair.device.type == "cuda":
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def parse_cells(text: str) -> list[Cell]:
    """Returns batches and contexts from `1x2048,8x2048`, or `grid`.

    Raises:
        typer.BadParameter: If it is something else.
    """
    if text == "grid":
        return GRID
    try:
        cells = [(int(a), int(b)) for a, b in (part.split("x") for part in text.replace(",", " ").split())]
    except ValueError:
        cells = []
    if not cells or min(min(cell) for cell in cells) < 1:
        raise typer.BadParameter(f"expected cells such as 1x2048,8x2048 (batch x context) or grid, got {text!r}")
    return cells


def parse_names(text: str, known: tuple[str, ...]) -> list[str]:
    """Returns names separated by commas; `all` is all of them.

    Raises:
        typer.BadParameter: If one is not known.
    """
    names = list(known) if text == "all" else text.replace(",", " ").split()
    if not names or (unknown := sorted(set(names) - set(known))):
        raise typer.BadParameter(f"expected names among {', '.join(known)}, got {unknown or text!r}; choose of those")
    return names


def main(
    is_tiny: Annotated[bool, typer.Option("--tiny", help="Tiny doubles of the shapes: for tests.")] = False,
    device: Annotated[str | None, typer.Option(help="Where it runs; CUDA if there is any.")] = None,
    models: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}, or all.")] = "qwen3-8b",
    cells: Annotated[str | None, typer.Option(help="BATCHxCONTEXT, separated by commas, or grid.")] = None,
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}, or all.")] = "all",
    widths: Annotated[str | None, typer.Option(help="Tokens verified per row; chosen by the batch.")] = None,
    compile_at: Annotated[str | None, typer.Option(help="Cells of the methods that compile; default all.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens generated per run; 49, tiny 9.")] = None,
    block_size: Annotated[int | None, typer.Option(min=2, help="Tokens per block; default the draft's.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a step's parts.")] = 21,
    budget: Annotated[float, typer.Option(help="Seconds after which nothing more is begun.")] = 1e9,
    memory_gib: Annotated[float | None, typer.Option(help="Memory that may be used; default most of it.")] = None,
    out: Annotated[Path | None, typer.Option(help="The record; step.json in $OUT or benchmarks/results.")] = None,
) -> None:
    """Time decoding steps of pairs with random weights; definitions in benchmarks/README.md."""
    started = time.monotonic()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not is_tiny and place.type != "cuda":
        raise typer.BadParameter(f"expected a CUDA device for the published shapes, got {place}; pass --tiny on a CPU")
    names = parse_names(models, tuple(SHAPES))
    chosen = parse_cells(cells) if cells else [(1, 32), (8, 32)] if is_tiny else CELLS
    total = total_memory(place) if memory_gib is None else round(memory_gib * 2**30 / USABLE)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    bench = Bench(
        device=place,
        dtype=dtype,
        is_tiny=is_tiny,
        cells=chosen,
        methods=parse_names(methods, METHODS),
        widths=None if widths is None else [int(part) for part in widths.replace(",", " ").split()],
        new_tokens=new_tokens or (9 if is_tiny else 49),
        repeats=repeats,
        samples=samples,
        block_size=block_size,
        compile_cells=parse_cells(compile_at) if compile_at else chosen,
        memory=None if total is None else int(total * USABLE),
        deadline=started + budget,
        bandwidth=copy_bandwidth(place, 2**16 if is_tiny else 2**30),
    )
    rate = product_rate(place, dtype, 64 if is_tiny else 8192)
    path = out or Path(os.environ.get("OUT", RESULTS)) / "step.json"
    watch = LoadWatch()
    may_be_kept = may_write(path, quiet=not is_tiny)
    is_complete = True
    try:
        for name in names:
            run_model(bench, name, lambda: write(record_of(bench, rate, watch, False), path) if may_be_kept else None)
    except KeyboardInterrupt:
        is_complete = False
        logger.warning("interrupted: what there is so far is written, as incomplete")
    watch.stop()
    record = record_of(bench, rate, watch, is_complete)
    show(
        "Steps with random weights; tokens per second are DERIVED for acceptance lengths",
        record["rows"],
        METHOD_COLUMNS,
    )
    show("The parts of a step over fixed buffers", record["stages"], STAGE_COLUMNS)
    show("Not run", record["not_run"], NOT_RUN_COLUMNS)
    show("Floors: one H200, Qwen3-8B's shapes, bfloat16", record["floors"], FLOOR_COLUMNS)
    # A tiny pair is never a record.
    finish(record, path, quiet=not is_tiny and watch.is_quiet())
    if bench.has_failed or not is_complete:
        raise typer.Exit(1 if is_complete else 130)


def record_of(bench: Bench, rate: float, watch: LoadWatch, is_complete: bool) -> dict[str, Any]:
    """Returns the record of what has been measured so far."""
    facts: dict[str, Any] = {
        "benchmark": "step",
        "is_tiny": bench.is_tiny,
        "is_complete": is_complete,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "max_new_tokens": bench.new_tokens,
        "repeats": bench.repeats,
        "copy_bytes_per_second": bench.bandwidth,
        "product_flops_per_second": rate,
        "weight_bytes": bench.weights,
        "draft_sources": bench.draft_sources,
        "graph_memory_bytes": bench.graph_memory,
        "load": watch.to_dict(),
        **provenance(bench.device),
    }
    judged = bench.device.type == "cuda" and not bench.is_tiny and bench.block_size in (None, 16)
    floors = floor_rows(bench.rows, bench.stages, bench.graph_memory, bench.weights, judged)
    return {
        "provenance": facts,
        "rows": bench.rows,
        "stages": bench.stages,
        "not_run": bench.not_run,
        "floors": floors,
    }


if __name__ == "__main__":
    typer.run(main)
