"""Checkpoints of a training run: everything that a step depends on, so that a resumed run is the same run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dflash_hf.modeling_dflash import DFlashDraftModel

STATE_FILE = "trainer_state.pt"
PREFIX = "checkpoint-"


def checkpoints(output_dir: Path) -> list[Path]:
    """Returns the checkpoint folders of a run, oldest first."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def save_checkpoint(
    output_dir: Path,
    step: int,
    draft: DFlashDraftModel,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
    keep: int | None = None,
) -> Path:
    """Writes `checkpoint-<step>` and removes the oldest ones beyond `keep`.

    The order of the data and the anchors of a step are functions of the seed and the step, so the only random states
    are the global ones (dropout).
    """
    folder = output_dir / f"{PREFIX}{step}"
    draft.save_pretrained(folder)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torch.save(
        {
            "step": step,
            "draft": draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "rng": torch.get_rng_state(),
            "cuda_rng": cuda,
        },
        folder / STATE_FILE,
    )
    if keep is not None:
        for old in checkpoints(output_dir)[:-keep]:
            shutil.rmtree(old)
    return folder


def load_checkpoint(
    folder: Path, draft: DFlashDraftModel, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]
) -> int:
    """Restores what `save_checkpoint` wrote, in place, and returns the number of steps that were done.

    Raises:
        ValueError: If the folder holds no training state.
    """
    if not (folder / STATE_FILE).is_file():
        raise ValueError(
            f"expected a checkpoint folder with {STATE_FILE}, got {folder}; pass a {PREFIX}<step> folder of a run"
        )
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    draft.load_state_dict(state["draft"])
    for optimizer, scheduler, optimizer_state, scheduler_state in zip(
        optimizers, schedulers, state["optimizers"], state["schedulers"], strict=True
    ):
        optimizer.load_state_dict(optimizer_state)
        scheduler.load_state_dict(scheduler_state)
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return int(state["step"])


def append_record(path: Path, record: dict[str, object]) -> None:
    """Appends one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


__all__ = ["append_record", "checkpoints", "load_checkpoint", "save_checkpoint"]
