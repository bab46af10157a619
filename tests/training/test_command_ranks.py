"""`dflash-hf train` in two processes: both train and measure, the first one does the rest; begun again it is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dflash_hf import load_draft
from dflash_hf.cli.train_settings import STAGES
from helpers import training_command_ranks
from helpers.training_command import SMALL, write_rows

LIMIT = 240  # seconds after which a start counts as hung


def told(text: str) -> list[tuple[str, str]]:
    """The lines of stages, as name and rest."""
    parts = [line.partition(": ")[::2] for line in text.splitlines()]
    return [(name, rest) for name, rest in parts if name in STAGES]


def test_two_processes_share_what_they_can(tmp_path: Path) -> None:
    out, notes = tmp_path / "out", tmp_path / "stages"
    words = [
        "--dataset",
        write_rows(tmp_path / "rows.jsonl"),
        "--output-dir",
        out,
        *SMALL,
        "--bench-prompts",
        2,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, training_command_ranks.__file__, notes, out, "train", *words]
    run = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    said, said_again = run.stdout.split("again\n")
    assert [name for name, _ in told(said)] == list(STAGES), "the first process alone speaks"
    first, second = ((tmp_path / f"stages.{rank}").read_text().split() for rank in (0, 1))
    assert (first, second) == (list(STAGES), ["run", "bench"])
    state = json.loads((out / "stages.json").read_text())
    assert [state[stage]["finished"] for stage in STAGES] == [True] * 5
    assert state["run"]["facts"]["steps"] == 4
    (measured,) = (
        m
        for m in json.loads((out / "bench" / "summary.json").read_text())["methods"]
        if m["method"] == "dflash"
    )
    assert measured["all"]["questions"] == 2
    draft = load_draft(out / "draft").state_dict()
    again = load_draft(out / "export" / "zlab").state_dict()
    assert all(value.equal(again[name]) for name, value in draft.items())
    lines = told(said_again)
    assert [(name, rest.partition(",")[0]) for name, rest in lines] == [
        (name, "done before") for name in STAGES
    ]
    assert said_again.endswith("changed: []\n")
