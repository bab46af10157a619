"""`serve_clients.py` compares clients at once with clients one after the other, on the bundled pair."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import serve_clients

from helpers.scripts import run_script

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
run = partial(run_script, serve_clients.main)


def written(folder: Path, num: int) -> str:
    """Writes so many questions, and returns their file."""
    rows = [
        {"question_id": number, "category": "sums", "turns": [f"Compute {number} + 4."]}
        for number in range(num)
    ]
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_fewer_questions_than_clients_are_refused(tmp_path: Path) -> None:
    done = run("--data", written(tmp_path, 2), "--clients", "3")
    assert done.exit_code == 2
    assert "expected 3 questions in" in " ".join(done.output.split())


@pytest.mark.usefixtures("forked_servers")
def test_two_clients_of_both_servers(tmp_path: Path) -> None:
    out = tmp_path / "serve_clients.json"
    done = run(
        *("--target", str(TOY / "target"), "--draft", str(TOY / "draft")),
        *("--data", written(tmp_path, 2), "--clients", "2", "--rounds", "1"),
        *("--max-tokens", "12", "--out", str(out)),
    )
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [row["max_rows"] for row in record["rows"]] == [2, 1]
    for row in record["rows"]:
        assert row["tokens"] == 24
        assert 0 < row["longest_wait"] <= row["seconds"]
    [conversation] = record["conversations"]
    assert conversation["second_turn_wait"] > 0
    assert conversation["prompt_tokens"] > 24
