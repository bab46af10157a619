"""What vLLM and SGLang make of our exports: taps, mask token, windows, causality, and every weight in its place.

Their own code, from their wheels, reads the folders; see `helpers.serving` for what stands in for the rest of them.

    pip install --no-deps --target build/engines vllm sglang
    python -m pytest tests/checkpoints/test_serving_engines.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dflash_hf import DFlashDraftModel
from dflash_hf.training.export import CardFacts, export
from helpers.serving import ENGINES, engines, function_of, installed, sglang_draft, vllm_draft
from tiny import draft_config, tiny_target

FULL: dict[str, Any] = {"layer_types": None, "sliding_window": None}
MIXED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 11,
}
NOT_CAUSAL: dict[str, Any] = {**MIXED, "is_causal": False}
DRAFTS = {"full": FULL, "mixed": MIXED, "not-causal": NOT_CAUSAL}
# vLLM takes speculators' causality of sliding layers for that of all, and our windows are not from the anchor.
CASES = [
    *((kind, "zlab") for kind in DRAFTS),
    ("full", "speculators"),
    ("full", "muse"),
    ("not-causal", "muse"),
]


def needs(name: str) -> None:
    if not installed(name):
        pytest.skip(
            f"no {name} in {ENGINES}: pip install --no-deps --target build/engines vllm sglang"
        )


def exported(folder: Path, kind: str, name: Any) -> tuple[Any, DFlashDraftModel, Path]:
    """A target, a random draft for it and the folder of its export."""
    target = tiny_target("qwen3").float()
    torch.manual_seed(1)
    draft = DFlashDraftModel(draft_config(target, **DRAFTS[kind])).eval()
    assert export(draft, folder, CardFacts(target="org/target"), name, target) is None
    return target, draft, folder / name


def weights_of(draft: DFlashDraftModel) -> dict[str, Tensor]:
    """A draft's weights by the engines' names: projections that they keep in one are joined."""
    state = {name: tensor for name, tensor in draft.state_dict().items() if "_proj" not in name}
    for index, layer in enumerate(draft.layers):
        assert isinstance(layer, nn.Module)
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        prefix = f"layers.{index}"
        parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        state[f"{prefix}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        state[f"{prefix}.self_attn.o_proj.weight"] = attention.o_proj.weight
        state[f"{prefix}.mlp.gate_up_proj.weight"] = torch.cat(
            (mlp.gate_proj.weight, mlp.up_proj.weight)
        )
        state[f"{prefix}.mlp.down_proj.weight"] = mlp.down_proj.weight
    return state


def loaded(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """What an engine's model holds; embedding and head are the target's, and mask embeddings are of other drafts."""
    every = {name.removeprefix(prefix): value for name, value in model.named_parameters()}
    return {
        name: every[name]
        for name in every
        if not name.endswith(("embed_tokens.weight", "lm_head.weight"))
    }


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_vllm_serves_the_draft_that_was_exported(kind: str, name: str, tmp_path: Path) -> None:
    needs("vllm")
    target, draft, folder = exported(tmp_path, kind, name)
    config = draft.config
    with engines():
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, speculative = vllm_draft(folder, target, written)
        found: Any = model
        found.model._build_fused_kv_buffers = lambda: None  # copies for a kernel
        found.load_weights(iter(load_file(folder / "model.safetensors").items()))
    assert found.get_draft_attn_causal() == config.is_causal
    # Muse's window is as wide on both sides, and its number one lower: vLLM reads it as any other.
    shift = int(name == "muse")
    windows = [
        None if (window := config.attention_kind(at)[0]) is None else window - shift
        for at in range(2)
    ]
    assert [layer.self_attn.sliding_window for layer in found.model.layers] == windows
    assert found.model.mask_token_id == config.mask_token_id
    theirs = loaded(found, "model.")
    assert not theirs.pop("mask_embedding").any()
    same(weights_of(draft), theirs)
    if name == "speculators":
        assert speculative == {"method": "dflash", "num_speculative_tokens": config.block_size - 1}


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[1] != "speculators"])
def test_sglang_serves_the_draft_that_was_exported(kind: str, name: str, tmp_path: Path) -> None:
    needs("sglang")
    _, draft, folder = exported(tmp_path, kind, name)
    config = draft.config
    with engines():
        model: Any = sglang_draft(folder)
        model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    # Their number is of the tokens before the query.
    windows = [
        -1 if (window := config.attention_kind(at)[0]) is None else window - 1 for at in range(2)
    ]
    if name == "muse":
        windows = [window if window == -1 else window - 1 for window in windows]
    assert [layer.self_attn.sliding_window_size for layer in model.layers] == windows
    kinds = [str(layer.self_attn.attn_type).rpartition(".")[2] for layer in model.layers]
    # SGLang runs sliding layers causally where the config is silent
    if (kind, name) != ("not-causal", "muse"):
        assert kinds == ["DECODER" if causal else "ENCODER_ONLY" for causal in config.is_causal]
    assert model.block_size == config.block_size
    assert model.draft_config.target_layer_ids == config.target_layer_ids
    assert model.draft_config.mask_token_id == config.mask_token_id
    same(weights_of(draft), loaded(model))


def test_taps_of_vllm_are_one_higher(tmp_path: Path) -> None:
    needs("vllm")
    for name in ("zlab", "speculators", "muse"):
        target, draft, folder = exported(tmp_path, "full", name)
        with engines():
            written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            model: Any = vllm_draft(folder, target, written)[0]
            config = model.config
            taps = function_of(
                "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
                "get_eagle3_aux_layers_from_config",
            )
            settings = type(
                "Settings", (), {"draft_model_config": type("Config", (), {"hf_config": config})}
            )
            assert taps(settings) == tuple(index + 1 for index in draft.config.target_layer_ids), (
                name
            )
