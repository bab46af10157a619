"""This module defines the format of Transformers' own DFlash draft, `MuseGlimmerAssistantModel`.

It is the only draft that Transformers has up to version 5.24. It is never causal inside the block, has no biases and
no scales, and uses the rows of the target's embedding as they are. The rule of its window is `|q - k| <= w`, which is
one token wider than ours. Its config does not contain the target's vocabulary and depth. So `vocab_size` and
`num_target_layers` are read as `None`, "not stated". If a draft does state them, they are written as extra keys, which
Transformers keeps but does not read.
"""

from __future__ import annotations

from typing import Any

from transformers import MuseGlimmerAssistantConfig

from dflash_hf.checkpoints.mapping import COMMON_IGNORED, CheckpointFormat, ConfigReader, plain_keys
from dflash_hf.configuration_dflash import DFlashConfig

DEFAULTS = MuseGlimmerAssistantConfig()
MODEL_TYPE = DEFAULTS.model_type
KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_dropout",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
)


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    num_layers = reader.take_num_layers("num_hidden_layers", default=DEFAULTS.num_hidden_layers)
    return {
        "num_hidden_layers": num_layers,
        "layer_types": reader.take("layer_types", default=["sliding_attention"] * num_layers),
        "sliding_window": reader.take("sliding_window", default=DEFAULTS.sliding_window, kind=int)
        + 1,
        "is_causal": False,
        "rope_parameters": reader.take_rope(DEFAULTS.default_theta),
        "raw_input_embeddings": True,
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    window: dict[str, int] = {}
    if config.sliding_window is not None:
        window = {"sliding_window": config.sliding_window - 1}
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        **window,
        "rope_parameters": config.rope_parameters,
    }


MUSE = CheckpointFormat(
    name="muse",
    matches=lambda config: config.get("model_type") == MODEL_TYPE,
    renamed={
        "encoder.fc.weight": "fc.weight",
        "encoder.output_norm_enc.weight": "hidden_norm.weight",
    },
    keys=plain_keys({name: getattr(DEFAULTS, name) for name in KEYS})
    + plain_keys(
        {"vocab_size": None, "num_target_layers": None, "initializer_range": 0.02}, optional=True
    ),
    read_rest=_read_rest,
    write_rest=_write_rest,
    ignored=COMMON_IGNORED,
    has_vocabulary=False,
)
