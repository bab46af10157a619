"""What a run leaves in its folder beside Transformers' own: `metrics.jsonl`, and which checkpoints are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

METRICS_FILE = "metrics.jsonl"
STATE_FILE = "trainer_state.json"  # Transformers writes it last


class Records(TrainerCallback):
    """Appends every record to `metrics.jsonl`, so that a killed run leaves them too; the last step has one as well."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        """Takes the steps of records, checkpoints and evaluations from the arguments, not from the checkpoint."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Asks for a record at the last step, and for an evaluation where there are any."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = control.should_evaluate or args.eval_strategy == IntervalStrategy.STEPS

    def on_log(self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        """Appends one line of JSON."""
        if state.is_world_process_zero:
            with (Path(str(args.output_dir)) / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **(kwargs.get("logs") or {})}) + "\n")


def whole_checkpoint(asked: str | None) -> str | None:
    """Returns the folder to go on from, `None` to begin; `ValueError` if it is no whole one."""
    if not asked:
        return None
    if not (Path(asked) / STATE_FILE).is_file():
        raise ValueError(
            f"expected a checkpoint folder with {STATE_FILE}, got {asked}; pass a {PREFIX_CHECKPOINT_DIR}-<step> "
            "folder of a run"
        )
    return str(asked)
