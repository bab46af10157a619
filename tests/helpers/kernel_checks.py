"""What the kernel tests share: where they run, memory that shows a wrong write, and how near is near enough."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="kernels run on a CPU in Triton's interpreter: make test-kernels",
    ),
)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [INTERPRETED, CUDA]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GUARD = 64


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated and not written holds NaN, or the greatest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class Guarded:
    """A contiguous tensor in the middle of a longer allocation; `whole` shows every write around it.

    Args:
        values (`torch.Tensor`): What the tensor holds at first.
    """

    def __init__(self, values: Tensor) -> None:
        self.whole = torch.full((values.numel() + 2 * GUARD,), 77, dtype=values.dtype, device=values.device)
        self.tensor = self.whole[GUARD : GUARD + values.numel()].view(values.shape)
        self.tensor.copy_(values)

    def copy(self) -> "Guarded":
        """Returns another allocation with the same values."""
        return Guarded(self.tensor)


def assert_same_writes(ours: dict[str, Guarded], wanted: dict[str, Guarded], tolerance: float = 0.0) -> None:
    """Both have written the same values to the same places, NaN where nothing was written, and nothing around."""
    for name, guarded in ours.items():
        torch.testing.assert_close(
            guarded.whole,
            wanted[name].whole,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check_raises(call: Callable[[], Any], *words: str) -> None:
    """A call is refused in a sentence that names these."""
    with pytest.raises(ValueError, match=r"^expected .*, got .*; ") as error:
        call()
    for word in words:
        assert word in str(error.value)
