"""This tree against an earlier commit of it: processes of both in turn, so that the machine's moods meet both.

    python benchmarks/trees.py e96103f

Prints for either tree what a call of one token costs beyond plain `generate`'s (one row, greedy), how much of that is
the draft's forward over the prompt, the median step with one row and with four, and tokens per second, on the bundled
pair in float32 with one torch thread; the last line is the record as JSON. Models and prompts are this tree's, only
the package is the commit's. On a busy machine it refuses to begin, as `decode.py` does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness.machine import ROOT, LoadWatch, provenance
from harness.report import show

CHILD = Path(__file__).parent / "harness" / "one_tree.py"
NAMES = ("call_ms", "draft_forward_ms", "step_ms", "step_4_rows_ms", "tokens_per_second")


def run_one(tree: Path, counts: list[int]) -> dict[str, float]:
    """Measures the package of a tree in a process of its own."""
    path = os.pathsep.join(str(tree / folder) for folder in ("src", "kernels/torch-ext"))
    done = subprocess.run(
        [sys.executable, str(CHILD), *map(str, counts)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise typer.BadParameter(
            f"expected the package of {tree} to run, got: {done.stderr.strip()[-500:]}"
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def git(*arguments: str) -> str:
    """Runs git in this repository.

    Raises:
        BadParameter: If it fails, with what it said.
    """
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise typer.BadParameter(
            f"expected a commit of this repository, got: {done.stderr.strip()}; see git log"
        )
    return done.stdout.strip()


def main(
    commit: Annotated[str, typer.Argument(help="The earlier commit.")],
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each tree.")] = 3,
    calls: Annotated[int, typer.Option(min=1, help="Calls of one token in each.")] = 50,
    answers: Annotated[int, typer.Option(min=1, help="Answers to each prompt in each.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 300,
    force: Annotated[bool, typer.Option(help="Also on a busy machine.")] = False,
) -> None:
    """Compares this tree with an earlier commit."""
    commit = git("rev-parse", "--short", "--verify", f"{commit}^{{commit}}")
    watch = LoadWatch()
    watch.sample()
    if not force and not watch.is_quiet():
        raise typer.BadParameter(
            f"expected an idle machine, got {watch.before:.1f} busy cores; wait, or pass --force"
        )
    runs: dict[str, list[dict[str, float]]] = {commit: [], "this tree": []}
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(earlier), commit)
        try:
            for _ in range(rounds):
                for name, tree in ((commit, earlier), ("this tree", ROOT)):
                    runs[name].append(run_one(tree, [calls, answers, max_new_tokens]))
        finally:
            git("worktree", "remove", "--force", str(earlier))
    medians = {
        name: {key: statistics.median(run[key] for run in some) for key in NAMES}
        for name, some in runs.items()
    }
    ratios = {key: medians["this tree"][key] / medians[commit][key] for key in NAMES}
    rows: list[dict[str, Any]] = [
        {"tree": name, **found} for name, found in (*medians.items(), ("ratio", ratios))
    ]
    show("Medians of processes in turn", rows, [("tree", "tree"), *((key, key) for key in NAMES)])
    print(
        json.dumps(
            {
                **provenance(torch.device("cpu")),
                "threads": 1,
                **watch.to_dict(),
                "runs": runs,
                "medians": medians,
                "ratios": ratios,
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
