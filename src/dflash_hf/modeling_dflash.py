"""The DFlash draft model, top to bottom. It knows nothing of decoding: no acceptance, no loop, no sampling.

A block is `[anchor, MASK, ..., MASK]`; its queries attend to the context (projected hidden states of the target) and
to the block itself, and every slot predicts the token at its own position. Shapes: `B` rows, `C` context tokens, `K`
block tokens, `L` taps, `D` hidden, `H`/`G` query/key heads, `E` head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from dflash_hf import ops
from dflash_hf.attention import RaggedMask, additive_mask, attend, mask_repeats
from dflash_hf.cache.context import ContextWeights, NewContext, stack_weights
from dflash_hf.cache.prompts import PromptSlots
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import LayerShape
from dflash_hf.cache_name import CACHE_NAME, one_cache
from dflash_hf.checkpoints.loading import DFlashPreTrainedModel
from dflash_hf.configuration_dflash import AttentionKind, DFlashConfig
from dflash_hf.devices import execution_device, raw_embeddings
from dflash_hf.dflash2 import CandidateSelector, GroupedDynamicConvolution, follow_path
from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.norm_and_rope import CosSin, DFlashRMSNorm, DFlashRotaryEmbedding, rotate
from dflash_hf.positions import visible

Mask = Tensor | BlockMask | RaggedMask
# What a block attends with and to: queries [B, K, H, E], keys and values [B, G, R, E], and the mask.
Attended = tuple[Tensor, Tensor, Tensor, Mask | None]


class DFlashMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn: Callable[[Tensor], Tensor] = ACT2FN[config.hidden_act]
        self.is_silu = config.hidden_act == "silu"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns `down(act(gate(x)) * up(x))`."""
        gate = self.gate_proj(hidden_states)
        up = self.up_proj(hidden_states)
        if self.is_silu and ops.fuses(gate, up):
            return self.down_proj(ops.silu_mul(gate, up))
        return self.down_proj(self.act_fn(gate) * up)


