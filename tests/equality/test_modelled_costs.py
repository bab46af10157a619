"""Runs whose widths follow modelled costs, as a user has them on a CPU: the text of plain `generate`, each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf import DFlashDraftModel
from dflash_hf.generation import step_costs
from dflash_hf.generation.widths import _kept_choosers
from helpers.half import half
from tiny import FAMILIES, oracle_draft, prompts, shallow_target, tiny_draft, tiny_target, truth_of

SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}

pytestmark = [pytest.mark.usefixtures("users_costs"), pytest.mark.same_on_every_release]


@pytest.fixture
def large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of tiny models cost what they read, as those of real ones do, and their operations nothing."""
    monkeypatch.setattr(step_costs, "LAYER_OVERHEAD_BYTES", 0)


def widths_of(target: Any, draft: DFlashDraftModel, inputs: Any) -> tuple[Any, list[int]]:
    """Returns the text of a call, and the width of each of its verifies."""
    text = target.generate(**inputs, **SETTINGS, assistant_model=draft)
    return text, draft.last_stats.verify_widths


@pytest.mark.usefixtures("large_layers")
@pytest.mark.parametrize(
    ("family", "lengths"),
    half(list(FAMILIES), {"1": [9], "3": [4, 11, 7], "8": [5, 6, 3, 9, 4, 8, 7, 2]}),
)
def test_texts_are_plain_generates_and_widths_the_same(family: str, lengths: list[int]) -> None:
    target = shallow_target(family)
    inputs = prompts(lengths, seed=3)
    plain = target.generate(**inputs, **SETTINGS)
    found: list[list[int]] = []
    for _ in range(2):
        draft = oracle_draft(target, truth_of(inputs, plain), seed=3)
        text, widths = widths_of(target, draft, inputs)
        assert torch.equal(text, plain)
        assert draft not in _kept_choosers, "nothing that a call has seen decides in the next one"
        found.append(widths)
    assert found[0] == found[1]
    assert max(found[0]) > 1


@pytest.mark.parametrize("overhead", [0, step_costs.LAYER_OVERHEAD_BYTES])
def test_a_draft_that_is_never_right_is_hardly_asked(
    overhead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "LAYER_OVERHEAD_BYTES", overhead)
    target = tiny_target("qwen3")
    inputs = prompts([4, 11, 7], seed=4)
    draft = tiny_draft(target, 8)
    text, widths = widths_of(target, draft, inputs)
    assert torch.equal(text, target.generate(**inputs, **SETTINGS))
    assert widths.count(1) > 0.7 * len(widths)
    _, same_widths = widths_of(target, draft, inputs)
    assert same_widths == widths
