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
    draw_from_logits,
    with_noise,
)
from dflash_hf.generation.state import DecodeState
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.parts import Target
from dflash_hf.tree import along

Rule = Literal["argmax", "shared_noise", "sample"]
# See `iterate`: the draft's logits [B, W - 1, V] and the token before the proposals [B] -> proposals [B, W - 1].
Propose = Callable[[Tensor, Tensor], Tensor]


class DFlashCandidateGenerator:
    """Drafts with a [`DFlashDraftModel`] over a ragged context cache.

    Of every verify it keeps the tapped states, rejected rows included, in fixed tensors; its next forward writes them.
    Before the first verify these are zeros, whose keys and values go where the block's own go right after. Tokens that
    were decoded without a draft gather there, one behind the other, until a forward of the draft takes them or the
    tensors are full.

    Args:
        draft, target: Of the run; the target's embedding and head serve drafts without their own.
        processors (`BlockProcessors`): The run's; their stateless warpers shape the proposals too.
        buffers (`FixedBuffers`): Its context cache and the newest context, both cleared.
        rule (`str`): How to propose when sampling.
        drafter (`DFlashDraftModel`): What computes the blocks and their logits: the draft, or a copy of it; see
            `float8.drafting_copy`.
    """

    def __init__(
        self,
        draft: DFlashDraftModel,
        target: Target,
        processors: BlockProcessors,
        buffers: FixedBuffers,
        rule: Rule,
        drafter: DFlashDraftModel,
    ) -> None:
        self.draft = draft
        self.drafter = drafter
        self.target = target
        self.processors = processors
        self.rule: Rule = rule
        # Width K of the draft's block, and tokens that are verified at most: K or fewer, or K + 1 where the anchor's
        # slot proposes too.
        self.block_size = buffers.shape.block_size
        self.verify_width = buffers.shape.width
        self.num_proposals = draft.config.num_proposals(self.block_size)
        self.device = buffers.shape.draft_layers[0].device
        self.dtype = draft.dtype
        # How far ahead of each slot's own position the token is that it proposes.
        self.ahead = int(draft.config.sample_from_anchor)
        self.cache = buffers.draft_cache
        self.buffers = buffers
        # Per row, the first index that there is context for [B]; the draft counts from there. None: from 0.
        self.offset: Tensor | None = None
        # Columns of the newest context that are taken: all of them behind a verify of more than one token, of which
        # the host does not know how many were right. Whether single tokens gather, and the columns of the last verify.
        self._num_held = 0
        self._gathers = True
        self._last = slice(0, 0)
        # What proposes trees, if it is trees that are to be verified.
        self.trees = buffers.trees
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

        A single token goes behind those that are there already, see [`pass_over`].

        Args:
            context_hidden_states (`torch.Tensor` of shape `[B, block.width, L * D]`): Tapped states of the verify.
            block (`RaggedBlock`): The block that was verified.
        """
        buffers = self.buffers
        room = self.buffers.context_states.shape[1]
        start = self._num_held % room if block.width == 1 else 0
        self._last = slice(start, start + min(block.width, room))
        if block.tree is None or buffers.node_states is None:
            buffers.context_states[:, self._last].copy_(context_hidden_states)
        else:
            buffers.node_states[:, : block.width].copy_(context_hidden_states)
        if not start:
            buffers.context_lengths.copy_(self._on_draft(block).lengths)
        self._num_held = start + 1 if block.width == 1 and self._gathers else room

    def take_path(self, path: Tensor, is_in_place: bool) -> None:
        """Takes the context of a tree's accepted path `[B, n]`; what is behind the path's end is rejected."""
        nodes = self.buffers.node_states
        taken = self.buffers.context_states[:, : path.shape[1]]
        assert nodes is not None
        if is_in_place:
            taken.copy_(nodes[:, : path.shape[1]])
        else:
            along(path.to(self.device), nodes, out=taken)

    def _context(self) -> NewContext:
        """The newest context, which the draft's next forward writes."""
        buffers = self.buffers
        states = self.buffers.context_states
        return NewContext(states, RaggedBlock.at(buffers.context_lengths, states.shape[1]), buffers.context_weights)

    def flush(self) -> None:
        """Writes the newest context where no draft forward will."""
        self.draft.write_context(self._context(), self.cache)

    def pass_over(self, is_static: bool) -> None:
        """Stands in for [`propose`] before a verify of one token: makes room for its context.

        Args:
            is_static (`bool`): Write the context of every token, so that each such step is the same.
        """
        self.logits = None
        self._gathers = not is_static
        if self.verify_width > 1 and (is_static or self._num_held == self.buffers.context_states.shape[1]):
            self.flush()

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
        draft = self.draft
        drafter = self.drafter
        device = state.block.device
        self.cache.begin(self._on_draft(block))
        noise_embeds = draft.embed(state.draft_ids, self.target.embedding)
        hidden = drafter.forward_block(noise_embeds.to(self.device, self.dtype), self.cache, self._context())
        is_tree = state.tree is not None
        num = self.num_proposals if is_tree else state.width - 1
        slots = slice(1 - self.ahead, num + 1 - self.ahead)  # those that propose
        hidden = hidden[:, slots]
        states = hidden
        if draft.lm_head is None:
            dtype = noise_embeds.dtype if draft.embed_tokens is None else self.target.model.dtype
            states = hidden.to(device, dtype)
        logits = drafter.compute_logits(states, self.target.head).to(device)
        self.logits = logits if self.keeps_logits else None
        if is_tree:
            self._propose_tree(state, hidden, logits, block.positions[:, slots])
        else:
            state.proposals.copy_(self._chain(state, hidden, logits, block.positions[:, slots]))

    def _drawn_positions(self, state: DecodeState, slots_BD: Tensor) -> Tensor:
        """Returns what noise is keyed by for the tokens that the slots at these positions `[B, D]` propose."""
        return state.keyed(slots_BD + self.ahead)

    def _chain(self, state: DecodeState, hidden: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        """Returns proposals `[B, W - 1]` that follow each other; `slots`, of the same shape, are where they are made.

        Of a selector, the noise goes over all transitions at once, whatever path they lead to, and a path uses that of
        a token once. So the distribution of a token is the softmax over the candidates behind those drawn before it.
        """
        if self.rule_of_user is not None:
            return self.rule_of_user(logits, state.anchor)
        if state.key is None or self.rule == "argmax":
            return self.draft.best_path(hidden, logits, state.anchor)
        is_drawn = self.rule == "sample"
        positions = self._drawn_positions(state, slots)
        if self.draft.candidate_selector is None and not is_drawn:
            return draw_from_logits(logits, self.processors, state.key, positions)
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

    def _propose_tree(self, state: DecodeState, hidden: Tensor, logits: Tensor, slots: Tensor) -> None:
        """Proposes a tree by the slots at these positions `[B, D]`.

        Under `shared_noise` it is of the scores that the target's own noise makes likely.
        """
        trees = self.trees
        candidates, scores = self._scores(state, hidden, logits)
        assert trees is not None
        assert state.nodes is not None
        if state.key is not None and self.rule != "argmax":
            scores = with_noise(scores, state.key, self._drawn_positions(state, slots), candidates)
        longest = self.draft.generation_config.max_matching_ngram_size
        follows = trees.follows if longest is None else trees.follows[:, : longest + 1]
        text = (state.ids, state.cursor, follows) if follows.shape[1] > 1 else ()
        trees.build(scores, state.nodes, state.whole_block, candidates, text)

    def _on_draft(self, block: RaggedBlock) -> RaggedBlock:
        """The same block, counted on the draft's device and from where its context begins."""
        if self.offset is not None:
            block = RaggedBlock(block.positions - self.offset[:, None], block.bound)
        return block.on(self.device)
