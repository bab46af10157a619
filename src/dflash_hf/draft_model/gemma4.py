"""This module defines the layers of a draft that is built like Gemma 4.

These layers have a norm before and after each sublayer, normed values, and attention scores without a scale.
DeepSpec's drafts for Gemma 4 have them. All of them run in torch, because the kernels of this package norm and round
in the same way as Qwen3. Shapes: `B` rows, `C` context tokens, `K` block tokens, `D` hidden size, `G`/`H` key/query
heads, `E` head size.

Source: DeepSpec `deepspec/modeling/dspark/gemma4/modeling.py`, Transformers `models/gemma4/modeling_gemma4.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.draft_model.layers import (
    Angles,
    CosSin,
    DFlashAttention,
    DFlashMLP,
    DFlashRMSNorm,
    Projector,
    rotate,
)


def rms_norm(states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns normed states `[..., D]`, times a weight `[D]` if given.

    They are computed in float32 or wider and rounded once.
    """
    # A sum of squares is too large for half precision. float64, which tests use, stays as it is.
    dtype = torch.promote_types(states.dtype, torch.float32)
    if weight is not None:
        weight = weight.to(dtype)
    normed = nn.functional.rms_norm(states.to(dtype), states.shape[-1:], weight, eps)
    return normed.to(states.dtype)


class DFlashGemma4Norm(DFlashRMSNorm):
    """This RMS norm multiplies by its weight before it rounds, as Gemma 4 does."""

    def _normed(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)


class DFlashGemma4Attention(DFlashAttention):
    """In this attention the values are normed too, without a weight, and the scores have no scale."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # Gemma 4 has no factor on the scores. The weights of the two norms below take its place.
        self.scaling = 1.0
        self.keys_are_values = config.keys_are_values
        if self.keys_are_values:
            # The key projection computes both keys and values.
            del self.v_proj
        self.q_norm = DFlashGemma4Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashGemma4Norm(config.head_dim, config.rms_norm_eps)

    def project_kv(self, hidden_states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Returns normed and rotated keys, and normed values, token-major `[B, C, G, E]` each."""
        projected = self._by_head(self.k_proj(hidden_states))
        key = rotate(self.k_norm(projected), angles)
        # Values are not rotated, so they are computed from the projection and not from the keys.
        value = projected
        if not self.keys_are_values:
            value = self._by_head(self.v_proj(hidden_states))
        # The norm of the values has no weight in Gemma 4.
        return key, rms_norm(value, None, self.k_norm.eps)

    def stacked_projections(self) -> list[nn.Module]:
        """Returns an empty list, because the kernel that writes context norms only keys."""
        return []

    def extend(
        self, hidden_states: Tensor, cos_sin: CosSin, cache: RaggedCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the keys and values of the current block.

        Returns its queries, and all keys and values to attend to.

        The shapes are those of [`DFlashAttention.extend`].
        """
        # No kernel is used here. It would norm in the same way as Qwen3 and would not norm the values.
        angles = Angles.of(cos_sin)
        query = self.project_q(hidden_states, angles)
        key, value = self.project_kv(hidden_states, angles)
        keys, values = cache.extend(self.layer_idx, key, value)
        return query, keys, values


class DFlashGemma4Layer(GradientCheckpointingLayer):
    """A Gemma 4 layer consists of attention and an MLP, each between two norms."""

    layer_scalar: Tensor

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.self_attn = DFlashGemma4Attention(config, layer_idx)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashGemma4Norm(size, eps)
        self.post_attention_layernorm = DFlashGemma4Norm(size, eps)
        self.pre_feedforward_layernorm = DFlashGemma4Norm(size, eps)
        self.post_feedforward_layernorm = DFlashGemma4Norm(size, eps)
        # The scalar is stored in the checkpoint and never trained.
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, projector: Projector, block_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer on the states `[B, K, D]` of blocks.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): Output of the layer before, or the embeddings.
            residual (`None`): Always `None`, because the layer before has added its residual itself.
            projector (`Projector`): Makes the operands of attention.
            block_size (`int`): Slots of a block. These layers do not use it.

        Returns:
            `tuple[torch.Tensor, None]`: The output including the residual stream, and `None`, because no later norm
            has to add anything.
        """
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attn(normed, projector)
        # The norm is applied to the sublayer's output and not to the sum, so the residual stream itself is not normed.
        stream = hidden_states + self.post_attention_layernorm(attended)
        normed = self.pre_feedforward_layernorm(stream)
        stream = stream + self.post_feedforward_layernorm(self.mlp(normed))
        return stream * self.layer_scalar, None
