"""Sets of questions for tests: rows as they are published, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_hf.bench.questions import Question
from dflash_hf.bench.sets import load_questions

ROWS = Path(__file__).resolve().parents[1] / "bench" / "rows"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def load(name: str, data_dir: Path | None = ROWS, **options: Any) -> list[Question]:
    """Reads a set as a run does, by default all of its rows in this folder."""
    return load_questions(name, data_dir=data_dir, **{"num_prompts": None, "seed": 0, **options})


def write(path: Path, *rows: object) -> Path:
    """Writes rows, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def upstream_rows(path: str) -> list[Any]:
    """Rows as their publishers have them."""
    text = (ROWS / path).read_text(encoding="utf-8")
    return (
        json.loads(text)
        if path.endswith(".json")
        else [json.loads(line) for line in text.splitlines()]
    )
