"""One decoding step in four functions over one state. No host sync in any of them; `loop` calls them in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf import ops
from dflash_hf.attention import RaggedBlock
from dflash_hf.cache import RaggedCache
from dflash_hf.generation.acceptance import accept_matching, accept_rejection, choose, clamp_commit
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.taps import Taps
from dflash_hf.target import Target


def draft_step(
    state: DecodeState, generator: DFlashCandidateGenerator, block: RaggedBlock, has_anchor: bool = False
) -> None:
    """Proposes the tokens after the anchor: one forward of the draft over `block`, into `state.proposals`."""
    generator.propose(state, block, has_anchor)


def verify_step(
    state: DecodeState, target: Target, cache: RaggedCache, block: RaggedBlock, extra: dict[str, Any] | None = None
) -> CausalLMOutputWithPast:
    """Runs the target once over the anchor and the proposals.

    Through the top-level model, so that soft caps, adapters and device hooks apply. Keys and values of all `W` tokens
    go into the cache; the rejected ones are overwritten by the next block. `block` says where the `W` tokens stand;
    `extra` are keywords of the caller's own for the target's forward.

    Returns:
        `CausalLMOutputWithPast`: The target's output, with logits `[B, W, V]`.
    """
    cache.begin(block)
    return target.model(
        input_ids=state.block,
        position_ids=target.position_ids(block.positions, state.position_delta),
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        ragged=block,
        **(extra or {}),
    )


def select_step(state: DecodeState, logits_BWV: Tensor, block: RaggedBlock, processors: BlockProcessors) -> Tensor:
    """Decides the target's tokens and how many proposals stand, when the processors can see the block at once.

    Writes `state.tokens` and `state.num_accepted`; returns the processed scores `[B, W, V]`.
    """
    scores = processors.warp(logits_BWV)
    accept_scores(state, scores, block)
    return scores


def accept_scores(state: DecodeState, scores_BWV: Tensor, block: RaggedBlock, tokens: Tensor | None = None) -> None:
    """Applies the acceptance rule of the run to processed scores; `tokens` saves choosing them again."""
    tokens, num_accepted = (tokens, None) if tokens is not None else _decided(state, scores_BWV, block)
    state.tokens.copy_(tokens)
    if num_accepted is None:
        num_accepted = accept_matching(state.proposals, state.tokens)
    state.num_accepted.copy_(num_accepted)


def _decided(state: DecodeState, scores_BWV: Tensor, block: RaggedBlock) -> tuple[Tensor, Tensor | None]:
    """The run's tokens `[B, W]`, and the number accepted `[B]` where that does not follow from them."""
    if state.key is None:
        return ops.best(scores_BWV), None
    positions = block.positions + 1
    if state.draft_probs is None:
        return choose(scores_BWV, state.key, positions), None
    num_accepted, tokens = accept_rejection(state.proposals, scores_BWV, state.draft_probs, state.key, positions)
    return tokens, num_accepted


def accept_by(state: DecodeState, num_accepted: Tensor) -> None:
    """Keeps as many proposals as a rule of the user's says; behind them stands the target's own token.

    Args:
        state (`DecodeState`): Its `tokens` are the target's after each verified token; changed in place.
        num_accepted (`torch.Tensor` of shape `[B]`, integer): In `[0, W - 1]`.
    """
    state.num_accepted.copy_(num_accepted)
    kept = torch.arange(state.proposals.shape[1], device=state.tokens.device) < state.num_accepted[:, None]
    state.tokens[:, :-1] = torch.where(kept, state.proposals, state.tokens[:, :-1])


def accept_step(state: DecodeState) -> None:
    """Commits what was accepted: cuts at EOS and at the limit, moves lengths and anchor, appends to `ids`."""
    num_committed, done = clamp_commit(state.tokens, state.num_accepted, state.eos_ids, state.remaining, state.done)
    state.num_committed.copy_(num_committed)
    state.done.copy_(done)
    width, device = state.tokens.shape[1], state.ids.device
    columns = torch.arange(width, device=device) + state.cursor[:, None]
    state.ids.scatter_(1, columns, state.tokens)
    commit_step(state)


def commit_step(state: DecodeState) -> None:
    """Moves lengths and anchor by `state.num_committed`; the tokens are in `ids` already."""
    state.lengths += state.num_committed
    state.cursor += state.num_committed
    state.remaining -= state.num_committed
    # Whatever was written behind it, the last committed token is the next anchor; a finished row keeps its own.
    last = state.ids.gather(1, state.cursor[:, None] - 1)
    state.anchor.copy_(last[:, 0])


def settle_step(
    state: DecodeState,
    logits_BWV: Tensor,
    block: RaggedBlock,
    processors: BlockProcessors,
    generator: DFlashCandidateGenerator,
    *,
    positions: Tensor,
    outcome: Tensor,
) -> None:
    """Does what `select_step`, `accept_step` and `report` do and begins the next block: chooses, then one kernel.

    Where `ops.accepts` says so. Of `ids` only what is committed is written.

    Args:
        state (`DecodeState`): Changed in place; `num_accepted` and `num_committed` are in `outcome`.
        logits_BWV (`torch.Tensor` of shape `[B, W, V]`): The target's.
        block (`RaggedBlock`): What was verified; its positions may be those of the next block afterwards.
        processors (`BlockProcessors`): The run's, all stateless.
        generator (`DFlashCandidateGenerator`): Gets the next block's ids.
        positions (`torch.Tensor` of shape `[B, P]`, int64): Gets the positions of the next block's tokens.
        outcome (`torch.Tensor` of shape `[5 + W, B]`, int64): Gets the report and the tokens.
    """
    if state.key is None and not processors.warpers and logits_BWV.dtype.itemsize <= 4:
        scores = logits_BWV  # float32 would order them the same
    else:
        scores = processors.warp(logits_BWV)
    tokens, num_accepted = _decided(state, scores, block)
    state.tokens.copy_(tokens)
    ops.accept_and_prepare(
        state.block,
        state.tokens,
        lengths_B=state.lengths,
        cursor_B=state.cursor,
        remaining_B=state.remaining,
        done_B=state.done,
        ids_BT=state.ids,
        draft_ids_BK=generator.block_ids,
        positions_BP=positions,
        record_FB=outcome,
        mask_token_id=generator.draft.config.mask_token_id,
        eos_ids_N=state.eos_ids,
        accepted_B=num_accepted,
    )


def report(state: DecodeState) -> Tensor:
    """Returns what the host has to know of a step, int64 `[5, B]`.

    Tokens committed, proposals accepted, lengths, finished rows, and columns of `ids` that are filled.
    """
    return torch.stack([state.num_committed, state.num_accepted, state.lengths, state.done.long(), state.cursor])


def context_step(generator: DFlashCandidateGenerator, taps: Taps, block: RaggedBlock) -> None:
    """Hands the verify's tapped states, all rows of the block, to the draft, whose next forward writes them."""
    generator.observe_block(taps.take(), block)


__all__ = [
    "accept_by",
    "accept_scores",
    "accept_step",
    "commit_step",
    "context_step",
    "draft_step",
    "report",
    "select_step",
    "settle_step",
    "verify_step",
]
