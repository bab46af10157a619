"""The drafting side of decoding: observes the target's tapped states, proposes the next block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache.context import NewContext
from dflash_hf.dflash2 import follow_path
from dflash_hf.generation.buffers import FixedBuffers
from dflash_hf.generation.sampling import (
    DRAFT_STREAM,
    TARGET_STREAM,
    BlockProcessors,
    choose,
    choose_from_logits,
    with_noise,
)
from dflash_hf.generation.state import DecodeState
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.parts import Target

Rule = Literal["argmax", "shared_noise", "sample"]
# See `iterate`: the draft's logits [B, W - 1, V] and the token before the proposals [B] -> proposals [B, W - 1].
Propose = Callable[[Tensor, Tensor], Tensor]


class DFlashCandidateGenerator:
    """Drafts with a [`DFlashDraftModel`] over a ragged context cache.

    Of every verify it keeps the tapped states, rejected rows included, in fixed tensors; its next forward writes them.
    Before the first verify these are zeros, whose keys and values go where the block's own go right after.

    Args:
        draft, target: Of the run; the target's embedding and head serve drafts without their own.
        processors (`BlockProcessors`): The run's; their stateless warpers shape the proposals too.
        buffers (`FixedBuffers`): Its context cache and the newest context, both cleared.
        rule (`str`): How to propose when sampling.
    """

    def __init__(
        self, draft: DFlashDraftModel, target: Target, processors: BlockProcessors, buffers: FixedBuffers, rule: Rule
    ) -> None:
        self.draft = draft
        self.target = target
        self.processors = processors
        self.rule: Rule = rule
        # Width K of the draft's block, and tokens that are verified at most: K or fewer, or K + 1 where the anchor's
        # slot proposes too.
        self.block_size, self.verify_width = buffers.shape.block_size, buffers.shape.width
        self.device, self.dtype = buffers.shape.draft_layers[0].device, draft.dtype
        # How far ahead of each slot's own position the token is that it proposes.
        self.ahead = int(draft.config.sample_from_anchor)
        self.cache = buffers.draft_cache
        self.buffers = buffers
        # Per row, the first index that there is context for [B]; the draft counts from there. None: from 0.
        self.offset: Tensor | None = None
        self._last = slice(0, 0)  # the columns of the last verify
        # Only `iterate` sets these: a proposal rule of the user's, and whether the last block's logits are kept.
        self.rule_of_user: Propose | None = None
        self.keeps_logits = False
        self.logits: Tensor | None = None

    def observe_prompt(self, context_hidden_states: Tensor, positions: Tensor) -> None:
        """Turns the taps `[B, S, L * D]` of (a chunk of) the prompts straight into context K/V.

        `positions` `[B, S]`, on the host, are each token's index in its row, negative for padding.
        """
        states = context_hidden_states.to(self.device, self.dtype)
        own = positions if self.offset is None else positions - self.offset.to(positions.device)[:, None]
        self.draft.write_prompt(states, own, self.cache)

    def begin(self, lengths: Tensor) -> None:
        """Begins a run whose prompts have these `lengths` `[B]`; `offset` is known and stays."""
        buffers = self.buffers
        if self.offset is not None:
            self.offset = buffers.offset.copy_(self.offset)
            lengths = lengths - self.offset
        buffers.context_lengths.copy_(lengths)
        # Weights are copied where a kernel is to write context of all layers at once.
        buffers.context_weights = self.draft.stack_weights(self.cache, buffers.context_weights)

    def observe_block(self, context_hidden_states: Tensor, block: RaggedBlock) -> None:
        """Takes the context of a verified block, rejected rows included; the next draft forward writes it.

        Args:
            context_hidden_states (`torch.Tensor` of shape `[B, block.width, L * D]`): Tapped states of the verify.
            block (`RaggedBlock`): The block that was verified.
        """
        buffers = self.buffers
        self._last = slice(0, block.width)
        buffers.context_states[:, self._last].copy_(context_hidden_states)
        buffers.context_lengths.copy_(self._on_draft(block).lengths)

    def _context(self) -> NewContext:
        """The newest context, which the draft's next forward writes."""
        buffers, states = self.buffers, self.buffers.context_states
        return NewContext(states, RaggedBlock.at(buffers.context_lengths, states.shape[1]), buffers.context_weights)

    def flush(self) -> None:
        """Writes the newest context where no draft forward will."""
        self.draft.write_context(self._context(), self.cache)

    @property
    def context_hidden_states(self) -> Tensor:
        """Tapped states `[B, W, L * D]` of the block that was verified last, rejected rows included."""
        return self.buffers.context_states[:, self._last]

    def propose(self, state: DecodeState, block: RaggedBlock) -> None:
        """Drafts a block in one forward and writes `state.proposals` (and `draft_probs` under rejection).

        Args:
            state (`DecodeState`): Changed in place.
            block (`RaggedBlock`): Where the draft's block stands, on the target's device.
        """
        draft, device = self.draft, state.block.device
        self.cache.begin(self._on_draft(block))
        noise_embeds = draft.embed(state.draft_ids, self.target.embedding)
        hidden = draft.forward_block(noise_embeds.to(self.device, self.dtype), self.cache, self._context())
        slots = slice(1 - self.ahead, state.width - self.ahead)  # those that propose
        hidden = states = hidden[:, slots]
        if draft.lm_head is None:
            dtype = noise_embeds.dtype if draft.embed_tokens is None else self.target.model.dtype
            states = hidden.to(device, dtype)
        logits = draft.compute_logits(states, self.target.head).to(device)
        self.logits = logits if self.keeps_logits else None
        positions = block.positions[:, slots] + self.ahead
        state.proposals.copy_(self._chain(state, hidden, logits, positions))

    def _chain(self, state: DecodeState, hidden: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
        """Returns proposals `[B, W - 1]` that follow each other.

        Of a selector, the noise goes over all transitions at once, whatever path they lead to, and a path uses that of
        a token once. So the distribution of a token is the softmax over the candidates behind those drawn before it.
        """
        if self.rule_of_user is not None:
            return self.rule_of_user(logits, state.anchor)
        if state.key is None or self.rule == "argmax":
            return self.draft.best_path(hidden, logits, state.anchor)
        is_drawn = self.rule == "sample"
        if self.draft.candidate_selector is None and not is_drawn:
            return choose_from_logits(logits, self.processors, state.key, positions)
        candidates, scores = self._scores(state, hidden, logits)
        if candidates is None:
            state.draft_probs = torch.softmax(scores, dim=-1)
            return choose(scores, state.key, positions, DRAFT_STREAM)
        noisy = with_noise(scores, state.key, positions, candidates, DRAFT_STREAM if is_drawn else TARGET_STREAM)
        path, path_scores = follow_path(candidates, scores, noisy.argmax(dim=-1))
        if is_drawn:
            probs = torch.softmax(path_scores, dim=-1)
            state.draft_probs = probs.new_zeros(*path.shape, logits.shape[-1]).scatter_(-1, candidates, probs)
        return path

    def _scores(self, state: DecodeState, hidden: Tensor, logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """A selector's candidates and scores, or the logits; processed where tokens are sampled."""
        selector = self.draft.candidate_selector
        candidates, scores = (None, logits) if selector is None else selector(hidden, logits, state.anchor)
        if state.key is not None and self.rule != "argmax":
            # Warpers work on rows of scores: of a selector, what may follow one predecessor.
            scores = self.processors.warp(scores.flatten(1, -2)).view_as(scores)
        return candidates, scores

    def _on_draft(self, block: RaggedBlock) -> RaggedBlock:
        """The same block, counted on the draft's device and from where its context begins."""
        if self.offset is not None:
            block = RaggedBlock(block.positions - self.offset[:, None], block.bound)
        return block.on(self.device)
