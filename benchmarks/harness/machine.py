"""Under what conditions a number was measured: machine, versions, commit, and whether anything else ran."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_hf.bench.provenance import conditions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# CPU cores kept busy by others above which nothing is recorded. A quiet machine shows a few hundredths.
MAX_BUSY_CORES = 0.2
SAMPLE_SECONDS = 2.0
PROC_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor time since boot over all cores.

    Args:
        busy, total (`float`): Ticks; `total` is 0 where the kernel does not say.
    """

    busy: float
    total: float


def parse_cpu_times(text: str) -> CpuTimes:
    """Reads the first line of `/proc/stat`: idle and waiting for a disk are idle, all else, also steal, is busy."""
    for line in text.splitlines():
        if line.startswith("cpu "):
            # user nice system idle iowait irq softirq steal; guest time is part of user and would count twice
            ticks = [float(value) for value in line.split()[1:9]]
            return CpuTimes(sum(ticks) - sum(ticks[3:5]), sum(ticks))
    return CpuTimes(0.0, 0.0)


def read_cpu_times() -> CpuTimes:
    """Returns the machine's processor time so far; zeros where there is no `/proc/stat`."""
    text = PROC_STAT.read_text(encoding="ascii") if PROC_STAT.is_file() else ""
    return parse_cpu_times(text)


def busy_cores(before: CpuTimes, after: CpuTimes, num_cores: int) -> float | None:
    """Returns how many cores were busy on average between two readings; `None` where the kernel does not say."""
    elapsed = after.total - before.total
    return None if elapsed <= 0 else (after.busy - before.busy) / elapsed * num_cores


def num_cores() -> int:
    """Returns the machine's number of cores."""
    return os.cpu_count() or 1


class LoadWatch:
    """Measures what others do on the machine: for a moment before a run, and over the run apart from its own work."""

    def __init__(self) -> None:
        self.before: float | None = None
        self.during: float | None = None
        self._times = read_cpu_times()
        self._own = time.process_time()
        self._clock = time.perf_counter()

    def sample(self) -> float | None:
        """Sleeps for `SAMPLE_SECONDS` and returns the cores that were busy meanwhile."""
        start = read_cpu_times()
        time.sleep(SAMPLE_SECONDS)
        self.before = busy_cores(start, read_cpu_times(), num_cores())
        return self.before

    def start(self) -> None:
        """Notes processor times and the clock, from which [`stop`] counts."""
        self._times = read_cpu_times()
        self._own = time.process_time()
        self._clock = time.perf_counter()

    def stop(self) -> float | None:
        """Ends the run and returns the cores that others kept busy during it."""
        busy = busy_cores(self._times, read_cpu_times(), num_cores())
        own = (time.process_time() - self._own) / (time.perf_counter() - self._clock)
        self.during = None if busy is None else max(0.0, busy - own)
        return self.during

    def is_quiet(self) -> bool:
        """Returns True if nothing that was measured was too much."""
        return all(load is None or load <= MAX_BUSY_CORES for load in (self.before, self.during))

    def to_dict(self) -> dict[str, float | None]:
        """Returns both measurements for the record."""
        return {"busy_cores_before": self.before, "busy_cores_of_others_during": self.during}


def provenance(device: torch.device) -> dict[str, Any]:
    """Returns what a reader has to know to repeat a measurement or to distrust it."""
    return {**conditions(), "device": device.type}
