"""This module writes `metrics.jsonl`, and finds and checks the complete checkpoints of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.utils import logging

from dflash_hf.data.row_files import write_whole
from dflash_hf.errors import require
from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.identity import text_identity

logger: Any = logging.get_logger(__name__)

METRICS_FILE = "metrics.jsonl"
STATE_FILE = "trainer_state.json"  # Transformers writes this file last


class Records(TrainerCallback, ExportableState):
    """Appends every record to `metrics.jsonl` immediately, so that a killed run leaves its records.

    The last step has a record too. The state of this callback, which checkpoints store, says which rows a step has. A
    run with other rows per step cannot continue from the checkpoint.

    Args:
        kept (mapping): The settings to store. See [`kept_of_rows`].
    """

    def __init__(self, kept: Mapping[str, int | str | None] = MappingProxyType({})) -> None:
        self.batches_per_step = 0
        self.rows_per_batch = 0
        self.rows = dict(kept)

    def state(self) -> dict[str, Any]:
        """Returns the state that `trainer_state.json` stores for this callback."""
        return {"args": {}, "attributes": vars(self)}

    def on_train_begin(self, args: Any, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        """Takes the intervals of records, checkpoints and evaluations from the arguments, not from the checkpoint.

        Records after the checkpoint are dropped, because their steps are done again. A run that was killed before its
        first checkpoint starts again at step 0.
        """
        state.compute_steps(args, state.max_steps)
        # The path in the checkpoint may be relative to another working folder, so it is set again.
        best = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if best.is_dir():
            state.best_model_checkpoint = str(best)
        self.batches_per_step = args.num_groups * args.gradient_accumulation_steps
        self.rows_per_batch = args.per_device_train_batch_size
        metrics = Path(str(args.output_dir)) / METRICS_FILE
        if state.is_world_process_zero and metrics.is_file():
            # With `eval_on_start`, a run that starts again also repeats the evaluation at step 0.
            begins_with_one = args.eval_on_start and state.global_step == 0
            last_step = -1 if begins_with_one else state.global_step
            _keep_records(metrics, last_step, lacks_evaluation(args, state))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Requests a record at the last step, and an evaluation if the run evaluates by steps."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = (
                control.should_evaluate or args.eval_strategy == IntervalStrategy.STEPS
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any
    ) -> None:
        """Appends a record to the file, as one line of JSON."""
        if state.is_world_process_zero:
            with (Path(str(args.output_dir)) / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"step": state.global_step, **(kwargs.get("logs") or {})}) + "\n"
                )


def lacks_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Returns True if a run was interrupted between its checkpoint and the evaluation of the same step.

    If checkpoints are due by steps and evaluations by epochs, Transformers writes the checkpoint first. An evaluation
    that is due by steps comes before the checkpoint.

    Args:
        args ([`~transformers.TrainingArguments`]): The options of the run that continues.
        state ([`~transformers.TrainerState`]): The state of the checkpoint, or of a new run.
    """
    step = state.global_step
    if step == 0 or args.eval_strategy != IntervalStrategy.EPOCH:
        return False
    epoch: Any = state.epoch
    ends_epoch = step >= state.max_steps or epoch % 1 == 0
    is_due = ends_epoch and epoch >= args.eval_delay
    return is_due and not any(_is_evaluation(record, step) for record in state.log_history)


def _is_evaluation(record: Mapping[str, Any], step: int) -> bool:
    """Says whether a record is from an evaluation at this step."""
    return record["step"] == step and any(name.startswith("eval_") for name in record)


