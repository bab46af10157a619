"""Time one decoding step of targets of published shapes, with random weights, next to the other ways of decoding.

Random weights accept almost nothing, so what is measured is milliseconds: of a step (one forward of the target and all
that belongs to it, see `decode.py`), of its parts, and against the bytes that it has to read. Tokens per second are
*derived*, for acceptance lengths that are given, and named so. Definitions and formulas are in benchmarks/README.md.

    python benchmarks/step.py                                   # Qwen3-8B's shapes, on one GPU
    python benchmarks/step.py --models all --cells grid         # everything; hours
    python benchmarks/step.py --tiny                            # the same code on a CPU, in seconds, for tests

    python benchmarks/step.py --methods none --widths 16,8,4    # the parts of a step only, at these widths
    python benchmarks/step.py --experiments all --methods none  # changed steps beside the step as it is

Writes `step.json` to `$OUT`, else to benchmarks/results, after every cell, and prints
the record as the last line; `plot.py` draws it. With `--tiny` it is written only to `$OUT` or `--out`.
A method that raises, whatever it is, becomes a row of `not_run`, and the others go on.
"""

from __future__ import annotations

import gc
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
from harness.experiments import EXPERIMENTS
from harness.machine import RESULTS, LoadWatch, provenance
from harness.methods import (
    OURS_DEFAULT,
    OURS_QWEN3,
    PLAIN,
    PLAIN_QWEN3,
    PLAIN_STATIC,
    STOCK,
    Method,
    measure,
    ours_as_chain,
    ours_at,
    with_options,
    zlab_method,
)
from harness.pair import Pair
from harness.rates import product_rate
from harness.report import finish, may_write, show, write
from harness.roofline import memory_needed
from harness.rows import Group, Row
from harness.shapes import SHAPES, build_pair, shape_of
from harness.stages import measure_stages
from harness.step_options import (
    CELLS,
    EXPERIMENT_COLUMNS,
    FLOOR_COLUMNS,
    METHOD_COLUMNS,
    NOT_RUN_COLUMNS,
    STAGE_COLUMNS,
    Cell,
    parse_cells,
    parse_names,
)
from harness.step_rows import SHORT, floor_rows, method_row, stage_row
from harness.trial import bandwidth_of, check_device, device_of, dtype_of

from dflash_hf import free_buffers
from dflash_hf.bench.cells import Options
from dflash_hf.devices import total_memory

METHODS = (
    "ours/default",
    "ours",
    "plain",
    "zlab",
    "stock",
    "ours/eager",
    "ours/sampled",
    "ours/qwen3-sampling",
    "plain/qwen3-sampling",
    "plain/static",
)
COMPILING = ("plain/static",)
# Share of a device's memory that may be planned with; the rest is the allocator's and the driver's.
USABLE = 0.92
WITHOUT_PICTURES = "it takes no vision target"
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Bench:
    """What a run of the script is asked for, and what it has found so far.

    Args:
        device, dtype: Where and in what.
        cells: Batches and contexts.
        methods: Names among `METHODS`.
        widths: Tokens verified per row, or `None` to choose by the batch ([`widths_for`]).
        new_tokens, ours_tokens (`int`): Length of a run, and of one of ours, whose steps are shorter.
        repeats, samples (`int`): Runs of a method, samples of a step's parts.
        block_size (`int`, *optional*): Instead of the shapes'.
        compile_cells: Where plain with a static cache is run.
        memory (`int`, *optional*): Bytes that may be used; `None` if nobody knows.
        deadline (`float`): Nothing is begun after this `time.monotonic()`.
        bandwidth (`float`): Bytes per second of a copy, measured.
        experiments: Names among `EXPERIMENTS`.
    """

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool
    cells: list[Cell]
    methods: list[str]
    widths: list[int] | None
    new_tokens: int
    ours_tokens: int
    repeats: int
    samples: int
    block_size: int | None
    compile_cells: list[Cell]
    memory: int | None
    deadline: float
    bandwidth: float
    experiments: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    stages: list[Row] = field(default_factory=list)
    experiment_rows: list[Row] = field(default_factory=list)
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

    def skip(
        self, model: str, cell: Cell | None, what: str, why: str, needed: int | None = None
    ) -> None:
        """Records what is not run, and why."""
        batch, context = cell or (None, None)
        row = {"model": model, "batch": batch, "context": context, "what": what, "why": why}
        self.not_run.append({**row, "bytes_needed": needed, "bytes_available": self.memory})
        logger.warning(
            "not run: %s, batch %s, context %s, %s: %s", model, batch, context, what, why
        )

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


