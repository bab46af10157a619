"""A run by two processes in one of which FlexAttention fails: `python flex_ranks.py FOLDER KIND`, by the tests.

The kind is `"whole"`, or `"sharded"` for a draft under FSDP, whose layers talk with the other process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.training import DFlashTrainer, forward
from helpers.forked_ranks import run_ranks
from helpers.training import draws, options, records
from helpers.training_ranks import allow_fsdp_on_cpu
from tiny import tiny_draft, tiny_target


def pretend_flex() -> None:
    """Lets "auto" try FlexAttention on a CPU, where SDPA stands for it; it fails in the second process."""
    wants = forward._wants_flex
    forward._wants_flex = lambda draft, asked, device: wants(draft, asked, torch.device("cuda"))
    masks = forward.BlockMaskRule.masks
    run = DFlashDraftModel.forward
    tried: list[bool] = []

    def dense(rule: Any, config: Any, flex: bool) -> Any:
        tried.append(flex)
        return masks(rule, config, False)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if tried[-1] and os.environ["RANK"] == "1":
            raise RuntimeError("out of resource")
        return run(*args, **kwargs)

    forward.BlockMaskRule.masks = dense
    DFlashDraftModel.forward = fail


def main(folder: Path, kind: str) -> None:
    """Trains, and prints its number, how many losses there are and why FlexAttention is not taken."""
    torch.set_num_threads(1)
    pretend_flex()
    target = tiny_target("qwen3")
    changes: dict[str, Any] = {}
    if kind == "sharded":
        allow_fsdp_on_cpu()
        changes = {"fsdp": True, "fsdp_config": {"version": 2}}
    args = options(
        folder,
        use_cpu=True,
        max_steps=3,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=1,
        ddp_timeout=20,
        **changes,
    )
    trainer = DFlashTrainer(
        model=tiny_draft(target, seed=1), target=target, args=args, train_dataset=draws(9)
    )
    trainer.train()
    losses = [record["loss"] for record in records(trainer)]
    # One write a process: two may print at once
    sys.stdout.write(f"{os.environ['RANK']} {len(losses)} {forward._flex_failures[0]}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_ranks(lambda: main(Path(sys.argv[1]), sys.argv[2]))
