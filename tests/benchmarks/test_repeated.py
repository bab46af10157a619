"""`repeated.py` answers questions twice and counts the texts that are the same, on the bundled pair."""

from __future__ import annotations

import json
from pathlib import Path

import repeated

from helpers.scripts import run_script

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"


def test_texts_on_a_busy_machine_are_the_same(tmp_path: Path) -> None:
    rows = [
        {"question_id": number, "category": "sums", "turns": [f"Compute {number} + 4."]}
        for number in range(3)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "sums.jsonl").write_text(text, encoding="utf-8")
    out = tmp_path / "repeated.json"
    done = run_script(
        repeated.main,
        *("--target", str(TOY / "target"), "--draft", str(TOY / "draft"), "--dtype", "bfloat16"),
        *("--data", str(tmp_path), "--sets", "sums", "--rows", "2", "--questions", "3"),
        *("--max-new-tokens", "12", "--out", str(out)),
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (row["texts"], row["same_texts"]) == (3, 3)
    assert (row["calls"], row["same_widths"]) == (2, 2)


def test_another_text_and_width_are_counted() -> None:
    first = [([[1, 2], [3, 4]], [8, 1])]
    second = [([[1, 2], [3, 5]], [8, 2])]
    found = {"texts": 2, "same_texts": 1, "calls": 1, "same_widths": 0}
    assert repeated.compared(first, second) == found
