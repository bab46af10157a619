"""Targets that two processes hold together: their text, their errors, and that neither ever waits for the other."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from helpers import forked_python, two_ranks

pytestmark = pytest.mark.same_on_every_release

# Seconds after which a start of two processes counts as hung.
LIMIT = 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """All cases of `helpers.two_ranks` in two processes, and behind them the one that ends them."""
    folder = tmp_path_factory.mktemp("ranks")
    two_ranks.save_targets(folder)
    return forked_python.run([two_ranks.__file__, folder], os.environ, LIMIT)


def test_two_processes_go_the_same_way(run: subprocess.CompletedProcess[str]) -> None:
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    errors = [error for case in found for error in case["errors"]]
    assert not errors, "\n".join(errors)
    checked = {case["case"]: case["checked"] for case in found}
    assert list(checked) == [case.__name__ for case in two_ranks.CASES], run.stderr
    assert sum(checked[name] for name in ("greedy", "greedy_pair", "shared_noise")) >= 20


def test_a_process_that_fails_within_a_forward_ends_the_other(
    run: subprocess.CompletedProcess[str],
) -> None:
    assert run.returncode != 0
    assert "Broken: of the caller's own" in run.stderr
