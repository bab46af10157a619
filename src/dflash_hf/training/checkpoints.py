"""What a run leaves in its folder beside Transformers' own: `metrics.jsonl`, and which checkpoints are whole."""

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
STATE_FILE = "trainer_state.json"  # Transformers writes it last


class Records(TrainerCallback, ExportableState):
    """Appends every record to `metrics.jsonl`, so that a killed run leaves them too; the last step has one as well.

    Checkpoints keep what says which rows a step has: a run with other ones is another run.

    Args:
        kept (mapping): See [`kept_of_rows`].
    """

    def __init__(self, kept: Mapping[str, int | str | None] = MappingProxyType({})) -> None:
        self.batches_per_step = 0
        self.rows_per_batch = 0
        self.rows = dict(kept)

    def state(self) -> dict[str, Any]:
        """Returns what `trainer_state.json` keeps of it."""
        return {"args": {}, "attributes": vars(self)}

    def on_train_begin(self, args: Any, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        """Takes the steps of records, checkpoints and evaluations from the arguments, not from the checkpoint.

        Records behind the checkpoint are dropped: their steps are done again. A run that was killed before its first
        checkpoint begins anew, behind step 0.
        """
        state.compute_steps(args, state.max_steps)
        # The checkpoint has the path as it was in the working folder of then
        best = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if best.is_dir():
            state.best_model_checkpoint = str(best)
        self.batches_per_step = args.num_groups * args.gradient_accumulation_steps
        self.rows_per_batch = args.per_device_train_batch_size
        metrics = Path(str(args.output_dir)) / METRICS_FILE
        if state.is_world_process_zero and metrics.is_file():
            # A run that begins with an evaluation does that of step 0 again, too.
            begins_with_one = args.eval_on_start and state.global_step == 0
            last_step = -1 if begins_with_one else state.global_step
            _keep_records(metrics, last_step, lacks_evaluation(args, state))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Asks for a record at the last step, and for an evaluation where there are any."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = (
                control.should_evaluate or args.eval_strategy == IntervalStrategy.STEPS
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any
    ) -> None:
        """Appends one line of JSON."""
        if state.is_world_process_zero:
            with (Path(str(args.output_dir)) / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"step": state.global_step, **(kwargs.get("logs") or {})}) + "\n"
                )


def lacks_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Returns True if a run was ended between its checkpoint and the evaluation of the same step.

    Transformers writes a checkpoint of steps before it evaluates at the end of the epoch. An evaluation that is due by
    steps comes before the checkpoint.

    Args:
        args ([`~transformers.TrainingArguments`]): Options of the run that goes on.
        state ([`~transformers.TrainerState`]): That of the checkpoint, or of a run that begins.
    """
    step = state.global_step
    if step == 0 or args.eval_strategy != IntervalStrategy.EPOCH:
        return False
    epoch: Any = state.epoch
    ends_epoch = step >= state.max_steps or epoch % 1 == 0
    is_due = ends_epoch and epoch >= args.eval_delay
    return is_due and not any(_is_evaluation(record, step) for record in state.log_history)


def _is_evaluation(record: Mapping[str, Any], step: int) -> bool:
    """Whether a record is of an evaluation at this step."""
    return record["step"] == step and any(name.startswith("eval_") for name in record)


def _keep_records(path: Path, last_step: int, is_evaluated_again: bool) -> None:
    """Drops lines that are no records from a file of records, and the records of what is done again.

    These are the steps behind `last_step`, and the evaluation at that one if it is made again.
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
    """The record in a line; `None` where a kill has cut it."""
    if not line.endswith("\n"):
        return None
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    return record


def whole_checkpoint(asked: str | bool | None, output_dir: Path) -> str | None:
    """Returns the folder to go on from, `None` to begin; `ValueError` if there is no whole one.

    What is `asked` is a folder, or `True` for the newest one of the run that was written to its end.
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
    """Returns the folders of a run's checkpoints that were written to their end, the newest one first."""
    return [path for path in _checkpoints(output_dir) if is_whole(path)]


def _checkpoints(output_dir: Path) -> list[Path]:
    """The folders of a run's checkpoints, the newest one first."""
    found = [
        path
        for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if re.search(r"-\d+$", path.name)
    ]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def kept_of_rows(
    args: DFlashTrainingArguments, lengths: Sequence[int]
) -> dict[str, int | str | None]:
    """Returns what says, beside their number, which rows come in which step: name -> value.

    Args:
        args ([`DFlashTrainingArguments`]): Options of the run.
        lengths (sequence of `int`): Tokens of each example.
    """
    return {
        "packing_length": args.packing_length,
        "data_seed": args.order_seed,
        "lengths of train_dataset": text_identity(" ".join(str(int(size)) for size in lengths)),
    }


def check_same_steps(
    folder: Path, args: DFlashTrainingArguments, kept: Mapping[str, int | str | None]
) -> None:
    """Refuses to go on with steps of other rows than those of a checkpoint: rows would be left out or come twice.

    Args:
        folder (`Path`): The checkpoint.
        args ([`DFlashTrainingArguments`]): Options of the run that is to go on from it.
        kept (mapping): See [`kept_of_rows`], of that run.

    Raises:
        ValueError: With both numbers; or if the checkpoint is another trainer's, which has no record of its rows.
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
    """Returns True if a checkpoint was written to its end: the state of the trainer is there and can be read."""
    try:
        json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
