"""What a device does at best, measured in the same run: bytes per second of a copy, operations of a matrix product."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash_hf.bench.timing import Marks
from dflash_hf.generation.capture import capture
from dflash_hf.pair.answers import synchronize

SAMPLES = 11


def milliseconds(
    calls: Sequence[Callable[[], Any]], device: torch.device, samples: int = SAMPLES
) -> list[float]:
    """Times a list of calls as a whole, several times; on CUDA as one graph, so that no launch waits for the host.

    Returns:
        `list[float]`: Milliseconds per call, one value per sample.

    Raises:
        NotCapturableError: If CUDA cannot capture a call. Others can be captured afterwards.
    """
    if device.type != "cuda":
        return uncaptured_milliseconds(calls, device, samples)
    index = device.index
    if index is None:
        index = torch.cuda.current_device()
    run = functools.partial(_run_all, calls)
    pool = torch.cuda.graph_pool_handle()
    # By its index the device is found where a refused capture is ended.
    graph, _ = capture(run, run, torch.device("cuda", index), pool)
    return _timed(graph.replay, len(calls), device, samples)


def uncaptured_milliseconds(
    calls: Sequence[Callable[[], Any]], device: torch.device, samples: int = SAMPLES
) -> list[float]:
    """Times a list of calls as [`milliseconds`] does, each launched by the host, whose time counts too."""
    return _timed(functools.partial(_run_all, calls), len(calls), device, samples)


def _run_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all calls; what they return is kept until the last one, so that each writes to memory of its own."""
    return [call() for call in calls]


def _timed(
    run: Callable[[], Any], num_calls: int, device: torch.device, samples: int
) -> list[float]:
    """Returns the milliseconds per call of each sample, after a run that does not count."""
    run()
    synchronize(device)
    marks = Marks(device)
    for _ in range(samples):
        marks.mark()
        run()
    marks.mark()
    return [span / num_calls for span in marks.intervals()]


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Returns the bytes per second, read and written, of a copy on the device by a kernel; median.

    Not by `copy_`: in a CUDA graph that is a node of its own kind, which reached 2.7 TB/s on an H200 where products
    read weights at 4.3.
    """
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    spans = milliseconds([lambda: torch.bitwise_not(source, out=target)] * 3, device)
    return 2 * num_bytes / (statistics.median(spans) / 1e3)


def product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Returns the operations per second (two per multiply and add) of a square matrix product of random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    spans = milliseconds([lambda: a @ b] * 3, device)
    return 2 * size**3 / (statistics.median(spans) / 1e3)
