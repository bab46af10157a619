"""The layout of DeepSpec's plain DFlash drafts (`markov_rank` 0); its DSpark heads are refused by name.

A flat Qwen3 config. Conventions: the anchor's slot proposes too, so a block of `B` gives `B` tokens; every layer is
full and never causal inside the block; tap -1 is the embedding output; embedding and head are the draft's own (frozen
copies of the target's), the embedding's rows raw.
Source: DeepSpec `deepspec/modeling/dspark/qwen3/{config,modeling}.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_hf.checkpoints.mapping import (
    BODY_BIASES,
    BODY_WEIGHTS,
    COMMON_IGNORED,
    DFLASH2_FIELDS,
    OWN_FIELDS,
    CheckpointFormat,
    ConfigReader,
    Key,
    read_rope,
    refuse_fields,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import shown

DEFAULT_THETA = 10000.0  # Qwen3Config's, like the other defaults below
NUM_ANCHORS = 512  # of its training; its class asks for the key

KEYS = (
    Key("vocab_size", ("vocab_size",)),
    Key("hidden_size", ("hidden_size",)),
    Key("intermediate_size", ("intermediate_size",)),
    Key("num_hidden_layers", ("num_hidden_layers",)),
    Key("num_attention_heads", ("num_attention_heads",)),
    Key("num_key_value_heads", ("num_key_value_heads",)),
    Key("head_dim", ("head_dim",), 128),
    Key("hidden_act", ("hidden_act",), "silu"),
    Key("rms_norm_eps", ("rms_norm_eps",), 1e-6),
    Key("max_position_embeddings", ("max_position_embeddings",), 32768),
    Key("attention_bias", ("attention_bias",), False),
    Key("attention_dropout", ("attention_dropout",), 0.0),
    Key("initializer_range", ("initializer_range",), 0.02),
    Key("block_size", ("block_size",)),
    Key("mask_token_id", ("mask_token_id",)),
    Key("target_layer_ids", ("target_layer_ids",)),
    Key("num_target_layers", ("num_target_layers",), None),
)

# What the layout has no key for -> the only value it can mean.
FIXED: dict[str, Any] = {
    "own_embed_tokens": True,
    "own_lm_head": True,
    "draft_vocab_size": None,
    "sample_from_anchor": True,
    "raw_input_embeddings": True,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


def _matches(config: Mapping[str, Any]) -> bool:
    return "markov_rank" in config and "target_layer_ids" in config and "dflash_config" not in config


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    decoder = reader.take("model_type", default="qwen3")
    if decoder != "qwen3":
        raise ValueError(
            f"expected model_type 'qwen3' beside markov_rank, got {shown(decoder)}; this variant is not supported"
        )
    layer_types: list[Any] = reader.take("layer_types", default=[], kind=list)
    if "sliding_attention" in layer_types:
        raise ValueError(
            f"expected layer_types all full_attention beside markov_rank, got {shown(layer_types)}; not supported"
        )
    return {
        "layer_types": layer_types or None,
        "is_causal": False,
        "rope_parameters": read_rope(reader, DEFAULT_THETA),
        **FIXED,
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "layer_types": config.layer_types,
        "rope_parameters": config.rope_parameters,
        "num_anchors": NUM_ANCHORS,
        "markov_rank": 0,
        "enable_confidence_head": False,
        "tie_word_embeddings": False,
    }


def _refuse(config: DFlashConfig) -> Iterator[str]:
    yield from refuse_fields(config, *DFLASH2_FIELDS, *OWN_FIELDS)
    assert config.layer_types is not None
    assert isinstance(config.is_causal, list)
    for name, only in FIXED.items():
        if (value := getattr(config, name)) != only:
            yield f"{name} = {value} (only {only})"
    if "sliding_attention" in config.layer_types:
        yield f"layer_types = {config.layer_types} (only full_attention)"
    if any(config.is_causal):
        yield f"is_causal = {config.is_causal} (only false in every layer)"
    if config.target_hidden_size != config.hidden_size:
        yield f"target_hidden_size = {config.target_hidden_size} (its class takes hidden_size)"


DEEPSPEC = CheckpointFormat(
    name="deepspec",
    matches=_matches,
    weights=BODY_WEIGHTS
    | BODY_BIASES
    | {name: name for name in ("fc.weight", "hidden_norm.weight", "embed_tokens.weight", "lm_head.weight")},
    keys=KEYS,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    neutral={"markov_rank": (0,), "enable_confidence_head": (False,)},
    ignored=COMMON_IGNORED - {"model_type"}
    | {"confidence_head_with_markov", "markov_head_type", "num_anchors"}  # of heads that are off, and of training
    | {"max_window_layers", "sliding_window", "use_sliding_window"},  # of layers that do not slide
    has_vocabulary=True,
)
