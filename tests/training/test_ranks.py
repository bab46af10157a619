"""Two processes are one that accumulates, plain and sharded: weights, records, walked acceptance; and they resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import training_ranks

# Seconds after which a start of two processes counts as hung.
LIMIT = 280
KINDS = ["plain", "muon", "fsdp"] if hasattr(torch.optim, "Muon") else ["plain", "fsdp"]


def numbers(path: Path) -> list[dict[str, float]]:
    """What was logged, without times and shares of an epoch."""
    found = json.loads(path.read_text())
    left_out = ("epoch", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    return [{k: v for k, v in r.items() if k not in left_out} for part in found.values() for r in part]


def test_two_processes_are_one_that_accumulates(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", training_ranks.__file__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(
        [*command, str(tmp_path / "two"), *KINDS], capture_output=True, text=True, timeout=LIMIT, env=environment
    )
    assert run.returncode == 0, run.stderr[-8000:]
    for kind in KINDS:
        alone = kind if kind != "fsdp" else "plain"
        if alone == kind:
            training_ranks.train(tmp_path / "one" / kind, kind)
        assert_same(tmp_path / "one" / alone, tmp_path / "two" / kind)


def assert_same(alone: Path, together: Path) -> None:
    start = dict(training_ranks.make(alone, "plain").draft.named_parameters())
    for name in ("whole", "resumed"):
        one, two = (load_file(folder / name / "model.safetensors") for folder in (alone, together))
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert value.dtype == torch.float64
            assert (value - two[key]).abs().max() < 1e-6, f"{key} of {name}"
            assert key not in start or not torch.equal(value, start[key]), f"{key} was not trained"
    one, two = (numbers(folder / "records.json") for folder in (alone, together))
    assert len(one) == 2 + 2
    for first, second in zip(one, two, strict=True):
        assert first == pytest.approx(second, rel=1e-5)
