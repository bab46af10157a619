"""Drafts with Laguna's layers compute what their definition says, which is written down here once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from helpers.activations import relative_error
from helpers.published_configs import CONFIGS, tiny
from helpers.published_drafts import inputs_of, write

LAGUNA = CONFIGS["poolside/Laguna-S-2.1-DFlash"]
HEADS, GROUPS, SIZE, WINDOW = 4, 2, 8, 5


def turned(states: Tensor, theta: float) -> Tensor:
    """RoPE over `[tokens, heads, E]` at positions 0, 1, ..."""
    angles = torch.arange(len(states))[:, None] / theta ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def states_of(weights: dict[str, Tensor], block: Tensor, taps: Tensor, num_layers: int) -> Tensor:
    """The block's states `[K, D]` behind the context's tapped states `[C, taps * D]`, from stored weights."""

    def norm(name: str, states: Tensor) -> Tensor:
        return rms_norm(states, states.shape[-1:], weights[f"{name}.weight"], 1e-6)

    width = block.shape[1]
    parts = taps.split(width, -1)
    normed = [norm(f"aux_hidden_norms.{i}", part) for i, part in enumerate(parts)]
    context = norm("hidden_norm", torch.cat(normed, -1) @ weights["fc.weight"].T)
    num_context = len(context)
    queries_at = torch.arange(num_context, num_context + len(block))[:, None]
    distance = queries_at - torch.arange(num_context + len(block))
    is_seen = (distance >= 0) & (distance < WINDOW)
    for index in range(num_layers):
        at = f"layers.{index}"
        own = norm(f"{at}.input_layernorm", block)
        both = torch.cat([norm(f"{at}.input_layernorm", context), own])
        rows = [HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE]
        query, key, value = weights[f"{at}.self_attn.qkv_proj.weight"].split(rows)
        q, k, v = ((both @ weight.T).view(len(both), -1, SIZE) for weight in (query, key, value))
        q = turned(norm(f"{at}.self_attn.q_norm", q), 500000.0)[num_context:]
        k = turned(norm(f"{at}.self_attn.k_norm", k), 500000.0)
        k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) * SIZE**-0.5
        scores = scores.masked_fill(~is_seen, -torch.inf)
        heads = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v)
        gate = softplus(own @ weights[f"{at}.self_attn.g_proj.weight"].T)
        heads = (heads * gate[..., None]).flatten(1)
        block = block + heads @ weights[f"{at}.self_attn.o_proj.weight"].T
        own = norm(f"{at}.post_attention_layernorm", block)
        gated = silu(own @ weights[f"{at}.mlp.gate_proj.weight"].T)
        inner = gated * (own @ weights[f"{at}.mlp.up_proj.weight"].T)
        block = block + inner @ weights[f"{at}.mlp.down_proj.weight"].T
    return norm("norm", block)


def write_draft(folder: Path) -> DFlashDraftModel:
    """Writes a tiny draft after the published config, with norms that are far from one."""
    draft = write(folder, LAGUNA)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    config = (folder / "config.json").read_text()
    save_draft(draft, folder, "laguna")
    (folder / "config.json").write_text(config)
    return draft


@torch.no_grad()
def test_a_block_is_what_the_definition_says(tmp_path: Path) -> None:
    write_draft(tmp_path)
    draft = load_draft(tmp_path, dtype=torch.float64)
    inputs = inputs_of(draft)
    found = draft(**inputs).last_hidden_state[0]
    stored = load_file(tmp_path / "model.safetensors")
    weights = {name: tensor.double() for name, tensor in stored.items()}
    block, taps = inputs["noise_embeds"][0], inputs["context_hidden_states"][0]
    assert relative_error(found, states_of(weights, block, taps, 6)) < 1e-6


def test_queries_keys_and_values_are_stored_as_one(tmp_path: Path) -> None:
    draft = write_draft(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    attention = draft.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(stored["layers.0.self_attn.qkv_proj.weight"], torch.cat(parts))
    assert not [name for name in stored if "q_proj" in name]
    again = load_draft(tmp_path, dtype=torch.float32)
    assert again.config.name_or_path == str(tmp_path)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, draft.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gating": "per-element"}, "gating 'per-head', a gate for each head, got 'per-element'"),
        ({"num_experts": 4}, r"num_experts absent or in .0,"),
        ({"draft_vocab_size": 24}, "draft_vocab_size = vocab_size = 64, got 24"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "one above the taps"),
        (
            {
                "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                "rope_parameters": {"sliding_attention": {}, "full_attention": {"factor": 2.0}},
            },
            "the same RoPE in rope_parameters for all kinds of layers",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "the same RoPE in rope_parameters for all kinds of layers",
        ),
        ({"layer_types": [], "rope_parameters": {"full_attention": {}}}, "the same RoPE in"),
        (
            {"partial_rotary_factor": 0.5},
            "a RoPE over whole heads, got partial_rotary_factor = 0.5",
        ),
        ({"num_attention_heads": 5}, "instead of|multiple of num_key_value_heads"),
        ({"moe_intermediate_size": 8}, r"got also \['moe_intermediate_size'\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**tiny(LAGUNA), **change}))
    with pytest.raises(ValueError, match=sentence):
        load_draft(tmp_path)


def test_a_rope_of_its_kind_of_layer_is_taken(tmp_path: Path) -> None:
    write_draft(tmp_path)
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = {**tiny(LAGUNA), "rope_theta": None, "rope_parameters": ropes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_draft(tmp_path).config.rope_parameters["rope_theta"] == 1e4
