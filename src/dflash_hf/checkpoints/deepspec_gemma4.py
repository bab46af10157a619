"""This module defines the format of DeepSpec's drafts for Gemma 4: plain DFlash (`markov_rank` 0) and DSpark.

The config is a flat Gemma 4 text config. The draft has layers like the target's full-attention layers. The size of
their heads is `global_head_dim`. If `attention_k_eq_v` is true, the key projection also makes the values, and there
are `num_global_key_value_heads` heads of them. The rows of the embedding are multiplied by the square root of the
hidden size. Everything else is as in [`deepspec`].
Source: DeepSpec `deepspec/modeling/dspark/gemma4/{config,modeling}.py`.
"""

from __future__ import annotations

from typing import Any

from dflash_hf.checkpoints.mapping import (
    COMMON_IGNORED,
    CONFIDENCE_KEYS,
    CONFIDENCE_WEIGHTS,
    MARKOV_WEIGHTS,
    REQUIRED,
    ROPE_KEYS,
    CheckpointFormat,
    ConfigReader,
    Key,
    Neutral,
    plain_keys,
)
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.errors import require

MODEL_TYPES = ("gemma4_text", "gemma4_unified_text")
KEYS = (
    *plain_keys(
        dict.fromkeys(
            (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "num_hidden_layers",
                "block_size",
                "mask_token_id",
                "target_layer_ids",
            ),
            REQUIRED,
        )
        | {
            "num_target_layers": None,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "final_logit_softcapping": None,
        }
    ),
    Key("hidden_act", "gelu_pytorch_tanh", ("hidden_activation",)),
    Key("head_dim", REQUIRED, ("global_head_dim",)),
    Key("keys_are_values", False, ("attention_k_eq_v",)),
)
# The key with the number of key/value heads depends on whether keys are values.
GROUPS = {True: "num_global_key_value_heads", False: "num_key_value_heads"}


def _read_rest(reader: ConfigReader) -> dict[str, Any]:
    layer_types: list[Any] = reader.take("layer_types", default=[], kind=list)
    what = "layer_types all full_attention beside markov_rank"
    action = "DeepSpec's drafts with windows are not supported here"
    require("sliding_attention" not in layer_types, what, layer_types, action)
    keys_are_values = reader.take("attention_k_eq_v", default=False, kind=bool)
    reader.stated(*GROUPS.values())
    hidden_size = reader.take("hidden_size", kind=int)
    # A negative size is refused later, together with the other sizes.
    scale = max(hidden_size, 0) ** 0.5
    return {
        "layer_family": "gemma4",
        "layer_types": layer_types or None,
        "num_key_value_heads": reader.take(GROUPS[keys_are_values]),
        "is_causal": False,
        "rope_parameters": _take_rope(reader),
        "input_embedding_scale": scale,
        "own_embed_tokens": True,
        "own_lm_head": True,
        "sample_from_anchor": True,
        "markov_rank": reader.take_markov_rank("markov_rank", kinds=("markov_head_type",)),
    }


def _take_rope(reader: ConfigReader) -> dict[str, Any]:
    """Takes the RoPE of the full layers. The RoPE of sliding layers stands beside it and is not used."""
    ropes: dict[str, Any] = reader.take("rope_parameters", kind=dict)
    rope: Any = ropes.get("full_attention")
    what = "a dictionary full_attention in rope_parameters of the checkpoint's config.json"
    require(isinstance(rope, dict), what, rope, "fix it")
    unknown = sorted(rope.keys() - ROPE_KEYS - {"partial_rotary_factor"})
    what = "a RoPE with known parameters"
    action = "a RoPE that needs them is not supported here"
    require(not unknown, what, unknown, action)
    return {"rope_type": "default", **rope}


def _write_rest(config: DFlashConfig) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        # DeepSpec's class reads one of the two, and its config states both.
        **dict.fromkeys(GROUPS.values(), config.num_key_value_heads),
        "head_dim": config.head_dim,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_parameters": {
            "full_attention": config.rope_parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "num_anchors": 512,  # for training; DeepSpec's class requires the key
        "markov_rank": config.markov_rank or 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": False,
    }


DEEPSPEC_GEMMA4 = CheckpointFormat(
    name="deepspec-gemma4",
    matches=lambda config: (
        {"markov_rank", "target_layer_ids"} <= config.keys()
        and "dflash_config" not in config
        and config.get("model_type") in MODEL_TYPES
    ),
    layer_families=("gemma4",),
    takes_partial_ropes=True,
    keys=KEYS,
    read_rest=_read_rest,
    write_rest=_write_rest,
    neutral={
        "enable_moe_block": Neutral((False,), "experts, as Gemma 4 itself may have them"),
        "hidden_size_per_layer_input": Neutral((0,), "Gemma 4's embeddings for each layer"),
        "num_kv_shared_layers": Neutral((0,), "layers that share keys, as Gemma 4 may have them"),
    },
    ignored=COMMON_IGNORED
    | CONFIDENCE_KEYS
    | {"num_anchors"}  # for training
    # Keys of layers that slide, share keys or have experts
    | {"head_dim", "sliding_window", "use_double_wide_mlp", "vocab_size_per_layer_input"}
    | {"moe_intermediate_size", "num_experts", "top_k_experts"}
    # Keys about the target
    | {"target_model_type", "target_text_model_type", "use_bidirectional_attention"},
    renamed=MARKOV_WEIGHTS,
    dropped=CONFIDENCE_WEIGHTS,
    has_vocabulary=True,
)
