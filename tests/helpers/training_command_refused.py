"""`python training_command_refused.py train ...`: the command in two ranks; prints how each of them has ended."""

from __future__ import annotations

import runpy

import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (as the next ones: loaded once for all forks)

import dflash_hf.cli.train_stages
import dflash_hf.training.trainer  # noqa: F401
from helpers.forked_ranks import exit_statuses


def command() -> None:
    """The command line, in a rank."""
    runpy.run_module("dflash_hf", run_name="__main__")


if __name__ == "__main__":
    print("statuses", *exit_statuses(command))
