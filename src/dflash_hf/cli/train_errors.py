"""This module explains errors that end a training: a full disk, full memory, or a step that is not finite."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from dflash_hf.cli.train_settings import Stage, TrainSettings, flag
from dflash_hf.cli.train_state import continuing
from dflash_hf.errors import one_line
from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.checkpoints import whole_checkpoints
from dflash_hf.training.failures import CheckpointError, NotFiniteError
from dflash_hf.training.features import free_bytes

# Releases of Transformers name this argument differently. Some releases accept both names.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if hasattr(TrainingArguments, name)
)


def explained(error: Exception, settings: TrainSettings, stage: Stage, less: str) -> Exception:
    """Returns an error with advice for a full disk, full memory or a step that is not finite, or `error` itself.

    Args:
        error (`Exception`): The error of the stage.
        settings ([`TrainSettings`]): The settings of the run.
        stage (`str`): The stage that failed.
        less (`str`): Options with which the stage takes less memory.
    """
    goes_on = continuing(settings.output_dir)
    if isinstance(error, CheckpointError):
        way = _continuation(settings.output_dir)
        return ValueError(
            f"{error.found}; make room on the disk or make it writable, and continue with {goes_on}, which {way}"
        )
    is_full_disk = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    if is_full_disk:
        free = free_bytes(settings.output_dir) / 2**20
        room = f"room on the disk of {settings.output_dir} for {stage}"
        return ValueError(
            f"expected {room}, got {free:,.0f} MB free; make room, and continue with {goes_on}"
        )
    if is_out_of_memory(error):
        return ValueError(
            f"expected {stage} to fit the memory, got {one_line(error)}; go on with {goes_on} {less}"
        )
    if isinstance(error, NotFiniteError):
        folder = "answered" if settings.answers == "target" else "prepared"
        rows = settings.output_dir / folder / "train.jsonl"
        lower = f"a --learning-rate below {settings.learning_rate:g}"
        return ValueError(
            f"{error.found}; continue with {goes_on} --redo and {lower}, which keeps the answers and begins the "
            f"training again, or name a new --output-dir; the rows are those of {rows}"
        )
    return error


def interruption(folder: Path) -> str:
    """Returns the message after an interrupt: how to continue the run, and from where its training continues."""
    said = f"Ended; {continuing(folder)} continues the run."
    is_in_training = (folder / "run").is_dir() and not (folder / "draft").is_dir()
    if is_in_training:
        said = f"{said} It {_continuation(folder)}."
    return said


def _continuation(folder: Path) -> str:
    """Says from where the same command continues a training. Steps after the last checkpoint are done again."""
    whole = whole_checkpoints(folder / "run")
    if whole:
        return f"goes on from {whole[0].name}"
    return "begins the training again and keeps the answers"


def is_out_of_memory(error: Exception) -> bool:
    """Returns True for errors that say that a device, or the memory of this machine, is full."""
    names = [kind.__name__ for kind in type(error).__mro__]
    is_of_the_cpu = "not enough memory" in str(error) or "can't allocate memory" in str(error)
    return "OutOfMemoryError" in names or "MemoryError" in names or is_of_the_cpu


def less_memory(settings: TrainSettings, arguments: DFlashTrainingArguments, stage: Stage) -> str:
    """Returns options with which a stage takes less memory. Options with the smallest drawbacks come first.

    After the first checkpoint, only options that do not change the result of the run are named.
    """
    if stage == "regenerate" and settings.answers_at_once > 1:
        return f"--answer-batch {settings.answers_at_once // 2}"
    if stage != "run":
        return "on a larger device"
    has_checkpoint = any((settings.output_dir / "run").glob("checkpoint-*"))
    if has_checkpoint:
        options = _of_the_same_run(arguments)
    else:
        options = _of_a_new_run(arguments)
    if not options:
        return "on a larger device"
    return " ".join(f"{flag(name)} {value}" for name, value in options.items())


def _of_the_same_run(arguments: DFlashTrainingArguments) -> dict[str, Any]:
    """Returns options that take less memory and change no result, for a run that continues from a checkpoint."""
    options = _of_evaluations(arguments, 1)
    if not getattr(arguments, CHECKPOINTING):
        options[CHECKPOINTING] = "true"
    if arguments.chunk_blocks > 16:
        options["chunk_blocks"] = arguments.chunk_blocks // 2
    return options


def _of_evaluations(arguments: DFlashTrainingArguments, num_rows: int) -> dict[str, Any]:
    """Returns an option with which evaluations take less memory, if they have more than `num_rows` rows at once."""
    is_evaluated = arguments.eval_strategy != IntervalStrategy.NO
    if is_evaluated and arguments.per_device_eval_batch_size > num_rows:
        return {"per_device_eval_batch_size": 1}
    return {}


def _of_a_new_run(arguments: DFlashTrainingArguments) -> dict[str, Any]:
    """Returns options that take less memory, for a run without a checkpoint."""
    options: dict[str, Any] = {}
    rows = arguments.per_device_train_batch_size
    if rows > 1:
        # A step keeps its number of rows, so an odd number of rows is divided into single rows.
        parts = 2 if rows % 2 == 0 else rows
        options["per_device_train_batch_size"] = rows // parts
        options["gradient_accumulation_steps"] = parts * arguments.gradient_accumulation_steps
    if not getattr(arguments, CHECKPOINTING):
        options[CHECKPOINTING] = "true"
    if not options and arguments.chunk_blocks > 16:
        options["chunk_blocks"] = arguments.chunk_blocks // 2
    if not options:
        options = {"num_anchors": max(1, arguments.num_anchors // 2), "optim": "muon"}
    # By default, an evaluation has as many rows at once as a forward of training.
    return options | _of_evaluations(arguments, rows)