def usable_memory(device: torch.device, gib: float | None) -> int | None:
    """Returns the bytes that a cell may need: those asked for, else most of the device; `None` if it does not say."""
    if gib is not None:
        return int(gib * 2**30)
    total = total_memory(device)
    if total is None:
        return None
    return int(total * USABLE)


def widths_for(batch: int, block: int) -> list[int]:
    """Returns the verify widths worth a measurement: narrower ones where a wide verify is bound by compute."""
    shares = [1.0]
    if batch >= 4:
        shares.append(0.5)
    if batch >= 16:
        shares.append(0.375)
    return [max(2, round(block * share)) for share in shares]


def run_model(bench: Bench, model: str, save: Any) -> None:
    """Builds a model and its draft and measures all cells; `save` is called after each."""
    shape = shape_of(model, bench.is_tiny)
    if bench.is_late():
        bench.skip(model, None, "all", "no time left")
        return
    plan = build_pair(model, shape, bench.dtype, torch.device("meta"), block_size=bench.block_size)
    needed = sum(
        w.numel() * w.element_size()
        for part in (plan.target, plan.draft)
        for w in part.parameters()
    )
    if bench.refuses(model, None, "weights", needed):
        return
    longest = max(bench.new_tokens, bench.ours_tokens)
    fitting = [
        cell
        for cell in bench.cells
        if not bench.refuses(model, cell, "all", memory_needed(plan, *cell, longest))
    ]
    if not fitting:
        return
    pair = build_pair(model, shape, bench.dtype, bench.device, block_size=bench.block_size)
    bench.weights[model] = needed
    bench.draft_sources[model] = shape.draft_source
    zlab = None
    if "zlab" in bench.methods and not shape.takes_pictures:
        zlab = zlab_method(pair)
    for cell in fitting:
        batch, context = cell
        shortest = context
        if batch > 1:
            shortest = context - context // 16
        pair.random_lengths = (shortest, context)
        run_methods(bench, model, pair, cell, methods_for(bench, model, pair, cell, zlab))
        run_stages(bench, model, pair, cell)
        run_experiments(bench, model, pair, cell)
        # A process that ends in what follows leaves what has been measured.
        save()
        run_graph_memory(bench, model, pair, cell)
        release(pair)
        save()


