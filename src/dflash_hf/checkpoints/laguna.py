"""This module defines the format of poolside's drafts for Laguna.

The config is a flat config of Laguna with a section `dflash_config`. The weights are the bare draft without embedding
and head. Queries, keys and values of a layer are one weight. Layer ids are 0-based numbers of the layers whose outputs
are tapped, `block_size` counts the anchor, and a window of `w` means `q - k < w`. Every layer is causal unless
`causal` says otherwise.
Source: vLLM `model_executor/models/laguna_dflash.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_hf.checkpoints.mapping import (
    COMMON_IGNORED,
    QWEN3_THETA,
    REQUIRED,
    CheckpointFormat,
    ConfigReader,
    Key,
    Neutral,
    plain_keys,
)
from dflash_hf.checkpoints.quantised import Stored, StoredRows
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import require

SECTION = "dflash_config"
KEYS = (
    *plain_keys(
        dict.fromkeys(
            (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "head_dim",
                "num_attention_heads",
                "num_key_value_heads",
            ),
            REQUIRED,
        )
        | {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
        }
    ),
    *(
        Key(name, default, (f"{SECTION}.{name}", name))
        for name, default in {
            "block_size": 16,
            "num_target_layers": None,
            "mask_token_id": REQUIRED,
            "target_layer_ids": REQUIRED,
        }.items()
    ),
)
# This key is our own addition, as in z-lab's format. vLLM looks the rows up in the weight.
RAW = Key("raw_input_embeddings", False, (f"{SECTION}.raw_input_embeddings",), optional=True)
FUSED = "qkv_proj.weight"
PARTS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def take_apart(stored: dict[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the stored weights with queries, keys and values apart. Weights of other shapes stay as they are."""
    sizes = [config.get(n) for n in ("num_attention_heads", "num_key_value_heads", "head_dim")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return stored  # the checks of the config refuse these sizes
    heads, groups, size = (int(number or 0) for number in sizes)
    rows = (heads * size, groups * size, groups * size)
    apart: dict[str, Stored] = {}
    for name, tensor in stored.items():
        layer, _, last = name.rpartition("self_attn.")
        fits = len(tensor.shape) == 2 and tensor.shape[0] == sum(rows)
        if last != FUSED or not fits or isinstance(tensor, StoredRows):
            apart[name] = tensor
            continue
        start = 0
        for part, count in zip(PARTS, rows, strict=True):
            shape = (count, tensor.shape[1])
            apart[f"{layer}self_attn.{part}"] = StoredRows(tensor, start, shape)
            start += count
    return apart


def put_together(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights in which queries, keys and values of a layer are one matrix, in this order of rows."""
    together: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer, _, last = name.rpartition("self_attn.")
        if last == PARTS[0]:
            parts = [weights[f"{layer}self_attn.{part}"] for part in PARTS]
            together[f"{layer}self_attn.{FUSED}"] = torch.cat(parts)
        elif last not in PARTS:
            together[name] = tensor
    return together


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    layers = reader.take_layers("sliding_window")
    gating = reader.take("gating", default=True)
    action = "gates of another kind are not supported here"
    require(gating in (True, "per-head"), "gating 'per-head', a gate for each head", gating, action)
    taps = reader.take(f"{SECTION}.target_layer_ids", "target_layer_ids", kind=list)
    reader.take_layers_above(taps)
    size = reader.take("vocab_size")
    reduced = reader.take("draft_vocab_size", default=size)
    what = f"draft_vocab_size = vocab_size = {size}"
    require(
        reduced == size, what, reduced, "here the format 'speculators' has reduced vocabularies"
    )
    # The config may have one RoPE for each kind of layer. All kinds that the draft has must have the same RoPE.
    ropes = reader.values.get("rope_parameters")
    if isinstance(ropes, dict) and any(isinstance(value, dict) for value in ropes.values()):
        kinds = layers["layer_types"]
        of_kinds = [rope for kind, rope in ropes.items() if kind in kinds]
        has_all = bool(kinds) and all(kind in list(ropes) for kind in kinds)
        is_one = has_all and all(rope == of_kinds[0] for rope in of_kinds)
        what = "the same RoPE in rope_parameters for all kinds of layers in layer_types"
        require(is_one, what, ropes, "a draft with several is not supported")
        reader.values["rope_parameters"] = of_kinds[0]
    return {
        **layers,
        "layer_family": "laguna",
        "is_causal": reader.take(f"{SECTION}.causal", default=True, kind=bool),
        "rope_parameters": reader.take_rope(QWEN3_THETA),
    }


def _refuse(config: DFlashConfig) -> Iterator[str]:
    if len(set(config.layer_types)) > 1:
        yield f"layer_types = {config.layer_types} (its readers know one kind in a draft)"


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    # Laguna's own config has one RoPE for each kind of layer.
    ropes = {kind: dict(config.rope_parameters) for kind in config.layer_types}
    window: dict[str, int] = {}
    if config.sliding_window is not None:
        window = {"sliding_window": config.sliding_window}
    return {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        # Laguna's config refuses null.
        **window,
        "tie_word_embeddings": False,
        "gating": "per-head",
        "num_experts": 0,
        "attention_bias": False,
        "draft_vocab_size": config.vocab_size,
        "rope_parameters": ropes,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        SECTION: {"causal": all(config.is_causal)},
    }


LAGUNA = CheckpointFormat(
    name="laguna",
    matches=lambda config: (
        config.get("model_type") == "laguna" and isinstance(config.get(SECTION), Mapping)
    ),
    layer_families=("laguna",),
    keys=(*KEYS, RAW),
    needs=("vocab_size", "num_target_layers"),
    section=SECTION,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    neutral={
        **dict.fromkeys(("attention_bias", "qkv_bias"), Neutral((False,), "biases of attention")),
        "num_experts": Neutral((0,), "layers with experts, as Laguna itself has them"),
    },
    ignored=COMMON_IGNORED | {"sliding_windows"},
    take_apart=take_apart,
    put_together=put_together,
    has_vocabulary=False,
)
