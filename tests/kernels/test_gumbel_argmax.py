"""`gumbel_argmax`: the kernel draws what its definition draws, and the definition what `choose` draws from scores."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_hf import ops
from dflash_hf.generation.draw import Draw
from dflash_hf.generation.sampling import (
    BlockProcessors,
    NoiseKey,
    choose,
    draw_from_logits,
)
from dflash_kernels import gumbel_argmax
from dflash_kernels._dispatch import runs_kernel
from dflash_kernels.gumbel_argmax import exponential_noise
from helpers.half import pairs
from helpers.kernel_checks import CUDA, DEVICES, DTYPES, check_raises, poisoned

INF = float("inf")


def inputs(
    rows: int, columns: int, vocab: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that tie often, a seed and positions."""
    random = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, columns, vocab, generator=random) * 8).round() / 4
    positions = torch.randint(0, 2**20, (rows, columns), generator=random)
    seed = torch.randint(-(2**62), 2**62, (), generator=random)
    return logits.to(device, dtype), seed.to(device), positions.to(device)


def check(
    logits: Tensor,
    seed: Tensor,
    positions: Tensor,
    least: Tensor | None,
    temperature: float,
    stream: int,
    first: Tensor | None = None,
) -> None:
    """The kernel chooses the definition's token, or one that is as good to the last digits."""
    assert runs_kernel(logits)
    arguments = (logits, seed, positions, least, temperature, stream, None, first)
    with poisoned():
        out = gumbel_argmax(*arguments)
    wanted = gumbel_argmax.reference(*arguments)
    assert out.shape == wanted.shape == positions.shape
    assert out.dtype == torch.int64
    scores = logits.float() / temperature
    if least is not None:
        scores = scores.masked_fill(scores < (least / temperature)[..., None], -INF)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    if first is not None:
        is_tied = logits.float() == least[..., None]
        scores = scores.masked_fill(is_tied & (tokens < first[..., None]), -INF)
    scores = scores - torch.log(exponential_noise(seed, positions, tokens, stream))
    ours, theirs = (scores.gather(-1, chosen[..., None]) for chosen in (out, wanted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 2047, 2048, 2049, 5000])
