"""Compare ways of decoding with the same target and draft, in one run, prompt by prompt.

`--pair vision` measures the bundled pair for pictures: prompts with one picture, several and none. `stock`,
`stock/static` and `zlab` cannot take pictures and are left out. Batches of it are of one kind, and of all kinds mixed.

Methods: `plain` (`generate`), `ours` (`assistant_model=draft`), `stock` (Transformers' own DFlash, the same draft),
`stock/static` (the same with a static cache, for which Transformers compiles the verify on an accelerator; from 5.24
on, elsewhere it is left out), `zlab` (z-lab's package `dflash` 0.1.0, the same weights) and `lookup` (prompt lookup,
15 tokens). The last four take one prompt at a time. Within a prompt every method runs before the next prompt does,
each time in another order, so that a machine that drifts does so for all of them.

The ways of decoding are those of `dflash-hf bench`. A *step* is one forward of the target after the prefill; its time
runs from one call of a stopping criterion that stops nothing to the next, so drafting and all that happens between
forwards is in it. `ours` and `zlab` have statistics instead: there each step of a run has the mean. *Acceptance
length* is the number of tokens committed per verify, the bonus included, pooled over rows and prompts; the prefill's
token (for lookup: all that the first forward commits) belongs to no verify. *tokens/s* is new tokens over the wall
time of the whole call, *decode tokens/s* leaves the prefill and its token out. A prompt's time is the median of its
repeats. *identical* says whether every text was plain's.

`--sampling` measures something else: the acceptance length of the proposal rules at several temperatures.

The last line on stdout is the whole record as JSON; it is also written to `--out`, benchmarks/results by default. What
is recorded there was measured on a machine that did nothing else: the script refuses to begin on a busy one, and does
not write if others were busy meanwhile. `--force` skips the check, marks all rows `"busy": true` and writes nothing
among the results.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import typer
from harness.floors import BareForwards
from harness.machine import MAX_BUSY_CORES, RESULTS, LoadWatch, provenance
from harness.methods import (
    LOOKUP,
    OURS,
    PLAIN,
    STOCK,
    STOCK_STATIC,
    Method,
    Outcome,
    measure,
    with_options,
    zlab_method,
)
from harness.pair import MIXED, TOY, Pair, load_pair, random_pair
from harness.report import Column, finish, show
from harness.rows import Group, Row, decode_row, floor_row, kinds_of_rows, sampling_row, vision_rows

from dflash_hf.bench.cells import Options
from dflash_hf.generation.checks import check_static_stock

logger = logging.getLogger(__name__)
METHODS = ("plain", "ours", "stock", "stock/static", "zlab", "lookup")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Of the bare forwards: behind the first repeat, and behind every prompt of the others.
FLOOR_SAMPLES = 10
SAMPLES_BESIDE = 2
BUSY_EXIT = 3

DECODE_COLUMNS: list[Column] = [
    ("method", "method"),
    ("batch", "batch"),
    ("prompts", "kind"),
    ("block", "block"),
    ("dtype", "dtype"),
    ("context", "context_tokens"),
    ("new", "new_tokens"),
    ("ms/step p20", "step_ms.p20"),
    ("p50", "step_ms.p50"),
    ("p80", "step_ms.p80"),
    ("tok/s", "tokens_per_second"),
    ("decode tok/s", "decode_tokens_per_second"),
    ("acceptance", "acceptance_length"),
    ("identical", "identical"),
]
FLOOR_COLUMNS: list[Column] = [
    ("batch", "batch"),
    ("context", "context_tokens"),
    ("draft ms", "bare_draft_ms.p50"),
    ("verify ms", "bare_verify_ms.p50"),
    ("speed-up", "speedup"),
    ("ideal", "ideal_speedup"),
    ("share", "share_of_ideal"),
    ("reached", "reached"),
    ("step / stock", "step_time_against.stock"),
    ("step / stock/static", "step_time_against.stock/static"),
    ("step / zlab", "step_time_against.zlab"),
]
VISION_COLUMNS: list[Column] = [
    ("what", "what"),
    ("prompts", "kind"),
    ("batch", "batch"),
    ("value", "value"),
    ("required", "required"),
    ("reached", "reached"),
]
SAMPLING_COLUMNS: list[Column] = [
    ("method", "method"),
    ("temperature", "temperature"),
    ("prompts", "kind"),
    ("runs", "runs"),
    ("verifies", "verifies"),
    ("acceptance", "acceptance_length"),
    ("95 % interval", "ci95"),
]


class BundledPair(StrEnum):
    """Pairs that come with a clone."""

    text = "text"
    vision = "vision"


BUNDLED = {BundledPair.text: TOY, BundledPair.vision: TOY / "vision"}
# Ways that know no pictures, and why they are left out.
WITHOUT_PICTURES = {
    "stock": "Transformers' own DFlash stops with an error in a vision target, for texts too",
    "stock/static": "Transformers' own DFlash stops with an error in a vision target, for texts too",
    "zlab": "z-lab's dflash_generate takes token ids alone",
    "lookup": "prompt lookup copies image tokens into its proposals, and the target refuses those",
}


class RandomPair(StrEnum):
    """Sizes of a pair with random weights."""

    tiny = "tiny"
    toy = "toy"


def numbers(text: str, kind: type[int] | type[float]) -> list[Any]:
    """Returns the numbers of an option such as `1,8`.

    Raises:
        typer.BadParameter: If it is something else.
    """
    try:
        values = [kind(part) for part in text.replace(",", " ").split()]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise typer.BadParameter(
            f"expected positive numbers separated by commas, got {text!r}; give 1,8 for instance"
        )
    return values


def choose_methods(pair: Pair, names: str) -> list[Method]:
    """Returns the methods asked for, those that cannot run left out with a logged reason.

    Raises:
        typer.BadParameter: If a name is not known.
    """
    asked = names.replace(",", " ").split()
    unknown = sorted(set(asked) - set(METHODS))
    if unknown:
        raise typer.BadParameter(f"expected methods among {METHODS}, got {unknown}; leave them out")
    if pair.takes_pictures:
        for name in WITHOUT_PICTURES.keys() & asked:
            logger.warning("leaving out %s: %s", name, WITHOUT_PICTURES[name])
        asked = [name for name in asked if name not in WITHOUT_PICTURES]
    known = {method.name: method for method in (PLAIN, OURS, STOCK, LOOKUP)}
    if STOCK_STATIC.name in asked:
        try:
            check_static_stock()
            known[STOCK_STATIC.name] = STOCK_STATIC
        except ValueError as error:
            logger.warning("leaving out %s: %s", STOCK_STATIC.name, error)
    zlab = zlab_method(pair) if "zlab" in asked else None
    if zlab is not None:
        known["zlab"] = zlab
    return [known[name] for name in METHODS if name in asked and name in known]


def groups_of_prompts(pair: Pair, batch: int, prompts: int) -> list[tuple[str, int]]:
    """Returns kind and first index of every group of `batch` prompts: `prompts` of each kind, but a group at least.

    There are fewer where prompts run out; a first group that is too large repeats some, which is logged.
    """
    kinds = list(pair.kinds)
    if batch > 1 and pair.takes_pictures:
        kinds.append(MIXED)
    for kind in kinds:
        if pair.count(kind) < batch:
            logger.warning(
                "batches of %d repeat prompts of kind %s: there are %d",
                batch,
                kind,
                pair.count(kind),
            )
    return [
        (kind, group * batch)
        for group in range(max(1, prompts // batch))
        for kind in kinds
        if group == 0 or (group + 1) * batch <= pair.count(kind)
    ]


def run_decode(
    pair: Pair,
    methods: list[Method],
    batches: list[int],
    prompts: int,
    repeats: int,
    options: Options,
    seed: int,
) -> tuple[dict[tuple[int, str], Group], dict[int, BareForwards]]:
    """Measures all methods over all prompts, `repeats` times, after one run of each that does not count.

    Returns the runs by batch and method, and the bare forwards by batch, timed behind the first repeat, which says how
    long texts are, and then beside every prompt.
    """
    groups: dict[tuple[int, str], Group] = defaultdict(Group)
    bare: dict[int, BareForwards] = {}
    for batch in batches:
        chosen = [method for method in methods if batch == 1 or method.takes_batches]
        if not chosen:
            logger.warning("leaving out batch %d: no method of this run takes it", batch)
            continue
        asked = groups_of_prompts(pair, batch, prompts)
        for method in chosen:
            measure(pair, method, pair.inputs(*asked[0], batch), options, seed)
        for repeat in range(repeats):
            for number, (kind, first) in enumerate(asked):
                turn = (number + repeat) % len(chosen)
                inputs = pair.inputs(kind, first, batch)
                outcomes = {
                    method.name: measure(pair, method, inputs, options, seed)
                    for method in [*chosen[turn:], *chosen[:turn]]
                }
                for name, outcome in outcomes.items():
                    groups[batch, name].add((kind, first), outcome, outcomes.get("plain"))
                if batch in bare:
                    bare[batch].sample(SAMPLES_BESIDE)
            if batch not in bare:
                bare[batch] = BareForwards(pair, batch, _middle(groups, batch))
                bare[batch].sample(FLOOR_SAMPLES)
    return groups, bare


def _middle(groups: dict[tuple[int, str], Group], batch: int) -> int:
    """Mean number of tokens a row has half-way through its answer."""
    lengths = [
        prompt + len(answer) / 2
        for (size, _), group in groups.items()
        if size == batch
        for outcome in group.outcomes()
        for prompt, answer in zip(outcome.prompt_tokens, outcome.answers, strict=True)
    ]
    return round(sum(lengths) / len(lengths))


def decode_record(
    pair: Pair, groups: dict[tuple[int, str], Group], bare: dict[int, BareForwards], busy: bool
) -> dict[str, list[Row]]:
    """Returns the rows, each kind of prompt and all together, and the floors; prints them as tables."""
    rows: list[Row] = []
    for (batch, method), group in groups.items():
        pooled = {name: group.of_kinds(kinds) for name, kinds in kinds_of_rows(pair).items()}
        rows += [
            decode_row(pair, method, batch, name, part, busy)
            for name, part in pooled.items()
            if part.runs
        ]
    compared = [floor_row(rows, forwards, busy) for forwards in bare.values()]
    floors = [row for row in compared if row is not None]
    show("Decoding", rows, DECODE_COLUMNS)
    show(
        "Ours against its bare forwards and the others (medians of this run)", floors, FLOOR_COLUMNS
    )
    if not pair.takes_pictures:
        return {"rows": rows, "floors": floors}
    asked = vision_rows(rows)
    show("What is asked of the pair for pictures", asked, VISION_COLUMNS)
    return {"rows": rows, "floors": floors, "vision_floors": asked}


def run_sampling(
    pair: Pair,
    temperatures: Sequence[float],
    prompts: int,
    repeats: int,
    max_new_tokens: int,
    first_seed: int,
) -> dict[tuple[str, float], list[tuple[str, Outcome]]]:
    """Measures the acceptance of our proposal rules and of stock under fixed seeds, one prompt at a time."""
    rules = ("shared_noise", "argmax", "sample")
    methods = [with_options(f"ours/{rule}", OURS, proposal=rule) for rule in rules]
    if not pair.takes_pictures:
        methods.append(STOCK)
    runs: dict[tuple[str, float], list[tuple[str, Outcome]]] = defaultdict(list)
    for seed in range(first_seed, first_seed + repeats):
        for kind, first in groups_of_prompts(pair, 1, prompts):
            for temperature in temperatures:
                options = Options(max_new_tokens=max_new_tokens, temperature=temperature)
                for method in methods:
                    outcome = measure(pair, method, pair.inputs(kind, first, 1), options, seed)
                    runs[method.name, temperature].append((kind, outcome))
    return runs


def sampling_record(
    pair: Pair, runs: dict[tuple[str, float], list[tuple[str, Outcome]]], busy: bool
) -> dict[str, list[Row]]:
    """Returns and prints the rows of `--sampling`."""
    rows: list[Row] = []
    kinds = ["all"]
    if len(pair.kinds) > 1:
        kinds = [*pair.kinds, "all"]
    for (method, temperature), tagged in runs.items():
        for kind in kinds:
            chosen = [outcome for tag, outcome in tagged if kind in ("all", tag)]
            rows.append(sampling_row(pair, method, temperature, kind, chosen, busy))
    show("Acceptance when sampling", rows, SAMPLING_COLUMNS)
    return {"rows": rows}


def main(
    pair_name: Annotated[
        BundledPair,
        typer.Option("--pair", help="The bundled pair for texts, or the one for pictures."),
    ] = BundledPair.text,
    target: Annotated[
        Path | None, typer.Option(help="Folder of another target of that kind.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft.")] = None,
    random: Annotated[
        RandomPair | None, typer.Option(help="Random weights instead, of this size.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts of each kind.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of an answer.")] = 256,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8",
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each prompt; with --sampling, seeds.")
    ] = 3,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = ",".join(METHODS),
    block_size: Annotated[
        int | None, typer.Option(help="A narrower block than the draft's.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str, typer.Option(help="Where both models run.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Compare proposal rules when sampling.")
    ] = False,
    temperatures: Annotated[
        str, typer.Option(help="For --sampling, separated by commas.")
    ] = "0.6,1.0",
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where the record goes.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run on a busy machine too; not for the record.")
    ] = False,
) -> None:
    """Measure decoding with a draft against the other ways; definitions in benchmarks/README.md."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(threads)
    if dtype not in DTYPES:
        raise typer.BadParameter(
            f"expected a dtype among {sorted(DTYPES)}, got {dtype!r}; choose one of them"
        )
    if random is not None and pair_name is BundledPair.vision:
        raise typer.BadParameter(
            "expected --random or --pair vision, got both; random weights answer random texts"
        )
    sizes = numbers(batch, int)
    heat = numbers(temperatures, float)
    watch = LoadWatch()
    load = None if force else watch.sample()
    if load is not None and load > MAX_BUSY_CORES:
        typer.echo(
            f"expected a quiet machine (at most {MAX_BUSY_CORES} cores busy), got {load:.2f} busy; wait, or pass "
            "--force for numbers that are not for the record",
            err=True,
        )
        raise typer.Exit(BUSY_EXIT)
    place = torch.device(device)
    if random is not None:
        pair = random_pair(random.value, DTYPES[dtype], place, block_size)
    else:
        folder = BUNDLED[pair_name]
        target = target or folder / "target"
        draft = draft or folder / "draft"
        vision = pair_name is BundledPair.vision
        pair = load_pair(target, draft, DTYPES[dtype], place, block_size, vision=vision)
    if sampling:
        name = "sampling"
        watch.start()
        runs = run_sampling(pair, heat, prompts, repeats, max_new_tokens, seed)
    else:
        name = "decode"
        chosen = choose_methods(pair, methods)
        watch.start()
        options = Options(max_new_tokens=max_new_tokens)
        groups, bare = run_decode(pair, chosen, sizes, prompts, repeats, options, seed)
    watch.stop()
    quiet = not force and watch.is_quiet()
    if sampling:
        rows = sampling_record(pair, runs, not quiet)
    else:
        rows = decode_record(pair, groups, bare, not quiet)
    if pair.takes_pictures:
        name += "_vision"
    facts = {"benchmark": name, "pair": pair.name, "max_new_tokens": max_new_tokens}
    facts |= {
        "prompts_per_kind": prompts,
        "repeats": repeats,
        "load": watch.to_dict(),
        **provenance(place),
    }
    finish({"provenance": facts, **rows}, out or RESULTS / f"{name}.json", quiet)


if __name__ == "__main__":
    typer.run(main)
