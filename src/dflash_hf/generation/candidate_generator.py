"""The drafting side of decoding: takes the tapped states of the prompts, and proposes blocks."""

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
# See `iterate`: the draft's logits [B, W - 1, V] and the token before the proposals [B] -> proposals [B, W - 1].
Propose = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Iterated:
    """What a run of `iterate` asks of its drafting side, and gets from it; other runs ask for nothing."""

    propose: Propose | None = None  # the caller's own rule
    keeps_logits: bool = False  # whether the last block's logits are kept
    logits: Tensor | None = None  # [B, W - 1, V]; none of a block that was not drafted


class DFlashCandidateGenerator:
    """Drafts with a [`DFlashDraftModel`] over a ragged context cache.

    Its forwards also write the tapped states of every verify, which [`NewestContext`] keeps.

    Args:
        request (`Request`): The call's inputs and settings. A draft without its own embedding and head uses the
            target's. The stateless warpers among the processors shape the proposals too.
        buffers (`FixedBuffers`): The run's, with its context cache and the newest context, both cleared.
        proposal (`str`): How to propose when sampling.
        drafter (`DFlashDraftModel`): The model that computes the blocks and their logits: the draft, or a copy of it;
            see `float8.drafting_copy`.
    """

    def __init__(
        self,
        request: Request,
        buffers: FixedBuffers,
        proposal: ProposalRule,
        drafter: DFlashDraftModel,
    ) -> None:
        # Another one once the models were looked at anew or rows have joined. The draft is the same in each of them;
        # the rest is read from it.
        self.request = request
        self.draft = request.draft
        self.drafter = drafter
        self.proposal: ProposalRule = proposal
        self.buffers = buffers
        # The draft's context, and what of it the cache does not hold yet.
        self.draft_cache = buffers.draft_cache
        self.newest = buffers.newest
        # Builds the trees that are verified; `None` in a run that verifies chains.
        self.trees = buffers.trees
        # The draft's device: to ask a model goes through its weights.
        self.device = self.newest.columns.device
        # Tokens of the draft's block, `K`, and how many of its slots propose.
        self.block_size = buffers.shape.block_size
        self.num_proposals = self.draft.config.num_proposals(self.block_size)
        # Tokens that are verified at most: `K` or fewer, or `K + 1` where the anchor's slot proposes too.
        self.verify_width = buffers.shape.width
        # How far behind each slot's own position the token stands that it proposes: 0, or 1.
        self.ahead = int(self.draft.config.sample_from_anchor)
        self.iterated = Iterated()

    def observe_prompt(
        self, context_hidden_states: Tensor, positions: Tensor, rows: list[int]
    ) -> None:
        """Turns the taps `[n, S, L * D]` of (a chunk of) the prompts of these rows straight into context K/V.

        `positions` `[n, S]`, on the host, are each token's index in its row, negative for padding.
        """
        states = self._as_draft(context_hidden_states)
        # Tokens before the offset get negative positions and go nowhere.
        if self.newest.has_offset:
            offset = self.newest.offset.to(positions.device)
            positions = positions - offset[rows, None]
        self.draft.write_prompt(states, positions, self.draft_cache, rows)

    def take_context(self, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies context of the first tokens of a single prompt in: keys and values `[1, G, n, E]` of each layer."""
        for layer, pair in zip(self.draft_cache.attention.values(), kept, strict=True):
            for buffer, states in zip(layer.buffers(), pair, strict=True):
                row = states[0].transpose(0, 1)
                copy_row(row, buffer[0], row.shape[0])

    def begin(self, lengths: Tensor) -> None:
        """Begins a run whose prompts have these `lengths` `[B]`; the offset is set by now."""
        newest = self.newest
        if newest.has_offset:
            lengths = lengths - newest.offset
        newest.begin(lengths)
        self.buffers.stack_weights(self.draft)

    def flush(self) -> None:
        """Writes the newest context if no forward of the draft will write it."""
        self.draft.write_context(self.newest.to_write(), self.draft_cache)

    def keep_context(self, is_static: bool) -> None:
        """Stands in for [`propose`] before a verify of one token: the newest context waits, or is written when full.

        Args:
            is_static (`bool`): Write the context of every token, so that each such step is the same.
        """
        self.iterated.logits = None
        self.newest.gathers = not is_static
        # A run that never drafts has nobody who reads context.
        never_drafts = self.verify_width == 1
        if never_drafts:
            return
        if is_static or self.newest.is_full:
            self.flush()

    def propose(self, state: DecodeState, block: RaggedBlock, is_static: bool) -> None:
        """Drafts a block in one forward and writes `state.proposals` (and `draft_probs` under rejection).

        Args:
            state (`DecodeState`): Changed in place.
            block (`RaggedBlock`): Where the draft's block stands, on the target's device.
            is_static (`bool`): Read nothing on the host, as a captured step must: no processor shapes the logits.
        """
        is_tree = state.is_tree
        # No node of a tree stands deeper than a chain of as many tokens.
        num_slots = min(state.width - 1, self.num_proposals)
        # The anchor's slot proposes too in some drafts; in others the first mask token's slot is the first to.
        first = 1 - self.ahead
        slots = slice(first, first + num_slots)
        # 1. One forward over `[anchor, MASK, ...]`, which also writes the context of the last verified block.
        self.draft_cache.begin(self.newest.counted(block))
        embeds = self.draft.embed(state.draft_ids, self.request.target.embedding)
        context = self.newest.to_write()
        hidden = self.drafter.forward_block(self._as_draft(embeds), self.draft_cache, context)
        # 2. Logits of the slots that propose alone: the head is the largest product of a draft.
        hidden = hidden[:, slots]
        logits = self._logits(hidden, embeds.dtype, state.block.device)
        if self.iterated.keeps_logits:
            self.iterated.logits = logits
        # 3. Tokens, or the nodes of a tree. Noise is keyed by the position of the proposed token.
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
        """Returns logits `[B, n, V]`, on the target's device, for states `[B, n, D]` of the draft."""
        states = hidden
        # A head of the draft's own is where the draft is, and in its dtype.
        if self.draft.lm_head is None:
            # The target's head takes states as its own layers give them.
            dtype = embeds_dtype
            if self.draft.embed_tokens is not None:
                dtype = self.request.target.model.dtype
            states = hidden.to(device, dtype)
        return self.drafter.compute_logits(states, self.request.target.head).to(device)

    def _takes_likeliest(self, state: DecodeState) -> bool:
        """Returns True if the proposals are the draft's likeliest tokens, without noise or warpers."""
        return not state.host.is_sampled or self.proposal == "argmax"

    def _chain(self, state: DecodeState, hidden: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        """Returns proposals `[B, W - 1]` that follow each other, of the slots at these positions `[B, W - 1]`."""
        propose = self.iterated.propose
        if propose is not None:
            # A copy: the caller's function may keep what it gets, and the anchor is written again.
            return propose(logits, state.anchor.clone())
        if self._takes_likeliest(state):
            return self.draft.best_path(hidden, logits, state.anchor)
        positions = slots + self.ahead
        if self.draft.candidate_selector is not None:
            return self._chain_of_candidates(state, hidden, logits, positions)
        if self.draft.config.is_dspark:
            return self._chain_of_slots(state, logits, positions)
        if self.proposal == "shared_noise":
            # With the target's own noise, so that the two agree where their distributions do.
            return draw_from_logits(logits, self.request.processors, state.noise_key, positions)
        tokens, state.draft_probs = self._draw(state, logits, positions)
        return tokens

    def _draw(self, state: DecodeState, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Draws tokens `[B, n]` for these positions; returns them, and the probabilities `[B, n, V]` of all tokens."""
        scores = self.request.processors.warp(logits)
        # Rejection compares the target's probabilities with these.
        probs = torch.softmax(scores, dim=-1)
        return choose(scores, state.noise_key, positions, DRAFT_STREAM), probs

    def _chain_of_slots(self, state: DecodeState, logits: Tensor, positions: Tensor) -> Tensor:
        """Returns sampled proposals `[B, W - 1]` of a Markov head's draft: each slot behind the token drawn before."""
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

        The noise goes over all transitions at once, whatever path they lead to, and a path uses that of a token once.
        So the distribution of a token is the softmax over the candidates behind those drawn before it.
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
            # Rejection looks at the whole vocabulary: tokens that are no candidates have a probability of 0.
            probs = torch.softmax(path_scores, dim=-1)
            vocab_size = logits.shape[-1]
            no_probs = probs.new_zeros(*path.shape, vocab_size)
            state.draft_probs = no_probs.scatter_(-1, candidates, probs)
        return path

    def _scores(
        self, state: DecodeState, hidden: Tensor, logits: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Returns the draft's candidates and scores, or none and the logits; processed where tokens are sampled."""
        candidates, scores = self.draft.transitions(hidden, logits, state.anchor)
        if not self._takes_likeliest(state):
            # Warpers work on rows of scores: a row of candidates holds those that may follow one predecessor.
            rows = scores.flatten(1, -2)
            scores = self.request.processors.warp(rows).view_as(scores)
        return candidates, scores

    def _propose_tree(
        self, state: DecodeState, hidden: Tensor, logits: Tensor, slots: Tensor
    ) -> None:
        """Proposes a tree by the slots at these positions `[B, n]`."""
        trees = self.trees
        assert trees is not None
        candidates, scores = self._scores(state, hidden, logits)
        if not self._takes_likeliest(state):
            # Under `shared_noise` a tree is of the scores that the target's own noise makes likely.
            positions = slots + self.ahead
            scores = with_noise(scores, state.noise_key, positions, candidates)
        # The probabilities that the text goes on as before, by the number of tokens that match.
        follows = trees.follows
        longest = self.draft.generation_config.max_matching_ngram_size
        if longest is not None:
            follows = follows[:, : longest + 1]
        text: tuple[Tensor, ...] = ()
        # With a limit of 0 nothing is looked for in the text.
        is_searched = follows.shape[1] > 1
        if is_searched:
            text = (state.ids, state.cursor, follows)
        trees.build(scores, state.nodes_of_step, state.block, candidates, text)

    def _as_draft(self, states: Tensor) -> Tensor:
        """Returns states on the draft's device, in its dtype."""
        # A model finds its dtype by looking through its weights; the newest context has it.
        dtype = self.newest.columns.dtype
        return states.to(self.device, dtype)
