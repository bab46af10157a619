"""What a device does at best, measured in the same run: bytes per second of a copy, operations of a matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from dflash_hf.bench.timing import Marks
from dflash_hf.pair.answers import synchronize

SAMPLES = 11


def milliseconds(
    calls: list[Callable[[], Any]], device: torch.device, samples: int = SAMPLES
) -> list[float]:
    """Times a list of calls as a whole, several times; on CUDA as one graph, so that no launch waits for the host.

    Returns:
        `list[float]`: Milliseconds per call, one value per sample.
    """
    for call in calls:
        call()
    synchronize(device)
    run: Callable[[], Any] = lambda: [call() for call in calls]  # noqa: E731
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()
    marks = Marks(device)
    for _ in range(samples):
        marks.mark()
        run()
    marks.mark()
    return [span / len(calls) for span in marks.intervals()]


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
