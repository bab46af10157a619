"""Where a Triton kernel can run (on CUDA with Triton installed, or in Triton's interpreter), and sizes of launches."""

from __future__ import annotations

import functools
import importlib.util
import os
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


__all__ = ["DTYPES", "cdiv", "has_triton", "interprets", "on_device_of", "power_of_two", "runs_kernel"]
