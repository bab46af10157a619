"""This module defines the layers of a DFlash draft: attention over context and block, and a gated MLP.

The norm and the RoPE of the draft are here too. The target uses those of Transformers.

Shapes: `B` rows, `C` context tokens, `K` block tokens, `R` keys, `D` hidden size, `H`/`G` query/key heads, `E` head
size, `T` channels of a head that the RoPE rotates.
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

# This name is not public. In a build of torch without it, `rms_norm` is called.
_fused_rms_norm: Any = getattr(torch, "_fused_rms_norm", None)
# Cosines and sines, `[..., 1, T]` each. The dimension of 1 is for the heads.
CosSin = tuple[Tensor, Tensor]


class Angles(NamedTuple):
    """An instance holds cosines and sines in the form in which [`rotate`] multiplies by them, `[..., 1, T]` each.

    They are made once for all layers.
    """

    cos: Tensor
    signed_sin: Tensor  # the sines of the first half of the channels are negated

    @classmethod
    def of(cls, cos_sin: CosSin) -> Angles:
        """Makes the angles from cosines and sines, `[..., 1, T]` each."""
        cos, sin = cos_sin
        first, second = sin.chunk(2, dim=-1)
        return cls(cos, torch.cat((-first, second), dim=-1))

    def behind(self, num_context: int) -> Angles:
        """Returns the angles of a block, which stand behind the `C` angles of its context in `[B, C + K, 1, T]`."""
        return Angles(self.cos[:, num_context:], self.signed_sin[:, num_context:])


# The operands of attention are queries [B, K, H, E], keys and values [B, G, R, E], and the mask.
Operands = tuple[Tensor, Tensor, Tensor, Mask]


class DFlashRMSNorm(nn.Module):
    """This norm computes `weight * x / sqrt(mean(x^2) + eps)`. The mean is computed in float32, as in Qwen3."""

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
            `torch.Tensor` of the same shape. With a `residual`, the result is a tuple of the normed sum of both and
            the sum itself, as in vLLM's `RMSNorm`.
        """
        if residual is None:
            return self._normed(hidden_states)
        if ops.use_kernel(ops.add_norm, residual, hidden_states, self.weight):
            # The kernel returns the sum and the normed sum in one tensor, the sum first.
            both = ops.add_norm(residual, hidden_states, self.weight, self.eps)
            total, normed = both.unbind()
            return normed, total
        # The residual stream is not normed, because later layers add to it.
        total = residual + hidden_states
        return self._normed(total), total

    def _normed(self, hidden_states: Tensor) -> Tensor:
        if ops.use_kernel(ops.rms_norm, hidden_states, self.weight):
            return ops.rms_norm(hidden_states, self.weight, self.eps)
        return rms_norm(hidden_states, self.weight, self.eps)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `weight * x / sqrt(mean(x^2) + eps)` of states `[..., D]`, rounded in the same way as
    in Qwen3's norm.
    """
    # In float32 nothing is rounded between the norm and the weight, so one operation computes both.
    if states.dtype == weight.dtype == torch.float32:
        return _torchs_norm(states, weight, weight.shape, eps)
    # Qwen3 rounds the normed states to 16 bits before it multiplies them by the weight. Drafts are trained in this
    # way.
    normed = _torchs_norm(states.to(torch.float32), None, weight.shape, eps)
    return weight * normed.to(states.dtype)


def _torchs_norm(states: Tensor, weight: Tensor | None, size: torch.Size, eps: float) -> Tensor:
    """Returns torch's own norm of float32 states `[..., D]`, times a weight `[D]` if one is given."""
    # `rms_norm` calls the same operation, but its overhead takes 1 % of a small model's step on a CPU (docs/log.md).
    if _fused_rms_norm is not None and states.is_cpu and not torch.is_grad_enabled():
        normed, _ = _fused_rms_norm(states, size, weight, eps)
        return normed
    return nn.functional.rms_norm(states, size, weight, eps)


