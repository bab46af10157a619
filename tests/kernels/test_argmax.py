"""`argmax`: the kernel gives what `torch.argmax` gives, ties, NaN, infinities and signed zeros included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_kernels import argmax
from dflash_kernels._dispatch import runs_kernel
from helpers.kernel_checks import (
    CUDA,
    DEVICES,
    DTYPES,
    INTERPRETED,
    check_apart,
    check_raises,
    poisoned,
)

NAN, INF = float("nan"), float("inf")


def check(logits: Tensor) -> None:
    """The kernel equals torch, from poisoned memory."""
    assert runs_kernel(logits)
    with poisoned():
        out = argmax(logits)
    assert out.dtype == torch.int64
    assert torch.equal(out, logits.argmax(dim=-1)), (out, logits.argmax(dim=-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, 9000])
def test_equals_torch(size: int, dtype: torch.dtype, device: str) -> None:
    # In 16 bits, and in steps of a quarter, the greatest value stands in many places: also in several chunks.
    logits = (
        torch.randn(2, 2, size, generator=torch.Generator().manual_seed(size)) * 4
    ).round() / 4
    check(logits.to(device, dtype))


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 15, 480])
def test_equals_torch_at_real_sizes(rows: int, dtype: torch.dtype, device: str) -> None:
    check(torch.randn(rows, 151936, device=device).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "row",
    [
        [1.0, 3.0, 3.0, 2.0],
        [-1.0, -3.0, -1.0],
        [-0.0, 0.0, -1.0],
        [0.0, -0.0],
        [-INF, -INF, -INF],
        [-INF, -5.0],
        [INF, 1.0, INF],
        [1.0, NAN, INF, NAN],
        [NAN, NAN],
        [INF, -NAN],
        [-1e-30, -2e-30],
    ],
    ids=str,
)
def test_special_values(row: list[float], dtype: torch.dtype, device: str) -> None:
    """As in torch: the first of equal values, -0 equal to 0, the first NaN above everything."""
    check(torch.tensor([row], dtype=dtype, device=device))
    # The same in the second chunk, behind values that never win against them (they may tie: then these are first).
    check(
        torch.cat(
            [torch.full((1, 4096), -INF, dtype=dtype), torch.tensor([row], dtype=dtype)], dim=1
        ).to(device)
    )


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(rows=st.lists(st.lists(st.floats(width=32), min_size=5, max_size=5), min_size=1, max_size=3))
def test_any_floats(device: str, rows: list[list[float]]) -> None:
    check(torch.tensor(rows, dtype=torch.float32, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_any_shape_and_strides(device: str) -> None:
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0)).to(device)
    for view in (
        logits[:, 1:],
        logits.transpose(0, 1),
        logits[..., 3::2],
        logits[0],
        logits[0, 0],
        logits[None],
    ):
        check(view)
    check(logits[:, :0])


def test_other_dtypes_take_the_reference() -> None:
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert not runs_kernel(logits)
    assert torch.equal(argmax(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_with_a_true_schema(device: str) -> None:
    torch.library.opcheck(argmax.op, (torch.randn(1, 2, 9, device=device),))


def test_bad_input() -> None:
    check_raises(lambda: argmax(torch.zeros(3, 0)), "(3, 0)")


@pytest.mark.parametrize("device", [INTERPRETED])
def test_tokens_may_lie_more_than_2_to_the_30_apart(device: str) -> None:
    def check() -> None:
        # 4.3 GB of addresses, of which hardly any are written and so take memory.
        logits = torch.empty_strided((2, 3), (1, 2**30 + 16), dtype=torch.float16)
        logits.copy_(torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, -1.0]]))
        assert argmax(logits).tolist() == [2, 1]

    check_apart(check)
