"""`trees.py` runs the package of another commit, and this tree's, in turn."""

from __future__ import annotations

import subprocess
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trees
from harness.machine import ROOT

from helpers import forked_python
from helpers.scripts import record_of, run_script

run = partial(run_script, trees.main)


def fork_this_tree(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program as `subprocess.run` does; this tree's own package in a process that has loaded it."""
    path = options.get("env", {}).get("PYTHONPATH", "")
    if path.startswith(str(ROOT / "src")):
        return forked_python.run(command[1:], options["env"], 120)
    return subprocess.run(command, **options)


def test_a_tree_is_measured_beside_a_commit_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "subprocess", SimpleNamespace(run=fork_this_tree))
    worktrees = subprocess.check_output(["git", "-C", str(ROOT), "worktree", "list"], text=True)
    quick = ("--rounds", "1", "--calls", "1", "--answers", "1", "--max-new-tokens", "4", "--force")
    done = run("HEAD", *quick)
    assert done.exit_code == 0, done.output
    record = record_of(done)
    here, there = record["medians"].pop("this tree"), record["medians"].popitem()[1]
    assert set(here) == set(there) == set(trees.NAMES)
    for name in trees.NAMES:
        assert record["ratios"][name] == here[name] / there[name]
    assert (
        subprocess.check_output(["git", "-C", str(ROOT), "worktree", "list"], text=True)
        == worktrees
    )


def test_a_commit_that_is_not_there_is_a_sentence() -> None:
    done = run("no-such-commit", "--force")
    assert done.exit_code == 2
    assert "expected a commit of this repository" in " ".join(done.output.replace("│", " ").split())
