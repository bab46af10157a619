"""One decoding step in four functions over one state. No host sync in any of them; `loop` calls them in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache import RaggedCache
from dflash_hf.generation.acceptance import accept_matching, accept_rejection, choose, clamp_commit
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.taps import Taps
from dflash_hf.target import Target


def draft_step(state: DecodeState, generator: DFlashCandidateGenerator, bound: int | None) -> None:
    """Proposes the tokens after the anchor: one forward of the draft, into `state.proposals`."""
    generator.propose(state, bound)


def verify_step(
    state: DecodeState, target: Target, cache: RaggedCache, bound: int | None, extra: dict[str, Any] | None = None
) -> tuple[Tensor, RaggedBlock]:
    """Runs the target once over the anchor and the proposals.

    Through the top-level model, so that soft caps, adapters and device hooks apply. Keys and values of all `W` tokens
    go into the cache; the rejected ones are overwritten by the next block. `extra` are keywords of the caller's own
    for the target's forward.

    Returns:
        `tuple[torch.Tensor, RaggedBlock]`: Logits `[B, W, V]`, and the block that was verified.
    """
    ids = torch.cat([state.anchor[:, None], state.proposals], dim=1)
    block = RaggedBlock(state.lengths, ids.shape[1], bound)
    cache.begin(block)
    outputs = target.model(
        input_ids=ids,
        position_ids=block.positions + state.position_delta[:, None],
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        ragged=block,
        **(extra or {}),
    )
    return outputs.logits, block


def select_step(state: DecodeState, logits_BWV: Tensor, block: RaggedBlock, processors: BlockProcessors) -> None:
    """Decides the target's tokens and how many proposals stand, when the processors can see the block at once.

    Writes `state.tokens` and `state.num_accepted`.
    """
    if state.key is None:
        state.tokens.copy_(processors.warp(logits_BWV).argmax(dim=-1))
        state.num_accepted.copy_(accept_matching(state.proposals, state.tokens))
        return
    accept_scores(state, processors.warp(logits_BWV), block)


def accept_scores(state: DecodeState, scores_BWV: Tensor, block: RaggedBlock, tokens: Tensor | None = None) -> None:
    """Applies the acceptance rule of the run to processed scores; `tokens` saves choosing them again."""
    positions = block.positions + 1
    if state.draft_probs is not None and state.key is not None:
        num_accepted, chosen = accept_rejection(state.proposals, scores_BWV, state.draft_probs, state.key, positions)
        state.tokens.copy_(chosen)
        state.num_accepted.copy_(num_accepted)
        return
    state.tokens.copy_(choose(scores_BWV, state.key, positions) if tokens is None else tokens)
    state.num_accepted.copy_(accept_matching(state.proposals, state.tokens))


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
    num_committed, done = clamp_commit(
        state.tokens, state.num_accepted, state.eos_ids, state.limit - state.num_new, state.done
    )
    state.num_committed.copy_(num_committed)
    state.done.copy_(done)
    width = state.tokens.shape[1]
    columns = state.columns + state.num_new[:, None] + torch.arange(width, device=state.ids.device)
    state.ids.scatter_(1, columns, state.tokens)
    last = state.tokens.gather(1, (num_committed - 1).clamp_min(0)[:, None])[:, 0]
    state.anchor.copy_(torch.where(num_committed > 0, last, state.anchor))
    # Out of place: the block that was just verified still holds the old lengths.
    state.lengths = state.lengths + num_committed
    state.num_new += num_committed


def context_step(generator: DFlashCandidateGenerator, taps: Taps, block: RaggedBlock) -> None:
    """Hands the verify's tapped states, all rows of the block, to the draft, whose next forward writes them."""
    generator.observe_block(taps.take(), block)


__all__ = ["accept_by", "accept_scores", "accept_step", "context_step", "draft_step", "select_step", "verify_step"]
