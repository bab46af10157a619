"""Decodes on every engine at once, with few layers of Qwen3-8B's shape, and says what does not work at all.

The first thing to run on a GPU: the defaults in bfloat16, batch 1 and 8, greedy and under Qwen3's own sampling, as
CUDA graphs, the same steps uncaptured, and eagerly; then what else a process does beside kept graphs (random numbers,
a capture of its own, `generate` with a static cache), and which kernels could not be had.

    python benchmarks/smoke.py             on a GPU
    python benchmarks/smoke.py --tiny      anywhere: tiny sizes in float32; nothing is captured without CUDA

A graph has to give exactly the text of the same steps uncaptured. A greedy text has to be plain `generate`'s, or to
part from it at a tie as narrow as `identity.py` asks for. Sampled texts of the eager engine are compared, not judged.
Every check is a row, printed when it is done; what raises is a row that failed, and the next check is run. Writes
`smoke.json` to `$OUT`, else to benchmarks/results, after every row, and prints the record as the last line. The exit
status is 1 if a row failed. Times are those of one call each, and no benchmark.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from harness.machine import RESULTS, provenance
from harness.methods import PLAIN, QWEN3_SAMPLING, Method, measure, ours_on
from harness.operations import failures, operations
from harness.pair import Inputs, Pair
from harness.report import Column, finish, may_write, show, write
from harness.rows import Row
from harness.shapes import SHAPES, Shape, build_pair, tiny
from harness.trial import check_device, device_of, dtype_of
from identity import alone, keeps, real_tokens

from dflash_hf.bench.cells import Options
from dflash_hf.pair.agreement import agreement, first_difference, reference_for

LAYERS = 4
TAPS = (0, 1, 2)
BATCHES = (1, 8)
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "qwen3": QWEN3_SAMPLING}
# As `ours_on` knows them, and as statistics call what ran. A graph is compared with what stands first.
ENGINES = ("static", "cuda_graph", "eager")
SAID = {True: "passed", False: "FAILED", None: "not run"}
COLUMNS: list[Column] = [
    ("check", "check"),
    ("passed", "passed"),
    ("engine", "engine"),
    ("width", "verify_width"),
    ("first s", "first_seconds"),
    ("second s", "second_seconds"),
    ("why", "why"),
]
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Smoke:
    """A pair, and what has been found so far.

    Args:
        pair (`Pair`): What decodes.
        new_tokens (`int`): Length of an answer.
        reference: What margins are measured with; see `agreement.reference_for`.
        save (callable): Called after every row.
        rows (`list[dict]`): A row for every check.
    """

    pair: Pair
    new_tokens: int
    reference: Any
    save: Callable[[], None]
    rows: list[Row]

    def add(self, check: str, passed: bool | None, **more: Any) -> None:
        """Adds the row of a check, prints it and saves; `None` as `passed` is a check that was not made."""
        row: Row = {"check": check, "passed": passed, "why": None, **more}
        self.rows.append(row)
        why = "" if row["why"] is None else f": {row['why']}"
        print(f"{SAID[passed]}: {check}{why}", flush=True)
        self.save()

    def attempt(self, check: str, run: Callable[[], dict[str, Any]]) -> None:
        """Makes a check, which returns `passed` and more of its row; what it raises is a failure."""
        try:
            found = run()
        except Exception as error:
            logger.error("failed: %s", check, exc_info=error)
            found = {
                "passed": False,
                "why": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            }
        self.add(check, **found)


def smoke_shape() -> Shape:
    """Returns a few layers of Qwen3-8B and a whole draft for them."""
    return replace(SHAPES["qwen3-8b"], layers=LAYERS, taps=TAPS)


def texts(smoke: Smoke, method: Method, inputs: Inputs, options: Options) -> dict[str, Any]:
    """Decodes twice, the second time with what the first has left; returns answers, seconds and what ran."""
    first, second = (measure(smoke.pair, method, inputs, options) for _ in range(2))
    stats = smoke.pair.draft.last_stats
    return {
        "answers": first.answers,
        "repeats_itself": first.answers == second.answers,
        "first_seconds": round(first.seconds, 3),
        "second_seconds": round(second.seconds, 3),
        "engine": stats.engine,
        "verify_width": stats.num_proposed + 1,
        "is_tree": bool(stats.num_tried_by_node),
    }


def unlike_plain(
    smoke: Smoke, inputs: Inputs, plain: list[list[int]] | None, answers: list[list[int]]
) -> str | None:
    """Says how greedy answers are not plain's, or `None` where they are, or part at a narrow tie."""
    if plain is None:
        return "expected plain's answers to compare with, got none; see the row of plain"
    pair = smoke.pair
    rows = zip(real_tokens(inputs), plain, answers, strict=True)
    for number, (prompt, wanted, found) in enumerate(rows):
        one = alone(prompt, pair)
        compared = agreement(
            pair.target, one, wanted, found, reference=smoke.reference, do_sample=False
        )
        if not keeps(compared):
            return f"row {number} {compared.sentence}"
    return None


