"""benchmarks/gold.py counts gold that scores as right, names what does not, and fails below its floors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gold
import pytest
import typer
from typer.testing import Result

from helpers.scripts import record_of, run_script

# Rows of upstream's schemas, in words of our own.
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k/test.jsonl": [
        {
            "question": "Ada buys 2 bags of 600 nails. How many?",
            "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200",
        },
        {
            "question": "Half of them rust?",
            "answer": "The answer is found by 1200 / 2 = <<1200/2=600>>600\n#### 600",
        },
    ],
    "math500/test.jsonl": [
        {
            "problem": "Halve $\\frac{2}{3}$.",
            "answer": "\\frac{1}{3}",
            "solution": "Half of two is one: $\\boxed{\\frac{1}{3}}$.",
        },
        {
            "problem": "Where is $x^2 > 1$ false?",
            "answer": "[-1, 1]",
            "solution": "On $\\boxed{[-1,1]}$.",
        },
    ],
    "humaneval/HumanEval.jsonl": [
        {
            "prompt": 'def half(n: int) -> int:\n    """ Half of n, rounded down\n    >>> half(5)\n    2\n    """\n',
            "canonical_solution": "    return n // 2\n",
            "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(-1) == -1\n",
            "entry_point": "half",
        }
    ],
}


def run(
    folder: Path, rows: dict[str, list[dict[str, Any]]]
) -> tuple[Result, dict[tuple[str, str], dict[str, Any]]]:
    """Runs the script over rows; returns its record's rows by set and form."""
    for name, values in rows.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
    out = folder / "gold.json"
    result = run_script(gold.main, "--data-dir", str(folder), "--out", str(out))
    record = json.loads(out.read_text())
    assert record == record_of(result)
    return result, {(row["set"], row["form"]): row for row in record["rows"]}


def test_gold_is_right(tmp_path: Path) -> None:
    result, rows = run(tmp_path, ROWS)
    assert result.exit_code == 0, result.output
    assert {key: (row["right"], row["rows"]) for key, row in rows.items()} == {
        ("gsm8k", "worked answer"): (2, 2),
        ("math-500", "boxed answer"): (2, 2),
        ("math-500", "worked solution"): (2, 2),
        ("humaneval", "body"): (1, 1),
        ("humaneval", "fenced block"): (1, 1),
    }
    assert all(not row["wrong"] and not row["control"] for row in rows.values())


def test_gold_that_is_wrong_is_named(tmp_path: Path) -> None:
    broken = json.loads(json.dumps(ROWS))
    broken["math500/test.jsonl"][1]["solution"] = "On $\\boxed{(-1,1)}$."
    broken["humaneval/HumanEval.jsonl"][0]["canonical_solution"] = "    return n / 2\n"
    result, rows = run(tmp_path, broken)
    assert result.exit_code == 1
    assert rows["math-500", "worked solution"]["wrong"] == [{"row": 1, "reference": "[-1, 1]"}]
    assert rows["math-500", "boxed answer"]["right"] == 2
    assert rows["humaneval", "body"]["right"] == rows["humaneval", "fenced block"]["right"] == 0


def test_missing_data_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"expected .*gsm8k/test.jsonl, got no such file"):
        gold.main(tmp_path)
