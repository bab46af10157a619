"""This module times calls on their device, and records what a stopping criterion sees of Transformers' loop."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria

from dflash_hf.pair.answers import synchronize


class Marks:
    """Points in time on a device, and the milliseconds between them.

    On CUDA the points are events in the stream. So nothing waits for the device, and the device's time is measured
    instead of the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []  # events on CUDA, otherwise seconds

    def mark(self) -> None:
        """Adds a point: the time now, or on CUDA the time when the device gets here."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        # By default, the event would be in the stream of the current device, which may not be the model's device.
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def intervals(self) -> list[float]:
        """Returns the milliseconds between neighbouring points. Waits for the device."""
        synchronize(self.device)
        return [_milliseconds(start, end) for start, end in itertools.pairwise(self.marks)]


def _milliseconds(start: Any, end: Any) -> float:
    if isinstance(start, torch.cuda.Event):
        return float(start.elapsed_time(end))
    return (end - start) * 1e3


class Recorder(StoppingCriteria):
    """Stops nothing. Notes when the loop of `generate` calls it, once per forward, and the length of the text then."""

    def __init__(self, device: torch.device) -> None:
        self.lengths: list[int] = []
        self._marks = Marks(device)
        self._marks.mark()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Returns that no row is done, a bool tensor `[B]`."""
        self.note(input_ids)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self, input_ids: Any) -> None:
        """Notes that a forward has ended. `input_ids` `[B, S]` is the text after it."""
        if not self.lengths:
            synchronize(input_ids.device)
        self._marks.mark()
        self.lengths.append(input_ids.shape[1])

    def times(self) -> tuple[float | None, list[float]]:
        """Returns the seconds until the first token, and the milliseconds of each step after it."""
        intervals = self._marks.intervals()
        if not intervals:
            return None, []
        return intervals[0] / 1e3, intervals[1:]
