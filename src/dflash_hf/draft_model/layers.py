"""The layers of a DFlash draft: attention over context and block, and a gated MLP.

Norm and RoPE are here too: the draft has its own, and the target has Transformers'.

Shapes: `B` rows, `C` context tokens, `K` block tokens, `R` keys, `D` hidden, `H`/`G` query/key heads, `E` head size,
`T` channels of a head that turn under RoPE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_hf import joint_products, ops
from dflash_hf.block.attention import CombinedMasks, Mask, RaggedBlock, RaggedMask, attend
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.configuration_dflash import AttentionKind, DFlashConfig, narrowed
from dflash_hf.packed_weights import DFlashLinear

# Not a public name: where a build of torch has none, `rms_norm` does.
_fused_rms_norm: Any = getattr(torch, "_fused_rms_norm", None)
# Cosines and sines, `[..., 1, T]` each: the 1 stands for the heads.
CosSin = tuple[Tensor, Tensor]


class Angles(NamedTuple):
    """Cosines and sines as [`rotate`] multiplies by them, `[..., 1, T]` each; made once for all layers."""

    cos: Tensor
    signed_sin: Tensor  # a minus before those of the first half of the channels

    @classmethod
    def of(cls, cos_sin: CosSin) -> Angles:
        """Makes them of cosines and sines `[..., 1, T]` each."""
        cos, sin = cos_sin
        first, second = sin.chunk(2, dim=-1)
        return cls(cos, torch.cat((-first, second), dim=-1))

    def behind(self, num_context: int) -> Angles:
        """Returns those of a block, out of those of its context and itself `[B, C + K, 1, T]`."""
        return Angles(self.cos[:, num_context:], self.signed_sin[:, num_context:])


# The operands of attention: queries [B, K, H, E], keys and values [B, G, R, E], and the mask.
Operands = tuple[Tensor, Tensor, Tensor, Mask]


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
        """Normalises states `[..., D]` over the last dimension.

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
        return rms_norm(hidden_states, self.weight, self.eps)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `weight * x / sqrt(mean(x^2) + eps)` of states `[..., D]`, rounded as Qwen3's norm rounds it."""
    # In float32 there is nothing to round between norm and weight, and one operation does both.
    if states.dtype == weight.dtype == torch.float32:
        return _torchs_norm(states, weight, weight.shape, eps)
    # Qwen3 rounds the normed states to 16 bits before the weight multiplies them, and drafts are trained so.
    normed = _torchs_norm(states.to(torch.float32), None, weight.shape, eps)
    return weight * normed.to(states.dtype)


def _torchs_norm(states: Tensor, weight: Tensor | None, size: torch.Size, eps: float) -> Tensor:
    """Returns torch's own norm of float32 states `[..., D]`, times a weight `[D]` where one is given."""
    # `rms_norm` calls the same operation. The way there takes 1 % of a small model's step on a CPU (docs/log.md).
    if _fused_rms_norm is not None and states.is_cpu and not torch.is_grad_enabled():
        normed, _ = _fused_rms_norm(states, size, weight, eps)
        return normed
    return nn.functional.rms_norm(states, size, weight, eps)


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
        """Returns the inverse frequencies `[T/2]` and the factor on cosines and sines (Transformers' rope utils)."""
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
    def forward(self, positions_BK: Tensor, states: Tensor) -> CosSin:
        """Returns cosines and sines `[B, K, 1, T]` in the dtype of `states` `[..., D]`, computed in float32."""
        angles_of = ops.implementation(ops.rope_angles, states)
        both: Tensor = angles_of(positions_BK, self.inv_freq, self.attention_scaling, states.dtype)
        # A dimension of 1 stands for the heads: all of them turn by the same angles.
        cos, sin = both[..., None, :].unbind()
        return cos, sin


