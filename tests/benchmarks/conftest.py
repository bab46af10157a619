"""What the tests of the scripts of benchmarks/ share: where the scripts are, and a stand-in for their results."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import forked_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each script look for a moment alone at whether the machine is idle: no test times anything."""
    monkeypatch.setattr("harness.machine.SAMPLE_SECONDS", 0.05)


def fork(command: list[str], stdout: Any, stderr: Any) -> forked_python.Process:
    """Starts a program as `subprocess.Popen` does, from a process that has loaded torch and Transformers."""
    return forked_python.start(command[1:], os.environ, Path(stdout.name), Path(stderr.name))


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the scripts' servers be forked; test_serve_load.py starts one as the scripts do."""
    monkeypatch.setattr("harness.served.subprocess", SimpleNamespace(Popen=fork))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of benchmarks/results, for every script that is loaded; it is not there yet."""
    folder = tmp_path / "results"
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(BENCHMARKS)) and hasattr(module, "RESULTS"):
            monkeypatch.setattr(module, "RESULTS", folder)
    monkeypatch.delenv("OUT", raising=False)
    return folder
