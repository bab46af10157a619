"""`linears` and `gated_linear`: against float64 within a few units in the last place, and what they leave to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from dflash_kernels import gated_linear, linears
from dflash_kernels.linears import MAX_ROWS
from helpers.kernel_checks import CUDA, DEVICES, DTYPES, PRODUCTS, Calls, check_raises, poisoned

pytestmark = pytest.mark.usefixtures("rounding")
# Rows, K, and the columns of each product: of a tile, one more and one less; ragged in all; a single number.
SHAPES = [
    (1, 64, (32,)),
    (16, 128, (64, 32, 32)),
    (5, 100, (40, 7, 33)),
    (17, 257, (31, 65)),
    (32, 129, (1,)),
    (3, 1, (5, 5)),
]
REAL = [
    (16, 4096, (4096, 1024, 1024)),
    (32, 4096, (12288, 12288)),
    (16, 12288, (4096,)),
]
# A sum in float32 is off by less than this many of its units, of the sum of all magnitudes.
UNITS = 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, PRODUCTS)


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Random numbers, the same for each device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_near(ours: Tensor, wanted: Tensor, magnitude: Tensor) -> None:
    """Rounded once to the result's own dtype, and off by some units of float32 of what was summed."""
    rounding = 0.51 * torch.finfo(ours.dtype).eps
    bound = rounding * wanted.abs() + UNITS * torch.finfo(torch.float32).eps * magnitude
    error = (ours.double() - wanted).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.2f} times the bound"
    assert ours.is_contiguous()


def check(rows: int, inner: int, columns: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Products with and without biases, of poisoned memory; with a residual and gated, where there are as many."""
    states = normal(rows, inner, dtype=dtype, device=device)
    weights = [
        normal(num, inner, dtype=dtype, device=device, seed=seed) / inner**0.5
        for seed, num in enumerate(columns, 1)
    ]
    biases = [normal(num, dtype=dtype, device=device, seed=num) for num in columns]
    with poisoned():
        plain = linears(states, weights, [], None)
        biased = linears(states, weights, biases, None)
    for index, weight in enumerate(weights):
        wanted = states.double() @ weight.double().T
        magnitude = states.double().abs() @ weight.double().abs().T
        bias = biases[index].double()
        assert_near(plain[index], wanted, magnitude)
        assert_near(biased[index], wanted + bias, magnitude + bias.abs())
    residual = normal(rows, columns[0], dtype=dtype, device=device, seed=9)
    with poisoned():
        [added] = linears(states, weights[:1], [], residual)
    # The product is rounded before the sum, as torch rounds.
    assert torch.equal(added, residual + plain[0])
    if len(columns) == 2 and columns[0] == columns[1]:
        with poisoned():
            gated = gated_linear(states, *weights)
        gate, up = plain
        wanted = silu(gate.double()).to(dtype).double() * up.double()
        # The exponential function may be another one's neighbour, and the activation too.
        tolerance = 1.6 * torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(gated.double(), wanted, rtol=tolerance, atol=1e-7)
        assert gated.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES, ids=str)
def test_products_are_near_those_of_float64(
    rows: int, inner: int, columns: tuple[int, ...], dtype: torch.dtype, device: str, calls: Calls
) -> None:
    check(rows, inner, columns, dtype, device)
    assert not calls.references


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner", "columns"), REAL, ids=str)
def test_products_of_real_sizes_are_near_those_of_float64(
    rows: int, inner: int, columns: tuple[int, ...], dtype: torch.dtype, device: str, calls: Calls
) -> None:
    check(rows, inner, columns, dtype, device)
    assert not calls.references


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernels_do_not_cover_torch_computes(device: str, calls: Calls) -> None:
    states = normal(2, 3, 20, dtype=torch.float32, device=device)
    weight = normal(20, 8, dtype=torch.float32, device=device, seed=1).T
    many = normal(MAX_ROWS + 1, 20, dtype=torch.float32, device=device)
    wide: list[Any] = [(states, weight), (many, weight.contiguous()), (states[:0], weight)]
    wide.append((states.double(), weight.double()))
    for given, matrix in wide:
        [out] = linears(given, [matrix], [], None)
        assert torch.equal(out, torch.nn.functional.linear(given, matrix))
        gated = gated_linear(given, matrix, matrix)
        assert torch.equal(gated, gated_linear.reference(given, matrix, matrix))
    residual = normal(2, 8, 3, dtype=torch.float32, device=device).mT
    linears(states, [weight.contiguous()], [], residual)
    assert not calls.kernels
    # States of other strides are copied.
    turned = normal(20, 3, dtype=torch.float32, device=device).T
    [out] = linears(turned, [weight.contiguous()], [], None)
    torch.testing.assert_close(out, turned @ weight.T)
    assert calls.kernels["linears"] == 1


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_each_with_a_true_schema(device: str) -> None:
    states, weight = torch.randn(2, 3, 8, device=device), torch.randn(5, 8, device=device)
    bias, residual = torch.randn(5, device=device), torch.randn(2, 3, 5, device=device)
    torch.library.opcheck(linears.op, (states, [weight, weight + 1], [bias, bias], None))
    torch.library.opcheck(linears.op, (states, [weight], [], residual))
    torch.library.opcheck(gated_linear.op, (states, weight, weight + 1))


def test_bad_input() -> None:
    states, weight = torch.ones(2, 6), torch.ones(5, 6)
    check_raises(lambda: linears(states, [], [], None), "1 to 3")
    check_raises(lambda: linears(states, [weight] * 4, [], None), "got 4")
    check_raises(lambda: linears(states, [weight.T], [], None), "[N, 6]", "[6, 5]")
    check_raises(lambda: linears(states, [weight.half()], [], None), "float16")
    check_raises(lambda: linears(states, [weight], [torch.ones(4)], None), "[[5]]", "[[4]]")
    check_raises(lambda: linears(states, [weight] * 2, [torch.ones(5)], None), "[[5], [5]]")
    check_raises(lambda: linears(states, [weight], [torch.ones(5).half()], None), "biases")
    check_raises(lambda: linears(states, [weight], [], states), "[2, 5]", "[2, 6]")
    check_raises(lambda: linears(states, [weight] * 2, [], torch.ones(2, 5)), "beside 2")
    residual = torch.ones(2, 5).half()
    check_raises(lambda: linears(states, [weight], [], residual), "residual", "float16")
    check_raises(lambda: gated_linear(states, weight, weight[:4]), "[5, 6]", "[4, 6]")
    check_raises(lambda: gated_linear(states, weight.T, weight.T), "[N, 6]")
