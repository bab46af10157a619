"""Make the published shapes of benchmarks/ importable, and pretend a GPU for every test here."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.pretended_gpu import pretended_gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """A pretended H200."""
    with pretended_gpu():
        yield
