"""Every causal family that Transformers has, built small from its config class, without a list of families to keep.

Settings are set wherever a config class knows their name; what one class needs differently stands in `PER_FAMILY`.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES: list[str] = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 20_000_000

_VALUES: list[tuple[Any, str]] = [
    (64, "vocab_size vocab_size_per_layer_input"),
    (32, "hidden_size n_embd d_model embed_dim lru_width"),
    (48, "intermediate_size ffn_dim d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim"),
    (
        24,
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    ),
    (24, "expert_ffn_hidden_size expert_intermediate_size shared_intermediate_size"),
    (4, "num_hidden_layers n_layer n_layers num_layers decoder_layers"),
    (4, "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads encoder_layers index_n_heads linear_num_key_heads"),
    (4, "linear_num_value_heads"),
    (
        8,
        "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim state_size mamba_d_state index_head_dim",
    ),
    (8, "hidden_size_per_layer_input laurel_rank linear_key_head_dim linear_value_head_dim"),
    (16, "q_lora_rank kv_lora_rank mamba_d_head"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts mamba_n_heads rotary_dim"),
    (2, "num_experts_per_tok moe_topk top_k_experts moe_top_k moe_k"),
    (1, "n_group topk_group first_k_dense_replace mamba_n_groups"),
    (6, "sliding_window"),
    (512, "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len index_topk"),
    (0.0, "attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop"),
    (0, "pad_token_id"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
]
SMALL = {name: value for value, names in _VALUES for name in names.split()}
# A default of None is left as it is: it switches something off.
_OPTIONAL = {
    "sliding_window",
    "head_dim",
    "q_lora_rank",
    "intermediate_size",
    "num_kv_heads",
    "lru_width",
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_MLA = {"head_dim": None, "num_key_value_heads": 4}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_SHARED = {"num_kv_shared_layers": 2}
_HEAD = {"head_dim": 8}
_UNTIED = {"tie_word_embeddings": False}  # tied random embeddings repeat the last token for ever

PER_FAMILY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _MLA
    ),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "youtu", "kimi_linear"), _MLA),
    "minicpm3": _MLA | _UNTIED,
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text", "ministral", "kolibri1", "laguna"), _MIXED | _UNTIED
    ),
    **dict.fromkeys(
        ("qwen2", "qwen3", "mellum"), _MIXED | {"use_sliding_window": True, "sliding_window": 6}
    ),
    "dots1": _MIXED | {"n_shared_experts": 1},
    **dict.fromkeys(
        ("vaultgemma", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _UNTIED
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONV),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _SHARED),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _HEAD),
    "gemma": _UNTIED,
    "bamba": {"attn_layer_indices": [1, 3]},
    "dots3_note": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "starcoder2": {"sliding_window": 6},
    "zaya": {"num_experts_per_tok": 1},
}
PER_FAMILY["ministral"] = PER_FAMILY["ministral"] | {"head_dim": 8}
# Their eager attention computes NaN for padding in float64, and some modules insist on float32.
FLOAT32 = {
    "gemma2",
    "vaultgemma",
    "granite_swa",
    "granitemoe_swa",
    "xglm",
    "inkling2_text",
    "xlnet",
}


class CannotBuildError(Exception):
    """The family's config class takes no small model from these settings; says why."""


def build(name: str, **overrides: Any) -> PreTrainedModel:
    """Builds a family's causal model with random weights, in float64 where it computes in float64.

    `overrides` go to its config.

    Raises:
        CannotBuildError: If Transformers refuses the settings, or the model is not small.
    """
    try:
        config = _config(name, overrides)
        with torch.device("meta"):
            num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        if num_parameters > MAX_PARAMETERS:
            raise CannotBuildError(f"{num_parameters:,} parameters")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        KeyError,
    ) as error:
        raise CannotBuildError(f"{type(error).__name__}: {error}") from error
    model = model.to(torch.float32 if name in FLOAT32 else torch.float64).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() >= 2 or parameter_name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _config(name: str, overrides: dict[str, Any]) -> Any:
    """The family's text config with the small settings that it knows."""
    kind = type(CONFIG_MAPPING[name]().get_text_config(decoder=True))
    defaults = kind().to_dict()
    known = set(defaults) | set(getattr(kind, "attribute_map", None) or {})
    settings = {
        key: value
        for key, value in SMALL.items()
        if key in known and not (key in _OPTIONAL and defaults.get(key, 0) is None)
    }
    settings |= PER_FAMILY.get(name, {}) | overrides
    config = kind(**{key: value for key, value in settings.items() if value is not None})
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config