def _keep_records(path: Path, last_step: int, is_evaluated_again: bool) -> None:
    """Drops broken lines from a file of records, and the records of steps and evaluations that are done again.

    These are the steps after `last_step`, and the evaluation at `last_step` if `is_evaluated_again`.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = []
    for line in lines:
        record = _record_of(line)
        if record is None or record["step"] > last_step:
            continue
        if is_evaluated_again and _is_evaluation(record, last_step):
            continue
        kept.append(line)
    if len(kept) < len(lines):
        write_whole(path, kept)


def _record_of(line: str) -> dict[str, Any] | None:
    """Returns the record in a line, or `None` if the line is no whole record, for example after the run was killed."""
    if not line.endswith("\n"):
        return None
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record else None


def whole_checkpoint(asked: str | bool | None, output_dir: Path) -> str | None:
    """Returns the folder of the checkpoint to continue from, or `None` for a new run.

    Args:
        asked (`str` or `bool`, *optional*): A folder, or `True` for the newest complete checkpoint of the run.
        output_dir (`Path`): The folder of the run.

    Raises:
        ValueError: If the folder is no complete checkpoint, or the run has none.
    """
    if not asked:
        return None
    if asked is not True:
        if not is_whole(Path(asked)):
            raise ValueError(
                f"expected a checkpoint folder with {STATE_FILE}, got {asked}; pass a {PREFIX_CHECKPOINT_DIR}-<step> "
                "folder of a run"
            )
        return str(asked)
    for path in _checkpoints(output_dir):
        if is_whole(path):
            return str(path)
        logger.warning(f"{path} was not written to its end; an earlier checkpoint is taken")
    raise ValueError(
        f"expected a whole checkpoint in {output_dir}, got none; leave resume_from_checkpoint out to begin"
    )


def whole_checkpoints(output_dir: Path) -> list[Path]:
    """Returns the folders of a run's complete checkpoints, the newest one first."""
    return [path for path in _checkpoints(output_dir) if is_whole(path)]


def _checkpoints(output_dir: Path) -> list[Path]:
    """Returns the folders of all checkpoints of a run, the newest one first."""
    found = [
        path
        for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if re.search(r"-\d+$", path.name)
    ]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def kept_of_rows(
    args: DFlashTrainingArguments, lengths: Sequence[int]
) -> dict[str, int | str | None]:
    """Returns the settings that determine which rows a step has, except the number of rows: name -> value.

    Args:
        args ([`DFlashTrainingArguments`]): The options of the run.
        lengths (sequence of `int`): The number of tokens of each example.
    """
    return {
        "packing_length": args.packing_length,
        "data_seed": args.order_seed,
        "lengths of train_dataset": text_identity(" ".join(str(int(size)) for size in lengths)),
    }


def check_same_steps(
    folder: Path, args: DFlashTrainingArguments, kept: Mapping[str, int | str | None]
) -> None:
    """Refuses to continue a checkpoint with steps of other rows: some rows would be left out or come twice.

    Args:
        folder (`Path`): The checkpoint.
        args ([`DFlashTrainingArguments`]): The options of the run that should continue from the checkpoint.
        kept (mapping): The settings of this run, as [`kept_of_rows`] returns them.

    Raises:
        ValueError: If the steps have other rows (the message has both values), or if another trainer has written the
            checkpoint, which then has no record of its rows.
    """
    state: Any = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    records: Any = state.get("stateful_callbacks", {}).get(Records.__name__)
    what = f"a checkpoint of a DFlashTrainer in {folder}"
    action = "give another folder, or begin anew"
    require(records is not None, what, "one without a record of its rows", action)
    was: Any = records["attributes"]
    batches = args.num_groups * args.gradient_accumulation_steps
    rows = args.per_device_train_batch_size
    require(
        was["batches_per_step"] == batches,
        f"{was['batches_per_step']} batches per step as in {folder}",
        batches,
        f"with {args.num_groups} processes (or groups of tensor_parallel_size processes) set "
        "gradient_accumulation_steps so that their product is that",
    )
    require(
        was["rows_per_batch"] == rows,
        f"{was['rows_per_batch']} rows per batch as in {folder}",
        rows,
        "set per_device_train_batch_size to that",
    )
    for name, value in was["rows"].items():
        action = "go on with the same examples and options, or begin anew"
        require(kept[name] == value, f"{name} {value} as in {folder}", kept[name], action)


def is_whole(folder: Path) -> bool:
    """Returns True if a checkpoint is complete, that is, if its `STATE_FILE` exists and can be read."""
    try:
        json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
