"""Whether upstream's own answers score as right: of GSM8K's test set, MATH-500, and HumanEval.

A score that finds gold wrong would find right answers of a model wrong as well. Each row is scored as an answer of a
model would be, in every form that upstream has of it: GSM8K's worked answer; MATH-500's answer in a box, and its
worked solution; HumanEval's body of the function, and the whole function in a fenced block. As a control, rows of
mathematics are also scored with the answer of the row before, which is right only where both say the same.

    python benchmarks/gold.py --data-dir ../shared/data     # with upstream's gsm8k, math500 and humaneval in it

Writes `gold.json` to `$OUT`, else to benchmarks/results, and prints the record as the last line. The exit status is 1
below the floors: 1,319 of 1,319; 490 of 500; 164 of 164. It runs HumanEval's programs on this machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.machine import RESULTS, provenance
from harness.report import Column, finish, show

from dflash_hf.bench.answers import Answer, Turn
from dflash_hf.bench.questions import Question, Score
from dflash_hf.bench.scores import score

Row = dict[str, Any]
COLUMNS: list[Column] = [
    ("set", "set"),
    ("form", "form"),
    ("rows", "rows"),
    ("right", "right"),
    ("floor", "floor"),
    ("control right", "control_right"),
    ("seconds", "seconds"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """A set with its own answers: its file, how it is scored, what is right, the forms of its answers, the floor."""

    name: str
    file: str
    score: Score
    reference: Callable[[Row], Any]
    forms: dict[str, Callable[[Row], str]]
    floor: float


GOLD = (
    Gold(
        name="gsm8k",
        file="gsm8k/test.jsonl",
        score="math",
        reference=lambda row: row["answer"].rpartition("####")[2].strip(),
        forms={"worked answer": lambda row: row["answer"]},
        floor=1.0,
    ),
    Gold(
        name="math-500",
        file="math500/test.jsonl",
        score="math",
        reference=lambda row: row["answer"],
        forms={
            "boxed answer": lambda row: f"The answer is $\\boxed{{{row['answer']}}}$.",
            "worked solution": lambda row: row["solution"],
        },
        floor=490 / 500,
    ),
    Gold(
        name="humaneval",
        file="humaneval/HumanEval.jsonl",
        score="code",
        reference=lambda row: {key: row[key] for key in ("prompt", "test", "entry_point")},
        forms={
            "body": lambda row: row["canonical_solution"],
            "fenced block": lambda row: f"```python\n{row['prompt']}{row['canonical_solution']}```",
        },
        floor=1.0,
    ),
)


def is_right(gold: Gold, row: Row, text: str) -> bool:
    """Returns True if a text scores as right for a row."""
    key: dict[str, Any] = {"dataset": gold.name, "question_id": 0, "category": gold.name}
    turn = Turn(text=text, token_ids=[], new_tokens=0, prompt_tokens=0, wall_time=0.0, latency=0.0)
    question = Question(**key, turns=("",), reference=gold.reference(row), score=gold.score)
    return (
        score(question, Answer(**key, model_id="gold", tstamp=0.0, turns=(turn,)), run_code=True)
        == 1
    )


def measure(gold: Gold, rows: list[Row], form: str) -> dict[str, Any]:
    """Scores every row with its own answer in one form, and with its predecessor's; returns a row of the table."""
    text = gold.forms[form]
    started = time.perf_counter()
    wrong = [{"row": number, "reference": gold.reference(row)} for number, row in enumerate(rows)]
    wrong = [
        entry for entry, row in zip(wrong, rows, strict=True) if not is_right(gold, row, text(row))
    ]
    seconds = time.perf_counter() - started
    control = [
        {"row": number, "reference": gold.reference(row), "answer": gold.reference(before)}
        for number, (before, row) in enumerate(zip([rows[-1], *rows], rows, strict=False))
        if gold.score == "math"
        and gold.reference(row) != gold.reference(before)
        and is_right(gold, row, text(before))
    ]
    return {
        "set": gold.name,
        "form": form,
        "rows": len(rows),
        "right": len(rows) - len(wrong),
        "floor": gold.floor,
        "reached": len(rows) - len(wrong) >= gold.floor * len(rows),
        "wrong": wrong,
        "control_right": len(control) if gold.score == "math" else None,
        "control": control,
        "seconds": seconds,
    }


def main(
    data_dir: Annotated[Path, typer.Option(help="The folder of gsm8k, math500 and humaneval.")],
    out: Annotated[
        Path | None, typer.Option(help="The record; gold.json in $OUT or benchmarks/results.")
    ] = None,
) -> None:
    """Score upstream's own answers."""
    rows: list[dict[str, Any]] = []
    for gold in GOLD:
        path = data_dir / gold.file
        if not path.is_file():
            raise typer.BadParameter(f"expected {path}, got no such file; fetch it from upstream")
        lines = path.read_text(encoding="utf-8").splitlines()
        rows += [
            measure(gold, [json.loads(line) for line in lines if line.strip()], form)
            for form in gold.forms
        ]
    show("Upstream's own answers", rows, COLUMNS)
    facts = {"benchmark": "gold", **provenance(torch.device("cpu"))}
    # What is right does not depend on who else uses the machine; the seconds do, and say so by standing alone.
    finish(
        {"provenance": facts, "rows": rows},
        out or Path(os.environ.get("OUT", RESULTS)) / "gold.json",
        quiet=True,
    )
    if not all(row["reached"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
