"""The draft against `MuseGlimmerAssistantModel`, Transformers' own DFlash draft: same folder, same activations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.checkpoints.drafts import load_draft, save_draft
from helpers.activations import recorded, relative_error

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": [FULL] * 3},
    "sliding": {"layer_types": None, "sliding_window": 5},
    "sliding-1": {"layer_types": None, "sliding_window": 1},
    "mixed": {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6},
    "llama3": {
        "layer_types": [FULL] * 3,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


def make_muse(**overrides: Any) -> MuseGlimmerAssistantModel:
    """A tiny draft of Transformers' class, in float64, with weights that hide nothing."""
    settings: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 128,
        "block_size": BLOCK,
        "mask_token_id": 39,
        "target_layer_ids": [1, 4],
    }
    torch.manual_seed(0)
    model = (
        MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**settings, **overrides}))
        .double()
        .eval()
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def compare(ours: DFlashDraftModel, theirs: MuseGlimmerAssistantModel) -> None:
    """Runs both as Transformers' candidate generator does, and compares every activation of every call."""
    caches = [DFlashCache(config=model.config) for model in (ours, theirs)]
    for cache in caches:
        cache.activate_past_recording()
    length = 0
    for call, num_context in enumerate((11, 3, 1, 4)):
        taps = torch.randn(1, num_context, 2 * 16, dtype=torch.float64)
        noise = torch.randn(1, BLOCK, 16, dtype=torch.float64)
        for cache in caches:
            cache.set_previous_accepted_tokens(num_context)
            if call > 0:
                cache.crop(-BLOCK)
        inputs: dict[str, Any] = {
            "noise_embeds": noise,
            "context_hidden_states": taps,
            "position_ids": torch.arange(length, length + num_context + BLOCK)[None],
            "attention_mask": torch.ones(1, length + num_context + BLOCK, dtype=torch.long),
        }
        length += num_context
        with recorded(ours.hidden_norm, ours.layers) as got:
            got["out"] = ours(**inputs, **{CACHE_NAME: caches[0]}).last_hidden_state
        with recorded(theirs.encoder, theirs.layers) as expected:
            expected["out"] = theirs(**inputs, **{CACHE_NAME: caches[1]}).last_hidden_state
        errors = {name: relative_error(got[name], expected[name]) for name in expected}
        assert max(errors.values()) < 1e-9, f"call {call}: {errors}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations(variant: str, tmp_path: Path) -> None:
    theirs = make_muse(**VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    ours = DFlashDraftModel.from_pretrained(tmp_path)
    assert ours.dtype == torch.float64
    assert ours.config.raw_input_embeddings
    assert (ours.config.vocab_size, ours.config.num_target_layers) == (None, None)
    window = theirs.config.sliding_window + 1
    assert ours.config.sliding_window == (None if ours.config.layer_types[0] == FULL else window)
    compare(ours, theirs)


@pytest.mark.parametrize("stated", [True, False])
def test_transformers_loads_our_export(stated: bool, tmp_path: Path) -> None:
    config = DFlashConfig(
        vocab_size=40 if stated else None,
        num_target_layers=8 if stated else None,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        layer_types=[SLIDING, FULL],
        sliding_window=5,
        is_causal=False,
        block_size=BLOCK,
        mask_token_id=39,
        target_layer_ids=[1, 4],
        raw_input_embeddings=True,
        initializer_range=0.4,
    )
    ours = DFlashDraftModel(config).double().eval()
    save_draft(ours, tmp_path, "muse")
    theirs = AutoModel.from_pretrained(tmp_path)
    assert isinstance(theirs, MuseGlimmerAssistantModel)
    assert theirs.config.sliding_window == 4
    compare(ours, theirs)
    back = load_draft(tmp_path).config
    assert (back.vocab_size, back.num_target_layers) == (
        config.vocab_size,
        config.num_target_layers,
    )