def test_kernel_draws_what_the_definition_draws(size: int, dtype: torch.dtype, device: str) -> None:
    logits, seed, positions = inputs(3, 2, size, dtype, device)
    check(logits, seed, positions, None, 1.0, 0)
    least = logits.topk(min(5, size)).values[..., -1].float()
    check(logits, seed, positions, least, 0.7, 3)
    first = torch.randint(0, size, positions.shape, device=device)
    check(logits, seed, positions, logits.amax(-1).float(), 0.7, 0, first)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_draws_what_the_definition_draws_at_real_sizes(
    dtype: torch.dtype, device: str
) -> None:
    check(*inputs(8, 16, 151936, dtype, device), None, 0.6, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    logits, seed, positions = inputs(4, 6, 40, torch.float32, device)
    check(logits[:, 1:], seed, positions[:, 1:], None, 1.0, 0)
    check(logits.transpose(0, 1), seed, positions.T, None, 1.0, 0)
    check(logits[..., 3::2], seed, positions, torch.zeros(4, 6, device=device), 1.0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_forbidden_tokens_are_never_drawn(device: str) -> None:
    logits, seed, positions = inputs(6, 8, 300, torch.float32, device)
    logits[..., 1:] = -INF
    assert not bool(gumbel_argmax(logits, seed, positions).any())
    logits, seed, positions = inputs(6, 8, 300, torch.float32, device)
    least = logits.topk(4).values[..., -1]
    drawn = logits.gather(-1, gumbel_argmax(logits, seed, positions, least, 2.0)[..., None])[..., 0]
    assert bool((drawn >= least).all())


@pytest.mark.parametrize("device", DEVICES)
def test_small_noise_keeps_its_digits(device: str) -> None:
    """The winner of a draw among many equal tokens has the smallest noise: where 1 - u has lost its digits."""
    logits = torch.zeros(2, 2, 70_000, device=device)
    _, seed, positions = inputs(2, 2, 4, torch.float32, device)
    assert torch.equal(
        gumbel_argmax(logits, seed, positions), gumbel_argmax.reference(logits, seed, positions)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("min_p", [None, 0.1])
@pytest.mark.parametrize("top_p", [None, 0.5, 0.95])
@pytest.mark.parametrize("top_k", [None, 1, 7, 20, 10_000])
def test_it_is_the_choice_from_processed_scores(
    top_k: int | None, top_p: float | None, min_p: float | None, device: str
) -> None:
    _, seed, positions = inputs(2, 3, 900, torch.float32, device)
    # No two are alike: which of equal ones a top-p leaves follows from how they are sorted.
    logits = torch.randn(2, 3, 900, generator=torch.Generator().manual_seed(1)).to(device) * 2
    filters = [(TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p), (MinPLogitsWarper, min_p)]
    warpers: list[Any] = [kind(value) for kind, value in filters if value is not None]
    processors = BlockProcessors(LogitsProcessorList([TemperatureLogitsWarper(0.8), *warpers]))
    is_known = top_p is None or top_k is not None
    assert processors.draw == (
        Draw(0.8, top_k or 0, top_p or 1.0, min_p or 0.0) if is_known else None
    )
    key = NoiseKey.of(seed, len(logits))
    with ops.kernels(True):
        found = draw_from_logits(logits, processors, key, positions)
    assert torch.equal(found, choose(processors.warp(logits), key, positions))
    with ops.kernels(False):
        assert torch.equal(found, draw_from_logits(logits, processors, key, positions))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("top_k", "top_p", "dtype"),
    pairs([4, 10, 80], [0.0, 0.3, 0.6, 0.9], {str(dtype): dtype for dtype in DTYPES}),
)
def test_of_equal_logits_it_draws_what_a_stable_sort_leaves(
    top_k: int, top_p: float, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
    _, seed, positions = inputs(2, 16, 100, dtype, device)
    # Four are alike each.
    order = torch.rand(2, 16, 100, generator=torch.Generator().manual_seed(1)).argsort(dim=-1)
    logits = (order // 4 * 0.25).to(device, dtype)
    warpers: list[Any] = [TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(0.01)]
    processors = BlockProcessors(LogitsProcessorList([TemperatureLogitsWarper(1.5), *warpers]))
    key = NoiseKey.of(seed, len(logits))
    with ops.kernels(True):
        found = draw_from_logits(logits, processors, key, positions)
    assert torch.equal(found, choose(processors.warp(logits), key, positions))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_draw_by_their_numbers_wherever_they_stand(device: str) -> None:
    logits, seed, positions = inputs(4, 3, 3000, torch.float32, device)
    numbers = torch.arange(4, device=device)
    wanted = gumbel_argmax(logits, seed, positions)
    assert torch.equal(gumbel_argmax(logits, seed, positions, rows_B=numbers), wanted)
    kept = [3, 1]
    moved = gumbel_argmax(logits[kept], seed, positions[kept], rows_B=numbers[kept])
    assert torch.equal(moved, wanted[kept])
    assert not torch.equal(gumbel_argmax(logits[kept], seed, positions[kept]), wanted[kept])


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_with_a_true_schema(device: str) -> None:
    logits, seed, positions = inputs(2, 3, 9, torch.float32, device)
    least = torch.zeros(2, 3, device=device)
    for bounds in ((None, None), (least, None), (least, torch.zeros_like(positions))):
        arguments = (logits, seed, positions, bounds[0], 0.5, 1, None, bounds[1])
        torch.library.opcheck(gumbel_argmax.op, arguments)


def test_bad_input() -> None:
    logits, seed, positions = inputs(2, 3, 9, torch.float32, "cpu")
    check_raises(lambda: gumbel_argmax(logits, seed, positions[:, :2]), "positions_BK", "[2, 3]")
    check_raises(lambda: gumbel_argmax(logits[..., :0], seed, positions), "vocabulary", "got 0")
    check_raises(lambda: gumbel_argmax(logits, seed, positions, None, 0.0), "temperature", "0.0")
    check_raises(lambda: gumbel_argmax(logits, seed, positions.int()), "positions_BK", "int32")
    check_raises(lambda: gumbel_argmax(logits, seed, positions, first_BK=positions), "least_BK")
