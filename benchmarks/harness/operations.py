"""The kernels' operations by name, and on which devices a kernel could not be had."""

from __future__ import annotations

from typing import Any

from dflash_hf import ops


def operations() -> dict[str, Any]:
    """Returns every operation that has a kernel, by name."""
    return {name: value for name, value in sorted(vars(ops).items()) if hasattr(value, "failures")}


def failures() -> dict[str, str]:
    """Returns, by operation and device, why a kernel was given up there and its definition runs instead."""
    return {
        f"{name} on {device}": why
        for name, operation in operations().items()
        for device, why in operation.failures.items()
    }