def decode(smoke: Smoke, sampling: str, batch: int) -> None:
    """Decodes one batch of prompts plainly, if it is greedy, and on every engine; a row for each."""
    pair = smoke.pair
    inputs = pair.inputs("random", batch, batch)
    options = Options(max_new_tokens=smoke.new_tokens, **SAMPLINGS[sampling])
    known: dict[str, list[list[int]]] = {}
    name = f"{sampling}, batch {batch}"

    def plainly() -> dict[str, Any]:
        outcome = measure(pair, PLAIN, inputs, options)
        known["plain"] = outcome.answers
        lengths = {len(answer) for answer in outcome.answers}
        return {"passed": lengths == {smoke.new_tokens}, "first_seconds": round(outcome.seconds, 3)}

    def drafted(engine: str) -> dict[str, Any]:
        found = texts(smoke, ours_on(engine), inputs, options)
        answers = found.pop("answers")
        known[engine] = answers
        wrong: list[str] = []
        if found["engine"] != engine:
            wrong.append(f"expected {engine} to run, got {found['engine']}; the log says why")
        if not found["repeats_itself"]:
            wrong.append("a second call gave another text")
        if engine == "cuda_graph" and answers != known.get("static"):
            wrong.append("its text is not that of the same steps uncaptured")
        if sampling == "greedy":
            unlike = unlike_plain(smoke, inputs, known.get("plain"), answers)
            wrong += [] if unlike is None else [unlike]
        if engine == "eager" and "static" in known:
            pairs = zip(answers, known["static"], strict=True)
            found["first_differences_from_static"] = [first_difference(a, b) for a, b in pairs]
        return {"passed": not wrong, "why": "; ".join(wrong) or None, **found}

    if sampling == "greedy":
        smoke.attempt(f"plain, {name}", plainly)
    for engine in ENGINES:
        if engine == "cuda_graph" and pair.device.type != "cuda":
            why = "there is no CUDA: the same steps, uncaptured, stand for it"
            smoke.add(f"{engine}, {name}", None, why=why)
            continue
        smoke.attempt(f"{engine}, {name}", lambda engine=engine: drafted(engine))


def kernels() -> dict[str, Any]:
    """Says which operations could not have their kernel."""
    found = failures()
    why = "; ".join(f"{name}: {reason}" for name, reason in found.items())
    return {
        "passed": not found,
        "why": why or None,
        "operations": sorted(operations()),
        "failures": found,
    }


def random_numbers(device: torch.device) -> dict[str, Any]:
    """Draws outside of any capture, as a process goes on to do beside kept graphs."""
    first, second = (torch.rand(64, device=device) for _ in range(2))
    is_right = bool(((first >= 0) & (first < 1)).all()) and not torch.equal(first, second)
    return {
        "passed": is_right,
        "why": None if is_right else "two draws are the same, or out of range",
    }


