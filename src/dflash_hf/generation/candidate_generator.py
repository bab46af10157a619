"""This module drafts: it turns the tapped states of the prompts into the draft's context, and proposes blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.rows import copy_row
from dflash_hf.draft_model.dflash2 import follow_path
from dflash_hf.draft_model.dspark import walk
from dflash_hf.generation.buffers import FixedBuffers
from dflash_hf.generation.request import Request
from dflash_hf.generation.sampling import (
    DRAFT_STREAM,
    TARGET_STREAM,
    choose,
    draw_from_logits,
    with_noise,
)
from dflash_hf.generation.shaped_proposals import shaped
from dflash_hf.generation.state import DecodeState
from dflash_hf.modeling_dflash import DFlashDraftModel

ProposalRule = Literal["argmax", "shared_noise", "sample"]
# A caller's own rule, see `iterate`: it gets the draft's logits [B, W - 1, V] and the token before the proposals [B],
# and returns the proposals [B, W - 1].
Propose = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Iterated:
    """The settings and logits of a run of `iterate`. In other runs, the fields keep their default values."""

    propose: Propose | None = None  # the caller's own rule
    keeps_logits: bool = False  # whether the logits of the last block are kept
    logits: Tensor | None = None  # [B, W - 1, V]; `None` if the last block was not drafted


class DFlashCandidateGenerator:
    """Drafts with a [`DFlashDraftModel`] over a ragged context cache.

    Each forward of the draft also writes the context of the last verify: [`NewestContext`] holds the verify's tapped
    states until then.

    Args:
        request (`Request`): The call's inputs and settings. A draft without its own embedding and head uses the
            target's. In sampling, the stateless warpers among the processors are applied to the draft's logits too.
        buffers (`FixedBuffers`): The run's buffers. Their context cache and newest context must be cleared.
        proposal (`str`): The proposal rule for sampling: `"argmax"`, `"shared_noise"` or `"sample"`.
        drafter (`DFlashDraftModel`): The model that computes the blocks and their logits. It is the draft or a copy of
            it; see `float8.drafting_copy`.
    """

    def __init__(
        self,
        request: Request,
        buffers: FixedBuffers,
        proposal: ProposalRule,
        drafter: DFlashDraftModel,
    ) -> None:
        # The request is replaced when the models are looked at again or rows join. The draft stays the same, so it is
        # kept here. Everything else is read from the current request.
        self.request = request
        self.draft = request.draft
        self.drafter = drafter
        self.proposal: ProposalRule = proposal
        self.buffers = buffers
        # The draft's context: the part in the cache, and the tapped states that are not written yet.
        self.draft_cache = buffers.draft_cache
        self.newest = buffers.newest
        # The builder of the trees that are verified; `None` in a run that verifies chains.
        self.trees = buffers.trees
        # The draft's device. It is kept because a model searches all its weights to find its device.
        self.device = self.newest.columns.device
        # `K`, the number of tokens in the draft's block, and the number of its slots that propose a token.
        self.block_size = buffers.shape.block_size
        self.num_proposals = self.draft.config.num_proposals(self.block_size)
        # The largest number of tokens in a verify.
        self.verify_width = buffers.shape.width
        # The position of a proposed token minus the position of its slot: 1 if the anchor's slot proposes too, else 0.
        self.ahead = int(self.draft.config.sample_from_anchor)
        self.iterated = Iterated()

    def observe_prompt(
        self, context_hidden_states: Tensor, positions: Tensor, rows: list[int]
    ) -> None:
        """Writes the draft's context of the given rows' prompts, or of a chunk of these prompts.

        Args:
            context_hidden_states (`torch.Tensor` of shape `[n, S, L * D]`): The tapped states.
            positions (`torch.Tensor` of shape `[n, S]`, int64): Each token's index in its row, negative for padding.
                The tensor is on the host.
            rows (`list[int]`): The rows of the cache, one for each of the `n` prompts.
        """
        states = self._as_draft(context_hidden_states)
        # Tokens before the offset get negative positions, so that they are not written.
        if self.newest.has_offset:
            offset = self.newest.offset.to(positions.device)
            positions = positions - offset[rows, None]
        self.draft.write_prompt(states, positions, self.draft_cache, rows)

    def take_context(self, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies context of the first `n` tokens into row 0: the keys and values `[1, G, n, E]` of each layer."""
        for layer, pair in zip(self.draft_cache.attention.values(), kept, strict=True):
            for buffer, states in zip(layer.buffers(), pair, strict=True):
                row = states[0].transpose(0, 1)
                copy_row(row, buffer[0], row.shape[0])

    def begin(self, lengths: Tensor) -> None:
        """Begins a run with prompts of these `lengths` `[B]`, int64. The offset must have been set before."""
        newest = self.newest
        if newest.has_offset:
            lengths = lengths - newest.offset
        newest.begin(lengths)
        self.buffers.stack_weights(self.draft)

    def flush(self) -> None:
        """Writes the newest context into the draft's cache, for when no forward of the draft will write it."""
        self.draft.write_context(self.newest.to_write(), self.draft_cache)

    def keep_context(self, is_static: bool) -> None:
        """Replaces [`propose`] before a verify of one token: writes the newest context if its columns are full.

        Args:
            is_static (`bool`): Whether to write the context of every single token, so that all steps are the same, as
                captured steps must be.
        """
        self.iterated.logits = None
        self.newest.gathers = not is_static
        # In a run that never drafts, no forward reads the context.
        never_drafts = self.verify_width == 1
        if never_drafts:
            return
        if is_static or self.newest.is_full:
            self.flush()

    def propose(self, state: DecodeState, block: RaggedBlock, is_static: bool) -> None:
        """Drafts a block in one forward.

        Writes `state.proposals`, or the nodes of a tree. Under rejection sampling it also sets `state.draft_probs`.

        Args:
            state (`DecodeState`): Changed in place.
            block (`RaggedBlock`): The place of the draft's block in each row, on the target's device.
            is_static (`bool`): Whether the step is a captured one. Such a step copies nothing to the host, so that no
                processor shapes the logits.
        """
        is_tree = state.is_tree
        # A tree of `width` nodes is at most as deep as a chain of `width` tokens.
        num_slots = min(state.width - 1, self.num_proposals)
        # The first slot that proposes is the anchor's in some drafts, and the first mask token's in the others.
        first = 1 - self.ahead
        slots = slice(first, first + num_slots)
        # 1. One forward over `[anchor, MASK, ...]`, which also writes the context of the last verified block.
        self.draft_cache.begin(self.newest.counted(block))
        embeds = self.draft.embed(state.draft_ids, self.request.target.embedding)
        context = self.newest.to_write()
        hidden = self.drafter.forward_block(self._as_draft(embeds), self.draft_cache, context)
        # 2. Logits for the slots that propose. All other slots are left out, because the head is the largest matrix
        # product of a draft.
        hidden = hidden[:, slots]
        logits = self._logits(hidden, embeds.dtype, state.block.device)
        if self.iterated.keeps_logits:
            self.iterated.logits = logits
        # 3. Tokens, or the nodes of a tree. The noise of a token depends on the position of the proposed token.
        positions = block.positions[:, slots]
        processors = self.request.processors
        if processors.shaping and not is_static:
            key = None if self._takes_likeliest(state) else state.noise_key
            positions_of_tokens = positions + self.ahead
            behind = self.draft.logits_behind
            logits = shaped(state, logits, processors, key, positions_of_tokens, behind)
        if is_tree:
            self._propose_tree(state, hidden, logits, positions)
        else:
            state.proposals.copy_(self._chain(state, hidden, logits, positions))

    def _logits(self, hidden: Tensor, embeds_dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns logits `[B, n, V]` on the given device for states `[B, n, D]` of the draft."""
        states = hidden
        # A draft's own head has the device and the dtype of the draft. Only for the target's head do states change.
        if self.draft.lm_head is None:
            # The target's head expects states in the dtype of the target's layers.
            dtype = embeds_dtype
            if self.draft.embed_tokens is not None:
                dtype = self.request.target.model.dtype
            states = hidden.to(device, dtype)
        return self.drafter.compute_logits(states, self.request.target.head).to(device)

    def _takes_likeliest(self, state: DecodeState) -> bool:
        """Returns True if the proposals are the draft's most likely tokens, without noise or warpers."""
        return not state.host.is_sampled or self.proposal == "argmax"

    def _chain(self, state: DecodeState, hidden: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        """Returns a chain of proposals `[B, W - 1]`, int64, for the slots at the positions `slots` `[B, W - 1]`."""
        propose = self.iterated.propose
        if propose is not None:
            # A copy, because the caller's function may keep the tensor, and the next step overwrites the anchor.
            return propose(logits, state.anchor.clone())
        if self._takes_likeliest(state):
            return self.draft.best_path(hidden, logits, state.anchor)
        positions = slots + self.ahead
        if self.draft.candidate_selector is not None:
            return self._chain_of_candidates(state, hidden, logits, positions)
        if self.draft.config.is_dspark:
            return self._chain_of_slots(state, logits, positions)
        if self.proposal == "shared_noise":
            # The draft uses the target's own noise, so that both choose the same token if their distributions agree.
            return draw_from_logits(logits, self.request.processors, state.noise_key, positions)
        tokens, state.draft_probs = self._draw(state, logits, positions)
        return tokens

    def _draw(self, state: DecodeState, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Draws tokens for these positions. Returns them `[B, n]`, and the probabilities of all tokens `[B, n, V]`."""
        scores = self.request.processors.warp(logits)
        # Rejection sampling compares these probabilities with the target's.
        probs = torch.softmax(scores, dim=-1)
        return choose(scores, state.noise_key, positions, DRAFT_STREAM), probs

    def _chain_of_slots(self, state: DecodeState, logits: Tensor, positions: Tensor) -> Tensor:
        """Returns sampled proposals `[B, W - 1]` of a draft with a Markov head.

        The slots are drawn one after the other, because a slot's logits depend on the token drawn before it.
        """
        probs: list[Tensor] = []
        processors = self.request.processors

        def sample(logits_B1V: Tensor, slot: slice) -> Tensor:
            position = positions[:, slot]
            if self.proposal == "shared_noise":
                return draw_from_logits(logits_B1V, processors, state.noise_key, position)
            token, of_slot = self._draw(state, logits_B1V, position)
            probs.append(of_slot)
            return token

        tokens = walk(logits, state.anchor, self.draft.logits_behind, sample)
        if probs:
            state.draft_probs = torch.cat(probs, dim=1)
        return tokens

    def _chain_of_candidates(
        self, state: DecodeState, hidden: Tensor, logits: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns sampled proposals `[B, W - 1]` among a selector's candidates.

        Noise is added to the scores of all transitions at once, before the path is known. A path uses one transition
        per slot. So a token's distribution is the softmax over the candidates, given the candidates drawn before it.
        """
        candidates, scores = self._scores(state, hidden, logits)
        assert candidates is not None
        is_drawn = self.proposal == "sample"
        stream = TARGET_STREAM
        if is_drawn:
            stream = DRAFT_STREAM
        noisy = with_noise(scores, state.noise_key, positions, candidates, stream)
        best = noisy.argmax(dim=-1)
        path, path_scores = follow_path(candidates, scores, best)
        if is_drawn:
            # Rejection sampling needs the whole vocabulary. Tokens that are not candidates have a probability of 0.
            probs = torch.softmax(path_scores, dim=-1)
            vocab_size = logits.shape[-1]
            no_probs = probs.new_zeros(*path.shape, vocab_size)
            state.draft_probs = no_probs.scatter_(-1, candidates, probs)
        return path

    def _scores(
        self, state: DecodeState, hidden: Tensor, logits: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Returns the draft's candidates and their scores, as [`DFlashDraftModel.transitions`] returns them.

        If proposals are sampled, the scores are warped.
        """
        candidates, scores = self.draft.transitions(hidden, logits, state.anchor)
        if not self._takes_likeliest(state):
            # Warpers work on rows of scores. Here a row holds the candidates that may follow one candidate.
            rows = scores.flatten(1, -2)
            scores = self.request.processors.warp(rows).view_as(scores)
        return candidates, scores

    def _propose_tree(
        self, state: DecodeState, hidden: Tensor, logits: Tensor, slots: Tensor
    ) -> None:
        """Writes the most likely tree of proposals into the state, from slots at the positions `slots` `[B, n]`."""
        trees = self.trees
        assert trees is not None
        candidates, scores = self._scores(state, hidden, logits)
        if not self._takes_likeliest(state):
            # Under `shared_noise` the target's own noise is added, so that the tree holds tokens that the target may
            # draw.
            positions = slots + self.ahead
            scores = with_noise(scores, state.noise_key, positions, candidates)
        # The probabilities that the text repeats an earlier passage, by the number of tokens that match.
        follows = trees.follows
        longest = self.draft.generation_config.max_matching_ngram_size
        if longest is not None:
            follows = follows[:, : longest + 1]
        text: tuple[Tensor, ...] = ()
        # With a limit of 0, the text is not searched for repetitions.
        is_searched = follows.shape[1] > 1
        if is_searched:
            text = (state.ids, state.cursor, follows)
        trees.build(scores, state.nodes_of_step, state.block, candidates, text)

    def _as_draft(self, states: Tensor) -> Tensor:
        """Returns states on the draft's device, in its dtype."""
        # The dtype comes from the newest context, because a model searches its weights to find its dtype.
        dtype = self.newest.columns.dtype
        return states.to(self.device, dtype)
