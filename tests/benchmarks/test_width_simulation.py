"""`width_simulation.py` decodes recorded answers in thought: by hand, and on the bundled pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import width_simulation
from width_simulation import Guess, guess_of, seconds_of

from dflash_hf.generation.cost_table import CostTable
from dflash_hf.generation.widths import FixedWidth
from helpers.scripts import run_script

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
# Two slots; in the first one token 7 is by far the likeliest, in the second 5 and 6 are nearly alike.
LEVELS = [[(-0.1, 7), (-3.0, 8)], [(-0.7, 5), (-0.8, 6)]]


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ([7, 6], Guess(path=[1, 3], chain=[1, 2], num_right=1)),
        ([7, 5], Guess(path=[1, 2], chain=[1, 2], num_right=2)),
        ([8, 5], Guess(path=[], chain=[1, 2], num_right=0)),
        ([7], Guess(path=[1], chain=[1, 2], num_right=1)),
    ],
)
def test_the_best_tree_of_four_tokens(truth: list[int], expected: Guess) -> None:
    assert guess_of(LEVELS, 4, truth) == expected


def test_a_batch_lasts_until_its_slowest_row_ends() -> None:
    right = Guess(path=[1], chain=[1], num_right=1)
    wrong = Guess(path=[], chain=[1], num_right=0)
    table = CostTable({1: {1: 1.0, 2: 3.0}, 2: {1: 2.0, 2: 5.0}}, {1: 3.0, 2: 5.0})
    # The first row needs two verifies of two tokens, the second four.
    answers = [[right] * 4, [wrong] * 4]
    assert seconds_of(FixedWidth(2), answers, table) == 2 * 5.0 + 2 * 3.0
    assert seconds_of(FixedWidth(1), answers, table) == 4 * 2.0


def test_a_table_of_the_bundled_pair(tmp_path: Path) -> None:
    rows = [
        {"question_id": number, "category": "sums", "turns": [f"Compute {number} + 4."]}
        for number in range(2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "sums.jsonl").write_text(text, encoding="utf-8")
    seconds = {str(width): 0.9 + 0.1 * width for width in (1, 2, 4, 16)}
    table = {"about": {}, "steps": {"1": seconds, "2": seconds}, "chains": {"1": 2.0, "2": 2.0}}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(table), encoding="utf-8")
    out = tmp_path / "found.json"
    arguments = [
        *("--costs", str(costs), "--data", str(tmp_path), "--sets", "sums", "--rows", "1,2"),
        *("--target", str(TOY / "target"), "--draft", str(TOY / "draft"), "--questions", "2"),
        *("--max-new-tokens", "12", "--out", str(out), "--answers", str(tmp_path / "answers.json")),
    ]
    done = run_script(width_simulation.main, *arguments)
    assert done.exit_code == 0, done.output
    first = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["rows"] for row in first] == [1, 2]
    for row in first:
        # The draft of the bundled pair is right for most of each block.
        assert row["one token"] < 0.8
        assert row["modelled costs"] > 0.7
    # The record of the answers is read again.
    again = run_script(width_simulation.main, *arguments)
    assert again.exit_code == 0, again.output
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == first
