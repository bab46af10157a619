"""A run of its own, to be killed: `python killed_run.py FOLDER` goes on from the folder's newest whole checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dflash_hf.training import DFlashTrainer
from helpers.training import draws, options
from tiny import tiny_draft, tiny_target


def train(folder: Path) -> None:
    """Trains a tiny draft to the end, saving often."""
    target = tiny_target("qwen3")
    args = options(
        folder,
        max_steps=400,
        save_steps=10,
        save_total_limit=None,  # how many there are says how far it is
        optim="muon" if hasattr(torch.optim, "Muon") else "adamw_torch",
    )
    trainer = DFlashTrainer(
        model=tiny_draft(target), target=target, args=args, train_dataset=draws(10)
    )
    is_begun = any(folder.glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=is_begun)
    trainer.save_model()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]))
