"""Drafts with attention sinks, scaled values and a partial RoPE compute what their definition says, written down anew.

So are MiMo's. A sink is one more column in a plain softmax here, which has no value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from dflash_hf.checkpoints.formats import FORMATS, detect_format
from dflash_hf.checkpoints.mapping import make_config
from helpers.activations import relative_error
from helpers.published_configs import CONFIGS, tiny
from helpers.published_drafts import inputs_of, write

MIMO = CONFIGS["XiaomiMiMo/MiMo-V2.6-Flash-RL, shrunk"]
HEADS, GROUPS, SIZE, TURNED, WINDOW, LAYERS = 4, 2, 8, 4, 5, 2
SINKS = "layers.0.self_attn.attention_sink_bias"


def turned(states: Tensor) -> Tensor:
    """RoPE over the first channels of `[tokens, heads, E]` at positions 0, 1, ..."""
    angles = torch.arange(len(states))[:, None] / 1e4 ** (torch.arange(0, TURNED, 2) / TURNED)
    cos, sin = (part[:, None] for part in (angles.cos(), angles.sin()))
    half = TURNED // 2
    first, second, kept = states.split([half, half, SIZE - TURNED], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, kept], -1)


def states_of(weights: dict[str, Tensor], block: Tensor, taps: Tensor) -> Tensor:
    """The block's states `[K, D]` behind the context's tapped states `[C, taps * D]`, from stored weights."""

    def norm(name: str, states: Tensor) -> Tensor:
        return rms_norm(states, states.shape[-1:], weights[f"{name}.weight"], 1e-6)

    def product(name: str, states: Tensor) -> Tensor:
        return states @ weights[f"{name}.weight"].T

    context = norm("hidden_norm", product("fc", taps))
    num_context = len(context)
    queries_at = torch.arange(num_context, num_context + len(block))[:, None]
    distance = queries_at - torch.arange(num_context + len(block))
    # As far ahead as back: no layer is causal.
    is_seen = distance.abs() < WINDOW
    for index in range(LAYERS):
        at = f"layers.{index}.self_attn"
        own = norm(f"layers.{index}.input_layernorm", block)
        both = torch.cat([context, own])
        q, k, v = (
            product(f"{at}.{part}_proj", both).view(len(both), -1, SIZE) for part in ("q", "k", "v")
        )
        q = turned(norm(f"{at}.q_norm", q))[num_context:]
        k = turned(norm(f"{at}.k_norm", k))
        k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v * 0.612))
        scores = torch.einsum("qhe,khe->hqk", q, k) * SIZE**-0.5
        scores = scores.masked_fill(~is_seen, -torch.inf)
        sinks = weights[f"{at}.attention_sink_bias"][:, None, None].expand(-1, len(block), 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        heads = torch.einsum("hqk,khe->qhe", shares, v)
        block = block + product(f"{at}.o_proj", heads.flatten(1))
        own = norm(f"layers.{index}.post_attention_layernorm", block)
        inner = silu(product(f"layers.{index}.mlp.gate_proj", own))
        inner = inner * product(f"layers.{index}.mlp.up_proj", own)
        block = block + product(f"layers.{index}.mlp.down_proj", inner)
    return norm("norm", block)


def write_draft(folder: Path) -> DFlashDraftModel:
    """Writes a tiny draft after the published config, with sinks and norms that are far from fresh ones."""
    draft = write(folder, MIMO)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    save_file(draft.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
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
    # Its cosines are computed in float32.
    assert relative_error(found, states_of(weights, block, taps)) < 1e-6
    without = {**weights, SINKS: torch.full((HEADS,), -1e9, dtype=torch.float64)}
    assert relative_error(found, states_of(without, block, taps)) > 1e-3


def test_sinks_get_gradients_and_begin_at_zero() -> None:
    config = tiny(MIMO)
    draft = DFlashDraftModel(make_config(detect_format(config).read_config(config)))
    sinks = draft.get_parameter(SINKS)
    assert not sinks.any()
    draft(**inputs_of(draft)).last_hidden_state.sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.any()


def test_sinks_come_back_from_both_formats(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "source")
    for form in ("zlab", "dflash"):
        save_draft(draft, tmp_path / form, form)
        again = load_draft(tmp_path / form, dtype=torch.float32)
        assert again.config.attention_sink_bias
        assert again.config.attention_value_scale == 0.612
        assert again.config.rotary_dim == TURNED
        assert torch.equal(again.get_parameter(SINKS), draft.get_parameter(SINKS))
    section = json.loads((tmp_path / "zlab" / "config.json").read_text())["dflash_config"]
    assert section["attention_sink_bias"] is True
    for form in ("speculators", "muse", "deepspec", "laguna"):
        with pytest.raises(ValueError, match=r"rope_parameters = .*its readers turn whole heads"):
            save_draft(draft, tmp_path / form, form)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"attention_sink_bias": False}, "attention_sink_bias = True beside"),
        ({"v_head_dim": 6}, "v_head_dim absent or equal to head_dim = 8, got 6"),
        ({"backbone_rotary_base": 5e6}, "backbone_rotary_base absent or equal to rope_theta"),
        ({"partial_rotary_factor": 0.4}, "an even number of channels out of 8, got 3"),
        (
            {"rope_scaling": {"partial_rotary_factor": 1.0}},
            "rope_scaling.partial_rotary_factor = 1.0",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 11, 23]}, "one above the taps .0, 11, 23."),
        ({"eagle_aux_hidden_state_layer_ids": [1, 12, "x", 24]}, "one above the taps .0, 11, 23."),
        ({"pard_token": 3}, "mask_token_id = 63 beside pard_token = 3"),
        ({"dflash_query_causal": True}, "is_causal = False beside dflash_query_causal = True"),
    ],
)
def test_contradictions_are_refused_by_name(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**tiny(MIMO), **change}))
    with pytest.raises(ValueError, match=sentence):
        load_draft(tmp_path)


def test_a_factor_of_one_is_a_rope_over_whole_heads(tmp_path: Path) -> None:
    values = write_draft(tmp_path).config.to_dict()
    values["rope_parameters"]["partial_rotary_factor"] = 1.0
    config = DFlashConfig(**values)
    assert "partial_rotary_factor" not in config.rope_parameters
    assert "partial_rotary_factor" not in FORMATS["zlab"].write_config(config, "float32")


@pytest.mark.parametrize("key", ["backbone_rotary_base", "dflash_query_causal", "pard_token"])
def test_copies_that_agree_are_read(key: str, tmp_path: Path) -> None:
    write_draft(tmp_path)
    values = {"backbone_rotary_base": 1e4, "dflash_query_causal": False, "pard_token": 63}
    agreeing = {**tiny(MIMO), key: values[key]}
    (tmp_path / "config.json").write_text(json.dumps(agreeing))
    assert load_draft(tmp_path).config.mask_token_id == 63


def test_weights_and_config_have_to_agree_about_sinks(tmp_path: Path) -> None:
    write_draft(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored[SINKS]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"missing {SINKS}"):
        load_draft(tmp_path)


def test_another_name_of_the_weights_says_how_to_rename(tmp_path: Path) -> None:
    write_draft(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "dflash_draft_model.safetensors")
    with pytest.raises(ValueError, match=r"rename dflash_draft_model.safetensors to model.safet"):
        load_draft(tmp_path)


def test_an_embedding_of_the_mask_token_is_refused(tmp_path: Path) -> None:
    write_draft(tmp_path)
    torch.save({"mask_token_id": 63, "embedding": torch.ones(32)}, tmp_path / "mask_embedding.pt")
    sentence = "the target's row of the mask token, got 'mask_embedding.pt'; vLLM and SGLang take"
    with pytest.raises(ValueError, match=sentence):
        load_draft(tmp_path)
