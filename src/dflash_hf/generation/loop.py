"""Draft, verify, accept until every row has finished: the eager engine, and what `generate` calls.

`decode` is what `generate` calls in place of its own sampling loop. Here, and in `static_step` for the other engines,
the host reads what a step has done; the steps themselves read nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.attention import RaggedBlock
from dflash_hf.devices import eagerly
from dflash_hf.generation import steps
from dflash_hf.generation.acceptance import choose, ends_row
from dflash_hf.generation.buffers import give_buffers
from dflash_hf.generation.cuda_graph import choose_engine, device_errors_explained, start_engine
from dflash_hf.generation.kept_cache import KeptCache
from dflash_hf.generation.outputs import DFlashGenerateOutput
from dflash_hf.generation.prefill import prefill
from dflash_hf.generation.room import has_room, make_room
from dflash_hf.generation.run import Run, finish_step, tapped, verify
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.generation_config import Engine
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.taps import Taps
from dflash_hf.target import find_target


def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft: DFlashDraftModel,
    streamer: BaseStreamer | None = None,
    given_cache: Cache | None = None,
    started: float | None = None,
    **model_kwargs: Any,
) -> DFlashGenerateOutput | torch.LongTensor:
    """Decodes with a draft; called by `generate` through `custom_generate` with everything prepared.

    Args:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `[B, S]`): Left-padded prompts.
        logits_processor, stopping_criteria, generation_config: As `generate` prepared them.
        draft (`DFlashDraftModel`): The draft; `draft.generation_config` holds its knobs.
        streamer (`BaseStreamer`, *optional*): Gets every accepted run; `generate` has put the prompt.
        given_cache (`Cache`, *optional*): `past_key_values` that the caller passed; advanced in place.
        started (`float`, *optional*): `time.perf_counter()` at the user's call; default now.
        model_kwargs: Forwarded to the target's prefill.

    Returns:
        `torch.LongTensor` `[B, S + new]`, or a [`DFlashGenerateOutput`].
    """
    started = time.perf_counter() if started is None else started
    draft.last_stats = None
    target = find_target(model)
    given_on, device = input_ids.device, target.device
    input_ids = cast(torch.LongTensor, input_ids.to(device))
    engine = choose_engine(target, draft)
    kept = KeptCache.find(target, given_cache, bool(generation_config.return_dict_in_generate))
    with eagerly(model, draft), nullcontext() if kept is None else kept.restored_on_error():
        run = prefill(
            target,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            draft,
            streamer,
            model_kwargs,
            started,
            kept,
            is_static=engine != "eager",
        )
        try:
            with torch.inference_mode() if target.takes_inference_mode else torch.no_grad():
                advance(run, engine)
        finally:
            draft.last_stats = run.stats
        sequences = _sequences(run.state, generation_config)
        keep(run, sequences)
    if run.buffers is not None:
        give_buffers(draft, run.buffers)
    if streamer is not None:
        streamer.end()
    sequences = cast(torch.LongTensor, sequences.to(given_on))
    run.watch.lap("rest")
    if not generation_config.return_dict_in_generate:
        return sequences
    return DFlashGenerateOutput(
        sequences=sequences,
        past_key_values=None if kept is None else kept.cache,
        speculative=run.stats,
        **run.recorder.collected(),
    )


def advance(run: Run, engine: Engine = "eager") -> None:
    """Drafts, verifies and accepts until every row has finished.

    Under inference mode, which saves 7 to 9 % of a step on a CPU (docs/log.md); what is returned to the user is made
    outside it.
    """
    try:
        with device_errors_explained():
            # Nothing is captured for an answer of one token.
            static = None if run.finished else start_engine(run, engine)
            with nullcontext() if static is None else static.on_device():
                _advance(run, static)
    finally:
        run.generator.release_context()


def _advance(run: Run, static: StaticStep | None) -> None:
    if static is not None and static.decides:
        static.advance(run)
        static = None  # if anything is left, the buffers were too small for it
    # Processors, criteria and streamers may call the target themselves: they find it as they left it.
    is_held = static is None and not run.calls_out() and not run.finished
    with tapped(run) if is_held else nullcontext() as held:
        while not run.finished:
            if static is not None and not has_room(run):
                static = None  # for good: what grows are other buffers than its own
            step(run, held, static)


def step(
    run: Run, held: Taps | None = None, static: StaticStep | None = None
) -> tuple[Tensor, RaggedBlock, list[int]]:
    """Runs one draft, verify and accept: what `generate` repeats, and what `iterate` does between two yields.

    Args:
        run (`Run`): Changed in place.
        held (`Taps`, *optional*): Taps of a target whose attention is switched already; without them the target is
            tapped and switched for no longer than the verify.
        static (`StaticStep`, *optional*): Runs both forwards over fixed buffers.

    Returns:
        `tuple[torch.Tensor, RaggedBlock, list[int]]`: The target's logits `[B, W, V]`, the block they belong to, and
        the number of tokens that each row has committed.
    """
    state = run.state
    outputs, block = _forwards(run, held) if static is None else static.forwards(run)
    run.watch.lap("verify")
    assert outputs.logits is not None
    logits = outputs.logits.to(state.ids.device)  # where the head is need not be where ids go in
    if run.lockstep is not None:
        scores = run.lockstep.decide(state, logits, block.positions + 1)
    else:
        scores = _select(run, logits, block)
        steps.accept_step(state)
    reported = steps.report(state).tolist()
    run.watch.lap("accept")
    committed = finish_step(run, reported, state.tokens)
    run.recorder.add(scores, logits, outputs.get("hidden_states"), committed)
    return logits, block, committed


def _forwards(run: Run, held: Taps | None) -> tuple[CausalLMOutputWithPast, RaggedBlock]:
    """Drafts and verifies over exactly as many keys as there are."""
    make_room(run)
    run.begin_step()
    drafted, block = run.next_blocks()
    steps.draft_step(run.state, run.generator, drafted)
    run.watch.lap("draft")
    return verify(run, block, held), block


def keep(run: Run, sequences: Tensor) -> None:
    """Advances the cache that was passed in or asked for, if there is one, after the run has finished.

    Args:
        run (`Run`): Finished; it cannot go on afterwards.
        sequences (`torch.Tensor` of shape `[B, columns + longest answer]`): What `generate` returns.
    """

    @torch.inference_mode()
    def verify_all(blocks: Iterator[RaggedBlock]) -> None:
        with tapped(run) as taps:
            for block in blocks:
                verify(run, block, taps)

    if run.kept is not None:
        make_room(run)  # for padding behind rows that ended early
        is_lent = run.buffers is not None
        run.stats.num_target_forwards += run.kept.finish(
            run.state, run.cache, run.generator, sequences, verify_all, is_lent
        )


def _select(run: Run, logits: Tensor, block: RaggedBlock) -> Tensor:
    """Chooses tokens, counts matches, returns scores; processors that read the prefix go position by position."""
    state = run.state
    if run.processors.is_stateless:
        scores = steps.select_step(state, logits, block, run.processors)
        if run.accept is not None:
            steps.accept_by(state, run.accept(state.proposals, state.tokens, logits))
        return scores
    positions = block.positions + 1

    def choose_at(scores: Tensor, index: int) -> Tensor:
        return choose(scores[:, None], state.key, positions[:, index : index + 1])[:, 0]

    def ends(tokens: Tensor, index: int) -> Tensor:
        at_limit = state.remaining <= index + 1
        return at_limit if state.eos_ids is None else at_limit | ends_row(tokens, state.eos_ids)

    columns = state.cursor.tolist()
    running = (~state.done).tolist()
    scores, tokens = run.processors.walk(logits, state.proposals, state.ids, columns, running, choose_at, ends)
    steps.accept_scores(state, scores, block, tokens)
    return scores


def _sequences(state: DecodeState, generation_config: GenerationConfig) -> torch.LongTensor:
    """Prompts and committed tokens `[B, S + longest answer]`, finished rows padded as `generate` pads them."""
    num_columns = state.columns + int(state.num_new.max())
    ids = state.ids[:, :num_columns].clone()
    beyond = torch.arange(num_columns, device=ids.device) >= state.cursor[:, None]
    pad = generation_config._pad_token_tensor
    if pad is not None:
        ids = torch.where(beyond, pad.to(ids.device), ids)
    return cast(torch.LongTensor, ids)


__all__ = ["advance", "decode", "keep", "step"]
