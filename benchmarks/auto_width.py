"""What verify widths that follow the run cost and bring: plain `generate`, the default, fixed widths, in turns.

Per draft (the pair's own; the same with random weights, which is never right) every way answers every prompt once per
round, in another order each time, all in this process. A way's ratio to plain is taken within the round and prompt;
the median of all, and the quotient of the sums of each prompt's quickest runs, are printed. `--clock cpu` (the
default) is the process's time on a processor, which other processes disturb least; `wall` is the clock on the wall.
Texts must be plain's. The last line on stdout is the record as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from harness.machine import provenance
from harness.pair import TOY, Pair, load_pair, never_right

from dflash_hf import DFlashDraftModel


class Clock(StrEnum):
    """What is measured."""

    cpu = "cpu"
    wall = "wall"


CLOCKS = {Clock.cpu: time.process_time, Clock.wall: time.perf_counter}
Way = tuple[str, DFlashDraftModel | None, int | None]


def answer(pair: Pair, inputs: dict[str, torch.Tensor], way: Way, num: int) -> torch.Tensor:
    """Generates `num` tokens: plain, or with the draft of `way` at its width."""
    settings: dict[str, Any] = {"max_new_tokens": num, "do_sample": False}
    target: Any = pair.target
    _, draft, width = way
    if draft is None:
        return target.generate(**inputs, **settings)
    draft.generation_config.verify_width = width
    return target.generate(**inputs, **settings, assistant_model=draft)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    prompts: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 1,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 256,
    fixed: Annotated[str, typer.Option(help="Fixed widths to compare with.")] = "1,8,12,16",
    to_the_end: Annotated[bool, typer.Option(help="Stop at end-of-sequence tokens.")] = False,
    clock: Annotated[Clock, typer.Option()] = Clock.cpu,
    pair_folder: Annotated[
        Path, typer.Option("--pair", help="Folder with target and draft.")
    ] = TOY,
) -> None:
    """Compare verify widths that follow the run with fixed ones, and both with plain decoding."""
    torch.set_num_threads(1)
    pair = load_pair(
        pair_folder / "target", pair_folder / "draft", torch.float32, torch.device("cpu"), None
    )
    if not to_the_end:
        pair.target.generation_config.eos_token_id = None
    ways: list[Way] = [("plain", None, None)]
    for name, draft in (("draft", pair.draft), ("never right", never_right(pair.draft))):
        ways.append((f"{name}, default", draft, None))
        ways += [
            (f"{name}, {width}", draft, int(width)) for width in fixed.split(",") if name == "draft"
        ]
    asked = [
        pair.inputs(kind, first * batch, batch) for kind in pair.kinds for first in range(prompts)
    ]
    times: dict[str, list[list[float]]] = {way[0]: [[] for _ in asked] for way in ways}
    widths: dict[str, list[list[int]]] = {way[0]: [[] for _ in asked] for way in ways}
    for turn in range(-1, rounds):  # the first round is not counted
        for index, inputs in enumerate(asked):
            texts: list[torch.Tensor] = []
            for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
                began = CLOCKS[clock]()
                texts.append(answer(pair, inputs, way, max_new_tokens))
                if turn >= 0:
                    times[way[0]][index].append(CLOCKS[clock]() - began)
                if way[1] is not None:
                    widths[way[0]][index] = way[1].last_stats.verify_widths
            assert all(torch.equal(text, texts[0]) for text in texts)
    rows: list[dict[str, Any]] = []
    for name, taken in times.items():
        pairs = [
            (a, b)
            for mine, plain in zip(taken, times["plain"], strict=True)
            for a, b in zip(mine, plain, strict=True)
        ]
        quickest, plain = (sum(min(runs) for runs in times[way]) for way in (name, "plain"))
        steps = [width for run in widths[name] for width in run]
        row = {
            "way": name,
            "median": statistics.median(a / b for a, b in pairs),
            "quickest": quickest / plain,
        }
        row |= {"seconds": quickest, "steps": len(steps), "singles": steps.count(1)}
        print(
            "  ".join(
                f"{key} {value:.4f}" if isinstance(value, float) else f"{value}"
                for key, value in row.items()
            )
        )
        rows.append(row)
    facts = {
        "benchmark": "auto_width",
        "clock": clock,
        "rounds": rounds,
        "batch": batch,
        "pair": pair.name,
    }
    facts |= {"prompts": len(asked), "max_new_tokens": max_new_tokens, "eos": to_the_end}
    print(json.dumps({"provenance": {**facts, **provenance(torch.device("cpu"))}, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
