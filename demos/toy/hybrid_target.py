"""The hybrid target: a small Qwen3.5 text model, gated delta nets with one full attention layer in four.

It answers the easier kinds of the text target's tasks with that target's tokenizer and chat template.
"""

import math
from pathlib import Path
from typing import Any, Final

import torch
from fast_delta_rule import fast_delta_rule
from tasks import Kind
from transformers import PreTrainedTokenizerBase, Qwen3_5ForCausalLM, Qwen3_5TextConfig

HYBRID_DIR: Final = Path(__file__).resolve().parent / "hybrid"
HYBRID_KINDS: Final[tuple[Kind, ...]] = ("code", "structured", "dialogue")


def make_hybrid_config(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Qwen3_5TextConfig:
    """Return the configuration of the hybrid target: 2 M parameters, two value heads per key head."""
    ids: Any = tokenizer
    return Qwen3_5TextConfig(
        vocab_size=len(ids),
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=max_length,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
        tie_word_embeddings=True,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        dtype="float32",
    )


@torch.no_grad()
def make_hybrid_model(config: Qwen3_5TextConfig) -> Qwen3_5ForCausalLM:
    """Return a fresh model whose time steps are drawn as Gated DeltaNet's authors do, log-uniform in 0.001 to 0.1.

    Transformers' own initial bias of 1 makes most heads forget within a token or two.
    """
    model = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            # The inverse of the softplus that the forward applies.
            parameter.copy_(step + torch.log(-torch.expm1(-step)))
    return model


def hybrid_logits(model: Qwen3_5ForCausalLM, input_ids_BS: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, S, V) of right-padded rows; nothing after a token changes what it sees."""
    with fast_delta_rule():
        return model(input_ids=input_ids_BS, use_cache=False).logits
