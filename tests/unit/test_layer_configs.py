"""Sizes of a config's layers, where they are alike and where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, MambaConfig, Qwen3Config

from dflash_hf.checkpoints.fresh import fresh_config
from dflash_hf.layer_configs import attention_sizes, commonest, layer_config, layer_values
from helpers.families import build
from helpers.static import set_engine
from tiny import oracle_draft, prompts, truth_of

GEMMA4 = Gemma4TextConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    head_dim=8,
    global_head_dim=16,
    hidden_size_per_layer_input=0,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)


def test_equal_layers_have_the_sizes_of_the_whole_config() -> None:
    config = Qwen3Config(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    assert attention_sizes(config) == [(4, 2, 16), (4, 2, 16)]
    assert layer_values(config, "intermediate_size") == [config.intermediate_size] * 2
    assert layer_values(config, "attention_chunk_size") == [None, None]
    assert layer_config(config, 1) is config


def test_layers_that_differ_have_sizes_of_their_own() -> None:
    assert attention_sizes(GEMMA4) == [(4, 2, 8), (4, 2, 8), (4, 1, 16)]
    assert layer_values(GEMMA4, "head_dim") == [8, 8, 16]
    assert layer_values(GEMMA4, "num_hidden_layers") == [3, 3, 3]
    assert layer_config(GEMMA4, 2).head_dim == 16
    assert commonest(attention_sizes(GEMMA4)) == (4, 2, 8)


def test_a_config_without_heads_has_no_sizes() -> None:
    assert attention_sizes(MambaConfig(num_hidden_layers=2)) == []


def test_a_fresh_draft_has_the_heads_of_most_layers() -> None:
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(GEMMA4)
    fields = {
        "num_hidden_layers": 1,
        "block_size": 4,
        "mask_token_id": 7,
        "target_layer_ids": [0, 2],
    }
    found = fresh_config(target, fields)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (4, 2, 8)
    assert found.intermediate_size == 48


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_a_target_whose_layers_differ_gives_the_plain_text(engine: Any) -> None:
    target = build("gemma4_text", global_head_dim=16)
    assert len(set(attention_sizes(target.config))) == 2
    inputs = prompts([4, 9], 0)
    ref = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    set_engine(draft, engine)
    out = target.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert torch.equal(out, ref)
    assert draft.last_stats.engine == engine