class DFlashRotaryEmbedding(nn.Module):
    """This module computes the cosines and sines of the draft's own RoPE over plain indices."""

    inv_freq: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        inv_freq, self.attention_scaling = self.frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @staticmethod
    def frequencies(config: DFlashConfig) -> tuple[Tensor, float]:
        """Returns the inverse frequencies `[T/2]` and the factor on cosines and sines, with Transformers' RoPE
        functions.
        """
        rope = config.rope_parameters
        # Transformers' table has all types except the default type.
        if rope["rope_type"] != "default":
            initialize = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
            inv_freq, scaling = initialize(config)
            return inv_freq, float(scaling)
        # Two channels share a frequency. It is `theta ** (-2 i / T)` for pair `i` of the channels that are rotated.
        even_channels = torch.arange(0, config.rotary_dim, 2, dtype=torch.float)
        exponent = even_channels / config.rotary_dim
        inv_freq = 1.0 / (rope["rope_theta"] ** exponent)
        return inv_freq, 1.0

    @torch.no_grad()
    def forward(self, positions_BK: Tensor, states: Tensor) -> CosSin:
        """Returns cosines and sines `[B, K, 1, T]` in the dtype of `states` `[..., D]`, computed in float32."""
        angles_of = ops.implementation(ops.rope_angles, states)
        both: Tensor = angles_of(positions_BK, self.inv_freq, self.attention_scaling, states.dtype)
        # A dimension of 1 is added for the heads, because all heads are rotated by the same angles.
        cos, sin = both[..., None, :].unbind()
        return cos, sin


