"""`top_tokens`: kernel and definition against a sort and a log-softmax."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from dflash_kernels import top_tokens
from dflash_kernels._dispatch import runs_kernel
from dflash_kernels.top_tokens import BLOCK, MAX_NUM
from helpers.kernel_checks import CUDA, DEVICES, DTYPES, Guarded, check_raises, poisoned

NAN, INF = float("nan"), float("inf")
# A block of the kernel is 512 tokens, from 16 on 128, and a program of its first launch sees 4,096; the definition
# looks at 64 first.
SHAPES = [
    (1, 1),
    (2, 2),
    (5, 3),
    (64, 63),
    (128, 8),
    (129, 16),
    (512, 15),
    (513, 7),
    (4096, 3),
    (4100, 31),
    (9000, 9),
]


def some(vocab: int, rows: tuple[int, ...] = (2, 3, 1)) -> Tensor:
    """Scores in steps of a quarter: every great one stands in several places, also of different blocks."""
    return (
        torch.randn(*rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    ).round() / 4


def check(scores: Tensor, num: int, is_first: bool = True) -> None:
    """Both give what a stable sort and a log-softmax give; the definition may take equal ones in another order."""
    wide = scores.to(torch.float32)
    wanted = wide.sort(dim=-1, descending=True, stable=True).indices[..., :num]
    before, results = scores.clone(), [top_tokens.reference(scores, num)]
    if is_first:
        assert runs_kernel(scores)
        with poisoned():
            results.append(top_tokens(scores, num))
        assert torch.equal(results[1][1], wanted), (results[1][1], wanted)
    for log_probs, order in results:
        assert (log_probs.dtype, order.dtype) == (torch.float32, torch.int64)
        assert log_probs.shape == order.shape == wanted.shape
        assert log_probs.is_contiguous()
        assert order.is_contiguous()
        assert all(len(set(row)) == num for row in order.flatten(0, -2).tolist())
        expected = torch.log_softmax(wide, dim=-1).gather(-1, wanted)
        is_known = ~expected.isnan()
        assert torch.equal(wide.gather(-1, order)[is_known], wide.gather(-1, wanted)[is_known])
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "num"), SHAPES)
def test_equals_a_sort(vocab: int, num: int, dtype: torch.dtype, device: str) -> None:
    check(some(vocab).to(device, dtype), num)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "num"), [(1, 7), (1, 63), (32, 15)])
def test_equals_a_sort_at_real_sizes(batch: int, num: int, dtype: torch.dtype, device: str) -> None:
    check(torch.randn(batch, 15, 1, 151936, device=device).to(dtype), num)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("vocab", "num"), [(1536, 2), (1536, 3), (1536, 4), (4096, 7), (6400, 12), (49152, MAX_NUM)]
)
def test_the_definition_looks_at_the_best_blocks(vocab: int, num: int, dtype: torch.dtype) -> None:
    """And gives the same: the greatest all in one block, each in another, the last one's equal in many."""
    scores = some(vocab).to(dtype)
    check(scores, num, is_first=False)
    scores[0, 0, 0, BLOCK : BLOCK + num] = 50 + torch.arange(num, dtype=dtype)
    scores[0, 1, 0, :: vocab // num] = 60.0
    scores[1, 0] = 1.0
    scores[1, 1, :, 1:] = -INF
    scores[1, 2] = torch.arange(vocab)
    check(scores, num, is_first=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [6, 300])
def test_few_tokens_are_left(vocab: int, dtype: torch.dtype, device: str) -> None:
    scores = torch.full((1, 4, 1, vocab), -INF)
    scores[0, 0, 0, -1] = 3.0
    scores[0, 1, 0, [1, 4, vocab - 2]] = torch.tensor([-1e4, 2.0, 2.0])
    scores[0, 2, 0, :2] = torch.tensor([-0.0, 0.0])
    scores[0, 3, 0, 1:3] = torch.tensor([0.0, -0.0])
    check(scores.to(device, dtype), min(vocab, 20))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [NAN, INF, -INF], ids=str)
def test_a_row_without_log_probabilities_has_tokens_all_the_same(kind: float, device: str) -> None:
    """Its neighbours are as they would be without it."""
    scores = some(300)
    if kind == -INF:
        scores[:, 1] = kind
    else:
        scores[0, 1, 0, [3, 299]] = scores[1, 1, 0, 130] = kind
    scores = scores.to(device)
    check(scores, 9)
    log_probs, order = top_tokens(scores, 9)
    assert log_probs[:, 1].isnan().all()
    assert not log_probs[:, [0, 2]].isnan().any()
    assert order.min() >= 0
    assert order.max() < 300
    assert order[0, 1, 0, :2].tolist() == ([0, 1] if kind == -INF else [3, 299])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("states", [4, 16])
def test_a_selectors_states(states: int, device: str) -> None:
    check(some(states, (2, 2, states)).to(device), min(states, 15))


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    scores = some(700, (2, 4, 2)).to(device)
    for view in (
        scores[:, 1:],
        scores.transpose(1, 2),
        scores[..., 3::2],
        scores[:, ::2, 1:],
        scores[:, :, :1],
    ):
        check(view, 5)
    moved = scores.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert moved.stride(-1) != 1
    check(moved, 5)
    check(some(700, (1, 1, 1)).expand(3, 2, 2, -1).to(device), 5)
    assert [tensor.shape for tensor in top_tokens(scores[:, :0], 3)] == [(2, 0, 2, 3)] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_around_is_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the kernels get to write, results and scratch."""
    kernel = importlib.import_module("dflash_kernels.top_tokens.kernel")
    guarded = list[Guarded]()

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        guarded.append(Guarded(torch.zeros(*shape, dtype=dtype, device=device)))
        return guarded[-1].tensor

    monkeypatch.setattr(kernel.torch, "empty", empty)
    for vocab, num in ((3, 3), (129, 9), (4100, 5)):
        scores = some(vocab).to(device)
        scores[0, 0, 0, 1:] = NAN if num == 9 else -INF
        kernel.launch({"scores_BDSV": scores, "num": num})
    assert len(guarded) == 4 * 3
    for whole, tensor in ((one.whole, one.tensor) for one in guarded):
        around = torch.ones_like(whole, dtype=torch.bool)
        around[64 : 64 + tensor.numel()] = False
        assert torch.all(whole[around] == 77)


def test_what_no_kernel_covers_takes_the_definition() -> None:
    for scores in (some(40).double(), torch.zeros(1, 1, 1, (1 << 20) + 1)):
        log_probs, order = top_tokens(scores, 2)
        wanted = top_tokens.reference(scores, 2)
        assert torch.equal(log_probs, wanted[0])
        assert torch.equal(order, wanted[1])


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_with_a_true_schema(device: str) -> None:
    torch.library.opcheck(top_tokens.op, (torch.randn(1, 2, 1, 9, device=device), 3))


def test_bad_input() -> None:
    scores = torch.zeros(1, 2, 1, 70)
    check_raises(lambda: top_tokens(scores, 0), "num from 1 to 63", "got 0")
    check_raises(lambda: top_tokens(scores, 64), "num from 1 to 63", "got 64")
    check_raises(lambda: top_tokens(scores[..., :4], 5), "the 4 tokens", "got 5")
    check_raises(lambda: top_tokens(scores[0], 5), "scores_BDSV", "[2, 1, 70]")
