"""Where a Triton kernel can run (on CUDA with Triton installed, or in Triton's interpreter), and sizes of launches."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def has_triton() -> bool:
    """Returns True if Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def interprets() -> bool:
    """Returns True if kernels run in Triton's interpreter: `TRITON_INTERPRET=1` before they are first used."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernel(tensor: Tensor) -> bool:
    """Returns True if a kernel can run on this tensor: its place and its dtype (float32, float16 or bfloat16)."""
    return tensor.dtype in DTYPES and has_triton() and (tensor.is_cuda or interprets())


def launch_errors() -> tuple[type[Exception], ...]:
    """Returns the types of what a launch raises where a kernel cannot be had; see [`is_fault_of_kernel`]."""
    # A driver's module that is built but cannot be loaded; no ldconfig; no libcuda where that looks; a C compiler that
    # fails; none, and what MLIR's passes raise.
    found = (ImportError, OSError, AssertionError, subprocess.CalledProcessError, RuntimeError)
    try:
        from triton.errors import TritonError
    except ImportError:  # a Triton without that module, or one that cannot be imported at all
        return found
    return (*found, TritonError)


def is_fault_of_kernel(error: Exception) -> bool:
    """Says whether such an error is about the kernel: it cannot be built, or does not fit into a multiprocessor.

    A device that has failed is not, nor is memory that has run out: what torch computes would meet the same.
    """
    # Torch's own errors of a device are of other classes, or say so
    if isinstance(error, RuntimeError):
        text = str(error)
        # The driver's words for code that it cannot load, among all that it says of a device or a capture.
        return type(error) is RuntimeError and (
            "CUDA" not in text or "kernel image" in text or "PTX" in text
        )
    return True


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """What a launch has to be made under: Triton launches on the current device, not on that of its arguments."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def cdiv(number: int, divisor: int) -> int:
    """Returns `number / divisor`, rounded up."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`, which is at least 1: what `tl.arange` takes."""
    return 1 << (number - 1).bit_length()


def split_rings(rings: Sequence[int]) -> tuple[int, tuple[int | None, ...]]:
    """Returns the longest of the buffers' rings, and for each buffer its ring if that is shorter, else `None`.

    A kernel is compiled anew for what divides a number in a tuple, whatever its decorator says. So the longest ring,
    which differs from run to run, is an argument of its own. Shorter ones follow from a layer's window.
    """
    longest = max(rings)
    return longest, tuple(None if ring == longest else ring for ring in rings)


__all__ = [
    "DTYPES",
    "cdiv",
    "has_triton",
    "interprets",
    "is_fault_of_kernel",
    "launch_errors",
    "on_device_of",
    "power_of_two",
    "runs_kernel",
    "split_rings",
]
