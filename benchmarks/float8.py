"""What drafting in FP8 costs a pair in acceptance, with the rounding emulated: any device, no time is measured.

Every prompt is answered with the draft's weights as they are and with `draft_dtype="float8_e4m3fn"`, whose products
are summed in float32 here ([`Emulated`]), the head's included. Whole blocks are verified, as
chains, so that nothing follows the clock.

    python benchmarks/float8.py                           # the bundled pair for texts, all held-out prompts
    python benchmarks/float8.py --target build/smollm2/target --draft demos/smollm2/draft --prompts FILE --num 24

Prints a row per choice; the last line is a JSON object. The acceptance length counts the bonus token. The exit status
is 1 if a text differs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from harness.machine import provenance
from harness.report import Column, show
from torch import Tensor

from dflash_hf.data.prompt_files import read_prompts
from dflash_hf.generation import float8
from dflash_hf.pair.answers import answer
from dflash_hf.pair.loading import load_pair

TOY = Path(__file__).resolve().parents[1] / "demos" / "toy"
DTYPES = (None, "float8_e4m3fn")
COLUMNS: list[Column] = [
    (name, name)
    for name in (
        "draft_dtype",
        "prompts",
        "verifies",
        "committed",
        "acceptance_length",
        "same_texts",
    )
]


class Emulated:
    """`scaled_linear` in float32, each weight converted once: to read FP8 takes a CPU longer than to multiply."""

    def __init__(self) -> None:
        # By address: a weight, which is held so that no other one gets its place, and its numbers in float32.
        self._converted: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, states: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Multiplies as [`float8.scaled_linear_in_float32`]."""
        place = weight.data_ptr()
        if place not in self._converted:
            self._converted[place] = (weight, weight.float())
        return float8.scaled_linear_in_float32(states, self._converted[place][1], scales)


def measure(
    pair: tuple[Any, Any, Any], prompts: list[Any], draft_dtype: str | None, limit: int
) -> dict[str, Any]:
    """Answers prompts one by one, greedily, with up to `limit` new tokens; returns the texts' ids and the counts."""
    target, draft, processor = pair
    draft.generation_config.draft_dtype = draft_dtype
    found = [
        answer(target, draft, processor, prompt, max_new_tokens=limit, do_sample=False)
        for prompt in prompts
    ]
    return {
        "draft_dtype": draft_dtype,
        "prompts": len(prompts),
        "verifies": sum(one.stats.num_verifies for one in found),
        "committed": sum(sum(map(sum, one.stats.num_committed)) for one in found),
        "ids": [one.ids for one in found],
    }


def main(
    target: Annotated[str, typer.Option(help="The target's folder.")] = str(TOY / "target"),
    draft: Annotated[str, typer.Option(help="The draft's folder.")] = str(TOY / "draft"),
    prompts: Annotated[Path, typer.Option(help="JSON lines of prompts.")] = TOY / "held_out.jsonl",
    num: Annotated[
        int | None, typer.Option(min=1, help="How many of them; all by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "float32",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of an answer.")] = 256,
) -> None:
    """Compare acceptance with and without FP8, emulated."""
    pair = load_pair(target, draft, dtype, "cpu")
    options = pair[1].generation_config
    config = pair[1].config
    options.num_tree_nodes = 0
    options.verify_width = config.num_proposals(config.block_size) + 1
    chosen = read_prompts(prompts)[:num]
    with (
        mock.patch.object(float8, "scaled_linear", Emulated()),
        mock.patch.object(float8, "why_not", return_value=None),
    ):
        rows = [measure(pair, chosen, draft_dtype, max_new_tokens) for draft_dtype in DTYPES]
    texts = rows[0]["ids"]
    for row in rows:
        row["same_texts"] = sum(
            one == other for one, other in zip(row.pop("ids"), texts, strict=True)
        )
        row["acceptance_length"] = row["committed"] / row["verifies"]
    show(f"acceptance in FP8, emulated: {draft}, {dtype}", rows, COLUMNS)
    record = {"draft": draft, "dtype": dtype, "max_new_tokens": max_new_tokens, "rows": rows}
    print(json.dumps({**record, "provenance": provenance(torch.device("cpu"))}), flush=True)
    sys.exit(any(row["same_texts"] < row["prompts"] for row in rows))


if __name__ == "__main__":
    typer.run(main)
