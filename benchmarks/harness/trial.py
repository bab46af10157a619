"""Where a script runs, and with what: published shapes on a GPU, doubles of them in a trial on a CPU (`--tiny`)."""

from __future__ import annotations

import torch
import typer

from .rates import copy_bandwidth


def device_of(name: str | None = None) -> torch.device:
    """Returns the device of a name; without one CUDA if there is any, and else the CPU."""
    if name is not None:
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def check_device(device: torch.device, is_tiny: bool) -> None:
    """Refuses published shapes on a CPU, where they would take hours and say nothing.

    Raises:
        typer.BadParameter: If the device is no GPU and this is no trial.
    """
    if not is_tiny and device.type != "cuda":
        raise typer.BadParameter(
            f"expected a CUDA device for the published shapes, got {device}; pass --tiny on a CPU"
        )


def dtype_of(is_tiny: bool) -> torch.dtype:
    """Returns the dtype of a script's models."""
    if is_tiny:
        return torch.float32
    return torch.bfloat16


def bandwidth_of(device: torch.device, is_tiny: bool) -> float:
    """Returns the bytes per second of a copy, of 1 GiB; in a trial of 64 KiB."""
    num_bytes = 2**30
    if is_tiny:
        num_bytes = 2**16
    return copy_bandwidth(device, num_bytes)
