"""The layout of Transformers' own DFlash draft, `MuseGlimmerAssistantModel` (the only one it has up to 5.23).

Never causal inside the block, no biases, no scales, raw rows of the target's embedding. Its sliding rule is
`|q - k| <= w`: one wider than ours. Its config says nothing of the target's vocabulary and depth: `vocab_size` and
`num_target_layers` come out as `None`, "not stated". Where a draft does state them, they are written as extra keys,
which Transformers keeps and does not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_hf.checkpoints.mapping import (
    BODY_WEIGHTS,
    COMMON_IGNORED,
    DFLASH2_FIELDS,
    FOREIGN_FIELDS,
    OWN_FIELDS,
    CheckpointFormat,
    ConfigReader,
    Key,
    read_rope,
    refuse_fields,
)
from dflash_hf.configuration_dflash import DFlashConfig

MODEL_TYPE = "muse_glimmer_assistant"
DEFAULT_THETA = 500000.0  # MuseGlimmerAssistantConfig's, like the other defaults below
DEFAULT_WINDOW = 2048

KEYS = (
    Key("hidden_size", ("hidden_size",), 6656),
    Key("intermediate_size", ("intermediate_size",), 19968),
    Key("num_attention_heads", ("num_attention_heads",), 32),
    Key("num_key_value_heads", ("num_key_value_heads",), 8),
    Key("head_dim", ("head_dim",), 128),
    Key("hidden_act", ("hidden_act",), "silu"),
    Key("rms_norm_eps", ("rms_norm_eps",), 1e-5),
    Key("max_position_embeddings", ("max_position_embeddings",), 131072),
    Key("attention_dropout", ("attention_dropout",), 0.0),
    Key("block_size", ("block_size",), 16),
    Key("mask_token_id", ("mask_token_id",), 201818),
    Key("target_layer_ids", ("target_layer_ids",), [1, 13, 25, 37, 49]),
    Key("vocab_size", ("vocab_size",), None, optional=True),
    Key("num_target_layers", ("num_target_layers",), None, optional=True),
    Key("initializer_range", ("initializer_range",), 0.02, optional=True),
)

# What the layout has no key for -> the only value it can mean.
FIXED = {
    "attention_bias": False,
    "raw_input_embeddings": True,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


def _matches(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == MODEL_TYPE


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    num_layers = reader.take_num_layers("num_hidden_layers", default=5)
    return {
        "num_hidden_layers": num_layers,
        "layer_types": reader.take("layer_types", default=["sliding_attention"] * num_layers),
        "sliding_window": reader.take("sliding_window", default=DEFAULT_WINDOW, kind=int) + 1,
        "is_causal": False,
        "rope_parameters": read_rope(reader, DEFAULT_THETA),
        **FIXED,
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        **({} if config.sliding_window is None else {"sliding_window": config.sliding_window - 1}),
        "rope_parameters": config.rope_parameters,
    }


def _refuse(config: DFlashConfig) -> Iterator[str]:
    yield from refuse_fields(config, *FOREIGN_FIELDS, *DFLASH2_FIELDS, *OWN_FIELDS)
    assert isinstance(config.is_causal, list)
    for name, only in FIXED.items():
        if (value := getattr(config, name)) != only:
            yield f"{name} = {value} (only {only})"
    if any(config.is_causal):
        yield f"is_causal = {config.is_causal} (only false in every layer)"
    if config.target_hidden_size != config.hidden_size:
        yield f"target_hidden_size = {config.target_hidden_size} (its class takes hidden_size)"


MUSE = CheckpointFormat(
    name="muse",
    matches=_matches,
    weights=BODY_WEIGHTS | {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"},
    keys=KEYS,
    read_rest=_read_rest,
    write_rest=_write_rest,
    refuse=_refuse,
    ignored=COMMON_IGNORED,
    has_vocabulary=False,
)
