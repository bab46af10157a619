"""Faults put in on purpose: what a mistake in a part of decoding would do, so that the fuzzer proves that it sees it.

Each changes one thing in the running package and puts it back. None changes what plain `generate` does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_hf import ops, undo
from dflash_hf.block import attention
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedLayer
from dflash_hf.cache.recurrent import RecurrentGroup
from dflash_hf.generation import accept, generate, prefill, sampling, step
from dflash_hf.generation.accept import PositionRule, SynchronizedRows, accepted
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import Recorder
from dflash_hf.generation.user_cache import UserCache
from dflash_hf.target_model import hidden_states

Patches = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A mistake.

    Args:
        put_in (callable): Makes it, through patches that take it back.
        kind (`str`): Cases that must show it.
    """

    put_in: Callable[[Patches], None]
    kind: str = "text"


def _wrapped(patches: Patches, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Has `change(original, *args, **kwargs)` stand where `owner.name` stands."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    patches.setattr(owner, name, changed)


def one_too_many(patches: Patches) -> None:
    """One proposal more than matches is accepted."""

    def more(commit: Any, state: Any, num_accepted: Tensor | None = None) -> None:
        num = accepted(state, num_accepted)
        num = (num + 1).clamp_max(state.width - 1)
        # The target's own token stands behind what matches; a proposal that does not match has to be taken over.
        kept = torch.arange(state.width - 1, device=num.device) < num[:, None]
        # Behind the end of a tree's path there is none.
        kept = kept & (state.proposals >= 0)
        state.tokens[:, :-1] = torch.where(kept, state.proposals, state.tokens[:, :-1])
        commit(state, num)

    _wrapped(patches, step, "commit", more)


def all_matches_count(patches: Patches) -> None:
    """Matches behind the first mismatch count too."""

    def every(commit: Any, state: Any, num_accepted: Tensor | None = None) -> None:
        num = (
            (state.proposals == state.tokens[:, :-1]).sum(dim=1)
            if num_accepted is None
            else num_accepted
        )
        commit(state, num)

    _wrapped(patches, step, "commit", every)


def wide_window(patches: Patches) -> None:
    """A window is one token too wide."""

    def wider(
        visible: Any,
        query: Tensor,
        key: Tensor,
        window: int | None,
        causal: bool,
        anchor: Any = None,
    ) -> Tensor:
        return visible(query, key, None if window is None else window + causal, causal, anchor)

    _wrapped(patches, attention, "visible", wider)


def stale_mask(patches: Patches) -> None:
    """A mask is that of an earlier block of the same size."""
    seen: dict[Any, Any] = {}

    def stale(mask: Any, block: RaggedBlock, num_slots: int, *args: Any, **kwargs: Any) -> Any:
        key = (num_slots // 4, block.width, len(block.lengths), *args, *kwargs.items())
        fresh = mask(block, num_slots, *args, **kwargs)
        kept = seen.setdefault(key, fresh)
        return (
            kept if fresh is not None and kept is not None and kept.shape == fresh.shape else fresh
        )

    _wrapped(patches, RaggedBlock, "mask", stale)


def position_off_by_one(patches: Patches) -> None:
    """The target counts its verified tokens from one further on."""
    _wrapped(patches, prefill, "position_delta", lambda delta, *args: delta(*args) + 1)


def rejected_token_shown(patches: Patches) -> None:
    """A processor sees all proposals before it is known which stand."""

    def shown(choose: Any, self: PositionRule, state: Any, logits: Tensor) -> Any:
        if state.width == 1:
            return choose(self, state, logits)
        positions, right = (
            iter(range(state.width)),
            torch.cat([state.proposals, state.proposals[:, :1]], dim=1),
        )
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(accept, "choose", lambda *_: right[:, next(positions), None])
            scores, is_chosen = choose(self, state, logits)
        state.tokens.copy_(accept.choose(scores, state.key, state.decided_positions))
        return scores, is_chosen

    _wrapped(patches, PositionRule, "_choose_tokens", shown)


def neighbours_row(patches: Patches) -> None:
    """A row reads the keys of the row before it."""

    def rolled(read: Any, self: RaggedLayer, block: RaggedBlock) -> Any:
        keys, values = read(self, block)
        return keys.roll(1, dims=0), values

    _wrapped(patches, RaggedLayer, "read", rolled)


def hook_left_behind(patches: Patches) -> None:
    """Taps are not taken off again."""
    open_for_ever: list[Any] = []

    def kept(hooked: Any, *hooks: Any) -> Any:
        open_for_ever.append(hooked(*hooks))
        open_for_ever[-1].__enter__()
        undo._open.changes.clear()  # the next call must not take them off either
        return nullcontext()

    _wrapped(patches, hidden_states, "hooked", kept)


def state_not_put_back(patches: Patches) -> None:
    """A recurrent state takes a block on whole, rejected tokens too."""

    def whole(replay: Any, self: RecurrentGroup, lengths: Tensor) -> None:
        replay(self, lengths + 1)

    _wrapped(patches, RecurrentGroup, "replay", whole)


def end_of_sequence_missed(patches: Patches) -> None:
    """An end of sequence inside a block does not end its row."""

    def missed(implementation: Any, operation: Any, block: Tensor) -> Any:
        chosen = implementation(operation, block)
        if operation is not ops.accept_and_prepare or block.shape[1] == 1:
            return chosen
        return lambda *args, **kwargs: chosen(*args, **(kwargs | {"eos_ids_N": None}))

    _wrapped(patches, ops, "implementation", missed)


def limit_passed(patches: Patches) -> None:
    """A row may get one token more than the limit."""

    def more(begin: Any, self: DecodeState, *args: Any, limit: int, **kwargs: Any) -> None:
        begin(self, *args, limit=limit + 1, **kwargs)

    _wrapped(patches, DecodeState, "begin", more)


def noise_by_slot(patches: Patches) -> None:
    """Sampling noise follows the slot in the block instead of the position in the text."""

    def by_slot(noise: Any, key: Tensor, positions: Tensor, *args: Any) -> Tensor:
        return noise(key, positions - positions[:, :1], *args)

    _wrapped(patches, sampling, "gumbel_noise", by_slot)


def cache_one_short(patches: Patches) -> None:
    """A cache of the user's gets the answer's keys shifted by one token."""
    _wrapped(
        patches, RaggedLayer, "read_rows", lambda read, self, positions: read(self, positions - 1)
    )


def context_of_another_text(patches: Patches) -> None:
    """A cache that was passed in is taken to hold one token less than it does."""

    def short(begin: Any, self: UserCache, *args: Any) -> Any:
        begin(self, *args)
        self.positions = self.positions + 1

    _wrapped(patches, UserCache, "load_context", short)


def criterion_forgotten(patches: Patches) -> None:
    """A stopping criterion is asked about the prefill's token only."""

    def forgotten(stop: Any, state: Any, *args: Any) -> None:
        if state.width == 1:
            stop(state, *args)

    _wrapped(patches, accept, "stop_by_criteria", forgotten)
    _wrapped(patches, SynchronizedRows, "choose", _chosen_without_criteria)


def _chosen_without_criteria(
    choose: Any, self: SynchronizedRows, state: Any, logits: Tensor
) -> Any:
    criteria, self.criteria = self.criteria, []
    try:
        return choose(self, state, logits)
    finally:
        self.criteria = criteria


def streamer_gets_more(patches: Patches) -> None:
    """A streamer gets a token that was not committed."""

    def more(note: Any, one: Any, reported: Any, tokens: Tensor) -> None:
        streamer = one.request.streamer
        num_new = reported.committed[0]
        if streamer is not None and not one.rule.feeds_streamer and tokens.shape[1] > num_new > 0:
            streamer.put(tokens[0, num_new : num_new + 1].clone())
        note(one, reported, tokens)

    _wrapped(patches, step, "take_report", more)


def scores_shifted(patches: Patches) -> None:
    """Scores are those of the token after."""

    def shifted(add: Any, self: Recorder, scores: Tensor, *args: Any) -> None:
        add(self, scores.roll(-1, dims=1), *args)

    _wrapped(patches, Recorder, "add", shifted)


def sampler_ignored(patches: Patches) -> None:
    """Warpers are applied to the first token of a block only."""

    def first(warp: Any, self: BlockProcessors, logits: Tensor) -> Tensor:
        warped = warp(self, logits)
        return torch.cat([warped[:, :1], logits[:, 1:].to(warped.dtype)], dim=1)

    _wrapped(patches, BlockProcessors, "warp", first)


def settings_changed(patches: Patches) -> None:
    """A call changes the target's settings."""

    def changed(check: Any, settings: Any) -> None:
        config = settings.model.generation_config
        config.max_length = (config.max_length or 0) + 1
        check(settings)

    _wrapped(patches, generate, "check_settings", changed)


def cache_not_restored(patches: Patches) -> None:
    """What an interrupted call has written stays in the user's cache."""
    patches.setattr(UserCache, "restored_on_error", lambda self: nullcontext())


def image_counted_as_text(patches: Patches) -> None:
    """Positions behind an image go on as if its tokens were words."""
    _wrapped(
        patches, prefill, "position_delta", lambda delta, *args: torch.zeros_like(delta(*args))
    )


FAULTS: dict[str, Fault] = {
    "one proposal too many is accepted": Fault(one_too_many),
    "matches behind a mismatch count": Fault(all_matches_count),
    "a window one too wide": Fault(wide_window),
    "a stale mask": Fault(stale_mask),
    "a position off by one": Fault(position_off_by_one),
    "a rejected token seen by a processor": Fault(rejected_token_shown),
    "a row that reads its neighbour": Fault(neighbours_row),
    "a hook left behind": Fault(hook_left_behind),
    "a recurrent state not put back": Fault(state_not_put_back),
    "an end of sequence missed inside a block": Fault(end_of_sequence_missed),
    "a limit passed": Fault(limit_passed),
    "noise that follows the slot": Fault(noise_by_slot),
    "a kept cache one token off": Fault(cache_one_short),
    "a conversation that goes on one position off": Fault(context_of_another_text),
    "a criterion asked too late": Fault(criterion_forgotten),
    "a streamer that gets too much": Fault(streamer_gets_more),
    "scores of the wrong token": Fault(scores_shifted),
    "a sampler applied to one token of a block": Fault(sampler_ignored),
    "settings changed for good": Fault(settings_changed),
    "a cache not restored after an interrupt": Fault(cache_not_restored, "interrupts"),
    "positions that ignore images": Fault(image_counted_as_text, "images"),
}
