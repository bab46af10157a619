"""Under what conditions a number was measured: machine, versions, commit, and whether anything else ran."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflash_hf import __version__
from dflash_hf.bench.provenance import commit, cpu_model, version

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
    return (
        parse_cpu_times(PROC_STAT.read_text(encoding="ascii"))
        if PROC_STAT.is_file()
        else CpuTimes(0.0, 0.0)
    )


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

    def sample(self, seconds: float = SAMPLE_SECONDS) -> float | None:
        """Sleeps and returns the cores that were busy meanwhile."""
        start = read_cpu_times()
        time.sleep(seconds)
        self.before = busy_cores(start, read_cpu_times(), num_cores())
        return self.before

    def start(self) -> None:
        """Begins the run."""
        self._times, self._own, self._clock = (
            read_cpu_times(),
            time.process_time(),
            time.perf_counter(),
        )

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
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": num_cores(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "platform": platform.platform(),
        },
        "device": device.type,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "triton", "transformers", "dflash")},
            # Not the installed one: the sources may run without being installed
            "dflash_hf": __version__,
        },
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }
