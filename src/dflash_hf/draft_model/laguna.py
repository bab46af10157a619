"""The layers of a draft that is built as Laguna is: heads behind a gate, and context that each layer norms for itself.

poolside's drafts for Laguna have them. Shapes: `B` rows, `C` context tokens, `K` block tokens, `D` hidden, `H` query
heads, `E` head size.

Source: vLLM `model_executor/models/laguna_dflash.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.draft_model.layers import DFlashAttention, DFlashDecoderLayer, DFlashRMSNorm


class DFlashLagunaAttention(DFlashAttention):
    """Attention whose heads are multiplied by a gate that the block's states open."""

    def __init__(self, config: DFlashConfig, layer_idx: int, norm: DFlashRMSNorm) -> None:
        super().__init__(config, layer_idx)
        self.g_proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=False)
        # The layer's own norm. A tuple, so that it is no part of this module too.
        self.context_norms = (norm,)

    def context_states(self, features: Tensor) -> Tensor:
        """Returns the context's features `[B, C, D]` after the layer's norm, as the block's states come."""
        (norm,) = self.context_norms
        return norm(features)

    def stacked_projections(self) -> list[nn.Module]:
        """Returns none: the kernel that writes context of all layers at once takes the same states for all."""
        return []

    def gated(self, heads: Tensor, hidden_states: Tensor) -> Tensor:
        """Returns heads `[B, K, H, E]`, each times its gate, of the block's normed states `[B, K, D]`."""
        gate = self.g_proj(hidden_states)
        # In float32 or wider, and rounded once.
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        gate = nn.functional.softplus(wide)
        return heads * gate.to(heads.dtype)[..., None]


class DFlashLagunaLayer(DFlashDecoderLayer):
    """A layer with that attention."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = DFlashLagunaAttention(config, layer_idx, self.input_layernorm)
