"""The same call twice in half precision: how many texts are the same, with other work on the machine meanwhile.

    make real
    .venv/bin/dflash-hf bench prepare gsm8k,humaneval,mt-bench,math500 --out build/smollm2/data
    .venv/bin/python benchmarks/repeated.py --rows 1,8

In half precision the number of tokens that are verified may decide a near tie. So the default chooses it by costs that
no clock has a part in, and a call gives the same text however slow the machine is. Every batch of questions is
answered twice, the second time beside processes that compute without a pause. Texts and widths of all verifies are
compared. Writes `repeated.json`; the exit status is 1 if a text differs. Nothing is timed: other load does not matter.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import typer
from batches import SMOLLM2, encoded
from harness.machine import RESULTS, ROOT, num_cores, provenance
from harness.report import finish, show

from dflash_hf import DFlashDraftModel
from dflash_hf.bench.sets import load_questions
from dflash_hf.pair.loading import load_pair

COLUMNS = [
    ("set", "set"),
    ("rows", "rows"),
    ("texts", "texts"),
    ("same text", "same_texts"),
    ("calls", "calls"),
    ("same widths", "same_widths"),
]


def compute_without_end() -> None:
    """Multiplies matrices until the process is ended."""
    torch.set_num_threads(1)
    matrix = torch.ones(256, 256)
    while True:
        matrix @ matrix


@contextmanager
def busy_machine() -> Generator[None]:
    """Keeps every core busy with other work."""
    # Forked processes would share torch's threads with this one.
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=compute_without_end, daemon=True) for _ in range(num_cores())]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def answered(
    target: Any, draft: DFlashDraftModel, batches: list[Any], limit: int
) -> list[tuple[list[list[int]], list[int]]]:
    """Returns the ids of each batch's texts, and the width of each verify."""
    found: list[tuple[list[list[int]], list[int]]] = []
    for inputs in batches:
        ids = target.generate(
            **inputs, assistant_model=draft, max_new_tokens=limit, do_sample=False
        )
        stats: Any = draft.last_stats
        found.append((ids.tolist(), list(stats.verify_widths)))
    return found


def compared(first: list[Any], second: list[Any]) -> dict[str, int]:
    """Returns how many texts there are, and how many are the same in both."""
    rows = [
        (one, other)
        for (texts, _), (others, _) in zip(first, second, strict=True)
        for one, other in zip(texts, others, strict=True)
    ]
    widths = [(one, other) for (_, one), (_, other) in zip(first, second, strict=True)]
    return {
        "texts": len(rows),
        "same_texts": sum(one == other for one, other in rows),
        "calls": len(widths),
        "same_widths": sum(one == other for one, other in widths),
    }


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = SMOLLM2 / "target-bf16",
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")] = (
        ROOT / "demos" / "smollm2" / "draft"
    ),
    data: Annotated[
        Path, typer.Option(help="Folder with the test sets that `dflash-hf bench prepare` wrote.")
    ] = SMOLLM2 / "data",
    sets: Annotated[
        str, typer.Option(help="Test sets, with commas between.")
    ] = "gsm8k,humaneval,mt-bench,math500",
    rows: Annotated[str, typer.Option(help="Rows of a batch, with commas between.")] = "1",
    questions: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    dtype: Annotated[str, typer.Option(help="torch dtype of the models, or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "repeated.json",
) -> None:
    """Answer the same questions twice and compare."""
    torch.set_num_threads(1)
    model, assistant, tokenizer = load_pair(str(target), str(draft), dtype, "cpu")
    tokenizer.padding_side = "left"
    found: list[dict[str, Any]] = []
    for name in sets.split(","):
        asked = load_questions(
            str(data / f"{name}.jsonl"), data_dir=None, num_prompts=questions, seed=0
        )
        texts = [question.turns[0] for question in asked]
        for size in map(int, rows.split(",")):
            firsts = range(0, len(texts), size)
            batches = [encoded(tokenizer, texts[first : first + size]) for first in firsts]
            once = answered(model, assistant, batches, max_new_tokens)
            with busy_machine():
                again = answered(model, assistant, batches, max_new_tokens)
            found.append({"set": name, "rows": size, **compared(once, again)})
            typer.echo(f"{found[-1]}", err=True)
    facts = {
        "benchmark": "repeated",
        "dtype": str(model.dtype),
        "max_new_tokens": max_new_tokens,
        "processes_beside": num_cores(),
        **provenance(torch.device("cpu")),
    }
    show("The same call twice, the second time on a busy machine", found, COLUMNS)
    finish({"provenance": facts, "rows": found}, out, True)
    raise typer.Exit(any(row["same_texts"] < row["texts"] for row in found))


if __name__ == "__main__":
    typer.run(main)
