"""`torchrun --nproc-per-node 2 training_command_ranks.py FILE train ...`: the command; each process notes its stages.

Every process appends the stages that it runs to FILE.0, FILE.1.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import dflash_hf.cli.train_stages as stages


def noted(name: str, runner: Any, notes: Path) -> Any:
    """The runner of a stage, which says that it was called."""

    def run(*args: Any) -> Any:
        with notes.open("a") as file:
            file.write(f"{name}\n")
        return runner(*args)

    return run


if __name__ == "__main__":
    path = Path(f"{sys.argv.pop(1)}.{os.environ['RANK']}")
    path.touch()
    for stage, runner in stages.RUNNERS.items():
        stages.RUNNERS[stage] = noted(stage, runner, path)
    runpy.run_module("dflash_hf", run_name="__main__")
