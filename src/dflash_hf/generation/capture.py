"""This module captures one CUDA graph, and cleans up after a capture that CUDA refuses.

During a capture, the random generator of the device belongs to the graph. Random CUDA operations of other threads then
raise an error, whatever their stream.
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
# Graphs that CUDA has refused are kept here, because torch's allocators use them even after their end.
_refused: list[Any] = []


class NotCapturableError(RuntimeError):
    """An error that says why a step cannot be captured."""


class HostNeededError(NotCapturableError):
    """An error that says that a step needs the host, so that it cannot be captured. It is found before the capture."""


def capture(
    warm_up: Callable[[], object], body: Callable[[], T], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures the operations that `body` launches. Returns the graph and the result of `body`.

    `warm_up` runs before on the same stream, because libraries allocate memory and kernels are compiled at their first
    calls. The graph's memory belongs to `pool`.

    Raises:
        NotCapturableError: If CUDA cannot capture the operations. Generator and allocator are then as before.
        RuntimeError: If the device has failed.
    """
    stream = _capture_stream(device)
    current = torch.cuda.current_stream(device)
    # The streams wait for each other, because the step reads tensors that this thread has just written, and writes
    # scratch memory that later steps use.
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            warm_up()
    finally:
        # This also holds after an error, because operations launched before the error write this scratch memory.
        current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The warm-up has made a workspace outside the graph's pool. It is freed, so that the graph makes its own.
    _clear_workspaces()
    try:
        # After a refused capture, `torch.cuda.graph` does not restore the current stream. The outer context does.
        with torch.cuda.stream(current), _capturing_on(graph, stream, pool):
            return graph, body()
    # Missing memory does not mean that the step cannot be captured. The caller frees the memory of all graphs.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # If the device has failed, this raises, and no cleanup is possible.
        with device_errors_explained():
            torch.cuda.synchronize(device)
        _end_refused(graph, device, stream, pool)
        raise NotCapturableError(f"CUDA could not capture it ({first_line(error)})") from error
    finally:
        _clear_workspaces()


def _clear_workspaces() -> None:
    """Frees cuBLAS's workspaces. This happens right before and right after a capture, so that the graph has its own.

    Other code clears the workspaces too, for example Inductor before its own captures. If a graph used a workspace
    outside its pool, or other work used a workspace of the pool, a replay could then write into another tensor's
    memory.
    """
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()


def _end_refused(
    graph: torch.cuda.CUDAGraph, device: torch.device, stream: torch.cuda.Stream, pool: Any
) -> None:
    """Does the cleanup that torch skips if CUDA raises an error at the end of a capture.

    Without it, the generator would refuse every random CUDA operation, and the allocator would look for a capture at
    each call.
    """
    _refused.append(graph)
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release: Any = getattr(torch._C, "_cuda_releasePool", None)
    is_ended = False
    if end is not None:
        # Torch raises if it has ended the capture itself. It has then also counted the pool's graphs.
        with suppress(RuntimeError):
            end(device.index, pool)
            is_ended = True
    if is_ended and release is not None:
        release(device.index, pool)
    graph.reset()
    # The generator leaves its capturing state at the end of a successful capture, whatever is captured.
    number = torch.zeros(1, device=device)
    trivial = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream(device)), _capturing_on(trivial, stream):
        number.add_(1)


@contextmanager
def _capturing_on(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None
) -> Generator[None]:
    """Captures on a stream. The capture begins and ends outside inference mode.

    The first capture makes tensors of the device's generator, which stay as long as any graph lives. If they were made
    in inference mode, captures of other code outside inference mode could not change them (pytorch #166792).
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
    """Returns the stream of all captures on a device. There is one, because cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream(device)
