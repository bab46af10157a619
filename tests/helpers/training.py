"""Runs of the trainer: random examples, options of a short run, and what was logged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from dflash_hf.training import DFlashTrainer, DFlashTrainingArguments, Example


def draws(count: int) -> list[Example]:
    """Random examples of different lengths."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(2, 12, (count, 2), generator=generator).tolist()
    rows = [torch.randint(1, 47, (sum(size),), generator=generator).tolist() for size in sizes]
    return [
        Example.from_pair(row[: size[0]], row[size[0] :])
        for row, size in zip(rows, sizes, strict=True)
    ]


def options(folder: Path, **changes: object) -> DFlashTrainingArguments:
    """Options of eight steps."""
    fields: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 3,
        "num_anchors": 3,
        "learning_rate": 1e-3,
        "logging_steps": 4,
        "disable_tqdm": True,
    }
    return DFlashTrainingArguments(**{**fields, **changes})


class AtStep(TrainerCallback):
    """Does something to the model when so many steps are done.

    Args:
        step (`int`): Steps.
        action (callable): Gets the model.
    """

    def __init__(self, step: int, action: Callable[[Any], object]) -> None:
        self.step, self.action = step, action

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == self.step:
            self.action(model)


def records(trainer: DFlashTrainer, name: str = "loss") -> list[dict[str, Any]]:
    """What was logged with a number of this name, in the order of a line of metrics.jsonl."""
    return [record for record in trainer.state.log_history if name in record]
