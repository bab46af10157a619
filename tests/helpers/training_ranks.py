"""Runs by two processes, plain and sharded: `python training_ranks.py FOLDER KIND ...`.

A start takes seconds, so that all kinds run in one, each in a folder of its own. `train` does the same in one process,
which accumulates what the two do at once. Everything is in float64.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import distributed
from transformers import Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

from dflash_hf.training import DFlashTrainer
from helpers.forked_ranks import run_ranks
from helpers.training import draws, options, records
from tiny import DFLASH2, shallow_target, tiny_draft

ADAPTED = ["fc", "q_proj", "v_proj", "down_proj"]
STEPS, BATCHES = 4, 4  # of one row, in a step


def make(folder: Path, kind: str, seed: int = 1) -> DFlashTrainer:
    """Nine rows: an epoch ends with a batch for one of the two processes alone.

    Args:
        folder (`Path`): Of the run.
        kind (`str`): `"plain"` or `"fsdp"`, a DFlash 2 draft under either; `"muon"`; `"lora"` or `"lora-fsdp"`, PEFT's
            adapter on such a draft. In a kind with `"shared"` the processes hold one target together, and get the same
            rows; with `"cache"` its features are on the disk.
        seed (`int`): Of the draft, or of its adapter.
    """
    target: Any = shallow_target("qwen3")
    changes: dict[str, Any] = {}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    num_groups = world
    is_shared = "shared" in kind and world > 1
    if is_shared:
        num_groups = 1
        changes = {"tensor_parallel_size": world}
    if "cache" in kind:
        changes |= {"feature_cache": str(folder / "features"), "loss": "kl"}
    if "fsdp" in kind:
        # As accelerate's own YAML of FSDP2 has it: what is saved is one file all the same
        how = {
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": True,
        }
        changes |= {"fsdp": True, "fsdp_config": how}
    args = options(
        folder,
        optim="muon" if kind == "muon" else "adamw_torch",
        max_steps=STEPS,
        logging_steps=STEPS // 2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=BATCHES // num_groups,
        save_steps=STEPS // 2,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        use_cpu=True,
        **changes,
    )
    if is_shared:
        target = share_of(target, folder / "target", world)
    draft: Any = tiny_draft(target, seed=1 if "lora" in kind else seed, **DFLASH2)
    if "lora" in kind:
        import peft

        torch.manual_seed(seed)
        draft = peft.get_peft_model(draft, peft.LoraConfig(r=2, target_modules=ADAPTED)).double()
    return DFlashTrainer(
        model=draft, target=target, args=args, train_dataset=draws(9), eval_dataset=draws(5)
    )


def share_of(whole: Any, folder: Path, num_ranks: int) -> Any:
    """A process's share of a target, which the first process writes to a folder."""
    whole.save_pretrained(folder)
    distributed.barrier()
    shares = DistributedConfig(tp_size=num_ranks)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype="auto", distributed_config=shares)


def train(folder: Path, kind: str) -> None:
    """Trains, keeps weights and records in the folder, and does the second half again from its checkpoint."""
    trainer = make(folder, kind)
    trainer.train()
    trainer.save_model(str(folder / "whole"))
    again = make(folder, kind, seed=2)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    again.save_model(str(folder / "resumed"))
    if trainer.is_world_process_zero():
        told = {name: records(trainer, name) for name in ("loss", "eval_acceptance_length")}
        (folder / "records.json").write_text(json.dumps(told))


@functools.cache
def allow_fsdp_on_cpu() -> None:
    """accelerate turns FSDP on for the devices in a list of its own, which has no CPU; gloo runs the same code."""
    whole = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        whole(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        # The state is one for all instances
        plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
        if plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = init


def main(folder: Path, kinds: list[str]) -> None:
    """Runs each kind; sharded ones come last, as they change accelerate."""
    torch.set_num_threads(1)
    for kind in kinds:
        if "fsdp" in kind:
            allow_fsdp_on_cpu()
        train(folder / kind, kind)
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_ranks(lambda: main(Path(sys.argv[1]), sys.argv[2:]))
