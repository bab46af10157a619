"""This module defines the DFlash draft model.

The model does not decode: it has no acceptance, no loop and no sampling.

A block is `[anchor, MASK, ..., MASK]`. The queries of a block attend to the context (projected hidden states of the
target) and to the block itself. Each slot predicts the token at its own position. Shapes: `B` rows, `C` context
tokens, `K` block tokens, `L` taps, `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from dflash_hf import ops
from dflash_hf.block.attention import CombinedMasks, Mask
from dflash_hf.block.cache_name import CACHE_NAME, one_cache
from dflash_hf.cache.context import ContextWeights, NewContext, stack_weights
from dflash_hf.cache.prefilled import PromptSlots
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import LayerShape
from dflash_hf.checkpoints.loading import DFlashPreTrainedModel
from dflash_hf.configuration_dflash import AttentionKind, DFlashConfig, narrowed
from dflash_hf.devices import execution_device, raw_embeddings
from dflash_hf.draft_model.dflash2 import (
    CandidateSelector,
    DFlash2Layer,
    GroupedDynamicConvolution,
    follow_path,
)
from dflash_hf.draft_model.dspark import MarkovHead, likeliest_transitions, walk
from dflash_hf.draft_model.gemma4 import DFlashGemma4Layer, DFlashGemma4Norm
from dflash_hf.draft_model.laguna import DFlashLagunaLayer
from dflash_hf.draft_model.layers import (
    Angles,
    BlockProjector,
    CombinedProjector,
    ContextProjector,
    DFlashAttention,
    DFlashDecoderLayer,
    DFlashRMSNorm,
    DFlashRotaryEmbedding,
    Projector,
)
from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.packed_weights import DFlashLinear


class DFlashDraftModel(DFlashPreTrainedModel):
    """A DFlash draft consists of a context projection, a few layers over `[context | block]`, and a final norm.

    The draft uses the target's embedding and head, unless its checkpoint has its own `embed_tokens` and `lm_head`. If
    the draft's own head has fewer tokens than the target, the checkpoint also has the offsets `d2t`. Each of these
    three attributes is `None` if the checkpoint does not have it.

    Use a draft as `target.generate(..., assistant_model=draft)`. Source: arXiv 2602.06036 section 3; z-lab
    `dflash/model.py::DFlashDraftModel`.
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        # The states of all tapped layers are concatenated, and one product projects them to the features of the
        # context.
        context_size = len(config.target_layer_ids) * config.target_hidden_size
        layer_class: type[DFlashDecoderLayer | DFlashGemma4Layer] = DFlashDecoderLayer
        norm_class = DFlashRMSNorm
        # The check of the config has made sure that other families have no convolutions.
        if config.conv_kernel_size is not None:
            layer_class = DFlash2Layer
        if config.layer_family == "gemma4":
            layer_class = DFlashGemma4Layer
            norm_class = DFlashGemma4Norm
        # Only Laguna's drafts have these norms, one for each tap.
        self.aux_hidden_norms = nn.ModuleList()
        if config.layer_family == "laguna":
            layer_class = DFlashLagunaLayer
            for _ in config.target_layer_ids:
                self.aux_hidden_norms.append(
                    norm_class(config.target_hidden_size, config.rms_norm_eps)
                )
        self.fc = DFlashLinear(context_size, size, bias=False)
        self.hidden_norm = norm_class(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            layer_class(config, index) for index in range(config.num_hidden_layers)
        )
        # FSDP looks for every class that is named here, and refuses a model that lacks one of them.
        self._no_split_modules = [layer_class.__name__]
        self.norm = norm_class(size, config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self._add_own_vocabulary(config)
        # These are the default settings of decoding. If the checkpoint has settings of its own, they replace these.
        self.generation_config = DFlashGenerationConfig()
        # The statistics of the last call are kept here for the user.
        self.last_stats: Any = None
        self.post_init()

    def _add_own_vocabulary(self, config: DFlashConfig) -> None:
        """Adds the draft's own modules that have a row per token.

        These modules are the selector, the Markov head, the embedding, the head and the offsets.
        """
        # The check of the config has made sure that a draft without a vocabulary size has no such modules.
        num_tokens = config.vocab_size or 0
        num_ids = config.draft_vocab_size or num_tokens
        hidden_size = config.hidden_size
        rank = config.selector_rank
        top_k = config.selector_top_k
        self.candidate_selector: CandidateSelector | None = None
        # A config has both of these fields or neither.
        if rank and top_k:
            self.candidate_selector = CandidateSelector(
                num_tokens, hidden_size, rank, top_k, config.initializer_range
            )
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(
                num_tokens, num_ids, config.markov_rank, config.initializer_range
            )
        self.embed_tokens: nn.Embedding | None = None
        if config.own_embed_tokens:
            self.embed_tokens = nn.Embedding(num_tokens, hidden_size)
        self.lm_head: nn.Linear | None = None
        if config.own_lm_head:
            self.lm_head = DFlashLinear(hidden_size, num_ids, bias=False)
        # The offsets are a buffer and not a parameter, because they are read from the checkpoint and never trained.
        offsets = None
        if config.draft_vocab_size:
            offsets = torch.zeros(num_ids, dtype=torch.long)
        self.register_buffer("d2t", offsets)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DFlashRotaryEmbedding):
            # The buffer is in no checkpoint, and a model that was built on the meta device has lost its values.
            inv_freq, _ = module.frequencies(module.config)
            module.inv_freq.copy_(inv_freq)
        elif isinstance(module, GroupedDynamicConvolution | CandidateSelector | MarkovHead):
            module.reset_parameters()

    def cache_shapes(self) -> list[LayerShape]:
        """Returns the shape of each layer of the draft's cache in a run.

        `generation_config.draft_window` narrows the windows.
        """
        size = self.config.head_dim
        draft_window = self.generation_config.draft_window
        # The layers compute on this device. If weights are offloaded, they are stored on another device.
        device = execution_device(self)
        shapes: list[LayerShape] = []
        for index in range(self.config.num_hidden_layers):
            window, _, _ = narrowed(self.config.attention_kind(index), draft_window)
            shape = LayerShape(
                num_heads=self.config.num_key_value_heads,
                key_size=size,
                value_size=size,
                window=window,
                dtype=self.dtype,
                value_dtype=self.dtype,
                device=device,
            )
            shapes.append(shape)
        return shapes

    def project_context(self, context_hidden_states: Tensor) -> Tensor:
        """Returns the context features `[B, C, D]` of tapped states `[B, C, L * D]`."""
        if len(self.aux_hidden_norms) > 0:
            taps = context_hidden_states.chunk(len(self.aux_hidden_norms), dim=-1)
            normed = [norm(tap) for norm, tap in zip(self.aux_hidden_norms, taps, strict=True)]
            context_hidden_states = torch.cat(normed, dim=-1)
        return self.hidden_norm(self.fc(context_hidden_states))

    def stack_weights(
        self, cache: RaggedCache, into: ContextWeights | None = None
    ) -> ContextWeights | None:
        """Returns copies of the weights with which a kernel writes the context of all layers at once.

        The result is `None` if no kernel writes the context. The copies overwrite the earlier copies `into` if the
        shapes, dtypes and devices are the same; see `cache.context`.
        """
        # The kernel rotates whole heads only.
        turns_all = self.config.rotary_dim == self.config.head_dim
        # This check comes first, so that a run on a CPU makes no list of modules.
        if not turns_all or not ops.use_kernel(ops.context_kv, self.fc.weight):
            return None
        # The kernel expects this order: the keys of a layer before its values, and layer after layer.
        projections: list[nn.Module] = []
        norms: list[Tensor] = []
        for attention in self._attentions():
            projections += attention.stacked_projections()
            norms.append(attention.k_norm.weight)
        return stack_weights(projections, norms, cache.buffers(), into)

    def write_context(self, context: NewContext, cache: RaggedCache) -> None:
        """Writes the keys and values of a verified block's context into the ragged cache, in place, at the block's
        positions.

        All tokens of the block are written, so that shapes never change. The next block overwrites the tokens that
        were not accepted. This method causes no host sync.

        Args:
            context (`NewContext`): Tapped states of the verified tokens, and their positions.
            cache (`RaggedCache`): The draft's cache.
        """
        # The context does not run through the layers: every layer computes its keys and values from the same features.
        features = self.project_context(context.states)
        cos_sin = self.rotary_emb(context.block.positions, features)
        eps = self.config.rms_norm_eps
        if context.write_all_layers(features, cos_sin, cache, eps):
            return
        angles = Angles.of(cos_sin)
        for attention in self._attentions():
            states = attention.context_states(features)
            key, value = attention.project_kv(states, angles)
            layer = cache.attention[attention.layer_idx]
            layer.write(key, value, context.block)

    def write_prompt(
        self,
        context_hidden_states: Tensor,
        positions: Tensor,
        cache: RaggedCache,
        rows: list[int] | None = None,
    ) -> None:
        """Writes the context of whole left-padded prompts, or of a chunk of them, into the ragged cache, in place.

        Args:
            context_hidden_states (`torch.Tensor` of shape `[n, S, L * D]`): Tapped states of the prompts.
            positions (`torch.Tensor` of shape `[n, S]`, int64): Index of each token in its row, negative for padding.
                The tensor may be on any device, and the host reads it.
            cache (`RaggedCache`): The draft's cache.
            rows (`list[int]`, *optional*): The rows of the cache that belong to these prompts, by default the first
                rows.
        """
        features = self.project_context(context_hidden_states)
        # Keys and values of padding are computed too, but they are not written. So any position will do for padding.
        positions_of_angles = positions.clamp_min(0).to(features.device)
        angles = Angles.of(self.rotary_emb(positions_of_angles, features))
        prompts = PromptSlots(positions, rows)
        for attention in self._attentions():
            states = attention.context_states(features)
            key, value = attention.project_kv(states, angles)
            layer = cache.attention[attention.layer_idx]
            layer.write_rows(key, value, prompts)

    def forward_block(
        self, noise_embeds: Tensor, cache: RaggedCache, context: NewContext | None = None
    ) -> Tensor:
        """Runs the layers over a block and the context in the ragged cache, and writes the newest context first.

        This method causes no host sync. The block's own keys and values are written behind each row's length. The next
        context overwrites them there. If the newest context is passed to this method and not to `write_context`, each
        layer projects it together with the block, in one product (measured in docs/log-archive.md). If a kernel writes
        the context, the angles of context and block are computed together.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, K, D]`): Embeddings of `[anchor, MASK, ...]`.
            cache (`RaggedCache`): The draft's cache. `cache.begin` must have been called for this block.
            context (`NewContext`, *optional*): The block that was verified last, and its tapped states. The new block
                overwrites the rejected tokens of that block.

        Returns:
            `torch.Tensor` of shape `[B, K, D]`: States after the final norm, ready for the target's head.
        """
        block = cache.block
        projector: Projector
        if context is None:
            # An earlier call of `write_context` has written the context.
            cos_sin = self.rotary_emb(block.positions, noise_embeds)
            projector = BlockProjector(cache, cos_sin)
        else:
            projector = self._with_context(context, cache, noise_embeds)
        return self._run_layers(noise_embeds, projector, block.width)

    def _with_context(
        self, context: NewContext, cache: RaggedCache, noise_embeds: Tensor
    ) -> Projector:
        """Writes the newest context with one kernel, or lets the layers write it.

        Returns the projector of the layers.
        """
        features = self.project_context(context.states)
        # The rejected tokens of the verified block count too, so that shapes are the same at every step.
        num_context = features.shape[1]
        # The angles of context and block are computed at once. Positions may occur twice, where the block replaces
        # rejected tokens.
        both = [context.block.positions, cache.block.positions]
        cos, sin = self.rotary_emb(torch.cat(both, dim=1), noise_embeds)
        if context.weights is not None:
            eps = self.config.rms_norm_eps
            context_cos_sin = (cos[:, :num_context], sin[:, :num_context])
            if context.write_all_layers(features, context_cos_sin, cache, eps):
                block_cos_sin = (cos[:, num_context:], sin[:, num_context:])
                return BlockProjector(cache, block_cos_sin)
        return ContextProjector(cache, context.block, features, (cos, sin))

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
        """Projects new context and runs blocks in one call, as Transformers' DFlash code and training do.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, Q, D]`): Embeddings of one block, or of several blocks in
                training.
            context_hidden_states (`torch.Tensor` of shape `[B, C, L * D]`): Tapped target states of the context
                tokens that are not in `cache` yet.
            position_ids (`torch.Tensor` of shape `[B, C + Q]`, *optional*): Indices of the context, and then of the
                block. By default they continue the cache.
            attention_mask (*optional*): Padding mask `[B, total]` (1 = real token) over cache, context and block. Or
                one ready mask for each kind of layer, `{(window, causal, from_anchor): mask}`, as training builds
                them. A ready mask is boolean `[B, 1, Q, C + Q]` or a `BlockMask`.
            cache (`Cache`, *optional*): Context and block are appended to it in place. The caller crops the block.
            block_size (`int`, *optional*): Slots of a block if `noise_embeds` holds several blocks. By default all
                embeddings are one block. Masks do not depend on it.
            then (callable, *optional*): Computes the result from the states within this call, so that DDP and FSDP see
                that the weights are used.
            past_key_values (`Cache`, *optional*): Name of the argument `cache` in older releases of Transformers.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` has the shape `[B, Q, D]` and comes after the final norm.
            With `then`, the result of `then` is returned instead.

        Raises:
            ValueError: If a cache is passed under both names.

        Source: Transformers `MuseGlimmerAssistantModel.forward`.
        """
        cache = one_cache(cache=cache, past_key_values=past_key_values)
        num_queries = noise_embeds.shape[1]
        num_new = context_hidden_states.shape[1] + num_queries
        if position_ids is None:
            # An ordinary cache has one length for all rows, which includes padding.
            position_ids = torch.arange(num_new, device=noise_embeds.device)[None]
            if cache is not None:
                position_ids = position_ids + cache.get_seq_length()
        context = self.project_context(context_hidden_states)
        # One table holds the angles of context and blocks. The queries use the last part of it.
        cos_sin = self.rotary_emb(position_ids, noise_embeds)
        masks = CombinedMasks(attention_mask, num_queries, noise_embeds.device)
        projector = CombinedProjector(context, cos_sin, masks, cache)
        # Convolutions must not cross from one block of a training batch into the next.
        hidden = self._run_layers(noise_embeds, projector, block_size or num_queries)
        # This runs inside the forward, because wrappers such as FSDP keep the weights gathered only until the forward
        # ends.
        if then is not None:
            return then(hidden)
        # The field's name differs between releases of Transformers.
        filled: dict[str, Any] = {CACHE_NAME: cache}
        return BaseModelOutputWithPast(last_hidden_state=hidden, **filled)

    def compute_logits(self, hidden_states: Tensor, head: nn.Module) -> Tensor:
        """Returns the draft's logits.

        They are the output of the head, times the draft's own multiplier, under its own soft cap.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., D]`): States after the final norm.
            head (`nn.Module`): The target's head, which is used by drafts without a head of their own.

        Returns:
            `torch.Tensor` of shape `[..., V]`: Logits over the target's vocabulary. The tokens that a reduced draft
            vocabulary leaves out have minus infinity.
        """
        if self.lm_head is not None:
            logits = self.lm_head(hidden_states)
        else:
            logits = head(hidden_states)
        # A multiplication by 1 would copy the largest tensor of a step.
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        # A soft cap keeps the order of the logits, but it changes the differences between them. This matters for
        # sampling and for trees.
        cap = self.config.final_logit_softcapping
        if cap:
            logits = torch.tanh(logits / cap) * cap
        # A token that a reduced vocabulary leaves out is never proposed.
        return self._over_all_tokens(logits, -torch.inf)

    def logits_behind(self, logits: Tensor, before: Tensor) -> Tensor:
        """Returns the logits of slots, given the tokens before these slots: `logits` plus the Markov head's vector.

        A draft without a Markov head returns `logits` unchanged.

        Args:
            logits (`torch.Tensor` of shape `[..., V]`): Logits of the slots, from [`compute_logits`].
            before (`torch.Tensor` of shape `[...]`, int64): The token before each slot. `logits` and `before` may be
                broadcast to each other.

        Returns:
            `torch.Tensor` of shape `[..., V]`: In float32 or wider, on the device of the logits. Without a Markov
            head, `logits` itself.
        """
        if self.markov_head is None:
            return logits
        bias = self._over_all_tokens(self.markov_head(before), 0.0)
        # The product has the dtype of the head's weights, which may be half precision. The sum is computed in float32
        # or wider.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(dtype) + bias.to(logits.device, dtype)

    def _over_all_tokens(self, values: Tensor, rest: float) -> Tensor:
        """Returns the values `[..., num_ids]` of the draft's tokens as `[..., V]`.

        All other tokens get the value `rest`.
        """
        if self.d2t is None:
            return values
        # The check of the config has made sure that a config with `draft_vocab_size` also states `vocab_size`.
        num_tokens = self.config.vocab_size or 0
        num_ids = self.d2t.shape[0]
        # Row `i` of a reduced head belongs to the token `i + d2t[i]`.
        everything = values.new_full((*values.shape[:-1], num_tokens), rest)
        ids = torch.arange(num_ids, device=self.d2t.device)
        return everything.index_copy_(-1, self.d2t + ids, values)

    def best_path(self, hidden_states: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """Returns the draft's own choice for a block, without noise.

        The choice is the greedy walk through the scores of the selector, or along the Markov head. Without both, it is
        the argmax of each slot.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): States of the slots after the anchor.
            logits (`torch.Tensor` of shape `[B, K, V]`): Logits of these slots, from [`compute_logits`].
            anchors (`torch.Tensor` of shape `[B]`, int64): The anchors.

        Returns:
            `torch.Tensor` of shape `[B, K]`, int64, on the device of the logits.
        """
        if self.candidate_selector is not None:
            candidates, scores = self.candidate_selector(hidden_states, logits, anchors)
            # The best candidate after each possible candidate is found for all slots at once. The walk only looks it
            # up.
            best = scores.argmax(dim=-1)
            path, _ = follow_path(candidates, scores, best)
            return path
        if self.markov_head is not None:
            return walk(logits, anchors, self.logits_behind, _likeliest)
        return ops.first_argmax(logits)

    def transitions(
        self, hidden_states: Tensor, logits: Tensor, anchors: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Returns the candidates and scores from which a tree of a block is built.

        The arguments are those of [`best_path`].

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[B, K, C]` and the scores of all transitions between them
            `[B, K, C, C]`, as [`CandidateSelector`] returns them. If the scores do not depend on the token before, the
            result is `None` and the logits.
        """
        if self.candidate_selector is not None:
            return self.candidate_selector(hidden_states, logits, anchors)
        if self.markov_head is not None:
            num = self.config.num_candidates or 0
            return likeliest_transitions(logits, anchors, self.logits_behind, num)
        return None, logits

    def embed(self, token_ids: Tensor, embedding: nn.Module) -> Tensor:
        """Returns the embeddings `[B, K, D]` of ids `[B, K]`.

        The embedding is the draft's own. If the draft has none, it is the target's, used in the same way as in the
        draft's training.
        """
        if self.embed_tokens is not None:
            # The ids are on the target's device.
            device = execution_device(self.embed_tokens)
            states = self.embed_tokens(token_ids.to(device))
        elif self.config.raw_input_embeddings:
            # The rows of the weight are read directly, because the target's module may scale or normalise them.
            states = raw_embeddings(embedding, token_ids)
        else:
            # The module is called, so that the target's own scaling and the user's hooks apply.
            states = embedding(token_ids)
        scale = self.config.input_embedding_scale
        if scale == 1.0:
            return states
        if self.config.layer_family == "gemma4":
            # Gemma's own embedding rounds its scale to the dtype of the weights.
            return states * torch.tensor(scale, dtype=states.dtype, device="cpu")
        return states * scale

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resizes the draft's own embedding and, if the draft has one, its own head, as Transformers does.

        Args:
            args: Positional arguments of [`~transformers.PreTrainedModel.resize_token_embeddings`].
            kwargs: Keyword arguments of the same method.

        Raises:
            ValueError: If the draft uses the target's embedding, or has other tables with a row per token.
        """
        # The rows of a selector, of a Markov head and of a reduced vocabulary belong to the tokens that the draft was
        # trained with.
        has_other_tables = (
            self.candidate_selector is not None
            or self.markov_head is not None
            or self.d2t is not None
        )
        has_only_a_head = self.embed_tokens is None and self.lm_head is not None
        if has_other_tables or has_only_a_head:
            raise ValueError(
                "expected a draft whose only rows per token are an embedding and a head of its own, got one with a "
                "selector, a Markov head, a reduced vocabulary or a head alone; load a draft that was trained for the "
                "resized target"
            )
        if self.embed_tokens is None:
            raise ValueError(
                "expected a draft with an embedding of its own, got one that uses the target's; resize the target's "
                "and set draft.config.vocab_size to its size"
            )
        return super().resize_token_embeddings(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Raises `TypeError`, because a draft cannot generate on its own. The message explains how a draft is used."""
        raise TypeError(
            "a DFlash draft proposes tokens for a target and cannot generate by itself; call "
            "target.generate(**inputs, assistant_model=draft) with the target it was trained for"
        )

    def _attentions(self) -> list[DFlashAttention]:
        """Returns the attention modules of all layers."""
        classes = (DFlashDecoderLayer, DFlashGemma4Layer)
        return [layer.self_attn for layer in self.layers if isinstance(layer, classes)]

    def _run_layers(self, hidden_states: Tensor, projector: Projector, block_size: int) -> Tensor:
        """Returns the states `[B, K, D]` of the embeddings `[B, K, D]` after all layers and the final norm."""
        # A layer does not add the residual itself. The next norm adds and normalises in one kernel.
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, projector, block_size)
        if residual is None:
            # Gemma 4's layers have added the residual themselves.
            return self.norm(hidden_states)
        # The final norm computes the last sum. Only the normed states are needed after it.
        normed, _ = self.norm(hidden_states, residual)
        return normed


def _likeliest(logits: Tensor, slots: slice) -> Tensor:
    """Returns the likeliest token `[B, 1]` of one slot's logits `[B, 1, V]`."""
    return ops.first_argmax(logits)
