"""Capturing one CUDA graph: the work before and behind it, and behind a capture that CUDA refuses.

During a capture the generator of the device counts for the graph: random CUDA operations of other threads raise then,
whatever their stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from dflash_hf.devices import device_errors_explained
from dflash_hf.errors import first_line

T = TypeVar("T")
# Graphs that CUDA has refused. Torch's allocators keep asking them which stream was theirs, also after their end.
_refused: list[Any] = []


class NotCapturableError(RuntimeError):
    """A step cannot be captured; the message is the reason."""


class HostNeededError(NotCapturableError):
    """A step cannot be captured because it needs the host, which was found before CUDA was asked."""


def capture(
    warm_up: Callable[[], object], body: Callable[[], T], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures what `body` launches; returns the graph, whose memory is the pool's, and what `body` returned.

    `warm_up` runs before, on the same stream: at their first calls libraries allocate, and kernels are compiled.
    Raises `NotCapturableError` if CUDA cannot capture it, with generator and allocator as before, and `RuntimeError`
    if the device has failed.
    """
    stream = _capture_stream(device)
    current = torch.cuda.current_stream(device)
    # The two streams wait for each other: the step reads what this thread has just written, and writes scratch.
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            warm_up()
    finally:
        # Also of one that has raised: what it has launched writes scratch that the steps to come use.
        current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The warm-up has made a workspace outside the graph's pool.
    _clear_workspaces()
    try:
        # The outer context puts the stream back also where `torch.cuda.graph` fails to: after a refused capture.
        with torch.cuda.stream(current), _capturing_on(graph, stream, pool):
            return graph, body()
    # No refusal of CUDA's: the caller gives the memory of all graphs back.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # A device that has failed raises here: then nothing can be put right.
        with device_errors_explained():
            torch.cuda.synchronize(device)
        _end_refused(graph, device, stream, pool)
        raise NotCapturableError(f"CUDA could not capture it ({first_line(error)})") from error
    finally:
        _clear_workspaces()


def _clear_workspaces() -> None:
    """Frees cuBLAS's workspaces: right before a capture and right after it, so that the graph has its own.

    Others clear them too (Inductor, before captures of its own). A replay would then write into memory that has
    become someone's tensor, if its workspace was not of the graph's pool, or the pool's went on to be used outside.
    """
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()


def _end_refused(
    graph: torch.cuda.CUDAGraph, device: torch.device, stream: torch.cuda.Stream, pool: Any
) -> None:
    """Does what torch does behind CUDA's end of a capture, which has raised.

    Else the generator would refuse every random CUDA operation, and the allocator look for a capture at each call.
    """
    _refused.append(graph)
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release: Any = getattr(torch._C, "_cuda_releasePool", None)
    is_ended = False
    if end is not None:
        # Torch raises where it has ended the capture itself, and then counts the pool's graphs.
        with suppress(RuntimeError):
            end(device.index, pool)
            is_ended = True
    if is_ended and release is not None:
        release(device.index, pool)
    graph.reset()
    # The generator's flag falls at the end of a capture that works, whatever is captured.
    number = torch.zeros(1, device=device)
    trivial = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream(device)), _capturing_on(trivial, stream):
        number.add_(1)


@contextmanager
def _capturing_on(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None
) -> Generator[None]:
    """Captures on a stream, begun and ended outside inference mode.

    The first capture makes the tensors of the device's generator, which stay as long as any graph lives. Made in
    inference mode, they could not be changed by captures of others outside of it (pytorch #166792).
    """
    is_inference = torch.is_inference_mode_enabled()
    with (
        torch.inference_mode(False),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        torch.inference_mode(is_inference),
    ):
        yield


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all captures on a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)
