"""Configs of published drafts, as their projects write them, and tiny drafts that are made after them.

`CONFIGS` are those that this package loads, `REFUSED` those of variants that it does not know. Sizes of vocabularies
and the mask token stand for others where no page says them.
"""

from __future__ import annotations

import copy
from typing import Any

FULL = "full_attention"
SLIDING = "sliding_attention"
# Taps of z-lab's drafts, and the depth of their targets.
OF_24 = ([1, 6, 11, 16, 21], 24)
OF_32 = ([1, 8, 15, 22, 29], 32)
OF_36 = ([1, 9, 17, 25, 33], 36)
OF_40 = ([1, 6, 11, 16, 22, 27, 32, 37], 40)


def zlab(
    layers: int,
    hidden_size: int,
    intermediate_size: int,
    heads: tuple[int, int],
    block_size: int,
    taps: tuple[list[int], int],
    window: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A config as z-lab writes it: full layers, or sliding ones and a full one at the end."""
    kinds = [FULL] * layers
    if window is not None:
        kinds = [SLIDING] * (layers - 1) + [FULL]
    target_layer_ids, num_target_layers = taps
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": target_layer_ids},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "layer_types": kinds,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "num_target_layers": num_target_layers,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": window is not None,
        "vocab_size": 151936,
        **more,
    }


def with_section(config: dict[str, Any], **section: Any) -> dict[str, Any]:
    """A config with other keys in its `dflash_config`; `None` takes one out."""
    out = copy.deepcopy(config)
    out["dflash_config"] |= section
    for name in [name for name, value in section.items() if value is None]:
        del out["dflash_config"][name]
    return out


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """A config without some of its keys."""
    return {name: value for name, value in config.items() if name not in names}


QWEN3_8B = zlab(5, 4096, 12288, (32, 8), 16, OF_36)
QWEN35 = {
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
}
# Its hub revision has the block in the section.
QWEN35_27B = with_section(
    without(
        zlab(
            *(6, 5120, 17408, (32, 8), 16, ([1, 10, 18, 27, 35, 44, 52, 61], 64), 4096),
            **QWEN35,
        ),
        "block_size",
    ),
    block_size=16,
    mask_token_id=248070,
)
DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": [SLIDING] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "pad_token_id": 248044,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "transformers_version": "5.15.0",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "transformer_layer_config": {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": [FULL] * 5,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "draft_vocab_size": 32000,
    "block_size": 8,
    "target_hidden_size": None,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "mask_token_id": 151669,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 7,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
}
DEEPSPEC: dict[str, Any] = {
    **without(QWEN3_8B, "dflash_config", "auto_map", "rope_scaling"),
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "mask_token_id": 151669,
    "num_anchors": 512,
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
DEEPSPEC_DSPARK: dict[str, Any] = {
    **DEEPSPEC,
    "markov_rank": 256,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# Read by a reader of its config on 2026-08-18: the layout, with what the card of SpecForge's recipe says.
RADIXARK: dict[str, Any] = {
    **without(DFLASH2, "is_causal", "sliding_window", "use_sliding_window", "max_window_layers"),
    "architectures": ["DSparkDraftModel"],
    "attention_mode": "gqa",
    "block_size": 7,
    "confidence_head_with_markov": True,
    "dflash_config": {
        "attention_mode": "gqa",
        "markov_rank": 256,
        "mask_token_id": 248070,
        "projector_type": "dspark",
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "draft_vocab_size": 248320,
    "enable_confidence_head": True,
    "layer_types": [FULL] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 248070,
    "projector_type": "dspark",
    "target_layer_ids": [5, 19, 33, 47, 61],
}
# RedHatAI/GLM-5.3-speculator.dspark's.
SPECULATORS_DSPARK: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [2, 20, 39, 58, 75],
    "block_size": 8,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 154880,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 154856,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 8,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "name_or_path": "zai-org/GLM-5.3",
        },
    },
    "speculators_model_type": "dspark",
    "speculators_version": "0.7.0.dev108",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "layer_types": [SLIDING] * 3,
        "max_position_embeddings": 1048576,
        "model_type": "qwen3",
        "num_attention_heads": 64,
        "num_hidden_layers": 3,
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "sliding_window": 2048,
        "use_sliding_window": True,
        "vocab_size": 154880,
    },
}
# Of its DSpark draft (revision 2fa72e76), with the heads off, as its recipe has them.
DEEPSPEC_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "block_size": 7,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_confidence_head": False,
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3840,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 15360,
    "layer_types": [FULL] * 5,
    "markov_rank": 0,
    "mask_token_id": 4,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_anchors": 512,
    "num_attention_heads": 16,
    "num_experts": None,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "num_target_layers": 48,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        FULL: {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "rope_theta": None,
        "rope_type": "default",
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
    "tie_word_embeddings": False,
    "top_k_experts": None,
    "transformers_version": "5.10.2",
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
# The defaults of Transformers' own class are this draft's.
MUSE: dict[str, Any] = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "block_size": 16,
    "head_dim": 128,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "layer_types": [SLIDING] * 5,
    "mask_token_id": 201818,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
# The values that a converter of its files checks; the others have their defaults.
LAGUNA: dict[str, Any] = {
    "architectures": ["DFlashLagunaForCausalLM"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": 16,
        "causal": True,
        "mask_token_id": 12,
        "num_target_layers": 48,
        "target_layer_ids": [1, 10, 19, 29, 38, 47],
    },
    "draft_vocab_size": 100352,
    "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 30, 39, 48],
    "gating": "per-head",
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "layer_types": [SLIDING] * 6,
    "max_position_embeddings": 1048576,
    "model_type": "laguna",
    "num_attention_heads": 72,
    "num_experts": 0,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
JETSPEC = with_section(
    without(
        zlab(8, 2048, 6144, (32, 4), 16, ([1, 10, 19, 28, 37], 40)),
        *("layer_types", "sliding_window", "use_sliding_window", "rope_theta", "rope_scaling"),
    ),
    causal_head=True,
    mask_token_id=248070,
)

# By the draft's Hub id, or by the project that writes it.
CONFIGS: dict[str, dict[str, Any]] = {
    "z-lab/Qwen3-4B-DFlash-b16": zlab(5, 2560, 9728, (32, 8), 16, OF_36),
    "z-lab/Qwen3-8B-DFlash-b16": QWEN3_8B,
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": zlab(8, 2048, 6144, (32, 4), 16, ([1, 12, 23, 34, 45], 48)),
    "z-lab/Qwen3-Coder-Next-DFlash": zlab(8, 2048, 6144, (32, 4), 16, ([3, 11, 23, 35, 43], 48)),
    "z-lab/Qwen3.5-4B-DFlash": zlab(
        *(6, 2560, 9216, (32, 8), 16, ([1, 5, 9, 13, 17, 21, 25, 29], 32), 4096),
        tie_word_embeddings=True,
        **QWEN35,
    ),
    "z-lab/Qwen3.5-9B-DFlash": zlab(
        *(6, 4096, 12288, (32, 8), 16, ([1, 5, 9, 13, 17, 21, 25, 29], 32), 4096), **QWEN35
    ),
    "z-lab/Qwen3.5-27B-DFlash": QWEN35_27B,
    "z-lab/Qwen3.5-35B-A3B-DFlash": with_section(
        without(zlab(6, 2048, 6144, (32, 8), 16, OF_40, 4096, **QWEN35), "block_size"),
        block_size=16,
        mask_token_id=248077,
    ),
    "z-lab/Qwen3.5-122B-A10B-DFlash": zlab(
        *(6, 3072, 9216, (32, 8), 16, ([1, 7, 14, 20, 26, 32, 39, 45], 48), 4096), **QWEN35
    ),
    "z-lab/Qwen3.6-27B-DFlash": zlab(
        5, 5120, 17408, (32, 8), 16, ([1, 16, 31, 46, 61], 64), 2048, **QWEN35
    ),
    "z-lab/Qwen3.6-35B-A3B-DFlash": zlab(6, 2048, 6144, (32, 8), 16, OF_40, 4096, **QWEN35),
    "z-lab/Qwen3.8-27B-DFlash2": DFLASH2,
    "z-lab/Muse-Glimmer-30B-DFlash2": with_section(
        DFLASH2
        | {
            "bos_token_id": 200000,
            "hidden_size": 6656,
            "intermediate_size": 19968,
            "max_position_embeddings": 131072,
            "num_target_layers": 52,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            "use_cache": False,
            "vocab_size": 202048,
        },
        block_size=16,
        final_logit_softcapping=20.0,
        mask_token_id=201818,
        output_multiplier=0.19611613513818404,
        target_layer_ids=[1, 13, 25, 37, 49],
    ),
    "z-lab/gemma-4-26B-A4B-it-DFlash": zlab(
        5, 2816, 5632, (32, 8), 16, ([1, 6, 11, 17, 22, 27], 30), 2048
    ),
    "z-lab/gemma-4-31B-it-DFlash": with_section(
        zlab(5, 5376, 10752, (64, 8), 16, ([1, 12, 23, 35, 46, 57], 60), 2048), mask_token_id=4
    ),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": zlab(5, 4096, 12288, (32, 8), 10, OF_32),
    "z-lab/Kimi-K2.5-DFlash": zlab(6, 7168, 18432, (64, 8), 8, ([1, 12, 24, 35, 47, 58], 61)),
    "z-lab/gpt-oss-20b-DFlash": zlab(8, 2880, 7680, (64, 8), 8, OF_24),
    "z-lab/gpt-oss-120b-DFlash": zlab(8, 2880, 7680, (64, 8), 10, OF_36),
    "incoai/Qwen3.8-27B-DFlash2": without(
        DFLASH2, "use_sliding_window", "max_window_layers", "bos_token_id", "transformers_version"
    ),
    "JetSpec/jetspec-qwen3-8b": with_section(QWEN3_8B, causal_head=True),
    "JetSpec/jetspec-Qwen3.6-35B-A3B": {
        **JETSPEC,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "vocab_size": 248320,
    },
    "nm-testing/dflash-qwen3-8b-speculators": SPECULATORS,
    "deepseek-ai/dflash_qwen3_8b_block7": DEEPSPEC,
    "deepseek-ai/dspark_qwen3_8b_block7": DEEPSPEC_DSPARK,
    "RadixArk/Qwen3.8-27B-DSpark": RADIXARK,
    "RedHatAI/GLM-5.3-speculator.dspark": SPECULATORS_DSPARK,
    "Model-Optimizer, DSpark": with_section(
        QWEN3_8B | {"architectures": ["Qwen3DSparkModel"], "block_size": 8},
        markov_head_type="vanilla",
        markov_rank=256,
        projector_type="dspark",
        shift_label=True,
        use_confidence_head=True,
    ),
    "deepseek-ai/dflash_gemma4_12b_block7": DEEPSPEC_GEMMA4,
    "deepseek-ai/dspark_gemma4_12b_block7": {
        **DEEPSPEC_GEMMA4,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
    },
    "meta-models/Muse-Glimmer-30B-assistant": MUSE,
    "poolside/Laguna-S-2.1-DFlash": LAGUNA,
    "SpecForge, Qwen3.5-35B-A3B": zlab(8, 2048, 6144, (32, 4), 16, ([1, 10, 19, 28, 37], 40)),
    "SpecForge, LFM2.5-1.2B": with_section(
        zlab(
            *(8, 2048, 6144, (32, 8), 16, ([1, 4, 7, 10, 13], 16)),
            head_dim=64,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            vocab_size=65536,
        ),
        mask_token_id=16,
    ),
    "SpecForge, Kimi-K2.7-Code": with_section(
        zlab(
            *(6, 7168, 18432, (64, 8), 8, ([1, 12, 24, 35, 47, 58], 61)),
            mask_token_id=163838,
            rope_scaling={**YARN, "type": "yarn"},
            rope_theta=50000.0,
            vocab_size=163840,
        ),
        mask_token_id=163838,
    ),
    "SpecForge, both schemas of RoPE": {
        **QWEN3_8B,
        "rope_parameters": {**YARN, "rope_theta": 1000000.0},
        "rope_scaling": YARN,
    },
    # Its draft of 2026-09, with the small sizes of a test of Modular's.
    "XiaomiMiMo/MiMo-V2.6-Flash-RL, shrunk": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "block_size": 8,
        "dflash_config": {
            "target_layer_ids": [0, 11, 23],
            "mask_token_id": 151675,
            "num_anchors": 4096,
            "block_size": 8,
            "loss_decay_gamma": 7.0,
            "attention_value_scale": 0.612,
            "attention_sink_bias": True,
        },
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 1024,
        "use_sliding_window": True,
        "is_causal": False,
        "num_target_layers": 48,
        "target_hidden_size": 64,
        "vocab_size": 152576,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-06,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "add_swa_attention_sink_bias": True,
        "tie_word_embeddings": False,
        "use_cache": True,
    },
    # The published file has quantised weights besides.
    "NVIDIA, Nemotron 3.5 Lightning's DSpark in bfloat16": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": 2688,
        "intermediate_size": 6144,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 131072,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "layer_types": [SLIDING] * 6,
        "sliding_window": 1024,
        "block_size": 8,
        "dspark_bonus_anchor": True,
        "dflash_query_causal": True,
        "attention_sink_bias": True,
        "markov_rank": 512,
        "markov_head_type": "vanilla",
        "eagle_aux_hidden_state_layer_ids": [2, 6, 20, 30, 42, 52],
        "dflash_config": {
            "attention_sink_bias": True,
            "causal": True,
            "mask_token_id": 990,
            "swa_window_size": 1024,
            "target_layer_ids": [1, 5, 19, 29, 41, 51],
            "use_swa": True,
            "sample_from_anchor": False,
        },
    },
    "Model-Optimizer, with a window": with_section(
        QWEN3_8B | {"sliding_window": 2048}, use_swa=True, swa_window_size=2048, causal=False
    ),
}

# With what the sentence says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash": (
        with_section(
            without(
                zlab(5, 6144, 16384, (128, 8), 8, ([0, 15, 31, 47, 69], 70)),
                *("layer_types", "use_sliding_window", "max_window_layers"),
            )
            | {"sliding_window": 1024, "partial_rotary_factor": 0.5, "v_head_dim": 128},
            num_anchors=4096,
            block_size=8,
            loss_decay_gamma=7.0,
            use_swa=True,
            swa_window_size=1024,
            backbone_rotary_base=5000000,
            attention_value_scale=0.612,
            attention_sink_bias=True,
        ),
        "backbone_rotary_base absent or equal to rope_theta = .*vLLM does without it",
    ),
    "DeepSpec, a recurrent head": (
        {**DEEPSPEC, "markov_rank": 256, "markov_head_type": "rnn"},
        "markov_head_type 'vanilla' in .*, got 'rnn'",
    ),
    "SpecForge, Domino": (
        with_section(QWEN3_8B, projector_type="domino", pure_draft_prefix_len=1),
        "pure_draft_prefix_len absent or in .0,|projector_type absent or in .'dflash'",
    ),
    "NeMo, JetSpec's recipe": (
        with_section(QWEN3_8B | {"is_causal": False}, causal=True),
        "is_causal = False beside dflash_config.causal = True",
    ),
    "AngelSlim/Qwen3-8b-dflare": (
        {
            **without(QWEN3_8B, "dflash_config", "auto_map", "rope_scaling", "block_size"),
            "model_type": "dflash",
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "num_target_layers": 5,
            "target_num_hidden_layers": 36,
        },
        "another project's layout .AngelSpec's.",
    ),
    "speculators, with Laguna's layers": (
        {
            **SPECULATORS,
            "transformer_layer_config": {
                **SPECULATORS["transformer_layer_config"],
                "model_type": "laguna",
                "rope_parameters": {FULL: YARN, SLIDING: YARN},
            },
        },
        "transformer_layer_config.model_type in .*got 'laguna'",
    ),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DFlash": (
        with_section(
            QWEN3_8B | {"quantization_config": {"quant_algo": "NVFP4"}}, attention_sink_bias=True
        ),
        "quant_method 'compressed-tensors' or 'fp8' in quantization_config",
    ),
}

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "target_hidden_size": 32,
    "global_head_dim": 8,
    "vocab_size": 64,
    "mask_token_id": 63,
    "draft_vocab_size": 24,
    "sliding_window": 5,
    "swa_window_size": 5,
    "selector_rank": 4,
    "selector_top_k": 6,
    "markov_rank": 4,
}


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """A config of the same keys with small sizes."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name in ("dflash_config", "transformer_layer_config"):
            out[name] = tiny(value)
        elif name == "draft_vocab_size" and value == config.get("vocab_size"):
            out[name] = TINY["vocab_size"]
        # A rank of 0 is none.
        elif name in TINY and value not in (None, 0):
            out[name] = TINY[name]
        else:
            out[name] = copy.deepcopy(value)
    # No reduced vocabulary.
    if "vocab_size" in config and config.get("draft_vocab_size") == config["vocab_size"]:
        out["draft_vocab_size"] = out["vocab_size"]
    return out
