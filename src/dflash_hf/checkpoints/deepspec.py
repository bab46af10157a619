"""This module defines the format of DeepSpec's drafts: plain DFlash (`markov_rank` 0) and DSpark.

The config is a flat Qwen3 config. The anchor's slot proposes too, so a block of `B` slots gives `B` tokens. Every
layer has full attention and is never causal inside the block. Tap -1 is the embedding output. The draft has its own
embedding and head, which are frozen copies of the target's. It uses the rows of the embedding without scaling. The
Markov head is the vanilla one. A confidence head is left out, because it proposes no token.
Source: DeepSpec `deepspec/modeling/dspark/qwen3/{config,modeling}.py`.
"""

from __future__ import annotations

from typing import Any

from dflash_hf.checkpoints.mapping import (
    COMMON_IGNORED,
    CONFIDENCE_KEYS,
    CONFIDENCE_WEIGHTS,
    MARKOV_WEIGHTS,
    QWEN3_KEYS,
    QWEN3_THETA,
    REQUIRED,
    CheckpointFormat,
    ConfigReader,
    plain_keys,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import require


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    decoder = reader.take("model_type", default="qwen3")
    require(
        decoder == "qwen3",
        "model_type 'qwen3' beside markov_rank",
        decoder,
        "DeepSpec's drafts with layers of other models than Qwen3 and Gemma 4 are not supported here",
    )
    layer_types: list[Any] = reader.take("layer_types", default=[], kind=list)
    what = "layer_types all full_attention beside markov_rank"
    action = "DeepSpec's drafts with windows are not supported here"
    require("sliding_attention" not in layer_types, what, layer_types, action)
    return {
        "layer_types": layer_types or None,
        "is_causal": False,
        "rope_parameters": reader.take_rope(QWEN3_THETA),
        "own_embed_tokens": True,
        "own_lm_head": True,
        "sample_from_anchor": True,
        "markov_rank": reader.take_markov_rank("markov_rank", kinds=("markov_head_type",)),
    }


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_parameters": config.rope_parameters,
        "num_anchors": 512,  # for training; DeepSpec's class requires the key
        "markov_rank": config.markov_rank or 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "tie_word_embeddings": False,
    }


_STATED = ("vocab_size", "num_hidden_layers", "block_size", "mask_token_id", "target_layer_ids")

DEEPSPEC = CheckpointFormat(
    name="deepspec",
    matches=lambda config: (
        {"markov_rank", "target_layer_ids"} <= config.keys() and "dflash_config" not in config
    ),
    keys=plain_keys(QWEN3_KEYS | dict.fromkeys(_STATED, REQUIRED) | {"num_target_layers": None}),
    read_rest=_read_rest,
    write_rest=_write_rest,
    ignored=COMMON_IGNORED - {"model_type"}
    | CONFIDENCE_KEYS
    | {"num_anchors"}  # for training
    | {"max_window_layers", "sliding_window", "use_sliding_window"},  # there are no sliding layers
    renamed=MARKOV_WEIGHTS,
    dropped=CONFIDENCE_WEIGHTS,
    has_vocabulary=True,
)
