"""`rms_norm`, `add_norm` and `silu_mul`: against Transformers' own modules, and the kernels against their references.

On a CPU in 16 bits bit for bit, but for an exponential that is another one's neighbour. A GPU sums in another order
and has a `rsqrt` and an `exp` of its own, there within four units in the last place.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dflash_kernels import add_norm, rms_norm, silu_mul
from dflash_kernels._dispatch import runs_kernel
from helpers.kernel_checks import CUDA, DEVICES, DTYPES, check_raises, poisoned

EPS = 1e-6
pytestmark = pytest.mark.usefixtures("rounding")
# A tile, one more, one less; rows that are one number; the widths of real heads and models.
SHAPES = [(3, 4, 64), (2, 65), (7, 127), (5, 1), (1, 1, 128), (2, 3, 1000)]
REAL = [(1, 16, 4096), (32, 16, 4096), (1, 16, 12288), (512, 151), (1, 16, 32, 128)]


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Random numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(*shape, generator=generator) * torch.exp(
        2 * torch.randn(*shape[:-1], 1, generator=generator)
    )
    return states.to(device, dtype)


def assert_close(ours: Tensor, wanted: Tensor, num_wrong: float = 0) -> None:
    """Equal on a CPU in 16 bits, but for so many that may be the number beside it; else within four of them."""
    assert ours.is_contiguous()
    if ours.is_cuda or ours.dtype == torch.float32:
        tolerance = 4 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        return
    differs = ~((ours == wanted) | (ours.isnan() & wanted.isnan()))
    assert int(differs.sum()) <= num_wrong
    torch.testing.assert_close(
        ours, wanted, rtol=torch.finfo(ours.dtype).eps, atol=0, equal_nan=True
    )


def check(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """All three, from poisoned memory."""
    first, second = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = normal(shape[-1], dtype=dtype, device=device, seed=3)
    assert runs_kernel(first)
    with poisoned():
        results = (
            rms_norm(first, weight, EPS),
            add_norm(first, second, weight, EPS),
            silu_mul(first, second),
        )
    assert_close(results[0], rms_norm.reference(first, weight, EPS))
    assert_close(results[1], add_norm.reference(first, second, weight, EPS))
    assert_close(results[2], silu_mul.reference(first, second), first.numel() / 500)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_what_the_references_compute(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    check(shape, dtype, device)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_kernels_equal_the_references_at_real_sizes(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    check(shape, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    first, second = (
        normal(6, 3, 10, dtype=torch.float32, device=device, seed=seed).mT for seed in (1, 2)
    )
    weight = normal(6, dtype=torch.float32, device=device)[::2]
    assert_close(rms_norm(first, weight, EPS), rms_norm.reference(first, weight, EPS))
    assert_close(
        add_norm(first, second, weight, EPS), add_norm.reference(first, second, weight, EPS)
    )
    assert_close(
        silu_mul(first, second[:1].expand_as(second)), silu_mul.reference(first, second[:1])
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_special_values(device: str) -> None:
    gate = torch.tensor(
        [0.0, -0.0, 100.0, -100.0, 3e38, -3e38, torch.inf, torch.nan], device=device
    )
    assert_close(silu_mul(gate, gate.sign() + 2), silu_mul.reference(gate, gate.sign() + 2))
    zeros, weight = torch.zeros(2, 5, device=device), torch.ones(5, device=device)
    assert torch.equal(rms_norm(zeros, weight, EPS), zeros)
    nothing = zeros[:0]
    assert rms_norm(nothing, weight, EPS).shape == (0, 5)
    assert add_norm(nothing, nothing, weight, EPS).shape == (2, 0, 5)
    assert silu_mul(nothing, nothing).shape == (0, 5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
def test_references_are_the_modules_of_transformers(kind: Any, dtype: torch.dtype) -> None:
    module = kind(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    first, second = (normal(3, 5, 48, dtype=dtype, device="cpu", seed=seed) for seed in (1, 2))
    assert torch.equal(rms_norm.reference(first, module.weight, 1e-5), module(first))
    total, normed = add_norm.reference(first, second, module.weight, 1e-5)
    assert torch.equal(total, first + second)
    assert torch.equal(normed, module(first + second))


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_each_with_a_true_schema(device: str) -> None:
    first, weight = torch.randn(2, 3, 8, device=device), torch.randn(8, device=device)
    torch.library.opcheck(rms_norm.op, (first, weight, EPS))
    torch.library.opcheck(add_norm.op, (first, first + 1, weight, EPS))
    torch.library.opcheck(silu_mul.op, (first, first + 1))


def test_bad_input() -> None:
    states, weight = torch.ones(2, 6), torch.ones(6)
    check_raises(lambda: rms_norm(states[:, :5], weight, EPS), "[2, 5]", "6")
    check_raises(lambda: rms_norm(states, weight.half(), EPS), "weight_D", "float16")
    check_raises(lambda: add_norm(states, states[:1], weight, EPS), "[1, 6]")
    check_raises(lambda: add_norm(states, states.half(), weight, EPS), "update", "float16")
    check_raises(lambda: silu_mul(states, states[:1]), "[1, 6]")
    check_raises(lambda: silu_mul(states, states.half()), "up", "float16")
