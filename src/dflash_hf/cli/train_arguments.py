"""This module makes the training arguments of `dflash-hf train` from the options, the target and the data."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_hf.cli.train_settings import OF_THE_TRAINER, TrainSettings, num_processes
from dflash_hf.data.sources import num_cores
from dflash_hf.pair.answers import Processor, tokenizer_of
from dflash_hf.training.arguments import DFlashTrainingArguments

IMAGE_WORKERS = 4


def make_arguments(settings: TrainSettings, **others: Any) -> DFlashTrainingArguments:
    """Returns the training arguments. Their output folder is `run` in the folder of the command.

    Raises:
        ValueError: If an argument is out of range.
    """
    given: dict[str, Any] = {
        # Without it, Transformers requires a GPU for bfloat16.
        "use_cpu": not torch.accelerator.is_available(),
        **{name: getattr(settings, name) for name in OF_THE_TRAINER},
        # Transformers' default of eight rows might not fit into memory even if the rows of a step do.
        "per_device_eval_batch_size": settings.per_device_train_batch_size,
        **settings.arguments,
        **others,
        # The trainer would upload `run`. The command itself uploads the draft after the last stage.
        "push_to_hub": False,
    }
    return DFlashTrainingArguments(output_dir=str(settings.output_dir / "run"), **given)


def arguments_for(
    settings: TrainSettings, target: PreTrainedModel, processor: Processor, has_held_out: bool
) -> DFlashTrainingArguments:
    """Returns [`make_arguments`] with values that follow from the target and the data, unless others were given."""
    others = evaluation(settings, has_held_out)
    is_precision_given = not settings.arguments.keys().isdisjoint({"bf16", "fp16"})
    if target.dtype == torch.bfloat16 and not is_precision_given:
        others["bf16"] = True  # the draft computes in the target's dtype, with weights in float32
    others |= loader_workers(settings, processor)
    return make_arguments(settings, **others)


def evaluation(settings: TrainSettings, has_held_out: bool) -> dict[str, Any]:
    """Returns the argument that says when the draft is evaluated: after each epoch, unless another time was given."""
    asked = settings.arguments
    if not has_held_out or "eval_strategy" in asked:
        return {}
    if "eval_steps" in asked:
        return {"eval_strategy": "steps"}
    return {"eval_strategy": "epoch"}


def asked_evaluations(settings: TrainSettings) -> dict[str, str]:
    """Returns the given options that need held-out conversations: option -> the option without this need."""
    asked = settings.arguments
    found: dict[str, str] = {}
    strategy = asked.get("eval_strategy", "no")
    if strategy != "no":
        found[f"--eval-strategy {strategy}"] = "--eval-strategy no"
    if "eval_steps" in asked and "eval_strategy" not in asked:
        found[f"--eval-steps {asked['eval_steps']:g}"] = "--eval-strategy no"
    if asked.get("load_best_model_at_end"):
        found["--load-best-model-at-end true"] = "--load-best-model-at-end false"
    if asked.get("eval_on_start"):
        found["--eval-on-start true"] = "--eval-on-start false"
    if asked.get("save_strategy") == "best":
        found["--save-strategy best"] = "--save-strategy steps"
    return found


def loader_workers(settings: TrainSettings, processor: Processor) -> dict[str, int]:
    """Returns the number of workers that build a process's batches, if decoding images would delay an accelerator."""
    sees_images = tokenizer_of(processor) is not processor
    is_given = "dataloader_num_workers" in settings.arguments
    if is_given or not sees_images or not torch.accelerator.is_available():
        return {}
    # Only the processes of one node share its cores.
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes()))
    # If a process is bound to its own cores, it does not share them, and the division may give 0.
    cores = max(num_cores() // sharing, 1)
    return {"dataloader_num_workers": min(IMAGE_WORKERS, cores)}
