"""Modelled costs of steps: the same choices whatever the clock says, and none that costs more than it brings."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn

from dflash_hf.generation.choice_costs import CHAIN, KnownCosts
from dflash_hf.generation.step_costs import (
    FULL_PRECISION,
    HALF_PRECISION,
    HALF_PRECISION_BY_TILES,
    LAYER_OVERHEAD_BYTES,
    StepCosts,
    speed_of,
)
from dflash_hf.generation.widths import WidthChooser
from dflash_hf.target_model.parts import find_target
from tiny import tiny_draft, tiny_target

# SmolLM2-135M-Instruct with its draft of three layers, in bfloat16.
SMOLLM2 = StepCosts(
    target=134_514_432,
    target_layers=30,
    draft=10_620_672,
    draft_layers=3,
    head=28_311_552,
    block_size=8,
    num_proposals=7,
)


def play(rows: int, share: float, seed: int, steps: int = 60) -> tuple[list[int], float, float]:
    """Returns the choices of a run on a clock that lies, its tokens per row, and its cost in plain steps."""
    chooser = WidthChooser(KnownCosts(SMOLLM2, 8))
    chooser.use_rows(rows)
    texts = random.Random(1)
    clock = random.Random(seed)
    choices: list[int] = []
    seconds = 0.0
    cost = 0.0
    tokens = 0.0
    for _ in range(steps):
        width, _ = chooser.next_choice()
        choices.append(width)
        accepted = []
        for _ in range(rows):
            num = 0
            while num < width - 1 and texts.random() < share:
                num += 1
            accepted.append(num)
        seconds += clock.random()
        chooser.learn(width, accepted, seconds)
        cost += SMOLLM2.of_step(width, rows) / SMOLLM2.of_step(1, rows)
        tokens += 1 + sum(accepted) / rows
    return choices, tokens, cost


def test_a_speed_follows_the_machine_and_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_tiles, dtype, expected in (
        (True, torch.bfloat16, HALF_PRECISION_BY_TILES),
        (True, torch.float16, HALF_PRECISION),
        (True, torch.float32, FULL_PRECISION),
        (False, torch.bfloat16, HALF_PRECISION),
        (False, torch.float64, FULL_PRECISION),
    ):
        answer = functools.partial(bool, has_tiles)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", answer, raising=False)
        assert speed_of(dtype) == expected
        target = tiny_target("llama").to(dtype)
        costs = StepCosts.of(find_target(target), tiny_draft(target, 8), 8)
        assert costs.speed == expected
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert speed_of(torch.bfloat16) == HALF_PRECISION


def test_few_tokens_cost_what_reading_the_weights_does() -> None:
    plain = SMOLLM2.of_step(1, rows=1)
    overhead = 30 * SMOLLM2.layer_overhead
    assert plain == overhead + SMOLLM2.target
    assert SMOLLM2.of_step(1, rows=6) == plain
    # Further ones take the time of one more reading, ten at a time.
    assert SMOLLM2.of_step(1, rows=6 + 10) == overhead + 2 * SMOLLM2.target
    assert SMOLLM2.of_step(1, rows=6 + 20) == overhead + 3 * SMOLLM2.target


def test_small_layers_cost_what_their_operations_do() -> None:
    """The bundled pair's steps of 8 rows over plain ones, as measured on an AMD EPYC (docs/log.md)."""
    bundled = StepCosts(
        target=5_018_880,
        target_layers=12,
        draft=1_180_992,
        draft_layers=3,
        head=294_912,
        block_size=16,
        num_proposals=15,
        speed=FULL_PRECISION,
        layer_overhead=LAYER_OVERHEAD_BYTES / 4,
    )
    plain = bundled.of_step(1, rows=8)
    for width, measured in ((2, 1.93), (8, 2.58), (16, 3.48)):
        assert 0.8 < bundled.of_step(width, rows=8) / plain / measured < 1.25


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("share", [0.2, 0.7])
def test_the_clock_chooses_nothing(rows: int, share: float) -> None:
    assert play(rows, share, seed=0) == play(rows, share, seed=1)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_a_run_costs_hardly_more_than_plain_decoding(rows: int, share: float) -> None:
    _, tokens, cost = play(rows, share, seed=0, steps=150)
    assert tokens > 0.96 * cost


def test_a_chain_costs_less_than_a_tree_of_as_many_tokens_by_what_building_it_takes() -> None:
    known = KnownCosts(SMOLLM2, 16, chain=8)
    known.use_rows(3)
    costs = known.of_choices()
    assert costs[CHAIN] == costs[8] - SMOLLM2.layer_overhead
    assert costs[CHAIN] > 0.98 * costs[8]


def test_weights_are_those_of_layers_and_heads() -> None:
    model = tiny_target("qwen3")
    draft = tiny_draft(model, 6)
    target = find_target(model)
    costs = StepCosts.of(target, draft, 6)
    head = sum(weight.numel() for weight in target.head.parameters())
    layers = sum(weight.numel() for layer in target.layers for weight in layer.parameters())
    assert costs.target == layers + head
    assert costs.head == head


def test_weights_in_buffers_count_as_linear_layers_do() -> None:
    class Packed(nn.Module):
        """A linear layer whose weights are packed into a buffer, as quantised ones are."""

        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.in_features = layer.in_features
            self.out_features = layer.out_features
            self.register_buffer("qweight", layer.weight.detach().to(torch.int8))

    model = tiny_target("qwen3")
    draft = tiny_draft(model, 6)
    target = find_target(model)
    whole = StepCosts.of(target, draft, 6)
    for layer in target.layers:
        for name, part in list(layer.named_modules()):
            if isinstance(part, nn.Linear):
                layer.set_submodule(name, Packed(part))
    assert StepCosts.of(find_target(model), draft, 6) == whole


def test_a_model_without_weights_costs_something() -> None:
    costs = StepCosts(
        target=1, target_layers=1, draft=1, draft_layers=1, head=1, block_size=4, num_proposals=3
    )
    assert costs.of_step(1, 1) > 0


def test_every_slot_of_a_markov_head_reads_it_anew() -> None:
    target = tiny_target("qwen3")
    found = find_target(target)
    plain = StepCosts.of(found, tiny_draft(target, 8), 8)
    dspark = StepCosts.of(found, tiny_draft(target, 8, markov_rank=4), 8)
    assert dspark.markov == 64 * 4
    assert dspark.of_step(1, 20) == plain.of_step(1, 20)
    # Its 256 weights, for 20 rows, at each slot; the products of so many tokens take longer than one reading.
    once = dspark.of_step(2, 20) - plain.of_step(2, 20)
    assert once > 64 * 4
    assert dspark.of_step(4, 20) - plain.of_step(4, 20) == pytest.approx(3 * once)
