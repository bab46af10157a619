"""Drafts with Gemma 4's, Laguna's and MiMo's layers inside `generate`: the plain text, in every engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from helpers.families import build
from helpers.half import half
from helpers.static import set_engine
from helpers.whole_blocks import use_whole_blocks
from tiny import oracle_draft, prompts, tiny_draft, tiny_target, truth_of

# DeepSpec's draft for Gemma 4 12B: all of its options.
DEEPSPEC: dict[str, Any] = {
    "layer_family": "gemma4",
    "keys_are_values": True,
    "num_key_value_heads": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_types": None,
    "is_causal": False,
    "rope_parameters": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
    "final_logit_softcapping": 30.0,
    "input_embedding_scale": 32**0.5,
    "own_embed_tokens": True,
    "own_lm_head": True,
    "sample_from_anchor": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "deepspec": DEEPSPEC,
    "dspark": {**DEEPSPEC, "markov_rank": 4},
    "own values, windows": {"layer_family": "gemma4"},
    "laguna": {
        "layer_family": "laguna",
        "layer_types": ["sliding_attention"] * 2,
        "is_causal": True,
    },
    "mimo": {
        "attention_sink_bias": True,
        "attention_value_scale": 0.612,
        "layer_types": ["sliding_attention"] * 2,
        "is_causal": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
}
NEW = 18


@cache
def target_of(family: str) -> PreTrainedModel:
    """A tiny Gemma 4, whose full layers have wider heads, or another family."""
    if family == "gemma4_text":
        return build(family, global_head_dim=16)
    return tiny_target(family)


@pytest.mark.parametrize(
    ("family", "variant", "engine"),
    half(["gemma4_text", "qwen3-sliding"], list(VARIANTS), ["eager", "static"]),
)
def test_greedy_equals_plain_generate(family: str, variant: str, engine: Any) -> None:
    target = target_of(family)
    for seed, lengths in enumerate(([9], [4, 11, 7])):
        inputs = prompts(lengths, seed)
        ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        draft = oracle_draft(target, truth_of(inputs, ref), seed, 6, **VARIANTS[variant])
        set_engine(draft, engine)
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref)
        assert draft.last_stats.engine == engine


@pytest.mark.parametrize("variant", VARIANTS)
def test_engines_and_chunks_propose_the_same(variant: str) -> None:
    target = target_of("gemma4_text")
    inputs = prompts([15, 33], 2)
    draft = tiny_draft(target, 6, **VARIANTS[variant])
    use_whole_blocks(draft)
    counts: list[list[int]] = []
    for engine, chunk in (("eager", None), ("static", None), ("eager", 7)):
        set_engine(draft, engine)
        target.generate(
            **inputs,
            max_new_tokens=NEW,
            do_sample=False,
            assistant_model=draft,
            prefill_chunk_size=chunk,
        )
        counts.append(draft.last_stats.num_committed)
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_trees_and_kept_caches_keep_the_text(variant: str) -> None:
    target = target_of("qwen3-sliding")
    inputs = prompts([9], 3)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 3, 6, **VARIANTS[variant])
    draft.generation_config.num_tree_nodes = 12
    cache = DynamicCache(config=target.config)
    settings: dict[str, Any] = {"do_sample": False, CACHE_NAME: cache}
    # A second call goes on from the first one's cache.
    for num in (NEW // 2, NEW - NEW // 2):
        ids = target.generate(**inputs, **settings, max_new_tokens=num, assistant_model=draft)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ids, ref)
    assert draft.last_stats.acceptance_length > 1


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("deepspec", "deepspec-gemma4"),
        ("dspark", "deepspec-gemma4"),
        ("laguna", "laguna"),
        ("mimo", "zlab"),
    ],
)
def test_a_saved_draft_proposes_the_same(variant: str, layout: Any, tmp_path: Path) -> None:
    target = target_of("gemma4_text")
    draft = tiny_draft(target, 6, **VARIANTS[variant])
    save_draft(draft, tmp_path, layout)
    again = load_draft(tmp_path, dtype=target.dtype)
    assert again.config.layer_family == draft.config.layer_family
    inputs = prompts([5, 8], 1)
    texts = [
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=one)
        for one in (draft, again)
    ]
    assert torch.equal(*texts)
    assert again.last_stats.num_committed == draft.last_stats.num_committed
