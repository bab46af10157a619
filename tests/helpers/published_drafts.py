"""Tiny drafts with random weights, written after the configs of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoints.formats import detect_format
from dflash_hf.checkpoints.mapping import make_config
from helpers.published_configs import tiny

# What a file of a format holds beside the draft's own weights, by their names there.
OWN = ("embed_tokens.weight", "lm_head.weight")
STORED = {"speculators": OWN, "deepspec": OWN, "deepspec-gemma4": OWN}


def write(folder: Path, published: dict[str, Any]) -> DFlashDraftModel:
    """Writes a tiny draft after a published config, with random weights, and returns it."""
    config = tiny(published)
    form = detect_format(config)
    names = frozenset(STORED.get(form.name, ()))
    torch.manual_seed(0)
    draft = DFlashDraftModel(make_config(form.read_config(config, names))).eval()
    weights = {form.their_name(name): tensor for name, tensor in draft.state_dict().items()}
    weights = form.put_together(weights)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return draft


def inputs_of(draft: DFlashDraftModel) -> dict[str, torch.Tensor]:
    """Random inputs of a forward."""
    config = draft.config
    generator = torch.Generator().manual_seed(3)
    width = len(config.target_layer_ids) * config.target_hidden_size
    block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    taps = torch.randn(1, 9, width, generator=generator)
    positions = torch.arange(9 + config.block_size)[None]
    return {
        "noise_embeds": block.to(draft.dtype),
        "context_hidden_states": taps.to(draft.dtype),
        "position_ids": positions,
    }
