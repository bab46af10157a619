"""The DFlash draft model. It knows nothing of decoding: no acceptance, no loop, no sampling.

A block is `[anchor, MASK, ..., MASK]`; its queries attend to the context (projected hidden states of the target) and
to the block itself, and every slot predicts the token at its own position. Shapes: `B` rows, `C` context tokens, `K`
block tokens, `L` taps, `D` hidden, `V` vocabulary.
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
    """A DFlash draft: a context projection, a few layers over `[context | block]`, a norm.

    It uses the target's embedding and head, unless its checkpoint has its own: `embed_tokens` and `lm_head`. If that
    head has fewer tokens than the target, the checkpoint also has the offsets `d2t`. Each of the three is `None`
    otherwise.

    Use it as `target.generate(..., assistant_model=draft)`. Source: arXiv 2602.06036 section 3; z-lab
    `dflash/model.py::DFlashDraftModel`.
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        # The context's features are one product of all tapped layers' states, side by side.
        context_size = len(config.target_layer_ids) * config.target_hidden_size
        layer_class: type[DFlashDecoderLayer | DFlashGemma4Layer] = DFlashDecoderLayer
        norm_class = DFlashRMSNorm
        # The config is checked: other families have no convolutions.
        if config.conv_kernel_size is not None:
            layer_class = DFlash2Layer
        if config.layer_family == "gemma4":
            layer_class = DFlashGemma4Layer
            norm_class = DFlashGemma4Norm
        # Norms of the taps, one each, which only Laguna's drafts have.
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
        # FSDP looks for every class that is named there, and refuses a model that lacks one.
        self._no_split_modules = [layer_class.__name__]
        self.norm = norm_class(size, config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self._add_own_vocabulary(config)
        # How calls decode with this draft; a checkpoint's own settings come over these.
        self.generation_config = DFlashGenerationConfig()
        # The statistics of the last call, for the user.
        self.last_stats: Any = None
        self.post_init()

    def _add_own_vocabulary(self, config: DFlashConfig) -> None:
        """Adds the modules with a row per token that this draft has of its own: selector, Markov head, embedding,
        head, offsets.
        """
        # The config is checked: without a size there are no such modules.
        num_tokens = config.vocab_size or 0
        num_ids = config.draft_vocab_size or num_tokens
        hidden_size = config.hidden_size
        rank = config.selector_rank
        top_k = config.selector_top_k
        self.candidate_selector: CandidateSelector | None = None
        # Both or neither.
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
        # A buffer and no parameter: offsets are read from the checkpoint and never trained.
        offsets = None
        if config.draft_vocab_size:
            offsets = torch.zeros(num_ids, dtype=torch.long)
        self.register_buffer("d2t", offsets)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DFlashRotaryEmbedding):
            # The buffer is in no checkpoint, and a model that was built on meta has lost it.
            inv_freq, _ = module.frequencies(module.config)
            module.inv_freq.copy_(inv_freq)
        elif isinstance(module, GroupedDynamicConvolution | CandidateSelector | MarkovHead):
            module.reset_parameters()

    def cache_shapes(self) -> list[LayerShape]:
        """Returns the shape of each layer of the draft's cache in a run, under `generation_config.draft_window`."""
        size = self.config.head_dim
        draft_window = self.generation_config.draft_window
        # Where the layers compute, which is not where offloaded weights are.
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
        """Returns context features `[B, C, D]` of tapped states `[B, C, L * D]`."""
        if len(self.aux_hidden_norms) > 0:
            taps = context_hidden_states.chunk(len(self.aux_hidden_norms), dim=-1)
            normed = [norm(tap) for norm, tap in zip(self.aux_hidden_norms, taps, strict=True)]
            context_hidden_states = torch.cat(normed, dim=-1)
        return self.hidden_norm(self.fc(context_hidden_states))

    def stack_weights(
        self, cache: RaggedCache, into: ContextWeights | None = None
    ) -> ContextWeights | None:
        """Returns copies of the weights with which a kernel writes context into all layers at once, or `None`.

        They are written over the earlier copies `into` if these fit; see `cache.context`.
        """
        # The kernel turns whole heads.
        turns_all = self.config.rotary_dim == self.config.head_dim
        # Asked first, so that no list of modules is made in runs on a CPU.
        if not turns_all or not ops.use_kernel(ops.context_kv, self.fc.weight):
            return None
        # Keys before values, layer after layer: the kernel knows the order.
        projections: list[nn.Module] = []
        norms: list[Tensor] = []
        for attention in self._attentions():
            projections += attention.stacked_projections()
            norms.append(attention.k_norm.weight)
        return stack_weights(projections, norms, cache.buffers(), into)

    def write_context(self, context: NewContext, cache: RaggedCache) -> None:
        """Writes a block's context keys and values into the ragged cache, in place, at the positions of this block.

        All tokens of the block are written, so that shapes never change. The next block overwrites the tokens that
        were not accepted. No host sync.

        Args:
            context (`NewContext`): Tapped states of the verified tokens, and their positions.
            cache (`RaggedCache`): The draft's cache.
        """
        # Every layer takes its keys and values from the same features: no layer runs over the context.
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
        """Writes the context of (a chunk of) whole prompts, left-padded, into the ragged cache, in place.

        Args:
            context_hidden_states (`torch.Tensor` of shape `[n, S, L * D]`): Tapped states of the prompts.
            positions (`torch.Tensor` of shape `[n, S]`, int64): Index of each token in its row; negative for padding.
                They may be on any device; they are read on the host.
            cache (`RaggedCache`): The draft's cache.
            rows (`list[int]`, *optional*): The cache's rows that these prompts are of, by default the first ones.
        """
        features = self.project_context(context_hidden_states)
        # Padding is computed along with the rest and written nowhere; any position will do for it.
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
        """Runs a block over the context in the ragged cache, writing the newest context first; no host sync.

        The block's own keys and values are written after each row's length. The next context overwrites them there. A
        context that is given here and not to `write_context` is projected in one product per layer with the block
        (measured in docs/log-archive.md). If a kernel writes it, the angles of both are computed together.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, K, D]`): Embeddings of `[anchor, MASK, ...]`.
            cache (`RaggedCache`): The draft's cache; `cache.begin` has been called for this block.
            context (`NewContext`, *optional*): Tapped states of the block that was verified last, and that block. This
                block overwrites its rejected tokens.

        Returns:
            `torch.Tensor` of shape `[B, K, D]`: States after the final norm, ready for the target's head.
        """
        block = cache.block
        projector: Projector
        if context is None:
            # `write_context` has written it, in a call of its own.
            cos_sin = self.rotary_emb(block.positions, noise_embeds)
            projector = BlockProjector(cache, cos_sin)
        else:
            projector = self._with_context(context, cache, noise_embeds)
        return self._run_layers(noise_embeds, projector, block.width)

    def _with_context(
        self, context: NewContext, cache: RaggedCache, noise_embeds: Tensor
    ) -> Projector:
        """Writes the newest context by one kernel, or leaves that to the layers; returns their projector."""
        features = self.project_context(context.states)
        # Of the last verify's block, rejected tokens included: shapes are the same at every step.
        num_context = features.shape[1]
        # The angles of both are computed at once: positions may overlap, where the block replaces rejected tokens.
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
        """Projects new context and runs blocks in one call, as Transformers' DFlash path and training do.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, Q, D]`): Embeddings of one block, or in training of several.
            context_hidden_states (`torch.Tensor` of shape `[B, C, L * D]`): Tapped target states of the context
                tokens that are not in `cache` yet.
            position_ids (`torch.Tensor` of shape `[B, C + Q]`, *optional*): Indices of the context, then of the block;
                by default they continue the cache.
            attention_mask (*optional*): Padding mask `[B, total]` (1 = real) over cache, context and block;
                or one ready mask per kind of layer, `{(window, causal, from_anchor): mask}`, boolean
                `[B, 1, Q, C + Q]` or a `BlockMask`, as training builds them.
            cache (`Cache`, *optional*): Advanced in place by context and block; the caller crops the block.
            block_size (`int`, *optional*): Slots per block if `noise_embeds` holds several blocks; by default it is
                one block. Masks do not follow from it.
            then (callable, *optional*): Makes the result from the states within this call, so that DDP and FSDP see
                that the weights are used.
            past_key_values (`Cache`, *optional*): The name of `cache` in older releases of Transformers.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` `[B, Q, D]` after the final norm; or the result of `then`.

        Raises:
            ValueError: If a cache is passed under both names.

        Source: Transformers `MuseGlimmerAssistantModel.forward`.
        """
        cache = one_cache(cache=cache, past_key_values=past_key_values)
        num_queries = noise_embeds.shape[1]
        num_new = context_hidden_states.shape[1] + num_queries
        if position_ids is None:
            # An ordinary cache has one length for all rows, padding included.
            position_ids = torch.arange(num_new, device=noise_embeds.device)[None]
            if cache is not None:
                position_ids = position_ids + cache.get_seq_length()
        context = self.project_context(context_hidden_states)
        # One table of angles for context and blocks, of which the queries take the last.
        cos_sin = self.rotary_emb(position_ids, noise_embeds)
        masks = CombinedMasks(attention_mask, num_queries, noise_embeds.device)
        projector = CombinedProjector(context, cos_sin, masks, cache)
        # Convolutions must not cross from one block of a training batch into the next.
        hidden = self._run_layers(noise_embeds, projector, block_size or num_queries)
        # Inside the forward, where wrappers of the weights still hold them together.
        if then is not None:
            return then(hidden)
        # The field's name differs between releases of Transformers.
        filled: dict[str, Any] = {CACHE_NAME: cache}
        return BaseModelOutputWithPast(last_hidden_state=hidden, **filled)

    def compute_logits(self, hidden_states: Tensor, head: nn.Module) -> Tensor:
        """Returns the draft's logits: the head, then the draft's own multiplier and soft cap.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., D]`): States after the final norm.
            head (`nn.Module`): The target's head, for drafts that have none.

        Returns:
            `torch.Tensor` of shape `[..., V]`: Logits over the target's vocabulary; minus infinity for the tokens that
            a reduced draft vocabulary leaves out.
        """
        if self.lm_head is not None:
            logits = self.lm_head(hidden_states)
        else:
            logits = head(hidden_states)
        # A product by 1 would copy the largest tensor of a step.
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        # A cap keeps the order of logits and changes their distances: it matters to sampling and to trees.
        cap = self.config.final_logit_softcapping
        if cap:
            logits = torch.tanh(logits / cap) * cap
        # What a reduced vocabulary leaves out is never proposed.
        return self._over_all_tokens(logits, -torch.inf)

    def logits_behind(self, logits: Tensor, before: Tensor) -> Tensor:
        """Returns the logits of slots, given the tokens before them: `logits` plus the Markov head's vector.

        A draft without a Markov head returns `logits` unchanged.

        Args:
            logits (`torch.Tensor` of shape `[..., V]`): Logits of the slots, from [`compute_logits`].
            before (`torch.Tensor` of shape `[...]`, int64): The token before each slot; both shapes may be broadcast.

        Returns:
            `torch.Tensor` of shape `[..., V]`: In float32 or wider, on the device of the logits.
        """
        if self.markov_head is None:
            return logits
        bias = self._over_all_tokens(self.markov_head(before), 0.0)
        # The product may be in half precision, as its weights are; the sum is not.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(dtype) + bias.to(logits.device, dtype)

    def _over_all_tokens(self, values: Tensor, rest: float) -> Tensor:
        """Returns values `[..., num_ids]` of the draft's tokens as `[..., V]`, with `rest` for all other tokens."""
        if self.d2t is None:
            return values
        # The config is checked: beside a reduced vocabulary it states the whole one.
        num_tokens = self.config.vocab_size or 0
        num_ids = self.d2t.shape[0]
        # Row `i` of a reduced head is the token `i + d2t[i]`.
        everything = values.new_full((*values.shape[:-1], num_tokens), rest)
        ids = torch.arange(num_ids, device=self.d2t.device)
        return everything.index_copy_(-1, self.d2t + ids, values)

    def best_path(self, hidden_states: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """Returns the draft's own choice for a block, without noise.

        That is the greedy walk of its selector or along its Markov head, or the argmaxes.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, K, D]`): States of the slots after the anchor.
            logits (`torch.Tensor` of shape `[B, K, V]`): Their logits, from [`compute_logits`].
            anchors (`torch.Tensor` of shape `[B]`, int64): The anchors.

        Returns:
            `torch.Tensor` of shape `[B, K]`, int64, on the device of the logits.
        """
        if self.candidate_selector is not None:
            candidates, scores = self.candidate_selector(hidden_states, logits, anchors)
            # The best candidate behind each one is found for all slots at once; the walk only looks them up.
            best = scores.argmax(dim=-1)
            path, _ = follow_path(candidates, scores, best)
            return path
        if self.markov_head is not None:
            return walk(logits, anchors, self.logits_behind, _likeliest)
        return ops.first_argmax(logits)

    def transitions(
        self, hidden_states: Tensor, logits: Tensor, anchors: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Returns the candidates and scores from which a tree of a block is built; the arguments are [`best_path`]'s.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Candidates `[B, K, C]` and the scores of all transitions between them
            `[B, K, C, C]`, as [`CandidateSelector`] returns them. If the scores do not depend on the token before, no
            candidates and the logits.
        """
        if self.candidate_selector is not None:
            return self.candidate_selector(hidden_states, logits, anchors)
        if self.markov_head is not None:
            num = self.config.num_candidates or 0
            return likeliest_transitions(logits, anchors, self.logits_behind, num)
        return None, logits

    def embed(self, token_ids: Tensor, embedding: nn.Module) -> Tensor:
        """Returns embeddings `[B, K, D]` of ids `[B, K]`: the draft's own, or the target's as in its training."""
        if self.embed_tokens is not None:
            # Ids are on the target's device.
            device = execution_device(self.embed_tokens)
            states = self.embed_tokens(token_ids.to(device))
        elif self.config.raw_input_embeddings:
            # Rows of the weight itself: the target's module may scale or normalise them.
            states = raw_embeddings(embedding, token_ids)
        else:
            # As a module, so that the target's own scaling and the user's hooks apply.
            states = embedding(token_ids)
        scale = self.config.input_embedding_scale
        if scale == 1.0:
            return states
        if self.config.layer_family == "gemma4":
            # Gemma's own embedding rounds its scale to the dtype of the weights.
            return states * torch.tensor(scale, dtype=states.dtype, device="cpu")
        return states * scale

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resizes the draft's own embedding, and its own head with it, as Transformers does.

        Args:
            args: Those of [`~transformers.PreTrainedModel.resize_token_embeddings`].
            kwargs: Those of the same method.

        Raises:
            ValueError: If the draft uses the target's embedding, or has other tables with a row per token.
        """
        # A selector, a Markov head and the ids of a reduced vocabulary belong to the tokens of the training.
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
        """Raises `TypeError`, which explains how a draft is used: it cannot generate on its own."""
        raise TypeError(
            "a DFlash draft proposes tokens for a target and cannot generate by itself; call "
            "target.generate(**inputs, assistant_model=draft) with the target it was trained for"
        )

    def _attentions(self) -> list[DFlashAttention]:
        """Returns the attention of every layer."""
        classes = (DFlashDecoderLayer, DFlashGemma4Layer)
        return [layer.self_attn for layer in self.layers if isinstance(layer, classes)]

    def _run_layers(self, hidden_states: Tensor, projector: Projector, block_size: int) -> Tensor:
        """Returns embeddings `[B, K, D]` after all layers and the final norm."""
        # The residual sum is left to the next norm, which adds and norms in one kernel.
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, projector, block_size)
        if residual is None:
            # Gemma 4's layers add up themselves.
            return self.norm(hidden_states)
        # The last sum is taken by the final norm; nobody needs it beside the norm's result.
        normed, _ = self.norm(hidden_states, residual)
        return normed


def _likeliest(logits: Tensor, slots: slice) -> Tensor:
    """Returns the likeliest token `[B, 1]` of one slot's logits `[B, 1, V]`."""
    return ops.first_argmax(logits)
