"""This module decides where a Triton kernel can run (on CUDA with Triton, or in its interpreter),
and sizes launches.
"""

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
    """Returns True if Triton is installed. Triton is not imported."""
    return importlib.util.find_spec("triton") is not None


def interprets() -> bool:
    """Returns True if kernels run in Triton's interpreter: `TRITON_INTERPRET=1` was set before their first use."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernel(tensor: Tensor) -> bool:
    """Returns True if a kernel can run on this tensor's device and dtype (float32, float16 or bfloat16)."""
    return tensor.dtype in DTYPES and has_triton() and (tensor.is_cuda or interprets())


def launch_errors() -> tuple[type[Exception], ...]:
    """Returns the types of errors that a launch raises if a kernel cannot be built or loaded; see
    [`is_fault_of_kernel`].
    """
    # ImportError: a driver's module was built but cannot be loaded. OSError: there is no ldconfig. AssertionError:
    # ldconfig does not find libcuda. CalledProcessError: a C compiler fails. RuntimeError: there is no C compiler, or
    # one of MLIR's passes fails.
    found = (ImportError, OSError, AssertionError, subprocess.CalledProcessError, RuntimeError)
    try:
        from triton.errors import TritonError
    except ImportError:  # a Triton without this module, or one that cannot be imported at all
        return found
    return (*found, TritonError)


def is_fault_of_kernel(error: Exception) -> bool:
    """Returns True if such an error is about the kernel: it cannot be built, or does not fit into a multiprocessor.

    An error of a device that has failed is not about the kernel, and neither is a lack of memory. torch's own
    operations would fail in the same way.
    """
    # torch's own errors about a device have other classes, or name the device
    if isinstance(error, RuntimeError):
        text = str(error)
        # These are the words that the driver uses for code that it cannot load. Its other messages about CUDA concern
        # the device or a capture.
        return type(error) is RuntimeError and (
            "CUDA" not in text or "kernel image" in text or "PTX" in text
        )
    return True


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Returns the context for a launch.

    Triton launches on the current device, and not on the device of the arguments.
    """
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def cdiv(number: int, divisor: int) -> int:
    """Returns `number / divisor`, rounded up."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`, because `tl.arange` needs one.

    `number` is at least 1.
    """
    return 1 << (number - 1).bit_length()


def split_rings(rings: Sequence[int]) -> tuple[int, tuple[int | None, ...]]:
    """Returns the longest of the buffers' rings, and for each buffer its ring if it is shorter, or `None`.

    A kernel is compiled again for other divisors of a number in a tuple, whatever its decorator says. So the longest
    ring, which differs from run to run, is an argument of its own. Shorter rings follow from a layer's window.
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