def methods_for(
    bench: Bench, model: str, pair: Pair, cell: Cell, zlab: Method | None
) -> list[tuple[Method, int | None]]:
    """Returns the methods of a cell, each with the tokens it verifies per row; the rest is recorded as not run."""
    block = pair.block_size
    widths = bench.widths or widths_for(cell[0], block)
    chain = ours_at(block, block)
    known: dict[str, list[tuple[Method, int | None]]] = {
        "ours/default": [(OURS_DEFAULT, block)],
        "ours": [(ours_at(width, block), width) for width in widths],
        "ours/eager": [(ours_as_chain("ours/eager", block, engine="eager"), block)],
        "ours/sampled": [(with_options("ours/sampled", chain, temperature=1.0), block)],
        "ours/qwen3-sampling": [(OURS_QWEN3, block)],
        "plain/qwen3-sampling": [(PLAIN_QWEN3, None)],
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
        elif name in COMPILING and cell not in bench.compile_cells:
            why = "not asked for here (--compile-at)"
        if why is None:
            found += known[name]
        else:
            bench.skip(model, cell, name, why)
    return found


def run_methods(
    bench: Bench, model: str, pair: Pair, cell: Cell, methods: list[tuple[Method, int | None]]
) -> None:
    """Runs each method over one batch of prompts, after a run that does not count.

    One after the other, not in turns: buffers and graphs of several widths at once may be more than are kept between
    calls, and a graph that is captured anew would be in the step's time.
    """
    inputs = pair.inputs("random", cell[1], cell[0])
    for method, width in methods:
        if bench.is_late():
            bench.skip(model, cell, method.name, "no time left")
            continue
        is_ours = method.name.startswith("ours")
        new_tokens = bench.new_tokens
        if is_ours:
            new_tokens = bench.ours_tokens
        options = Options(max_new_tokens=new_tokens)
        free_buffers(pair.draft)
        group = Group()
        try:
            if method.name in COMPILING and bench.device.type == "cuda":
                torch.compiler.reset()  # what another cell has compiled was for other shapes
            measure(pair, method, inputs, options)
            for _ in range(bench.repeats):
                group.add(("random", 0), measure(pair, method, inputs, options), None)
        except Exception as error:
            # Whatever it is, of ours at its first contact with a GPU or of another's code: the others are still run.
            bench.fail(model, cell, method.name, error)
            release(pair)
            continue
        stats = pair.draft.last_stats
        engine = None
        if is_ours:
            width = stats.num_proposed + 1  # the defaults' is not known before
            engine = stats.engine
        bench.rows.append(method_row(pair, model, method.name, width, cell, group, engine))


def run_stages(bench: Bench, model: str, pair: Pair, cell: Cell) -> None:
    """Times the parts of a step as users get it, and of chains at every width."""
    inputs = pair.inputs("random", cell[1], cell[0])
    options = Options(max_new_tokens=bench.new_tokens)
    widths: list[int | None] = [None, *(bench.widths or widths_for(cell[0], pair.block_size))]
    for width in widths:
        what = f"parts at width {width}"
        if width is None:
            what = "parts of the defaults"
        if bench.is_late():
            bench.skip(model, cell, what, "no time left")
            continue
        try:
            stages = measure_stages(pair, inputs, options, width, bench.samples)
        except Exception as error:
            bench.fail(model, cell, what, error)
            release(pair)
            continue
        bench.stages.append(
            stage_row(pair, model, cell, stages, bench.bandwidth, is_default=width is None)
        )


def run_experiments(bench: Bench, model: str, pair: Pair, cell: Cell) -> None:
    """Times a step as users get it under each experiment, and says whether the text is what it is without any."""
    inputs = pair.inputs("random", cell[1], cell[0])
    options = Options(max_new_tokens=bench.new_tokens)
    wanted: list[list[int]] | None = None
    for name in bench.experiments:
        if bench.is_late():
            bench.skip(model, cell, f"experiment {name}", "no time left")
            continue
        release(pair)  # what has been captured knows nothing of it
        try:
            with EXPERIMENTS[name](pair) as changed:
                answers = measure(pair, OURS_DEFAULT, inputs, options).answers
                stages = measure_stages(pair, inputs, options, None, bench.samples)
        except Exception as error:
            bench.fail(model, cell, f"experiment {name}", error)
            continue
        finally:
            release(pair)
        if wanted is None:
            wanted = answers
        row = stage_row(pair, model, cell, stages, bench.bandwidth, is_default=True)
        found = {"experiment": name, "changed": len(changed), "same_text": answers == wanted}
        bench.experiment_rows.append({**found, **row})


def run_graph_memory(bench: Bench, model: str, pair: Pair, cell: Cell) -> None:
    """Measures the memory of graphs on CUDA, in the one cell of which the floor is asked."""
    is_wanted = cell == (1, SHORT) and bench.device.type == "cuda" and bool(bench.methods)
    if not is_wanted or bench.is_late():
        return
    inputs = pair.inputs("random", cell[1], cell[0])
    try:
        bench.graph_memory[model] = graph_memory(pair, inputs, bench.new_tokens)
    except Exception as error:
        bench.fail(model, cell, "memory of graphs", error)


def graph_memory(pair: Pair, inputs: Any, new_tokens: int) -> Row:
    """Returns the greatest memory, in bytes, that a run reserves under each engine, from an empty cache on."""
    found = {}
    for engine in ("eager", "cuda_graph"):
        release(pair)
        torch.cuda.reset_peak_memory_stats(pair.device)
        method = ours_at(pair.block_size, pair.block_size, engine=engine)
        measure(pair, method, inputs, Options(max_new_tokens=new_tokens))
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


def chosen_experiments(text: str) -> list[str]:
    """Returns the experiments asked for, behind the step as it is, which they are compared with; none for `none`.

    Raises:
        typer.BadParameter: If one is not known.
    """
    if text == "none":
        return []
    names = parse_names(text, tuple(EXPERIMENTS))
    return ["unchanged", *(name for name in names if name != "unchanged")]


def main(
    is_tiny: Annotated[
        bool, typer.Option("--tiny", help="Tiny doubles of the shapes: for tests.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Where it runs; CUDA if there is any.")] = None,
    models: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}, or all.")] = "qwen3-8b",
    cells: Annotated[
        str | None, typer.Option(help="BATCHxCONTEXT, separated by commas, or grid.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help=f"Of {', '.join(METHODS)}, or all, or none.")
    ] = "all",
    widths: Annotated[
        str | None, typer.Option(help="Tokens verified per row; chosen by the batch.")
    ] = None,
    compile_at: Annotated[
        str | None, typer.Option(help="Cells of the methods that compile; default all.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens generated per run; 49, tiny 9.")
    ] = None,
    ours_tokens: Annotated[
        int | None, typer.Option(min=2, help="The same of ours; 129, tiny the others'.")
    ] = None,
    experiments: Annotated[
        str, typer.Option(help=f"Of {', '.join(EXPERIMENTS)}, or all, or none.")
    ] = "none",
    block_size: Annotated[
        int | None, typer.Option(min=2, help="Tokens per block; default the draft's.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a step's parts.")] = 21,
    budget: Annotated[float, typer.Option(help="Seconds after which nothing more is begun.")] = 1e9,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory that may be used; default most of it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The record; step.json in $OUT or benchmarks/results.")
    ] = None,
) -> None:
    """Time decoding steps of pairs with random weights; definitions in benchmarks/README.md."""
    started = time.monotonic()
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    place = device_of(device)
    check_device(place, is_tiny)
    names = parse_names(models, tuple(SHAPES))
    chosen = cells_of(cells, CELLS)
    dtype = dtype_of(is_tiny)
    length = new_tokens or 49
    length_of_ours = ours_tokens or 129
    product_size = 8192
    if is_tiny:
        length = new_tokens or 9
        length_of_ours = ours_tokens or length
        product_size = 64
        chosen = cells_of(cells, [(1, 32), (8, 32)])
    asked_methods: list[str] = []
    if methods != "none":
        asked_methods = parse_names(methods, METHODS)
    asked_widths = None
    if widths is not None:
        asked_widths = [int(part) for part in widths.replace(",", " ").split()]
    bench = Bench(
        device=place,
        dtype=dtype,
        is_tiny=is_tiny,
        cells=chosen,
        methods=asked_methods,
        widths=asked_widths,
        new_tokens=length,
        ours_tokens=length_of_ours,
        repeats=repeats,
        samples=samples,
        block_size=block_size,
        compile_cells=cells_of(compile_at, chosen),
        memory=usable_memory(place, memory_gib),
        deadline=started + budget,
        bandwidth=bandwidth_of(place, is_tiny),
        experiments=chosen_experiments(experiments),
    )
    rate = product_rate(place, dtype, product_size)
    path = out or Path(os.environ.get("OUT", RESULTS)) / "step.json"
    watch = LoadWatch()
    may_be_kept = may_write(path, quiet=not is_tiny)
    is_complete = True
    try:
        for name in names:
            run_model(
                bench,
                name,
                lambda: write(record_of(bench, rate, watch, False), path) if may_be_kept else None,
            )
    except KeyboardInterrupt:
        is_complete = False
        logger.warning("interrupted: what there is so far is written, as incomplete")
    watch.stop()
    record = record_of(bench, rate, watch, is_complete)
    show_record(record)
    # A tiny pair is never a record.
    finish(record, path, quiet=not is_tiny and watch.is_quiet())
    if bench.has_failed or not is_complete:
        raise typer.Exit(1 if is_complete else 130)


