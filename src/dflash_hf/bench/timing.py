"""Points in time of a call on its device, and what a stopping criterion sees of Transformers' loop."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria

from dflash_hf.pair.answers import synchronize


class Marks:
    """Points in time on a device, and the milliseconds between them.

    On CUDA they are events in the stream: nothing waits for the device, and its time is measured, not the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []  # events on CUDA, else seconds

    def mark(self) -> None:
        """Adds a point: now, or on CUDA when the device gets here."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        # By default it would be of the current device's stream, whichever the model is on.
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def intervals(self) -> list[float]:
        """Returns the milliseconds between neighbouring points; waits for the device."""
        synchronize(self.device)
        return [_milliseconds(start, end) for start, end in itertools.pairwise(self.marks)]


def _milliseconds(start: Any, end: Any) -> float:
    if isinstance(start, torch.cuda.Event):
        return float(start.elapsed_time(end))
    return (end - start) * 1e3


class Recorder(StoppingCriteria):
    """Stops nothing; notes when the loop of `generate` comes by, once per forward, and how long the text is then."""

    def __init__(self, device: torch.device) -> None:
        self.lengths: list[int] = []
        self._marks = Marks(device)
        self._marks.mark()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Returns that no row is done."""
        self.note(input_ids)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self, input_ids: Any) -> None:
        """Notes that a forward has ended, and the length of the text `[B, S]` behind it."""
        if not self.lengths:
            synchronize(input_ids.device)
        self._marks.mark()
        self.lengths.append(input_ids.shape[1])

    def times(self) -> tuple[float | None, list[float]]:
        """Returns the seconds until the first token, and the milliseconds of each step behind it."""
        intervals = self._marks.intervals()
        if not intervals:
            return None, []
        return intervals[0] / 1e3, intervals[1:]
