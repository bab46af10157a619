"""This module measures tokens and rows per second of a training, and the share of time in which it waits for data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Throughput(TrainerCallback):
    """Sums the time, tokens and rows of the steps since the last record.

    A step begins when the loop requests its batches, and ends before its record. So evaluations, checkpoints and the
    skipping of batches in a resumed run belong to no step.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets tokens, rows, seconds and waiting time to zero, and begins a step now."""
        self._tokens = 0
        self._rows = 0
        self._seconds = 0.0
        self._waited = 0.0
        self._began = time.perf_counter()

    def begin_step(self) -> None:
        """Begins a step. Its batches are requested now."""
        self._began = time.perf_counter()

    def add_batches(self, batches: Sequence[dict[str, Any]]) -> None:
        """Adds the batches of the step, which have now arrived. There are several if gradients are accumulated."""
        self._waited += time.perf_counter() - self._began
        for batch in batches:
            self._tokens += batch["num_tokens"]
            self._rows += batch["num_rows"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds the seconds since the step began."""
        self._seconds += time.perf_counter() - self._began

    def take(self, num_copies: int) -> dict[str, float]:
        """Returns the entries of a record for the steps since the last record, and resets the sums.

        All processes must call this method. Tokens and rows are summed over all processes. The seconds are the largest
        of all processes, and so is the waiting time, because the other processes wait for the slowest one.

        Args:
            num_copies (`int`): How many processes have the same rows.
        """
        mine = (self._tokens, self._rows, self._seconds, self._waited)
        self.reset()
        everyone: list[tuple[int, int, float, float]] = gather_object([mine])
        tokens, rows, seconds, waited = zip(*everyone, strict=True)
        longest = max(*seconds, 1e-9)
        return {
            "seconds": longest,
            "tokens_per_second": sum(tokens) / num_copies / longest,
            "rows_per_second": sum(rows) / num_copies / longest,
            "data_wait_share": max(waited) / longest,
        }
