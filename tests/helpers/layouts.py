"""Tiny drafts, and the groups of settings that some layouts can express and others cannot."""

from __future__ import annotations

from typing import Any

import torch

from dflash_hf import DFlashConfig, DFlashDraftModel

FULL, SLIDING = "full_attention", "sliding_attention"
TINY: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "block_size": 4,
    "mask_token_id": 47,
    "num_target_layers": 8,
    "target_layer_ids": [0, 5],
}
CONV: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 4}
SELECTOR: dict[str, Any] = {"selector_rank": 3, "selector_top_k": 5}
DFLASH2: dict[str, Any] = {**CONV, **SELECTOR}
DSPARK: dict[str, Any] = {"markov_rank": 3}
MUSE_LIKE: dict[str, Any] = {"raw_input_embeddings": True, "is_causal": False}
ANCHORED: dict[str, Any] = {
    "layer_types": [SLIDING, FULL],
    "sliding_window": 7,
    "window_from_anchor": True,
}
OWN: dict[str, Any] = {"own_embed_tokens": True, "own_lm_head": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
}

# Configs, and the layouts (besides our own) that can express them.
CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, ["zlab", "speculators"]),
    "sliding means causal": ({"layer_types": [SLIDING, FULL], "sliding_window": 7}, ["zlab"]),
    "all causal": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 7, "is_causal": True},
        ["zlab"],
    ),
    "window, no causality": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 7, **MUSE_LIKE},
        ["zlab", "muse"],
    ),
    "muse-like, full": (MUSE_LIKE, ["zlab", "speculators", "muse", "zlab"]),
    "nothing stated": ({**MUSE_LIKE, "vocab_size": None, "num_target_layers": None}, ["muse"]),
    "yarn": (
        {**MUSE_LIKE, "rope_parameters": YARN, "max_position_embeddings": 256},
        ["zlab", "speculators", "muse", "zlab"],
    ),
    "scales": (
        {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
        ["zlab"],
    ),
    "biases": ({"attention_bias": True}, ["zlab", "speculators"]),
    "other details": (
        {
            **MUSE_LIKE,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "attention_dropout": 0.1,
            "initializer_range": 0.1,
        },
        ["zlab", "speculators", "muse", "zlab"],
    ),
    "mixed causality": ({"layer_types": [FULL, FULL], "is_causal": [True, False]}, []),
    "wider target": ({**MUSE_LIKE, "target_hidden_size": 20}, []),
    "dflash 2": ({**MUSE_LIKE, **DFLASH2}, ["zlab"]),
    "convolution alone": (CONV, []),
    "selector alone": (SELECTOR, []),
    "window from the anchor": (ANCHORED, ["speculators"]),
    "window from the anchor, no causality": ({**ANCHORED, "is_causal": False}, ["speculators"]),
    "window from the anchor, all causal": ({**ANCHORED, "is_causal": True}, []),
    "own embedding and head": (OWN, ["speculators"]),
    "own head": ({"own_lm_head": True}, ["speculators"]),
    "reduced vocabulary": (
        {**ANCHORED, "own_lm_head": True, "draft_vocab_size": 13},
        ["speculators"],
    ),
    "from the anchor": ({"sample_from_anchor": True}, ["speculators"]),
    "deepspec": (
        {**OWN, "is_causal": False, "sample_from_anchor": True, "target_layer_ids": [-1, 2, 7]},
        ["deepspec", "speculators", "deepspec"],
    ),
    "dspark": ({**DSPARK, "sample_from_anchor": True}, ["zlab", "speculators", "zlab"]),
    "dspark, kept anchor": (DSPARK, ["zlab", "speculators"]),
    "dspark, reduced vocabulary": (
        {**ANCHORED, **DSPARK, "own_lm_head": True, "draft_vocab_size": 13},
        ["speculators"],
    ),
    "dspark of deepspec": (
        {**OWN, **DSPARK, "is_causal": False, "sample_from_anchor": True},
        ["deepspec", "speculators", "deepspec"],
    ),
    "dspark, muse-like": ({**MUSE_LIKE, **DSPARK}, ["zlab", "speculators"]),
    "tapped after DeepStack": ({**MUSE_LIKE, "tap_after_deepstack": True}, []),
    "embedding tapped": ({"target_layer_ids": [-1, 2]}, ["zlab", "speculators"]),
}


def make_draft(**overrides: Any) -> DFlashDraftModel:
    """A tiny random draft, random also where a fresh one has zeros or the identity.

    Its reduced vocabulary, if it has one, is every third token from 5 on.
    """
    torch.manual_seed(0)
    draft = DFlashDraftModel(DFlashConfig(**{**TINY, **overrides})).eval()
    for name, parameter in draft.named_parameters():
        if any(part in name for part in ("_conv.", "selector.", "markov_head.", "sink_bias")):
            torch.nn.init.normal_(parameter)
    if draft.d2t is not None:
        draft.d2t.copy_(5 + 2 * torch.arange(draft.d2t.shape[0]))
    return draft


def content(config: DFlashConfig) -> dict[str, Any]:
    """The config without what Transformers notes about files."""
    volatile = {"architectures", "_name_or_path", "transformers_version", "dtype"}
    return {key: value for key, value in config.to_dict().items() if key not in volatile}
