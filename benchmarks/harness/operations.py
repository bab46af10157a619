"""The kernels' operations by name, and on which devices a kernel could not be had."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
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


@contextmanager
def no_stand_ins(what: str = "kernels that run") -> Generator[None]:
    """Makes it an error that a kernel is given up inside, for its definition would be measured in its place.

    The operation is as before then: its kernel is tried again. `what` says what was expected.

    Raises:
        RuntimeError: If a kernel was given up.
    """
    known = {name: dict(operation.failures) for name, operation in operations().items()}
    before = failures()
    try:
        yield
    finally:
        after = failures()
        for name, operation in operations().items():
            operation.failures.clear()
            operation.failures.update(known[name])
    new = {name: why for name, why in after.items() if name not in before}
    if new:
        raise RuntimeError(f"expected {what}, got {new}; compare without them")
