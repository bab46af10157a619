"""How often a text with a draft is plain `generate`'s in half precision, and by how little it is not.

A verify is a wider forward than plain's and rounds in another order, so in bfloat16 a near tie may fall the other way.
For every text that differs, `dflash_hf.pair.agreement` measures the `margin` at the first token that does, by a
float32 copy of the target: it has to be a tie, and under 0.25. A graph has to give exactly the text of the same step
launched eagerly (`static`): the same operations and widths.

    python benchmarks/identity.py                         # the bundled pair in bfloat16, on CUDA if there is any
    python benchmarks/identity.py --random tiny           # random weights, in seconds: to try the script

Writes `identity.json` to `$OUT`, else to benchmarks/results, and prints the record as the last line. The exit status
is 1 if a margin is too wide or two engines differ that must not. Nothing is timed: a busy machine does not matter.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from harness.machine import RESULTS, provenance
from harness.methods import PLAIN, measure, ours_on
from harness.pair import TOY, Inputs, Pair, load_pair, random_pair
from harness.report import Column, finish, show
from harness.rows import Row
from harness.trial import device_of

from dflash_hf import free_buffers
from dflash_hf.bench.cells import Options
from dflash_hf.pair.agreement import Agreement, agreement, reference_for

MAX_MARGIN = 0.25
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COLUMNS: list[Column] = [
    ("engine", "engine"),
    ("ran on", "ran_on"),
    ("batch", "batch"),
    ("texts", "num_texts"),
    ("identical to plain", "num_identical"),
    ("rate", "identity_rate"),
    ("widest margin", "widest_margin"),
    ("ties < 0.25", "margins_kept"),
    ("as static", "as_static"),
    ("acceptance", "acceptance_length"),
]


def engines_for(device: torch.device) -> tuple[str, ...]:
    """Returns the engines that run on a device, by the names that `ours_on` takes."""
    if device.type == "cuda":
        return ("static", "eager", "cuda_graph")
    return ("static", "eager")


def keeps(found: Agreement) -> bool:
    """Returns whether answers are identical, or part at a tie as narrow as the bundled pair's have to be."""
    return found.identical or (
        found.holds and found.margin is not None and found.margin < MAX_MARGIN
    )


def compare(pair: Pair, groups: list[tuple[str, int]], batch: int, options: Options) -> list[Row]:
    """Decodes batches of prompts plainly and on every engine; returns a row per engine."""
    answers: dict[str, list[list[int]]] = {}
    committed: dict[str, list[int]] = {}
    prompts: list[list[int]] = []
    ran_on: dict[str, str] = {}
    engines = engines_for(pair.device)
    methods = {"plain": PLAIN, **{engine: ours_on(engine) for engine in engines}}
    for kind, first in groups:
        inputs = pair.inputs(kind, first, batch)
        prompts += real_tokens(inputs)
        for name, method in methods.items():
            outcome = measure(pair, method, inputs, options)
            answers.setdefault(name, []).extend(outcome.answers)
            counts = committed.setdefault(name, [0, 0])
            counts[0], counts[1] = counts[0] + outcome.committed, counts[1] + outcome.verifies
            if name != "plain":
                ran_on[name] = pair.draft.last_stats.engine
    free_buffers(pair.draft)
    rows: list[Row] = []
    reference = reference_for(pair.target)
    for engine in engines:
        compared = [
            agreement(
                pair.target, alone(prompt, pair), plain, ours, reference=reference, do_sample=False
            )
            for prompt, plain, ours in zip(prompts, answers["plain"], answers[engine], strict=True)
        ]
        found = [
            {"text": number, **(one.to_dict() or {})}
            for number, one in enumerate(compared)
            if not one.identical
        ]
        num = len(prompts)
        # None too where an answer ends early, which has no margin and is no tie.
        widest = max((one.margin for one in compared if one.margin is not None), default=None)
        rows.append(
            {
                "engine": engine,
                "ran_on": ran_on[engine],
                "batch": batch,
                "dtype": pair.dtype,
                "num_texts": num,
                "num_identical": num - len(found),
                "identity_rate": (num - len(found)) / num,
                "divergences": found,
                "widest_margin": widest,
                "margins_kept": all(map(keeps, compared)),
                # Only a graph replays exactly what the static step launches.
                "as_static": answers[engine] == answers["static"]
                if engine == "cuda_graph"
                else None,
                "acceptance_length": committed[engine][0] / max(committed[engine][1], 1),
            }
        )
    return rows


def alone(prompt: list[int], pair: Pair) -> Inputs:
    """Returns a prompt's tokens as the inputs of one row."""
    ids = torch.tensor([prompt], device=pair.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def real_tokens(inputs: Inputs) -> list[list[int]]:
    """Returns each prompt without its padding."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def main(
    random: Annotated[
        str | None, typer.Option(help="Random weights of this size (tiny, toy) instead.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="Where it runs; CUDA if there is any.")] = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts of each kind, per batch size.")
    ] = 8,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of an answer.")] = 128,
    out: Annotated[
        Path | None, typer.Option(help="The record; identity.json in $OUT or benchmarks/results.")
    ] = None,
) -> None:
    """Compare texts with a draft with plain generate's in half precision; definitions in benchmarks/README.md."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if dtype not in DTYPES:
        raise typer.BadParameter(
            f"expected a dtype among {sorted(DTYPES)}, got {dtype!r}; choose one of them"
        )
    place = device_of(device)
    if random is None:
        pair = load_pair(TOY / "target", TOY / "draft", DTYPES[dtype], place)
    else:
        pair = random_pair(random, DTYPES[dtype], place)
    rows: list[Row] = []
    for size in (int(part) for part in batch.replace(",", " ").split()):
        groups = [
            (kind, group * size) for group in range(max(1, prompts // size)) for kind in pair.kinds
        ]
        rows += compare(pair, groups, size, Options(max_new_tokens=max_new_tokens))
    facts: dict[str, Any] = {
        "benchmark": "identity",
        "pair": pair.name,
        "max_new_tokens": max_new_tokens,
    }
    facts |= {"prompts_per_kind": prompts, "required_margin": MAX_MARGIN, **provenance(place)}
    show(f"Texts against plain generate's, {dtype} on {place}", rows, COLUMNS)
    path = out or Path(os.environ.get("OUT", RESULTS)) / "identity.json"
    # Random weights are never a record.
    finish({"provenance": facts, "rows": rows}, path, quiet=random is None)
    wrong = [row for row in rows if not row["margins_kept"] or row["as_static"] is False]
    if wrong:
        for row in wrong:
            print(
                f"FAIL: {row['engine']}, batch {row['batch']}: {row['divergences'][:5]}",
                file=sys.stderr,
            )
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