def rotate(states_BKHE: Tensor, angles: Angles) -> Tensor:
    """Returns states `[B, K, H, E]` with RoPE applied to their first `T` channels, in its half-split form."""
    cos, signed_sin = angles
    num_turned = cos.shape[-1]
    if num_turned < states_BKHE.shape[-1]:
        kept = states_BKHE[..., num_turned:]
        return torch.cat([rotate(states_BKHE[..., :num_turned], angles), kept], dim=-1)
    # A channel turns with the one half a head further on, as in Llama, and not with its neighbour.
    partners = states_BKHE.roll(num_turned // 2, dims=-1)
    return states_BKHE * cos + partners * signed_sin


class DFlashMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.intermediate_size
        # Linear layers without biases, as in published drafts; only attention's may have one.
        self.gate_proj = DFlashLinear(size, inner, bias=False)
        self.up_proj = DFlashLinear(size, inner, bias=False)
        self.down_proj = DFlashLinear(inner, size, bias=False)
        self.act_fn: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]
        self.is_silu = config.hidden_act == "silu"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns `down(act(gate(x)) * up(x))` of states `x` `[..., D]`, in their shape."""
        [out] = joint_products.linears(self._gated(hidden_states), self.down_proj)
        return out

    def _gated(self, hidden_states: Tensor) -> Tensor:
        # The kernels know one activation.
        is_joint = self.is_silu and joint_products.is_gated_jointly(
            hidden_states, self.gate_proj, self.up_proj
        )
        if is_joint:
            return ops.gated_linear(hidden_states, self.gate_proj.weight, self.up_proj.weight)
        gate = self.gate_proj(hidden_states)
        up = self.up_proj(hidden_states)
        if self.is_silu and ops.use_kernel(ops.silu_mul, gate, up):
            return ops.silu_mul(gate, up)
        return self.act_fn(gate) * up


class DFlashAttention(nn.Module):
    """Queries from the block, keys and values from the context and the block."""

    attention_sink_bias: Tensor | None

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        # Configs may have an integer here.
        self.dropout = float(config.attention_dropout)
        # Scores of normed queries and keys keep a variance that does not grow with the head's size.
        self.scaling = config.head_dim**-0.5
        self.kind: AttentionKind = config.attention_kind(layer_idx)
        size = config.hidden_size
        bias = config.attention_bias
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        # Query heads that share a key head.
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = DFlashLinear(size, query_size, bias=bias)
        self.k_proj = DFlashLinear(size, key_size, bias=bias)
        self.v_proj = DFlashLinear(size, key_size, bias=bias)
        self.o_proj = DFlashLinear(query_size, size, bias=bias)
        # Each head is normed by itself, with one weight for all of them, as in Qwen3.
        self.q_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.value_scale = float(config.attention_value_scale)
        # A score for each query head that takes a share of the softmax, as a key without a value would.
        sinks = None
        if config.attention_sink_bias:
            sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
        self.register_parameter("attention_sink_bias", sinks)

    def kind_in(self, cache: RaggedCache) -> AttentionKind:
        """Returns the kind of this layer over a cache, whose window may be narrower than the layer's own."""
        window = cache.attention[self.layer_idx].shape.window
        return narrowed(self.kind, window)

    def project_q(self, hidden_states: Tensor, angles: Angles) -> Tensor:
        """Returns queries (normed, rotated), token-major `[B, K, H, E]`."""
        query = self._by_head(self.q_proj(hidden_states))
        return rotate(self.q_norm(query), angles)

    def project_kv(self, hidden_states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Returns keys (normed, rotated) and values, token-major `[B, C, G, E]`."""
        key = self._by_head(self.k_proj(hidden_states))
        value = self._by_head(self.v_proj(hidden_states))
        key = rotate(self.k_norm(key), angles)
        return key, value

    def context_states(self, features: Tensor) -> Tensor:
        """Returns what keys and values of the context are made of `[B, C, D]`: its features as they are."""
        return features

    def gated(self, heads: Tensor, hidden_states: Tensor) -> Tensor:
        """Returns heads `[B, K, H, E]` as they go into the output projection: times the factor on the values."""
        # A factor on all values is one on each of their sums, and the cache keeps them as they are.
        if self.value_scale == 1.0:
            return heads
        return heads * self.value_scale

    def stacked_projections(self) -> list[nn.Module]:
        """Returns the layers that a kernel may stack to write context: of keys, then of values."""
        return [self.k_proj, self.v_proj]

    def extend(
        self, hidden_states: Tensor, cos_sin: CosSin, cache: RaggedCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the begun block's keys and values; returns its queries, and all keys and values to attend to.

        The queries are `[B, K, H, E]`, keys and values `[B, G, R, E]`. This is `project_q`, `project_kv` and
        `RaggedCache.extend`. Where `ops.use_kernel` decides so, one kernel does all that comes after the projections.
        """
        # Products first: they are the only part that is the same with and without the kernel.
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = joint_products.linears(hidden_states, *projections)
        query, key, value = map(self._by_head, projected)
        # The kernel norms, rotates and writes in one launch.
        norms = (self.q_norm.weight, self.k_norm.weight)
        buffers = cache.attention[self.layer_idx].buffers()
        floats = (query, key, value, *norms, *cos_sin)
        cos, sin = cos_sin
        # The kernel turns whole heads.
        turns_all = cos.shape[-1] == self.head_dim
        if not turns_all or not ops.use_kernel(ops.norm_rope_write, *floats, buffers=buffers):
            angles = Angles.of(cos_sin)
            query = rotate(self.q_norm(query), angles)
            key = rotate(self.k_norm(key), angles)
            keys, values = cache.extend(self.layer_idx, key, value)
            return query, keys, values
        query = ops.norm_rope_write(
            query,
            key,
            value,
            *norms,
            # The kernel takes [B, K, E], the same angles for all heads.
            cos.squeeze(2),
            sin.squeeze(2),
            cache.block.lengths,
            *buffers,
            self.k_norm.eps,
        )
        # The kernel has written the block, so that it is read with its context.
        keys, values = cache.read(self.layer_idx)
        return query, keys, values

    def forward(self, hidden_states: Tensor, projector: Projector) -> Tensor:
        """Returns the attention output `[B, K, D]` of the block's normed states."""
        query, key, value, mask = projector.project(self, hidden_states)
        # Queries are token-major for the kernels before attention, and head-major for attention itself.
        query = query.transpose(1, 2)
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        sinks = self.attention_sink_bias
        heads = attend(query, key, value, mask, self.scaling, sinks=sinks, dropout=dropout)
        heads = self.gated(heads, hidden_states)
        [out] = joint_products.linears(heads.flatten(2), self.o_proj)
        return out

    def _by_head(self, states: Tensor) -> Tensor:
        """Returns projected states `[B, K, heads * E]` as `[B, K, heads, E]`."""
        # The number of heads is left open: queries have more of them than keys.
        by_head = (*states.shape[:-1], -1, self.head_dim)
        return states.view(by_head)


class Projector(ABC):
    """Makes the operands of attention in one forward of the draft; the only part in which its forwards differ."""

    @abstractmethod
    def project(self, attention: DFlashAttention, normed: Tensor) -> Operands:
        """Returns what a layer's block attends with and to, made of the block's normed states `[B, K, D]`."""


class BlockProjector(Projector):
    """A block over the ragged cache, which holds all its context."""

    def __init__(self, cache: RaggedCache, cos_sin: CosSin) -> None:
        self.cache = cache
        self.cos_sin = cos_sin  # of the block

    def project(self, attention: DFlashAttention, normed: Tensor) -> Operands:
        """Returns the operands, after writing the block into the cache."""
        query, key, value = attention.extend(normed, self.cos_sin, self.cache)
        mask = RaggedMask(self.cache.block, attention.kind_in(self.cache))
        return query, key, value, mask


class ContextProjector(Projector):
    """A block over the ragged cache, whose newest context each layer writes first.

    Args:
        cache (`RaggedCache`): The draft's cache.
        context (`RaggedBlock`): Where the newest context stands.
        features (`torch.Tensor` of shape `[B, C, D]`): The newest context, projected.
        cos_sin (`tuple[torch.Tensor, torch.Tensor]`): Of context and block, `[B, C + K, 1, E]` each.
    """

    def __init__(
        self, cache: RaggedCache, context: RaggedBlock, features: Tensor, cos_sin: CosSin
    ) -> None:
        self.cache = cache
        self.context = context
        self.features = features
        self.num_context = features.shape[1]
        self.angles = Angles.of(cos_sin)
        self.block_angles = self.angles.behind(self.num_context)

    def project(self, attention: DFlashAttention, normed: Tensor) -> Operands:
        """Returns the operands, after writing context and block into the cache."""
        num = self.num_context
        index = attention.layer_idx
        # One product for context and block: their rows are few, and the weights are read once.
        features = attention.context_states(self.features)
        joined = torch.cat([features, normed], dim=1)
        key, value = attention.project_kv(joined, self.angles)
        # The context comes first: its rejected rows are overwritten by the block.
        layer = self.cache.attention[index]
        layer.write(key[:, :num], value[:, :num], self.context)
        keys, values = self.cache.extend(index, key[:, num:], value[:, num:])
        # Context has no queries: nobody asks what it would say.
        query = attention.project_q(normed, self.block_angles)
        mask = RaggedMask(self.cache.block, attention.kind_in(self.cache))
        return query, keys, values, mask


class CombinedProjector(Projector):
    """Blocks over their context in one sequence, with or without an ordinary cache: Transformers' contract, training.

    Args:
        context (`torch.Tensor` of shape `[B, C, D]`): The new context, projected.
        cos_sin (`tuple[torch.Tensor, torch.Tensor]`): Of context and blocks, `[B, C + Q, 1, E]` each.
        masks (`CombinedMasks`): The masks.
        cache (`Cache`, *optional*): Cache to be advanced by context and blocks.
    """

    def __init__(
        self, context: Tensor, cos_sin: CosSin, masks: CombinedMasks, cache: Cache | None
    ) -> None:
        self.context = context
        self.angles = Angles.of(cos_sin)
        self.block_angles = self.angles.behind(context.shape[1])
        # Masks are made once per kind of layer, by the first one that asks.
        self.masks = masks
        self.cache = cache

    def project(self, attention: DFlashAttention, normed: Tensor) -> Operands:
        """Returns the operands, after advancing the cache where there is one."""
        # The same product as in decoding, over as many blocks as there are.
        # Context and blocks are one sequence, as an ordinary cache takes them: head-major.
        context = attention.context_states(self.context)
        joined = torch.cat([context, normed], dim=1)
        key, value = attention.project_kv(joined, self.angles)
        key = key.to(value.dtype).transpose(1, 2)
        value = value.transpose(1, 2)
        if self.cache is not None:
            key, value = self.cache.update(key, value, attention.layer_idx)
        # The context proposes nothing, so that there are queries of the blocks alone.
        query = attention.project_q(normed, self.block_angles)
        # Under autocast float32 norms leave queries and keys wider than values, and FlexAttention takes one dtype.
        query = query.to(value.dtype)
        num_keys = key.shape[2]
        mask = self.masks.of(attention.kind, num_keys, attention.repeats, query.dtype)
        return query, key, value, mask


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP with pre-norms."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashRMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(size, config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, projector: Projector, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on the states `[B, K, D]` of blocks.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): Output of the layer before, or the embeddings.
            residual (`torch.Tensor`, *optional*): Residual stream that `hidden_states` are not yet added to; `None` in
                the first layer.
            projector (`Projector`): Makes the operands of attention.
            block_size (`int`): Slots of a block, of which these layers need not know.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Output of the MLP, and the residual stream that it is not yet added
            to: the next norm adds and norms both in one kernel.
        """
        # The embeddings are the stream of the first layer; all later sums are taken within a norm.
        if residual is None:
            stream = hidden_states
            normed = self.input_layernorm(hidden_states)
        else:
            normed, stream = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(normed, projector)
        normed, stream = self.post_attention_layernorm(hidden_states, stream)
        hidden_states = self.mlp(normed)
        # Not added up here: the next norm takes both and gives sum and norm at once.
        return hidden_states, stream
