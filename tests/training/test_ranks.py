"""Two processes are one that accumulates, plain and sharded, a draft or an adapter on one: weights, records, walked
acceptance; and they resume."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import forked_python, training_ranks

# PEFT's own use of a property that Transformers renamed.
pytestmark = pytest.mark.filterwarnings("default:`is_gradient_checkpointing`:FutureWarning")
# Seconds after which a start of two processes counts as hung.
LIMIT = 280
# Of two processes -> of one.
KINDS = {"plain": "plain", "fsdp": "plain"}
KINDS |= {"shared": "plain", "shared-cache": "cache", "shared-fsdp": "plain"}
KINDS |= {"muon": "muon"} if hasattr(torch.optim, "Muon") else {}
KINDS |= {"lora-fsdp": "lora"} if importlib.util.find_spec("peft") else {}


def numbers(path: Path) -> list[dict[str, float]]:
    """What was logged, without times and shares of an epoch; of rates, what they are rates of."""
    found = json.loads(path.read_text())
    left_out = ["epoch", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"]
    left_out += ["seconds", "tokens_per_second", "rows_per_second", "data_wait_share"]
    told: list[dict[str, float]] = []
    for record in (record for part in found.values() for record in part):
        kept = {name: value for name, value in record.items() if name not in left_out}
        if "seconds" in record:
            kept["tokens"] = record["tokens_per_second"] * record["seconds"]
            kept["rows"] = record["rows_per_second"] * record["seconds"]
        told.append(kept)
    return told


def test_two_processes_are_one_that_accumulates(tmp_path: Path) -> None:
    kinds = sorted(KINDS, key=lambda kind: "fsdp" in kind)
    words = [training_ranks.__file__, tmp_path / "two", *kinds]
    run = forked_python.run(words, os.environ, LIMIT)
    assert run.returncode == 0, run.stderr[-8000:]
    for alone in sorted(set(KINDS.values())):
        training_ranks.train(tmp_path / "one" / alone, alone)
    for kind, alone in KINDS.items():
        assert_same(tmp_path / "one" / alone, tmp_path / "two" / kind, alone)


def assert_same(alone: Path, together: Path, kind: str) -> None:
    model = training_ranks.make(alone, "lora" if kind == "lora" else "plain").model
    start = {name.replace(".default", ""): value for name, value in model.named_parameters()}
    file = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    for name in ("whole", "resumed"):
        one, two = (load_file(folder / name / file) for folder in (alone, together))
        assert one.keys() == two.keys()
        assert kind != "lora" or one.keys() == {name for name in start if "lora_" in name}
        for key, value in one.items():
            assert value.dtype == torch.float64
            assert (value - two[key]).abs().max() < 1e-6, f"{key} of {name}"
            assert key not in start or not torch.equal(value, start[key]), f"{key} was not trained"
    one, two = (numbers(folder / "records.json") for folder in (alone, together))
    assert len(one) == 2 + 2
    for first, second in zip(one, two, strict=True):
        assert first == pytest.approx(second, rel=1e-5)
