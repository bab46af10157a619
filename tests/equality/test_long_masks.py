"""Attention masks that go on behind the prompt, as a caller makes them who allocates for the whole answer.

Plain `generate` looks keys up in the mask by column, and takes the prompt's positions from the mask's last columns:
everything is shifted by as much as the mask is longer. Rotary targets do not notice, those with a table do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dflash_hf import iterate
from dflash_hf.block.cache_name import CACHE_NAME
from helpers.families import build
from helpers.half import pairs
from helpers.static import set_engine, tensor_oracle
from tiny import prompts, shallow_target, truth_of

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def longer(mask: Tensor, num: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], num)], dim=1)


def target_of(family: str) -> PreTrainedModel:
    return build(family) if family in ("gpt2", "opt") else shallow_target(family)


@pytest.mark.parametrize(
    ("family", "lengths", "num", "engine"),
    pairs(
        ["qwen3", "qwen3-sliding", "gpt2", "opt"],
        [[9], [4, 9, 6]],
        [1, 12, 30],
        ["eager", "static"],
    ),
)
def test_ones_behind_the_prompt(family: str, lengths: list[int], num: int, engine: Any) -> None:
    target, inputs = target_of(family), prompts(lengths, 0)
    settings: dict[str, Any] = {
        **inputs,
        **GREEDY,
        "attention_mask": longer(inputs["attention_mask"], num),
    }
    ref = target.generate(**settings)
    if family == "gpt2":
        assert not torch.equal(ref, target.generate(**inputs, **GREEDY))
    draft = tensor_oracle(target, truth_of(inputs, ref), 0)
    set_engine(draft, engine)
    assert torch.equal(target.generate(**settings, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1.2


@pytest.mark.parametrize("value", [1, 2])  # Transformers drops a mask of ones on the way
@pytest.mark.parametrize("num", [0, 3])
def test_one_row_of_a_mask_may_stand_for_all(value: int, num: int) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([9, 9], 0)
    settings: dict[str, Any] = {
        **inputs,
        "attention_mask": torch.full((1, 9 + num), value),
        **GREEDY,
    }
    ref = target.generate(**settings)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0)
    assert torch.equal(target.generate(**settings, assistant_model=draft), ref)


@pytest.mark.parametrize("name", ["iterate", "chunks", "embeds", "cache"])
@pytest.mark.parametrize("family", ["qwen3-sliding", "gpt2"])
def test_other_ways(family: str, name: str) -> None:
    target, inputs = target_of(family), prompts([4, 9], 0)
    settings: dict[str, Any] = {
        **inputs,
        **GREEDY,
        "attention_mask": longer(inputs["attention_mask"], 5),
    }
    if name == "chunks":
        settings["prefill_chunk_size"] = 4
    if name == "embeds":
        settings["inputs_embeds"] = target.get_input_embeddings()(settings["input_ids"])
    ours = dict(settings)
    if name == "cache":
        settings[CACHE_NAME] = DynamicCache(config=target.config)
        ours[CACHE_NAME] = DynamicCache(config=target.config)
    ref = target.generate(**settings)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0)
    if name == "iterate":
        steps = list(iterate(target, draft, **ours))
        assert torch.equal(torch.cat([step.committed[0] for step in steps]), ref[0, 9:])
        return
    assert torch.equal(target.generate(**ours, assistant_model=draft), ref)
    if name == "cache":
        assert ours[CACHE_NAME].get_seq_length() == settings[CACHE_NAME].get_seq_length()


def test_masks_that_hide_tokens_to_come_are_refused() -> None:
    target, inputs = shallow_target("qwen3"), prompts([4, 9], 0)
    mask = longer(inputs["attention_mask"], 5)
    mask[1, 11] = 0
    draft = tensor_oracle(target, truth_of(inputs, inputs["input_ids"]), 0)
    with pytest.raises(
        ValueError, match="expected ones behind the 9 columns of the prompt in attention_mask"
    ):
        target.generate(inputs["input_ids"], attention_mask=mask, **GREEDY, assistant_model=draft)