def cells_of(text: str | None, default: list[Cell]) -> list[Cell]:
    """Reads cells such as `1x2048`; the default where none are named."""
    if not text:
        return default
    return parse_cells(text)


def show_record(record: dict[str, Any]) -> None:
    """Prints the tables of a record."""
    title = "Steps with random weights; tokens per second are DERIVED for acceptance lengths"
    show(title, record["rows"], METHOD_COLUMNS)
    show("The parts of a step over fixed buffers", record["stages"], STAGE_COLUMNS)
    if record["experiments"]:
        title = "Experiments: the step of the defaults, changed"
        show(title, record["experiments"], EXPERIMENT_COLUMNS)
    show("Not run", record["not_run"], NOT_RUN_COLUMNS)
    title = "Floors: asked of one H200, Qwen3-8B's shapes, bfloat16"
    show(title, record["floors"], FLOOR_COLUMNS)


def record_of(bench: Bench, rate: float, watch: LoadWatch, is_complete: bool) -> dict[str, Any]:
    """Returns the record of what has been measured so far."""
    facts: dict[str, Any] = {
        "benchmark": "step",
        "is_tiny": bench.is_tiny,
        "is_complete": is_complete,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "max_new_tokens": bench.new_tokens,
        "max_new_tokens_of_ours": bench.ours_tokens,
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
        "experiments": bench.experiment_rows,
        "not_run": bench.not_run,
        "floors": floors,
    }


if __name__ == "__main__":
    typer.run(main)
