"""The draft's RMS norm and RoPE; the target has Transformers' own.

Shapes: `B` rows, `K` tokens of a block, `H` heads, `D` hidden, `E` head size, `R` channels of a head that turn.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_hf import ops
from dflash_hf.configuration_dflash import DFlashConfig

# Cosines and sines, `[..., 1, R]` each: the 1 stands for the heads.
CosSin = tuple[Tensor, Tensor]


class DFlashRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)`, the mean in float32 as in Qwen3."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @overload
    def forward(self, hidden_states: Tensor) -> Tensor: ...

    @overload
    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalises the last dimension.

        Returns:
            `torch.Tensor` of the same shape. With a `residual`, the norm of the sum of both and the sum, as in vLLM's
            `RMSNorm`.
        """
        if residual is None:
            return self._normed(hidden_states)
        if ops.use_kernel(ops.add_norm, residual, hidden_states, self.weight):
            # The kernel returns both in one tensor, the sum first.
            both = ops.add_norm(residual, hidden_states, self.weight, self.eps)
            total, normed = both.unbind()
            return normed, total
        # The stream stays unnormed: later layers add to it.
        total = residual + hidden_states
        return self._normed(total), total

    def _normed(self, hidden_states: Tensor) -> Tensor:
        if ops.use_kernel(ops.rms_norm, hidden_states, self.weight):
            return ops.rms_norm(hidden_states, self.weight, self.eps)
        size = self.weight.shape
        # In float32 there is nothing to round between norm and weight, and one operation does both.
        if hidden_states.dtype == self.weight.dtype == torch.float32:
            return nn.functional.rms_norm(hidden_states, size, self.weight, self.eps)
        # Qwen3 rounds the normed states to 16 bits before the weight multiplies them, and drafts are trained so.
        states = hidden_states.to(torch.float32)
        normed = nn.functional.rms_norm(states, size, None, self.eps)
        return self.weight * normed.to(hidden_states.dtype)


class DFlashRotaryEmbedding(nn.Module):
    """Cosines and sines of the draft's own RoPE over plain indices."""

    inv_freq: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        inv_freq, self.attention_scaling = self.frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @staticmethod
    def frequencies(config: DFlashConfig) -> tuple[Tensor, float]:
        """Returns the inverse frequencies `[R/2]` and the factor on cosines and sines (Transformers' rope utils)."""
        rope = config.rope_parameters
        # Transformers' table has all types but the default one.
        if rope["rope_type"] != "default":
            initialize = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
            inv_freq, scaling = initialize(config)
            return inv_freq, float(scaling)
        # Pairs of channels share a frequency: `theta ** (-2 i / E)` for pair `i` of those that turn.
        even_channels = torch.arange(0, config.rotary_dim, 2, dtype=torch.float)
        exponent = even_channels / config.rotary_dim
        inv_freq = 1.0 / (rope["rope_theta"] ** exponent)
        return inv_freq, 1.0

    @torch.no_grad()
    def forward(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        """Returns cosines and sines `[..., 1, R]` for `positions` `[...]`, computed in float32."""
        # Half precision could not tell neighbouring positions of a long text apart.
        freqs = positions[..., None].float() * self.inv_freq.float()
        # Both halves of a head turn by the same angles; a dimension of 1 stands for the heads.
        angles = torch.cat((freqs, freqs), dim=-1)
        angles = angles[..., None, :]
        cos = angles.cos() * self.attention_scaling
        sin = angles.sin() * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


def rotate(states_BKHE: Tensor, cos_sin: CosSin) -> Tensor:
    """Returns states `[B, K, H, E]` with RoPE applied to their first `R` channels, in its half-split form."""
    cos, sin = cos_sin
    num_turned = cos.shape[-1]
    if num_turned < states_BKHE.shape[-1]:
        kept = states_BKHE[..., num_turned:]
        return torch.cat([rotate(states_BKHE[..., :num_turned], cos_sin), kept], dim=-1)
    first, second = states_BKHE.chunk(2, dim=-1)
    # A channel turns with the one half a head further on, as in Llama, and not with its neighbour.
    turned = torch.cat((-second, first), dim=-1)
    return states_BKHE * cos + turned * sin
