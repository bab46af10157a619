"""Which tokens may be drawn follows from the greatest logits alone: the same ones that Transformers' warpers leave."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.logits_process import TopPLogitsWarper

from dflash_hf.generation.draw import Draw
from dflash_hf.generation.sampling import (
    BlockProcessors,
    NoiseKey,
    choose,
    draw_from_logits,
)

VOCAB = 500
SEED = torch.tensor(7)


def processors_of(*warpers: Any) -> BlockProcessors:
    return BlockProcessors(LogitsProcessorList(warpers))


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_what_may_be_drawn_is_what_transformers_leaves(temperature: float, spread: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 6, VOCAB) * spread
    for top_k, top_p, min_p in itertools.product(
        [1, 5, 20, 64, VOCAB], [0.0, 0.3, 0.8, 0.95, 1.0], [0.0, 0.05, 0.5]
    ):
        warpers = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)]
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
        warpers += [MinPLogitsWarper(min_p)]
        processors = processors_of(*warpers)
        draw = processors.draw
        assert draw == Draw(temperature, top_k, top_p, min_p)
        left = processors.warp(logits) > -torch.inf
        values, tokens = draw.greatest(logits)
        assert torch.equal(draw.are_kept(values), left.gather(-1, tokens)), (top_k, top_p, min_p)
        least, first = draw.bounds(values, tokens)
        assert torch.equal(logits >= least[..., None], left), (top_k, top_p, min_p)
        assert (first is not None) == (top_p < 1.0)


def test_a_min_p_alone_looks_at_the_greatest_logit() -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, 3, VOCAB)
    processors = processors_of(TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.2))
    assert processors.draw == Draw(0.7, 0, 1.0, 0.2)
    left = processors.warp(logits) > -torch.inf
    assert bool(left.sum() > left[..., 0].numel())
    chosen = draw_from_logits(
        logits, processors, NoiseKey.of(SEED, 2), torch.arange(3).expand(2, -1)
    )
    assert bool(left.gather(-1, chosen[..., None]).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top_k", [3, 20, 70])
def test_the_choice_is_that_of_all_scores(top_k: int, dtype: torch.dtype) -> None:
    """In bfloat16 many logits equal the k-th, all of which may be drawn."""
    torch.manual_seed(5)
    logits, positions = torch.randn(5, 40, VOCAB).to(dtype), torch.arange(40).expand(5, -1)
    processors = processors_of(
        TemperatureLogitsWarper(0.9), TopKLogitsWarper(top_k), TopPLogitsWarper(0.9)
    )
    key = NoiseKey.of(SEED, len(logits))
    wanted = choose(processors.warp(logits), key, positions)
    assert torch.equal(draw_from_logits(logits, processors, key, positions), wanted)
    assert len(wanted.unique()) > 20


@pytest.mark.parametrize("min_p", [0.0, 0.5])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("top_k", [4, 10, 40])
def test_of_equal_logits_as_many_are_drawn_as_the_warpers_leave(
    top_k: int, top_p: float, min_p: float
) -> None:
    """A top-p ends among tokens of one logit, four of each. Which of them stay follows from how they are sorted."""
    torch.manual_seed(6)
    logits = torch.randperm(40) // 4 * 0.5
    logits, positions = logits.expand(1, 2000, -1), torch.arange(2000)[None]
    processors = processors_of(
        TemperatureLogitsWarper(1.5),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(top_p),
        MinPLogitsWarper(min_p),
    )
    left = processors.warp(logits[:, :1])[0, 0] > -torch.inf
    drawn = draw_from_logits(logits, processors, NoiseKey.of(SEED, 1), positions).unique()
    assert torch.equal(logits[0, 0, drawn].sort().values, logits[0, 0, left].sort().values)


def test_other_warpers_and_orders_are_applied_as_they_are() -> None:
    temperature, top_k, top_p = (
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(5),
        TopPLogitsWarper(0.9),
    )
    assert processors_of().draw == Draw()
    assert processors_of(top_k).draw == Draw(top_k=5)
    assert processors_of(temperature, top_p).draw is None, "looks at the whole vocabulary"
    assert processors_of(top_k, temperature).draw is None
    assert processors_of(top_p, top_k).draw is None
    assert processors_of(TopKLogitsWarper(5, filter_value=-1.0)).draw is None
    assert processors_of(top_k, TopPLogitsWarper(0.9, min_tokens_to_keep=2)).draw is None
    assert processors_of(top_k, TopKLogitsWarper(3)).draw is None