def own_capture(device: torch.device) -> dict[str, Any]:
    """Captures random numbers outside of inference mode, and replays them twice."""
    drawn = torch.zeros(64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn.uniform_()
    replays: list[torch.Tensor] = []
    for _ in range(2):
        graph.replay()
        replays.append(drawn.clone())
    is_right = bool((replays[0] > 0).any()) and not torch.equal(*replays)
    return {
        "passed": is_right,
        "why": None if is_right else "two replays drew the same numbers, or none",
    }


def static_cache(pair: Pair) -> dict[str, Any]:
    """Has plain `generate` go over a static cache, for which Transformers compiles and captures on CUDA.

    A target of one tiny layer: what is compiled is of the same kind, and compiling takes most of the time.
    """
    shape = replace(tiny(SHAPES["qwen3-8b"]), layers=1, taps=(0,))
    small = build_pair("qwen3-8b", shape, pair.target.dtype, pair.device, lengths=(24, 24))
    inputs = small.inputs("random", 0, 1)
    began = time.perf_counter()
    out = small.target.generate(
        **inputs, max_new_tokens=8, do_sample=False, cache_implementation="static"
    )
    seconds = round(time.perf_counter() - began, 3)
    wanted = (1, inputs["input_ids"].shape[1] + 8)
    is_right = tuple(out.shape) == wanted
    why = None if is_right else f"expected ids of shape {wanted}, got {tuple(out.shape)}"
    return {"passed": is_right, "why": why, "first_seconds": seconds}


def main(
    is_tiny: Annotated[
        bool, typer.Option("--tiny", help="Tiny sizes, on any device: to try the script.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Where it runs; CUDA if there is any.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of an answer.")] = 24,
    out: Annotated[
        Path | None, typer.Option(help="The record; smoke.json in $OUT or benchmarks/results.")
    ] = None,
) -> None:
    """Try every engine and what a process does beside it; what is asked of each is in the script's head."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    place = device_of(device)
    check_device(place, is_tiny)
    shape = smoke_shape()
    lengths = (480, 512)
    if is_tiny:
        shape = tiny(SHAPES["qwen3-8b"])
        lengths = (20, 24)
    dtype = dtype_of(is_tiny)
    pair = build_pair("qwen3-8b", shape, dtype, place, lengths=lengths)
    path = out or Path(os.environ.get("OUT", RESULTS)) / "smoke.json"
    facts: dict[str, Any] = {
        "benchmark": "smoke",
        "is_tiny": is_tiny,
        "is_complete": False,
        "dtype": pair.dtype,
        "layers": shape.layers,
        **provenance(place),
    }
    record: dict[str, Any] = {"provenance": facts, "rows": []}
    may_be_kept = may_write(path, quiet=not is_tiny)
    smoke = Smoke(
        pair=pair,
        new_tokens=new_tokens,
        reference=reference_for(pair.target),
        save=lambda: write(record, path) if may_be_kept else None,
        rows=record["rows"],
    )
    for sampling in SAMPLINGS:
        for batch in BATCHES:
            decode(smoke, sampling, batch)
    smoke.attempt("kernels of all operations", kernels)
    smoke.attempt("random numbers beside kept graphs", lambda: random_numbers(place))
    if place.type == "cuda":
        smoke.attempt("a capture outside of inference mode", lambda: own_capture(place))
    else:
        smoke.add("a capture outside of inference mode", None, why="there is no CUDA")
    smoke.attempt("plain generate with a static cache", lambda: static_cache(pair))
    show(f"Smoke: {pair.dtype} on {place}", smoke.rows, COLUMNS)
    facts["is_complete"] = True
    # Tiny sizes are never a record.
    finish(record, path, quiet=not is_tiny)
    if any(row["passed"] is False for row in smoke.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
