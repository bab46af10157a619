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
from dflash_hf.target_model.parts import Target
from dflash_hf.tree import along

ProposalRule = Literal["argmax", "shared_noise", "sample"]
# See `iterate`: the draft's logits [B, W - 1, V] and the token before the proposals [B] -> proposals [B, W - 1].
Propose = Callable[[Tensor, Tensor], Tensor]


class NewestContext:
    """Tapped states in fixed tensors of the buffers, some columns of each row.

    A verify of more than one token takes all columns, rejected tokens included: the host does not know how many were
    right. Tokens that were decoded without a draft gather, one behind the other, until a forward of the draft writes
    them or the columns are full. Before the first verify the states are zeros, whose keys and values go where the
    block's own go right after.

    Args:
        buffers (`FixedBuffers`): The run's, whose newest context is cleared.
    """

    def __init__(self, buffers: FixedBuffers) -> None:
        self._buffers = buffers
        # Whether single tokens gather. Not in captured steps, each of which writes its own.
        self.gathers = True
        self._num_taken = 0
        # The columns of the last verify.
        self._newest = slice(0, 0)

    @property
    def is_full(self) -> bool:
        """Whether there is no column for a further token."""
        return self._num_taken == self._num_columns

    @property
    def states(self) -> Tensor:
        """Tapped states `[B, W, L * D]` of the block that was verified last, rejected rows included."""
        return self._buffers.context_states[:, self._newest]

    def add(self, states: Tensor, is_tree: bool) -> bool:
        """Adds the tapped states of a verify, rejected rows included.

        Args:
            states (`torch.Tensor` of shape `[B, W, L * D]`): Of the verified tokens.
            is_tree (`bool`): Whether they are the nodes of a tree, of which [`add_path`] takes those that stand.

        Returns:
            `bool`: True if they are the first ones behind what has been written: then [`begin_at`] says where.
        """
        width = states.shape[1]
        is_single = width == 1
        start = self._num_taken % self._num_columns if is_single else 0
        self._newest = slice(start, start + min(width, self._num_columns))
        nodes = self._buffers.node_states
        if is_tree and nodes is not None:
            nodes[:, :width].copy_(states)
        else:
            self.states.copy_(states)
        self._num_taken = self._num_columns
        if is_single and self.gathers:
            self._num_taken = start + 1
        return start == 0

    def begin_at(self, lengths: Tensor) -> None:
        """Says where the first of the states stands in each row `[B]`, int64, as the draft counts."""
        self._buffers.context_lengths.copy_(lengths)

    def add_path(self, path_BN: Tensor, is_in_place: bool) -> None:
        """Takes the states of a tree's accepted path `[B, n]`; what is behind the path's end is rejected."""
        nodes = self._buffers.node_states
        assert nodes is not None
        taken = self._buffers.context_states[:, : path_BN.shape[1]]
        if is_in_place:
            taken.copy_(nodes[:, : path_BN.shape[1]])
        else:
            along(path_BN.to(nodes.device), nodes, out=taken)

    def to_write(self) -> NewContext:
        """Returns what the draft's next forward writes: the states of all columns, and where they stand."""
        buffers = self._buffers
        block = RaggedBlock.at(buffers.context_lengths, self._num_columns)
        return NewContext(buffers.context_states, block, buffers.context_weights)

    @property
    def _num_columns(self) -> int:
        return self._buffers.context_states.shape[1]


