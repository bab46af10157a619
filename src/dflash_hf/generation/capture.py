"""One capture of a CUDA graph: what comes before and after it, and what a refused one has left behind.

During a capture the generator of the device counts for the graph: random CUDA operations of other threads raise then,
whatever their stream. A process has one capture at a time here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# Graphs that CUDA has refused. Torch's allocators keep asking them which stream was theirs, also after their end.
_refused: list[Any] = []


class NotCapturableError(RuntimeError):
    """A step cannot be captured; the message is the reason."""


def capture(
    warm_up: Callable[[], object], body: Callable[[], T], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures what `body` launches, after running `warm_up` on the same stream.

    Args:
        warm_up (callable): Makes the first calls: libraries allocate, and kernels are compiled and chosen, at theirs.
        body (callable): What is captured.
        device (`torch.device`): Where, with its index.
        pool: What the graph's memory is taken from.

    Returns:
        `tuple`: The graph, and what `body` returned.

    Raises:
        NotCapturableError: If CUDA cannot capture it. Generator and allocator are as before then.
        RuntimeError: If the device has failed.
    """
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    _clear_workspaces()
    try:
        # The outer context puts the stream back also where `torch.cuda.graph` fails to: after a refused capture.
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            return graph, body()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        with device_errors_explained():
            torch.cuda.synchronize(device)  # a device that has failed does not get over it
        _end_refused(graph, device, stream, pool)
        raise NotCapturableError(f"CUDA could not capture it ({first_line(error)})") from error
    finally:
        _clear_workspaces()


def _clear_workspaces() -> None:
    """Lets go of cuBLAS's workspaces: right before a capture and right after it, the graph's is its own.

    Others clear them too (Inductor, before captures of its own). A replay would then write into memory that has
    become someone's tensor, if its workspace was not of the graph's pool, or the pool's went on to be used outside.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _end_refused(graph: torch.cuda.CUDAGraph, device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """Ends what a refused capture has left under way in the allocator and the generator.

    Torch does that behind CUDA's own end of the capture, which has raised: from then on the generator would refuse
    every random CUDA operation, and the allocator look for a capture with every allocation.
    """
    _refused.append(graph)
    end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if end is not None:
        try:
            end(device.index, pool)
        except RuntimeError:
            release = None  # torch has ended it itself, and counts the pool's graphs
        if release is not None:
            release(device.index, pool)
    graph.reset()
    # The generator's flag falls at the end of a capture that works, whatever is captured.
    number, trivial = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(torch.cuda.current_stream(device)),
        torch.cuda.graph(trivial, stream=stream, capture_error_mode="thread_local"),
    ):
        number.add_(1)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def device_errors_explained() -> Generator[None]:
    """Says what an error of the device means for the process."""
    try:
        yield
    except RuntimeError as error:
        if "CUDA error" not in str(error):  # older releases of torch have no class for them
            raise
        raise RuntimeError(
            f"expected the steps to run on CUDA, got {first_line(error)}; this run is lost and its buffers are not "
            "used again. A device that has failed stays so: restart the process, and set engine='eager' with "
            "CUDA_LAUNCH_BLOCKING=1 to see where it happens"
        ) from error


def first_line(error: BaseException) -> str:
    """Returns an error's class and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


__all__ = ["NotCapturableError", "capture", "device_errors_explained", "first_line"]
