"""When the target's forwards of a run ended: what "milliseconds per step" means here.

A step lasts from the end of one forward of the target to the end of the next, so it contains whatever a method does in
between (drafting, acceptance, caches, criteria) and exactly one forward. The prefill is no step. On CUDA the marks are
events in the stream, so nothing waits for the device and its time, not the host's, is measured.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dflash_hf import SpeculativeStats

Mark = float | torch.cuda.Event


def synchronize(device: torch.device) -> None:
    """Waits until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Points in time on a device, and the milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Mark] = []

    def mark(self) -> None:
        """Adds a point: now, or on CUDA when the device gets here."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def intervals(self) -> list[float]:
        """Returns the milliseconds between neighbouring points; waits for the device."""
        synchronize(self.device)
        return [_milliseconds(a, b) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def _milliseconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return (end - start) * 1e3
    return float(start.elapsed_time(end))


class StepClock:
    """Times a run of a target: `with StepClock(model) as clock: model.generate(...)`.

    After the block: `seconds` (wall time of the block), `prefill_seconds` (until the first forward had ended),
    `step_ms` (one value per forward after the prefill) and `num_forwards`.

    Args:
        model (`nn.Module`): The target; a hook is put on it while the block runs.
        device (`torch.device`): Where it runs.
        is_hooked (`bool`): `False` where a hook would change what is measured: replayed forwards call none, compiled
            ones would take it in, and with a draft a target on which hooks hang runs otherwise. Then the run calls
            `marks.mark` itself behind every token, or [`take`] says how long the parts took.
    """

    def __init__(self, model: nn.Module, device: torch.device, is_hooked: bool = True) -> None:
        self.model = model
        self.marks = Marks(device)
        self.seconds = 0.0
        self.prefill_seconds = 0.0
        self.step_ms: list[float] = []
        self._handle: RemovableHandle | None = None
        self._is_hooked = is_hooked

    @property
    def num_forwards(self) -> int:
        """Forwards of the target, the prefill's included."""
        return len(self.marks.marks) - 1

    def __enter__(self) -> StepClock:
        if self._is_hooked:
            self._handle = self.model.register_forward_hook(self._ended)
        synchronize(self.marks.device)
        self.marks.mark()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        synchronize(self.marks.device)
        self.seconds = time.perf_counter() - self._start
        if self._handle is not None:
            self._handle.remove()
        intervals = self.marks.intervals()
        if intervals:
            self.prefill_seconds, self.step_ms = intervals[0] / 1e3, intervals[1:]

    def take(self, stats: SpeculativeStats) -> None:
        """Takes the times of a run without a hook from its statistics: each step counts with the mean of all.

        Both ends of what is divided are reads on the host of what the device has done.
        """
        steps = stats.num_target_forwards - 1
        self.prefill_seconds = stats.time_to_first_token
        self.step_ms = (
            [(stats.total_seconds - stats.time_to_first_token) * 1e3 / steps] * steps
            if steps
            else []
        )

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        self.marks.mark()