class DFlashCandidateGenerator:
    """Drafts with a [`DFlashDraftModel`] over a ragged context cache.

    Of every verify it keeps the tapped states, see [`NewestContext`]; its next forward writes them.

    Args:
        draft, target: Of the run; the target's embedding and head serve drafts without their own.
        processors (`BlockProcessors`): The run's; their stateless warpers shape the proposals too.
        buffers (`FixedBuffers`): Its context cache and the newest context, both cleared.
        proposal (`str`): How to propose when sampling.
        drafter (`DFlashDraftModel`): What computes the blocks and their logits: the draft, or a copy of it; see
            `float8.drafting_copy`.
    """

    def __init__(
        self,
        draft: DFlashDraftModel,
        target: Target,
        processors: BlockProcessors,
        buffers: FixedBuffers,
        proposal: ProposalRule,
        drafter: DFlashDraftModel,
    ) -> None:
        self.draft = draft
        self.drafter = drafter
        self.target = target
        self.processors = processors
        self.proposal: ProposalRule = proposal
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
        self.newest = NewestContext(buffers)
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
        if self.offset is not None:
            positions = positions - self.offset.to(positions.device)[:, None]
        self.draft.write_prompt(states, positions, self.cache)

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
        is_first = self.newest.add(context_hidden_states, block.tree is not None)
        if is_first:
            self.newest.begin_at(self._on_draft(block).lengths)

    def flush(self) -> None:
        """Writes the newest context where no draft forward will."""
        self.draft.write_context(self.newest.to_write(), self.cache)

    def pass_over(self, is_static: bool) -> None:
        """Stands in for [`propose`] before a verify of one token: makes room for its context.

        Args:
            is_static (`bool`): Write the context of every token, so that each such step is the same.
        """
        self.logits = None
        self.newest.gathers = not is_static
        never_drafts = self.verify_width == 1
        if not never_drafts and (is_static or self.newest.is_full):
            self.flush()

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
        hidden = drafter.forward_block(noise_embeds.to(self.device, self.dtype), self.cache, self.newest.to_write())
        is_tree = state.tree is not None
        num = self.num_proposals if is_tree else state.width - 1
        slots = slice(1 - self.ahead, num + 1 - self.ahead)  # those that propose
        hidden = hidden[:, slots]
        states = hidden
        if draft.lm_head is None:
            # The target's head takes states as its own layers give them.
            has_own_embedding = draft.embed_tokens is not None
            states = hidden.to(device, self.target.model.dtype if has_own_embedding else noise_embeds.dtype)
        logits = drafter.compute_logits(states, self.target.head).to(device)
        if self.keeps_logits:
            self.logits = logits
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
        if state.key is None or self.proposal == "argmax":
            return self.draft.best_path(hidden, logits, state.anchor)
        is_drawn = self.proposal == "sample"
        positions = self._drawn_positions(state, slots)
        if self.draft.candidate_selector is None and not is_drawn:
            return draw_from_logits(logits, self.processors, state.key, positions)
        candidates, scores = self._scores(state, hidden, logits)
        if candidates is None:
            state.draft_probs = torch.softmax(scores, dim=-1)
            return choose(scores, state.key, positions, DRAFT_STREAM)
        stream = DRAFT_STREAM if is_drawn else TARGET_STREAM
        noisy = with_noise(scores, state.key, positions, candidates, stream)
        path, path_scores = follow_path(candidates, scores, noisy.argmax(dim=-1))
        if is_drawn:
            probs = torch.softmax(path_scores, dim=-1)
            state.draft_probs = probs.new_zeros(*path.shape, logits.shape[-1]).scatter_(-1, candidates, probs)
        return path

    def _scores(self, state: DecodeState, hidden: Tensor, logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """A selector's candidates and scores, or the logits; processed where tokens are sampled."""
        selector = self.draft.candidate_selector
        candidates = None
        scores = logits
        if selector is not None:
            candidates, scores = selector(hidden, logits, state.anchor)
        if state.key is not None and self.proposal != "argmax":
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
        if state.key is not None and self.proposal != "argmax":
            scores = with_noise(scores, state.key, self._drawn_positions(state, slots), candidates)
        longest = self.draft.generation_config.max_matching_ngram_size
        follows = trees.follows
        if longest is not None:
            follows = follows[:, : longest + 1]
        is_searched = follows.shape[1] > 1
        text = (state.ids, state.cursor, follows) if is_searched else ()
        trees.build(scores, state.nodes, state.whole_block, candidates, text)

    def _on_draft(self, block: RaggedBlock) -> RaggedBlock:
        """The same block, counted on the draft's device and from where its context begins."""
        if self.offset is not None:
            block = RaggedBlock(block.positions - self.offset[:, None], block.bound)
        return block.on(self.device)
