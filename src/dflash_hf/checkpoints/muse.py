"""The format of Transformers' own DFlash draft, `MuseGlimmerAssistantModel` (the only one it has up to 5.23).

Never causal inside the block, no biases, no scales, raw rows of the target's embedding. Its sliding rule is
`|q - k| <= w`: one wider than ours. Its config says nothing of the target's vocabulary and depth: `vocab_size` and
`num_target_layers` come out as `None`, "not stated". Where a draft does state them, they are written as extra keys,
which Transformers keeps and does not read.
"""

from __future__ import annotations

from typing import Any

from dflash_hf.checkpoints.mapping import COMMON_IGNORED, CheckpointFormat, ConfigReader, plain_keys
from dflash_hf.configuration_dflash import DFlashConfig

MODEL_TYPE = "muse_glimmer_assistant"
DEFAULT_THETA = 500000.0  # MuseGlimmerAssistantConfig's, like the other defaults below
DEFAULT_WINDOW = 2048
DEFAULTS: dict[str, Any] = {
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "attention_dropout": 0.0,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    num_layers = reader.take_num_layers("num_hidden_layers", default=5)
    return {
        "num_hidden_layers": num_layers,
        "layer_types": reader.take("layer_types", default=["sliding_attention"] * num_layers),
        "sliding_window": reader.take("sliding_window", default=DEFAULT_WINDOW, kind=int) + 1,
        "is_causal": False,
        "rope_parameters": reader.take_rope(DEFAULT_THETA),
        "raw_input_embeddings": True,
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


MUSE = CheckpointFormat(
    name="muse",
    matches=lambda config: config.get("model_type") == MODEL_TYPE,
    renamed={"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"},
    keys=plain_keys(DEFAULTS)
    + plain_keys({"vocab_size": None, "num_target_layers": None, "initializer_range": 0.02}, optional=True),
    read_rest=_read_rest,
    write_rest=_write_rest,
    ignored=COMMON_IGNORED,
    has_vocabulary=False,
)
