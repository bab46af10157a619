"""`python training_command_ranks.py FILE FOLDER train ...`: the command in two ranks, and again on its FOLDER.

Every process appends the stages that it runs the first time to FILE.0, FILE.1. Between the two stands a line, "again",
and behind them which files the second one has changed.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (as the next and the last: loaded once for all forks)

import dflash_hf.bench.run
import dflash_hf.cli.train_stages as stages
import dflash_hf.training.trainer  # noqa: F401
from helpers.forked_ranks import run_ranks


def noted(name: str, runner: Any, notes: Path) -> Any:
    """The runner of a stage, which says that it was called."""

    def run(*args: Any) -> Any:
        with notes.open("a") as file:
            file.write(f"{name}\n")
        return runner(*args)

    return run


def command(words: list[str], notes: str | None = None) -> None:
    """The command line, in a rank."""
    if notes is not None:
        path = Path(f"{notes}.{os.environ['RANK']}")
        path.touch()
        for stage, runner in stages.RUNNERS.items():
            stages.RUNNERS[stage] = noted(stage, runner, path)
    sys.argv[1:] = words
    runpy.run_module("dflash_hf", run_name="__main__")


def written(folder: str) -> dict[str, int]:
    """When each file of a run was written."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): path.stat().st_mtime_ns for path in files}


if __name__ == "__main__":
    file, folder, *first = sys.argv[1:]
    run_ranks(lambda: command(first, file))
    print("again")
    before = written(folder)
    run_ranks(lambda: command(["train", "--output-dir", folder]))
    print("changed:", [path for path, when in written(folder).items() if before.get(path) != when])