class DFlashAttention(nn.Module):
    """Queries from the block, keys and values from the context and the block."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.dropout = float(config.attention_dropout)
        self.scaling = config.head_dim**-0.5
        self.kind: AttentionKind = config.attention_kind(layer_idx)
        size = config.hidden_size
        bias = config.attention_bias
        query_size, key_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(size, query_size, bias=bias)
        self.k_proj = nn.Linear(size, key_size, bias=bias)
        self.v_proj = nn.Linear(size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, size, bias=bias)
        self.q_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)

    def project_q(self, hidden_states: Tensor, cos_sin: CosSin) -> Tensor:
        """Returns queries (normed, rotated), token-major `[B, K, H, E]`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        return rotate(self.q_norm(self.q_proj(hidden_states).view(shape)), cos_sin)

    def project_kv(self, hidden_states: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Returns keys (normed, rotated) and values, token-major `[B, C, G, E]`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        key = rotate(self.k_norm(self.k_proj(hidden_states).view(shape)), cos_sin)
        return key, self.v_proj(hidden_states).view(shape)

    def extend(self, hidden_states: Tensor, cos_sin: CosSin, cache: RaggedCache) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries `[B, K, H, E]` of the block that was begun, and all keys and values with the block's own.

        What `project_q`, `project_kv` and `RaggedCache.extend` do, behind the projections by a kernel where
        `ops.writes` says so.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (f(hidden_states).view(shape) for f in (self.q_proj, self.k_proj, self.v_proj))
        norms = (self.q_norm.weight, self.k_norm.weight)
        keys, values = cache.attention[self.layer_idx].buffers()
        if not ops.writes([query, key, value, *norms, *cos_sin], (keys, values)):
            query = rotate(self.q_norm(query), cos_sin)
            key = rotate(self.k_norm(key), cos_sin)
            return query, *cache.extend(self.layer_idx, key, value)
        cos, sin = (part.squeeze(2) for part in cos_sin)
        lengths = cache.block.lengths
        eps = self.k_norm.eps
        query = ops.norm_rope_write(query, key, value, *norms, cos, sin, lengths, keys, values, eps)
        return query, *cache.read(self.layer_idx)

    def forward(self, hidden_states: Tensor, attended: Attending) -> Tensor:
        """Returns the states `[B, K, D]` that the block's normed ones attend to by what is made of them."""
        query, key, value, mask = attended(self, hidden_states)
        dropout = self.dropout if self.training else 0.0
        out = attend(query.transpose(1, 2), key, value, mask, self.scaling, dropout=dropout)
        return self.o_proj(out.flatten(2))


# Of normed states [B, K, D]; decoding over the ragged cache and the combined forward differ in this alone.
Attending = Callable[[DFlashAttention, Tensor], Attended]


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP with pre-norms."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv: GroupedDynamicConvolution | None = None
        self.mlp_conv: GroupedDynamicConvolution | None = None
        if config.conv_kernel_size is not None and config.conv_group_size is not None:  # DFlash 2 only
            sizes = (config.hidden_size, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv = GroupedDynamicConvolution(*sizes)
            self.mlp_conv = GroupedDynamicConvolution(*sizes)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, attended: Attending, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on the states `[B, K, D]` of one block, or of several of `block_size` slots each.

        Convolutions touch the block's states only: the context's keys and values are projected from features that no
        layer changes.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): What the layer before gave, or the embeddings.
            residual (`torch.Tensor`, *optional*): What that is still to be added to; `None` in the first layer.
            attended (callable): Makes queries, keys and values of normed states.
            block_size (`int`): Slots of a block.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: What the MLP gives, and the residual that it is still to be added to:
            the next norm takes both, in one kernel where there is one.
        """
        if residual is None:
            stream = hidden_states
            normed = self.input_layernorm(hidden_states)
        else:
            normed, stream = self.input_layernorm(hidden_states, residual)
        attention = functools.partial(self.self_attn, attended=attended)
        hidden_states = self._mixed(self.attention_conv, normed, attention, block_size)
        normed, stream = self.post_attention_layernorm(hidden_states, stream)
        return self._mixed(self.mlp_conv, normed, self.mlp, block_size), stream

    @staticmethod
    def _mixed(
        conv: GroupedDynamicConvolution | None, states: Tensor, part: Callable[[Tensor], Tensor], block_size: int
    ) -> Tensor:
        """Runs a part of the layer on states `[B, K, D]`, with the convolutions of DFlash 2 around it."""
        if conv is None:
            return part(states)
        return conv(states, part, block_size)


class DFlashDraftModel(DFlashPreTrainedModel):
    """A DFlash draft: a context projection, a few layers over `[context | block]`, a norm.

    It uses the target's embedding and head, unless its checkpoint brought its own: `embed_tokens`, `lm_head` and,
    where that head knows fewer tokens than the target, the offsets `d2t` (all `None` otherwise).

    Use it as `target.generate(..., assistant_model=draft)`. Source: arXiv 2602.06036 section 3; z-lab
    `dflash/model.py::DFlashDraftModel`.
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        size = config.vocab_size or 0
        rank = config.selector_rank
        top_k = config.selector_top_k
        self.candidate_selector: CandidateSelector | None = None
        if rank is not None and top_k is not None:  # DFlash 2 only
            self.candidate_selector = CandidateSelector(
                size, config.hidden_size, rank, top_k, config.initializer_range
            )
        self.embed_tokens = nn.Embedding(size, config.hidden_size) if config.own_embed_tokens else None
        num_ids = config.draft_vocab_size or size
        self.lm_head = nn.Linear(config.hidden_size, num_ids, bias=False) if config.own_lm_head else None
        self.register_buffer("d2t", torch.zeros(num_ids, dtype=torch.long) if config.draft_vocab_size else None)
        self.generation_config = DFlashGenerationConfig()
        self.last_stats: Any = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DFlashRotaryEmbedding):
            module.inv_freq.copy_(module.frequencies(module.config)[0])
        elif isinstance(module, GroupedDynamicConvolution | CandidateSelector):
            module.reset_parameters()

    def cache_shapes(self) -> list[LayerShape]:
        """Returns what each layer of the draft's cache is."""
        heads = self.config.num_key_value_heads
        size = self.config.head_dim
        windows = [self.config.attention_kind(index)[0] for index in range(self.config.num_hidden_layers)]
        where = self.dtype, self.dtype, execution_device(self)
        return [LayerShape(heads, size, size, window, *where) for window in windows]

    def project_context(self, context_hidden_states: Tensor) -> Tensor:
        """Projects tapped states `[B, C, L * D]` to context features `[B, C, D]`."""
        return self.hidden_norm(self.fc(context_hidden_states))

    def stack_weights(self, cache: RaggedCache, into: ContextWeights | None = None) -> ContextWeights | None:
        """Copies what a kernel needs to write context of all layers into this cache at once; see `cache.context`."""
        if not ops.fuses(self.fc.weight):
            return None
        own = self._attentions()
        projections = [module for attention in own for module in (attention.k_proj, attention.v_proj)]
        return stack_weights(projections, [attention.k_norm.weight for attention in own], cache.buffers(), into)

    def write_context(self, context: NewContext, cache: RaggedCache) -> None:
        """Writes a block's context keys and values into the ragged cache, in place, where that block stood.

        Always all rows of the block, so shapes never change; those beyond the accepted ones are overwritten by the
        next block. No host sync.

        Args:
            context (`NewContext`): Tapped states of the verified tokens, and where they stood.
            cache (`RaggedCache`): The draft's cache.
        """
        features = self.project_context(context.states)
        cos_sin = self.rotary_emb(context.block.positions, features.dtype)
        if context.write_all_layers(features, cos_sin, cache, self.config.rms_norm_eps):
            return
        for own in self._attentions():
            cache.attention[own.layer_idx].write(*own.project_kv(features, cos_sin), context.block)

    def write_prompt(self, context_hidden_states: Tensor, positions: Tensor, cache: RaggedCache) -> None:
        """Writes the context of (a chunk of) whole prompts, left-padded, into the ragged cache, in place.

        Args:
            context_hidden_states (`torch.Tensor` of shape `[B, S, L * D]`): Tapped states of the prompt.
            positions (`torch.Tensor` of shape `[B, S]`, int64): Index of each token in its row; negative for padding.
                On any device, best the host: where they go is found there.
            cache (`RaggedCache`): The draft's cache.
        """
        features = self.project_context(context_hidden_states)
        cos_sin = self.rotary_emb(positions.clamp_min(0).to(features.device), features.dtype)
        prompts = PromptSlots(positions)
        for own in self._attentions():
            cache.attention[own.layer_idx].write_rows(*own.project_kv(features, cos_sin), prompts)

    def forward_block(self, noise_embeds: Tensor, cache: RaggedCache, context: NewContext | None = None) -> Tensor:
        """Runs a block over the context in the ragged cache, writing the newest context first; no host sync.

        Writes the block's own keys and values past each row's length, where the next context overwrites them. Giving
        the newest context here instead of to `write_context` projects both in one product per layer
        (measured in docs/log-archive.md), or computes their angles together where kernels write them.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, K, D]`): Embeddings of `[anchor, MASK, ...]`.
            cache (`RaggedCache`): The draft's cache; `cache.begin` has been called for this block.
            context (`NewContext`, *optional*): Tapped states of the block that was verified last, and that block. Its
                rejected rows are overwritten by this block's.

        Returns:
            `torch.Tensor` of shape `[B, K, D]`: States after the final norm, ready for the target's head.
        """
        block = cache.block
        features = None
        earlier = 0
        positions = block.positions
        if context is not None:
            features = self.project_context(context.states)
            earlier = context.states.shape[1]
            positions = torch.cat([context.block.positions, positions], dim=1)
        cos, sin = self.rotary_emb(positions, noise_embeds.dtype)
        cos_sin = (cos[:, earlier:], sin[:, earlier:])
        if context is not None and features is not None and context.weights is not None:
            angles = (cos[:, :earlier], sin[:, :earlier])
            is_written = context.write_all_layers(features, angles, cache, self.config.rms_norm_eps)
            if is_written:
                context = None

        def attended(attention: DFlashAttention, normed: Tensor) -> Attended:
            mask = RaggedMask(block, attention.kind)
            if context is None or features is None:
                return *attention.extend(normed, cos_sin, cache), mask
            key, value = attention.project_kv(torch.cat([features, normed], dim=1), (cos, sin))
            cache.attention[attention.layer_idx].write(key[:, :earlier], value[:, :earlier], context.block)
            key, value = cache.extend(attention.layer_idx, key[:, earlier:], value[:, earlier:])
            return attention.project_q(normed, cos_sin), key, value, mask

        return self._run_layers(noise_embeds, attended, block.width)

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | dict[AttentionKind, Mask] | None = None,
        cache: Cache | None = None,
        block_size: int | None = None,
        then: Callable[[Tensor], Any] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Projects new context and runs blocks in one call: the contract of Transformers' DFlash path, and training.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, Q, D]`): Embeddings of one block, or in training of several.
            context_hidden_states (`torch.Tensor` of shape `[B, C, L * D]`): Tapped target states of the context
                tokens that are not in `cache` yet.
            position_ids (`torch.Tensor` of shape `[B, C + Q]`, *optional*): Indices of the context, then of the block;
                by default they continue the cache.
            attention_mask (*optional*): `[B, total]` padding mask (1 = real) over everything in the cache, the context
                and the block; or one ready mask per kind of layer, `{(window, causal, from_anchor): mask}`,
                boolean `[B, 1, Q, C + Q]` or a `BlockMask`, as training builds them.
            cache (`Cache`, *optional*): Advanced in place by context and block; the caller crops the block.
            block_size (`int`, *optional*): Slots per block where `noise_embeds` holds several; by default it is one
                block. Masks do not follow from it.
            then (callable, *optional*): Makes a result of the states in here, where DDP and FSDP see the weights used.
            past_key_values (`Cache`, *optional*): The name of `cache` in older releases of Transformers.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` `[B, Q, D]` after the final norm; or the result of `then`.

        Raises:
            ValueError: If a cache is passed under both names.

        Source: Transformers `MuseGlimmerAssistantModel.forward`.
        """
        cache = one_cache(cache=cache, past_key_values=past_key_values)
        num_new = context_hidden_states.shape[1] + noise_embeds.shape[1]
        if position_ids is None:
            position_ids = torch.arange(num_new, device=noise_embeds.device)[None]
            if cache is not None:
                position_ids = position_ids + cache.get_seq_length()
        context = self.project_context(context_hidden_states)
        cos, sin = self.rotary_emb(position_ids, noise_embeds.dtype)
        num_queries = noise_embeds.shape[1]
        masks: dict[tuple[AttentionKind, int], Mask] = {}

        def mask_of(attention: DFlashAttention, num_keys: int) -> Mask:
            key = (attention.kind, num_keys)
            if key not in masks:
                if isinstance(attention_mask, dict):
                    mask = attention_mask[attention.kind]
                else:  # the newest key is the block's last
                    window, causal, from_anchor = attention.kind
                    keys = torch.arange(num_keys, device=noise_embeds.device)
                    queries = keys[-num_queries:, None]
                    mask = visible(queries, keys, window, causal, queries[:1] if from_anchor else None)[None, None]
                    if attention_mask is not None:
                        mask = mask & attention_mask[:, None, None, -num_keys:].bool()
                if isinstance(mask, Tensor):
                    repeats = mask_repeats(attention.repeats, mask.device)
                    mask = additive_mask(~mask, noise_embeds.dtype)
                    if repeats > 1:
                        mask = mask.repeat(1, 1, repeats, 1)
                masks[key] = mask
            return masks[key]

        cos_sin = (cos[:, -num_queries:], sin[:, -num_queries:])

        def attended(attention: DFlashAttention, normed: Tensor) -> Attended:
            joined = torch.cat([context, normed], dim=1)
            key, value = (states.transpose(1, 2) for states in attention.project_kv(joined, (cos, sin)))
            if cache is not None:
                key, value = cache.update(key, value, attention.layer_idx)
            return attention.project_q(normed, cos_sin), key, value, mask_of(attention, key.shape[2])

        hidden = self._run_layers(noise_embeds, attended, block_size or num_queries)
        filled: dict[str, Any] = {CACHE_NAME: cache}
        output = BaseModelOutputWithPast(last_hidden_state=hidden, **filled)
        if then is not None:
            return then(hidden)
        return output

    def compute_logits(self, hidden_states: Tensor, head: nn.Module) -> Tensor:
        """Applies the head and the draft's own multiplier and soft cap.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., D]`): States after the final norm.
            head (`nn.Module`): The target's head, for drafts that have none.

        Returns:
            `torch.Tensor` of shape `[..., V]`: Logits over the target's vocabulary; minus infinity for the tokens that
            a reduced draft vocabulary leaves out.
        """
        own_head = self.lm_head
        logits = head(hidden_states) if own_head is None else own_head(hidden_states)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap:
            logits = torch.tanh(logits / cap) * cap
        if self.d2t is None:
            return logits
        assert self.config.vocab_size is not None
        everything = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        target_ids = self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)
        return everything.index_copy_(-1, target_ids, logits)

    def best_path(self, hidden_states: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """Returns the draft's own choice for a block, without noise: the greedy walk of its selector, or the argmaxes.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): States of the slots after the anchor.
            logits (`torch.Tensor` of shape `[B, K, V]`): Their logits, from [`compute_logits`].
            anchors (`torch.Tensor` of shape `[B]`, int64): The anchors.

        Returns:
            `torch.Tensor` of shape `[B, K]`, int64, on the device of the logits.
        """
        if self.candidate_selector is None:
            return ops.best(logits)
        candidates, scores = self.candidate_selector(hidden_states, logits, anchors)
        return follow_path(candidates, scores, scores.argmax(dim=-1))[0]

    def embed(self, token_ids: Tensor, embedding: nn.Module) -> Tensor:
        """Looks ids `[B, K]` up in the draft's own embedding, or in the target's as this draft was trained with it."""
        if self.embed_tokens is not None:
            states = self.embed_tokens(token_ids.to(execution_device(self.embed_tokens)))
        elif self.config.raw_input_embeddings:
            states = raw_embeddings(embedding, token_ids)
        else:
            states = embedding(token_ids)
        scale = self.config.input_embedding_scale
        if scale == 1.0:
            return states
        return states * scale

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Explains how a draft is used: it cannot generate on its own.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a DFlash draft proposes tokens for a target and cannot generate by itself; call "
            "target.generate(**inputs, assistant_model=draft) with the target it was trained for"
        )

    def _attentions(self) -> list[DFlashAttention]:
        return [layer.self_attn for layer in self.layers if isinstance(layer, DFlashDecoderLayer)]

    def _run_layers(self, hidden_states: Tensor, attended: Attending, block_size: int) -> Tensor:
        """Runs all layers and the final norm on embeddings `[B, K, D]`."""
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, attended, block_size)
        normed, _ = self.norm(hidden_states, residual)
        return normed
