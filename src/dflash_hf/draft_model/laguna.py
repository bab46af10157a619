"""This module defines the layers of a draft that is built like Laguna.

The heads of these layers have a gate, and each layer norms the context itself. poolside's drafts for Laguna have these
layers. Shapes: `B` rows, `C` context tokens, `K` block tokens, `D` hidden size, `H` query heads, `E` head size.

Source: vLLM `model_executor/models/laguna_dflash.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.draft_model.layers import DFlashAttention, DFlashDecoderLayer, DFlashRMSNorm


class DFlashLagunaAttention(DFlashAttention):
    """In this attention, each head is multiplied by a gate that is computed from the block's states."""

    def __init__(self, config: DFlashConfig, layer_idx: int, norm: DFlashRMSNorm) -> None:
        super().__init__(config, layer_idx)
        self.g_proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=False)
        # The context uses the norm of the layer. It is kept in a tuple, so that it is not registered a second time in
        # this module.
        self.context_norms = (norm,)

    def context_states(self, features: Tensor) -> Tensor:
        """Returns the context's features `[B, C, D]` after the layer's norm, which the block's
        states go through too.
        """
        (norm,) = self.context_norms
        return norm(features)

    def stacked_projections(self) -> list[nn.Module]:
        """Returns an empty list, because the kernel that writes the context of all layers uses the same states for all
        layers.
        """
        return []

    def gated(self, heads: Tensor, hidden_states: Tensor) -> Tensor:
        """Returns the heads `[B, K, H, E]`, each times its gate.

        The gates come from the block's normed states `[B, K, D]`.
        """
        gate = self.g_proj(hidden_states)
        # The gate is computed in float32 or wider, and rounded once.
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        gate = nn.functional.softplus(wide)
        return heads * gate.to(heads.dtype)[..., None]


class DFlashLagunaLayer(DFlashDecoderLayer):
    """A Laguna layer is a decoder layer with [`DFlashLagunaAttention`]."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = DFlashLagunaAttention(config, layer_idx, self.input_layernorm)