def rotate(states_BKHE: Tensor, angles: Angles) -> Tensor:
    """Returns states `[B, K, H, E]` with RoPE applied to their first `T` channels, in the half-split form."""
    cos, signed_sin = angles
    num_turned = cos.shape[-1]
    if num_turned < states_BKHE.shape[-1]:
        kept = states_BKHE[..., num_turned:]
        return torch.cat([rotate(states_BKHE[..., :num_turned], angles), kept], dim=-1)
    # A channel is paired with the channel that is `T / 2` places further, as in Llama, and not with its neighbour.
    partners = states_BKHE.roll(num_turned // 2, dims=-1)
    return states_BKHE * cos + partners * signed_sin


class DFlashMLP(nn.Module):
    """This is a gated MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.intermediate_size
        # The linear layers have no biases, as in published drafts. Only the projections of attention may have one.
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
        # The kernels compute only one activation, SiLU.
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
    """In this attention, queries come from the block, and keys and values come from the context and the block."""

    attention_sink_bias: Tensor | None

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        # The value in a config may be an integer.
        self.dropout = float(config.attention_dropout)
        # With this factor, the variance of the scores does not grow with the size of a head.
        self.scaling = config.head_dim**-0.5
        self.kind: AttentionKind = config.attention_kind(layer_idx)
        size = config.hidden_size
        bias = config.attention_bias
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        # The number of query heads that share a key head.
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = DFlashLinear(size, query_size, bias=bias)
        self.k_proj = DFlashLinear(size, key_size, bias=bias)
        self.v_proj = DFlashLinear(size, key_size, bias=bias)
        self.o_proj = DFlashLinear(query_size, size, bias=bias)
        # Each head is normed separately, and all heads have the same weight, as in Qwen3.
        self.q_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.value_scale = float(config.attention_value_scale)
        # Each query head has a score that takes a share of the softmax, as a key without a value would.
        sinks = None
        if config.attention_sink_bias:
            sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
        self.register_parameter("attention_sink_bias", sinks)

    def kind_in(self, cache: RaggedCache) -> AttentionKind:
        """Returns the kind of this layer over a cache.

        The window of the cache may be narrower than the layer's own.
        """
        window = cache.attention[self.layer_idx].shape.window
        return narrowed(self.kind, window)

    def project_q(self, hidden_states: Tensor, angles: Angles) -> Tensor:
        """Returns normed and rotated queries, token-major `[B, K, H, E]`."""
        query = self._by_head(self.q_proj(hidden_states))
        return rotate(self.q_norm(query), angles)

    def project_kv(self, hidden_states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Returns normed and rotated keys, and values, token-major `[B, C, G, E]` each."""
        key = self._by_head(self.k_proj(hidden_states))
        value = self._by_head(self.v_proj(hidden_states))
        key = rotate(self.k_norm(key), angles)
        return key, value

    def context_states(self, features: Tensor) -> Tensor:
        """Returns the states `[B, C, D]` from which keys and values of the context are computed: the features
        unchanged.
        """
        return features

    def gated(self, heads: Tensor, hidden_states: Tensor) -> Tensor:
        """Returns the heads `[B, K, H, E]` as the input of the output projection: times the factor on the values."""
        # A factor on all values can be applied to their weighted sums. So the cache holds values without the factor.
        if self.value_scale == 1.0:
            return heads
        return heads * self.value_scale

    def stacked_projections(self) -> list[nn.Module]:
        """Returns the linear layers that a kernel may stack to write context: first the keys' layer, then the values'
        layer.
        """
        return [self.k_proj, self.v_proj]

    def extend(
        self, hidden_states: Tensor, cos_sin: CosSin, cache: RaggedCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the keys and values of the current block.

        Returns its queries, and all keys and values to attend to.

        The queries are `[B, K, H, E]`, keys and values `[B, G, R, E]`. This method combines `project_q`, `project_kv`
        and `RaggedCache.extend`. If `ops.use_kernel` decides so, one kernel does everything after the projections.
        """
        # The products come first, because they are the only part that is the same with and without the kernel.
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = joint_products.linears(hidden_states, *projections)
        query, key, value = map(self._by_head, projected)
        # The kernel norms, rotates and writes in one launch.
        norms = (self.q_norm.weight, self.k_norm.weight)
        buffers = cache.attention[self.layer_idx].buffers()
        floats = (query, key, value, *norms, *cos_sin)
        cos, sin = cos_sin
        # The kernel rotates whole heads only.
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
            # The kernel takes angles [B, K, E], which are the same for all heads.
            cos.squeeze(2),
            sin.squeeze(2),
            cache.block.lengths,
            *buffers,
            self.k_norm.eps,
        )
        # The kernel has written the block, so this read returns its keys and values together with the context's.
        keys, values = cache.read(self.layer_idx)
        return query, keys, values

    def forward(self, hidden_states: Tensor, projector: Projector) -> Tensor:
        """Returns the attention output `[B, K, D]` of the block's normed states."""
        query, key, value, mask = projector.project(self, hidden_states)
        # The kernels before attention need token-major queries, and attention itself needs head-major queries.
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
        # The number of heads is inferred, because there are more query heads than key heads.
        by_head = (*states.shape[:-1], -1, self.head_dim)
        return states.view(by_head)


class Projector(ABC):
    """A projector makes the operands of attention in one forward of the draft.

    The draft's forwards differ only in this part.
    """

    @abstractmethod
    def project(self, attention: DFlashAttention, normed: Tensor) -> Operands:
        """Returns the operands of a layer's attention, made from the block's normed states `[B, K, D]`."""


class BlockProjector(Projector):
    """This projector is for a block over a ragged cache that holds all of its context."""

    def __init__(self, cache: RaggedCache, cos_sin: CosSin) -> None:
        self.cache = cache
        self.cos_sin = cos_sin  # of the block, `[B, K, 1, T]` each

    def project(self, attention: DFlashAttention, normed: Tensor) -> Operands:
        """Returns the operands, after writing the block into the cache."""
        query, key, value = attention.extend(normed, self.cos_sin, self.cache)
        mask = RaggedMask(self.cache.block, attention.kind_in(self.cache))
        return query, key, value, mask


class ContextProjector(Projector):
    """This projector is for a block over a ragged cache into which each layer first writes the newest context.

    Args:
        cache (`RaggedCache`): The draft's cache.
        context (`RaggedBlock`): The positions of the newest context.
        features (`torch.Tensor` of shape `[B, C, D]`): The projected features of the newest context.
        cos_sin (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of context and block, `[B, C + K, 1, T]` each.
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
        # One product projects context and block together: they have few rows, and the weights are read only once.
        features = attention.context_states(self.features)
        joined = torch.cat([features, normed], dim=1)
        key, value = attention.project_kv(joined, self.angles)
        # The context is written first, because the block overwrites its rejected tokens.
        layer = self.cache.attention[index]
        layer.write(key[:, :num], value[:, :num], self.context)
        keys, values = self.cache.extend(index, key[:, num:], value[:, num:])
        # The context needs no queries, because its outputs are not used.
        query = attention.project_q(normed, self.block_angles)
        mask = RaggedMask(self.cache.block, attention.kind_in(self.cache))
        return query, keys, values, mask


class CombinedProjector(Projector):
    """This projector runs blocks and their context as one sequence, with or without an ordinary cache.

    Transformers' interface and training use it.

    Args:
        context (`torch.Tensor` of shape `[B, C, D]`): The projected features of the new context.
        cos_sin (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of context and blocks, `[B, C + Q, 1, T]`
            each.
        masks (`CombinedMasks`): The masks.
        cache (`Cache`, *optional*): The cache to which context and blocks are appended.
    """

    def __init__(
        self, context: Tensor, cos_sin: CosSin, masks: CombinedMasks, cache: Cache | None
    ) -> None:
        self.context = context
        self.angles = Angles.of(cos_sin)
        self.block_angles = self.angles.behind(context.shape[1])
        # Masks are made once per kind of layer, when the first layer of this kind needs its mask.
        self.masks = masks
        self.cache = cache

    def project(self, attention: DFlashAttention, normed: Tensor) -> Operands:
        """Returns the operands. If there is a cache, context and blocks are appended to it first."""
        # This is the same product as in decoding, but over any number of blocks. Context and blocks are one sequence,
        # and its keys and values are head-major, because an ordinary cache expects this form.
        context = attention.context_states(self.context)
        joined = torch.cat([context, normed], dim=1)
        key, value = attention.project_kv(joined, self.angles)
        key = key.to(value.dtype).transpose(1, 2)
        value = value.transpose(1, 2)
        if self.cache is not None:
            key, value = self.cache.update(key, value, attention.layer_idx)
        # The context proposes no tokens, so only the blocks have queries.
        query = attention.project_q(normed, self.block_angles)
        # Under autocast, norms in float32 make queries and keys wider than values, but FlexAttention needs one dtype.
        query = query.to(value.dtype)
        num_keys = key.shape[2]
        mask = self.masks.of(attention.kind, num_keys, attention.repeats, query.dtype)
        return query, key, value, mask


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """A decoder layer consists of attention and an MLP, each with a norm before it."""

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
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): Output of the layer before, or the embeddings in the
                first layer.
            residual (`torch.Tensor`, *optional*): Residual stream to which `hidden_states` have not been added yet. It
                is `None` in the first layer.
            projector (`Projector`): Makes the operands of attention.
            block_size (`int`): Slots of a block. These layers do not use it.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Output of the MLP, and the residual stream to which it has not been
            added yet. The next norm adds and normalises both in one kernel.
        """
        # The embeddings are the residual stream of the first layer. All later sums are computed within a norm.
        if residual is None:
            stream = hidden_states
            normed = self.input_layernorm(hidden_states)
        else:
            normed, stream = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(normed, projector)
        normed, stream = self.post_attention_layernorm(hidden_states, stream)
        hidden_states = self.mlp(normed)
        # The sum is not computed here, because the next norm returns the sum and the normed sum at once.
        return hidden_states, stream
