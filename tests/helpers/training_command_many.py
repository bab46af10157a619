"""`python training_command_many.py RANKS FILE train ...`: the command in so many ranks, in float64.

Every rank writes to FILE.0, FILE.1, ... as JSON on which device each of its targets was loaded, and after how many
seconds of waiting for the others its process group would end it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (as the next and the last: loaded once for all forks)
from torch import distributed

import dflash_hf.bench.run
import dflash_hf.cli.train_stages
import dflash_hf.training.trainer  # noqa: F401
from dflash_hf.cli import train_target
from helpers.forked_ranks import run_ranks


def longest_wait() -> float:
    """Seconds that a collective of the default group waits."""
    group: Any = distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def command(words: list[str], file: str) -> None:
    """The command line, in a rank, with a draft in float64."""
    torch.set_default_dtype(torch.float64)
    load = train_target.load_target
    devices: list[str] = []
    waits: list[float] = []

    def noted(target: str, dtype: str, device: str) -> Any:
        devices.append(device)
        waits.append(longest_wait())
        return load(target, dtype, device)

    train_target.load_target = noted
    sys.argv[1:] = words
    try:
        runpy.run_module("dflash_hf", run_name="__main__")
    finally:  # it leaves by SystemExit
        facts = {"devices": devices, "waits": waits}
        Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(facts))


if __name__ == "__main__":
    count, first, *rest = sys.argv[1:]
    run_ranks(lambda: command(rest, first), num_ranks=int(count))
