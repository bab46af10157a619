"""The drafting side of decoding: observes the target's tapped states, proposes the next block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache import RaggedCache
from dflash_hf.cache_size import check_memory
from dflash_hf.devices import execution_device
from dflash_hf.dflash2 import follow_path
from dflash_hf.generation.acceptance import DRAFT_STREAM, TARGET_STREAM, choose
from dflash_hf.generation.noise import gumbel_noise
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.new_context import ContextWeights, NewContext
from dflash_hf.target import Target

Rule = Literal["argmax", "shared_noise", "sample"]
# See `iterate`: the draft's logits [B, W - 1, V] and the token before the proposals [B] -> proposals [B, W - 1].
Propose = Callable[[Tensor, Tensor], Tensor]


class DFlashCandidateGenerator(CandidateGenerator):
    """Drafts with a [`DFlashDraftModel`] over a ragged context cache.

    Args:
        draft (`DFlashDraftModel`): The draft.
        target (`Target`): The target, whose embedding and head serve drafts without their own.
        processors (`BlockProcessors`): The run's processors; their stateless warpers shape the proposals too.
        block_size (`int`): Width `K` of the draft's block.
        verify_width (`int`): Tokens `W` that will be verified at most, the anchor included: `K` or fewer, or `K + 1`
            where the anchor's slot proposes too. How many each time is in the state.
        rule (`str`): How to propose when sampling.
        batch (`int`): Rows.
        max_length (`int`): Longest row the context cache must hold, one block included.
        cache (`RaggedCache`, *optional*): Cleared context cache of that shape to use instead of a new one.
        block_ids (`torch.Tensor` of shape `[B, K]`, int64, *optional*): Where to keep the ids of its block.

    Raises:
        ValueError: If the context cache is larger than what is free of the device's memory.
    """

    def __init__(
        self,
        draft: DFlashDraftModel,
        target: Target,
        processors: BlockProcessors,
        *,
        block_size: int,
        verify_width: int,
        rule: Rule,
        batch: int,
        max_length: int,
        cache: RaggedCache | None = None,
        block_ids: Tensor | None = None,
    ) -> None:
        self.draft = draft
        self.target = target
        self.processors = processors
        self.block_size = block_size
        self.verify_width = verify_width
        self.rule = rule
        self.device = execution_device(draft)
        # Only `iterate` sets these: a proposal rule of the user's, and whether the last block's logits are kept.
        self.rule_of_user: Propose | None = None
        self.keeps_logits = False
        self.logits: Tensor | None = None
        if cache is None:
            shapes = [(shape, draft.dtype.itemsize, draft.dtype.itemsize) for shape in draft.cache_shapes()]
            block = max(block_size, verify_width)
            check_memory(shapes, self.device, batch, max_length, block)
            cache = RaggedCache(
                draft.cache_shapes(),
                batch=batch,
                max_length=max_length,
                block=block,
                dtype=draft.dtype,
                device=self.device,
            )
        if block_ids is None:
            block_ids = torch.empty(batch, block_size, dtype=torch.long, device=self.device)
        self.cache = cache
        self.block_ids = block_ids.fill_(draft.config.mask_token_id)
        # Per row, the first index that there is context for [B]; the draft counts from there. None: from 0.
        self.offset: Tensor | None = None
        self._context: NewContext | None = None
        self._held: tuple[Tensor, Tensor] | None = None
        # Copied when they are first needed: Transformers' own loop never does.
        self._weights: ContextWeights | None = None
        self._has_weights = False
        self._seen = 0
        self._pending: Tensor | None = None

    def observe_prompt(self, context_hidden_states: Tensor, positions: Tensor) -> None:
        """Turns the taps of (a chunk of) the prompts straight into context K/V.

        Args:
            context_hidden_states (`torch.Tensor` of shape `[B, S, L * D]`): Tapped states.
            positions (`torch.Tensor` of shape `[B, S]`): Index of each token in its row, negative for padding.
        """
        draft = self.draft
        states = context_hidden_states.to(self.device, draft.dtype)
        own = positions if self.offset is None else positions - self.offset[:, None]
        draft.write_prompt(states, own.to(self.device), self.cache)

    def observe_block(self, context_hidden_states: Tensor, block: RaggedBlock) -> None:
        """Takes the context of a verified block, rejected rows included; the next draft forward writes it.

        Args:
            context_hidden_states (`torch.Tensor` of shape `[B, block.width, L * D]`): Tapped states of the verify.
            block (`RaggedBlock`): The block that was verified.
        """
        own = self._on_draft(block)
        if self._held is None:
            self._context = NewContext(context_hidden_states.to(self.device, self.draft.dtype), own)
            return
        states, lengths = self._held
        states[:, : block.width].copy_(context_hidden_states)
        lengths.copy_(own.lengths)

    def hold_context(self, states: Tensor, lengths: Tensor) -> None:
        """Keeps the newest context in fixed tensors from now on, until [`release_context`].

        There is always one then. Before the first verify it is what the tensors hold: its keys and values go where the
        next block's own go right after.

        Args:
            states (`torch.Tensor` of shape `[B, W, L * D]`): On the draft's device and in its dtype.
            lengths (`torch.Tensor` of shape `[B]`, int64): Where the block stood that they are from, as the draft
                counts.
        """
        self._held = (states, lengths)

    def release_context(self) -> None:
        """Stops keeping the newest context in fixed tensors; it stays there as long as nothing else is written."""
        self._context, self._held = self._take_context(), None

    def hold_weights(self, into: ContextWeights | None = None) -> ContextWeights | None:
        """Copies the weights with which a kernel writes context, where one is to, and keeps them for this run.

        Args:
            into (`ContextWeights`, *optional*): Copies of an earlier run, written again if they fit.
        """
        self._weights, self._has_weights = self.draft.stack_weights(self.cache, into), True
        return self._weights

    def _take_context(self) -> NewContext | None:
        """The context that waits for the next draft forward; it waits no longer."""
        context, self._context = self._context, None
        if self._held is not None:
            states, lengths = self._held
            context = NewContext(states, RaggedBlock(lengths, states.shape[1]))
        if context is None:
            return None
        weights = self._weights if self._has_weights else self.hold_weights()
        return context._replace(weights=weights)

    def flush(self) -> None:
        """Writes the context that waits for the next draft forward, where there will be none."""
        if (context := self._take_context()) is not None:
            self.draft.write_context(context, self.cache)

    @property
    def context_hidden_states(self) -> Tensor:
        """Tapped states `[B, W, L * D]` of the block that was verified last, rejected rows included."""
        assert self._context is not None
        return self._context.states

    def propose(self, state: DecodeState, block: RaggedBlock, has_anchor: bool = False) -> None:
        """Drafts a block in one forward and writes `state.proposals` (and `draft_probs` under rejection).

        Args:
            state (`DecodeState`): Changed in place.
            block (`RaggedBlock`): Where the draft's block stands, on the target's device.
            has_anchor (`bool`): Whether `block_ids` begin with the anchor already.
        """
        if self.verify_width < 2:
            return
        draft, device = self.draft, state.block.device
        self.cache.begin(self._on_draft(block))
        if not has_anchor:
            self.block_ids[:, 0] = state.anchor
        noise_embeds = draft.embed(self.block_ids.to(device), self.target.embedding)
        context = self._take_context()
        hidden = draft.forward_block(noise_embeds.to(self.device, draft.dtype), self.cache, context)
        # The slots that propose, and how far ahead of each one's own position its token is.
        ahead = int(draft.config.sample_from_anchor)
        slots = slice(1 - ahead, state.width - ahead)
        hidden = states = hidden[:, slots]
        if draft.lm_head is None:
            dtype = noise_embeds.dtype if draft.embed_tokens is None else self.target.model.dtype
            states = hidden.to(device, dtype)
        logits = draft.compute_logits(states, self.target.head).to(device)
        self.logits = logits if self.keeps_logits else None
        if self.rule_of_user is not None:
            state.proposals.copy_(self.rule_of_user(logits, state.anchor))
            return
        if state.key is None or self.rule == "argmax":
            state.proposals.copy_(draft.best_path(hidden, logits, state.anchor))
            return
        positions = block.positions[:, slots] + ahead
        if draft.candidate_selector is not None:
            candidates, scores = draft.candidate_selector(hidden, logits, state.anchor)
            self._propose_path(state, candidates, scores, positions, logits.shape[-1])
            return
        scores = self.processors.warp(logits)
        if self.rule == "sample":
            state.draft_probs = torch.softmax(scores, dim=-1)
            state.proposals.copy_(choose(scores, state.key, positions, DRAFT_STREAM))
        else:
            state.proposals.copy_(choose(scores, state.key, positions, TARGET_STREAM))

    def _propose_path(
        self, state: DecodeState, candidates: Tensor, scores: Tensor, positions: Tensor, vocab_size: int
    ) -> None:
        """Draws a path through the selector's candidates `[B, K, C]`, whose scores are `[B, K, C, C]`.

        The run's warpers and the noise go over all transitions at once, whatever path they lead to; the noise of a
        token at a position is the same behind every predecessor, and a path uses it once. So the law of a token is
        the softmax over the candidates behind the tokens drawn before it.
        """
        assert state.key is not None
        stream = DRAFT_STREAM if self.rule == "sample" else TARGET_STREAM
        noise = gumbel_noise(state.key, positions, vocab_size, stream).gather(-1, candidates)
        # Warpers work on rows of scores; here a row is what may follow one predecessor.
        scores = self.processors.warp(scores.flatten(1, 2)).view_as(scores)
        path, path_scores = follow_path(candidates, scores, (scores + noise[:, :, None]).argmax(dim=-1))
        state.proposals.copy_(path)
        if self.rule == "sample":
            probs = torch.softmax(path_scores, dim=-1)
            state.draft_probs = probs.new_zeros(*path.shape, vocab_size).scatter_(-1, candidates, probs)

    # Upstream's own generators also return no logits, whatever the base class is annotated with.
    def get_candidates(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, Tensor | None]:
        """Proposes under Transformers' own assisted loop (greedy, batch size 1); not used by this package's loop.

        Taps opened around the run must hand their states to [`collect`]; how many of their rows were accepted follows
        from `input_ids`.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, S]`): Everything committed so far.
            kwargs: What Transformers passes besides; not needed.

        Returns:
            `tuple`: `input_ids` with the proposals appended, and no logits.
        """
        if self._pending is None:
            return input_ids, None
        states, self._pending = self._pending, None
        accepted = input_ids.shape[1] - 1 - self._seen
        positions = torch.arange(self._seen, self._seen + accepted, device=states.device)[None]
        self.observe_prompt(states[:, :accepted], positions)
        self._seen += accepted
        state = DecodeState.start(
            input_ids,
            lengths=torch.full((1,), self._seen, device=input_ids.device),
            limit=0,
            width=self.verify_width,
            position_delta=torch.zeros(1, dtype=torch.long, device=input_ids.device),
            eos_ids=None,
            key=None,
        )
        state.anchor.copy_(input_ids[:, -1])
        self.propose(state, RaggedBlock(state.lengths, self.block_size))
        return cast(torch.LongTensor, torch.cat([input_ids, state.proposals], dim=1)), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: Tensor, num_matches: int) -> None:
        """Does nothing: the block's width is fixed. Older Transformers require it to be defined."""

    def collect(self, context_hidden_states: Tensor) -> None:
        """Keeps the tapped states of the target's last forward for `get_candidates`; a sink for [`taps.Taps`]."""
        self._pending = context_hidden_states

    def _on_draft(self, block: RaggedBlock) -> RaggedBlock:
        """The same block, counted on the draft's device and from where its context begins."""
        if self.offset is not None:
            block = RaggedBlock(block.lengths - self.offset, block.width, block.bound)
        return block.on(self.device)


__all__ = ["DFlashCandidateGenerator"]
