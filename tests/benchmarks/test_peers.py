"""`peers.py` compares this package with other ways, on the bundled pair, and draws what it has recorded."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import peers
import plot
import pytest
import typer

from helpers.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "demos" / "toy"
run = partial(run_script, peers.main)


@pytest.mark.parametrize("text", ["http://localhost:8081", "a=http://localhost:8081=0"])
def test_what_is_no_running_server_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"expected NAME=URL=PID .*, got '{text}'"):
        peers.servers_of([text])


def test_a_record_of_two_dtypes_and_its_picture(tmp_path: Path) -> None:
    rows = [
        {"question_id": number, "category": "sums", "turns": [f"Compute {number} + 4."]}
        for number in range(2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "sums.jsonl").write_text(text, encoding="utf-8")
    out = tmp_path / "peers.json"
    for dtype in ("float32", "bfloat16"):
        done = run(
            *("--target", str(TOY / "target"), "--draft", str(TOY / "draft"), "--dtype", dtype),
            *("--data", str(tmp_path), "--sets", "sums", "--questions", "1", "--batch", "2"),
            *("--max-new-tokens", "8", "--out", str(out)),
        )
        assert done.exit_code == 0, done.output
    record = json.loads(out.read_text(encoding="utf-8"))
    assert {row["dtype"] for row in record["rows"]} == {"float32", "bfloat16"}
    found = {
        (row["dtype"], row["way"], row["rows"]): row
        for row in record["rows"]
        if row["set"] == peers.ALL
    }
    for way in ("plain-static", "dflash", "undrafted", "stock", "lookup"):
        row = found["float32", way, 1]
        assert row["over_plain"] > 0
        assert (row["same_text"], row["texts"]) == (1, 1)
    assert found["float32", "dflash", 1]["tokens_per_verify"] > 1
    assert found["float32", "dflash", 2]["same_text"] == 2
    assert ("float32", "stock", 2) not in found, "it takes one row"
    assert "busy_cores_before" in record["provenance"]["float32"]["load"]
    drawn = run_script(plot.main, str(out))
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "peers.png").is_file()
