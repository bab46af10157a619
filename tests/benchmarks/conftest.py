"""What the tests of the scripts of benchmarks/ share: where the scripts are, and a stand-in for their results."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each script look for a moment alone at whether the machine is idle: no test times anything."""
    monkeypatch.setattr("harness.machine.SAMPLE_SECONDS", 0.05)


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
