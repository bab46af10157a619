"""From a call to the run that decodes it: settings, the target's prefill with taps on, the first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.cache import RaggedCache
from dflash_hf.cache_size import OutOfRoomError
from dflash_hf.devices import execution_device
from dflash_hf.generation import steps
from dflash_hf.generation.acceptance import choose
from dflash_hf.generation.buffers import (
    EOS_IDS,
    BufferShape,
    FixedBuffers,
    free_buffers,
    take_buffers,
)
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator, Rule
from dflash_hf.generation.kept_cache import KeptCache
from dflash_hf.generation.lockstep import Lockstep
from dflash_hf.generation.noise import new_key
from dflash_hf.generation.outputs import Recorder
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.prompts import extra_inputs, position_delta, prompt_positions, run_prefill
from dflash_hf.generation.room import first_room
from dflash_hf.generation.run import Run, finish_step
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import SpeculativeStats, Stopwatch
from dflash_hf.generation.widths import WidthChooser, candidate_widths
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.reentry import outermost
from dflash_hf.taps import Taps
from dflash_hf.target import Target, check_length


def prefill(
    target: Target,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft: DFlashDraftModel,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    started: float,
    kept: KeptCache | None = None,
    is_static: bool = False,
) -> Run:
    """Runs the target over the prompts with taps on, moves its cache into the ragged one, commits the first token.

    Arguments as `decode`; `kept` is the cache that `keep` will advance; `is_static` puts everything that a step reads
    or writes into fixed buffers. Reads lengths on the host.

    Raises:
        ValueError: If the run would cross a boundary of the target's RoPE, or its K/V have no room in memory.
        RuntimeError: If the taps did not fire.
    """
    devices = (input_ids.device, draft.device) if draft.generation_config.synchronize else ()
    watch = Stopwatch(stats := SpeculativeStats(), started, devices)
    watch.lap("prepare")
    pad = generation_config._pad_token_tensor
    processors = BlockProcessors(logits_processor, 0 if pad is None else int(pad))
    block_size, width, _ = widths = _widths_and_rule(draft, generation_config, processors)
    past = 0 if kept is None else kept.past
    positions = prompt_positions(target, input_ids, generation_config, model_kwargs, past)
    limit = _limit(stopping_criteria, generation_config, input_ids.shape[1])
    longest = int(positions[:, -1].max()) + 1
    check_length(target, min(longest, past or longest), positions.shape[1] + limit + width - 1)
    delta = position_delta(target, input_ids, model_kwargs, positions)
    eos_ids = _eos_ids(stopping_criteria, input_ids.device)
    widest, batch = max(block_size, width), input_ids.shape[0]
    buffers, room = None, first_room(limit, is_static)
    if is_static:
        shape = _buffer_shape(target, draft, batch, block_size, width, eos_ids, delta)
        buffers = take_buffers(target, draft, shape, max(longest, input_ids.shape[1]) + room + widest)
    generator = _generator(target, draft, processors, widths, batch, longest + room + widest, buffers)
    if kept is not None:
        kept.begin(generator, positions, limit)
    outputs, filled = _fill(generator, input_ids, generation_config, model_kwargs, positions, kept)
    cache = _into_ragged(generator, filled, positions, longest + room, kept, buffers)
    state = _start(
        input_ids, positions, limit, room, delta, eos_ids, generator, buffers, bool(generation_config.do_sample)
    )
    _describe(stats, batch, generator, cache, state)
    criteria = [c for c in stopping_criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    recorder = Recorder(generation_config, batch)
    run = Run(
        target=target,
        generator=generator,
        cache=cache,
        processors=processors,
        state=state,
        criteria=criteria,
        streamer=streamer,
        stats=stats,
        watch=watch,
        recorder=recorder,
        lockstep=Lockstep.if_needed(processors, criteria, streamer, state, [] if recorder.has_scores else None),
        longest=longest,
        prompt=longest,
        room=room,
        extra=extra_inputs(model_kwargs),
        kept=kept,
        buffers=buffers,
        chooser=_chooser(draft, width),
        reach=None if target.num_positions is None else (target.num_positions - delta).tolist(),
    )
    _commit_first(run, outputs)
    return run


def _generator(
    target: Target,
    draft: DFlashDraftModel,
    processors: BlockProcessors,
    widths: tuple[int, int, Rule],
    batch: int,
    max_length: int,
    buffers: FixedBuffers | None,
) -> DFlashCandidateGenerator:
    """The drafting side of a run, over fixed buffers if there are any; `widths` as `_widths_and_rule` says."""
    block_size, verify_width, rule = widths
    return DFlashCandidateGenerator(
        draft,
        target,
        processors,
        block_size=block_size,
        verify_width=verify_width,
        rule=rule,
        batch=batch,
        max_length=max_length,
        cache=None if buffers is None else buffers.draft_cache,
        block_ids=None if buffers is None else buffers.block_ids,
    )


def _fill(
    generator: DFlashCandidateGenerator,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    positions: Tensor,
    kept: KeptCache | None,
) -> tuple[CausalLMOutputWithPast, Cache]:
    """Runs Transformers' own prefill (the user's attention implementation, chunks, images) with taps on.

    The taps are projected to draft context chunk by chunk, so no feature tensor of the whole prompt is kept. Returns
    the target's output (of the last chunk) and the cache that it filled.
    """
    target, draft = generator.target, generator.draft
    given = kept.cache if kept is not None and kept.given else None
    # Whatever was prepared: a static, quantised or offloaded cache saves nothing, decoding has one of its own.
    model_kwargs["past_key_values"] = DynamicCache(config=target.config) if given is None else given
    seen = past = 0 if kept is None else kept.past

    def sink(states: Tensor) -> None:
        nonlocal seen
        generator.observe_prompt(states, positions[:, seen : seen + states.shape[1]])
        seen += states.shape[1]

    ids, deepstack = draft.config.target_layer_ids, draft.config.tap_after_deepstack
    with (
        outermost(target.model, target.decoder) as is_ours,
        Taps(target.layers, ids, sink, deepstack, counts=lambda kwargs: is_ours()).open(),
    ):
        outputs = run_prefill(target, input_ids, generation_config, model_kwargs, past, positions.shape[1])
    if seen != positions.shape[1]:
        raise RuntimeError(
            f"expected taps on {positions.shape[1] - past} prompt tokens, got {seen - past}; a compiled target runs "
            "no hooks that are added later, use the model as it was before torch.compile"
        )
    # Not always the one that was handed in: Phi-3 starts a new one for prompts beyond its first RoPE range.
    filled = outputs.past_key_values
    if filled is None:
        raise RuntimeError(
            f"expected a cache from the prefill of {type(target.model).__name__}, got none; call target.eval(), "
            "gradient checkpointing in training mode turns caches off"
        )
    if given is not None and filled is not given:
        raise ValueError(
            f"expected {type(target.model).__name__} to go on with the cache passed in, got a new one from it (its "
            "RoPE depends on the length); pass the whole conversation without past_key_values"
        )
    del model_kwargs["past_key_values"], outputs.past_key_values
    return outputs, filled


def _into_ragged(
    generator: DFlashCandidateGenerator,
    filled: Cache,
    positions: Tensor,
    max_length: int,
    kept: KeptCache | None,
    buffers: FixedBuffers | None,
) -> RaggedCache:
    """Moves the prefill's cache into a ragged one with room for `max_length` tokens and a block.

    The prefill's own cache is emptied, one passed in is not. Where there is no room beside what calls of other shapes
    have left, that is freed, and fixed buffers are made no longer than they have to be.
    """
    width, keep = generator.verify_width, kept is not None and kept.given
    exact = max_length + (width if buffers is None else max(width, generator.block_size))
    length = exact if buffers is None else buffers.capacity
    into, recurrences = None if buffers is None else buffers.cache, generator.target.recurrences
    try:
        cache = RaggedCache.take_prefill(filled, positions, length, width, keep, into, recurrences)
    except OutOfRoomError:
        free_buffers(generator.draft)
        cache = RaggedCache.take_prefill(filled, positions, exact, width, keep, into, recurrences)
        if buffers is not None:
            buffers.capacity = exact
    if buffers is not None:
        buffers.take_cache(cache)
    return cache


def _describe(
    stats: SpeculativeStats, batch: int, generator: DFlashCandidateGenerator, cache: RaggedCache, state: DecodeState
) -> None:
    """Says in the statistics what is known of a run before its first step."""
    stats.num_committed, stats.num_accepted = ([[] for _ in range(batch)] for _ in range(2))
    stats.num_proposed, stats.num_target_forwards = generator.verify_width - 1, 1
    stats.proposal = generator.rule if state.key is not None else "greedy"
    stats.cache_bytes = cache.num_bytes() + generator.cache.num_bytes()


def _start(
    input_ids: Tensor,
    positions: Tensor,
    limit: int,
    room: int,
    delta: Tensor,
    eos_ids: Tensor | None,
    generator: DFlashCandidateGenerator,
    buffers: FixedBuffers | None,
    is_sampled: bool,
) -> DecodeState:
    """The state of a run whose prompts are in the caches: new, or in fixed buffers."""
    lengths, key = positions[:, -1] + 1, new_key(input_ids.device) if is_sampled else None
    if buffers is None:
        return DecodeState.start(
            input_ids,
            lengths=lengths,
            limit=limit,
            width=generator.verify_width,
            position_delta=delta,
            eos_ids=eos_ids,
            key=key,
            room=room,
        )
    buffers.state.restart(input_ids, lengths=lengths, limit=limit, position_delta=delta, eos_ids=eos_ids, key=key)
    buffers.hold(generator)
    return buffers.state


def _commit_first(run: Run, outputs: CausalLMOutputWithPast) -> None:
    """Commits the token that the prefill decides: its last logits, no proposals, all processors at once."""
    run.recorder.add_prefill(outputs)
    state, logits = run.state, outputs.logits
    assert logits is not None
    logits = logits[:, -1:].to(state.ids.device)
    # The anchor is not in the caches: lengths stay where they are, the anchor's index.
    lengths = state.lengths.clone()
    if run.lockstep is not None:
        scores = run.lockstep.decide(state, logits, lengths[:, None])
    else:
        scores = run.processors(state.ids[:, : state.columns], logits[:, 0].to(torch.float32, copy=True))[:, None]
        state.tokens.copy_(choose(scores, state.key, lengths[:, None]).expand_as(state.tokens))
        state.num_accepted.zero_()
        steps.accept_step(state)
    state.lengths.copy_(lengths)
    reported = steps.report(state).tolist()
    run.watch.lap("prefill")
    committed = finish_step(run, reported, state.tokens, is_prefill=True)
    run.recorder.add(scores, logits, None, committed)


def _widths_and_rule(
    draft: DFlashDraftModel, generation_config: GenerationConfig, processors: BlockProcessors
) -> tuple[int, int, Rule]:
    """Resolves the draft's knobs: block size, verify width, proposal rule."""
    knobs = draft.generation_config
    block_size = knobs.block_size or draft.config.block_size
    widest = draft.config.num_proposals(block_size) + 1
    width = widest if knobs.verify_width in (None, "auto") else int(knobs.verify_width)
    rule: Rule = "argmax" if knobs.proposal == "auto" else knobs.proposal
    if rule == "sample" and generation_config.do_sample and not processors.is_stateless:
        raise ValueError(
            "expected only temperature, top-k, top-p and other warpers of single scores under proposal='sample', got "
            f"{[type(p).__name__ for p in processors.processors]}; use proposal='shared_noise'"
        )
    return block_size, width, rule


def _chooser(draft: DFlashDraftModel, widest: int) -> WidthChooser | None:
    """What chooses the width of each verify, if that is asked for and there is a choice."""
    if draft.generation_config.verify_width != "auto" or len(candidate_widths(widest)) < 2:
        return None
    return WidthChooser(widest)


def _limit(criteria: StoppingCriteriaList, generation_config: GenerationConfig, num_columns: int) -> int:
    """Tokens a row may generate after a prompt of `num_columns` columns."""
    lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    # Plain `generate` looks at the limit after a token, so there is always one.
    return max(1, min(lengths, default=int(generation_config.max_length)) - num_columns)


def _eos_ids(criteria: StoppingCriteriaList, device: torch.device) -> Tensor | None:
    """Every end-of-sequence id that the criteria know."""
    ids = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    return torch.cat([i.reshape(-1) for i in ids]).to(device) if ids else None


def _buffer_shape(
    target: Target,
    draft: DFlashDraftModel,
    batch: int,
    block_size: int,
    width: int,
    eos_ids: Tensor | None,
    delta: Tensor,
) -> BufferShape:
    """What fixed buffers for a run must be like."""
    num_eos = 0 if eos_ids is None else eos_ids.shape[0]
    return BufferShape(
        batch=batch,
        block_size=block_size,
        width=width,
        num_eos=-(-max(num_eos, 1) // EOS_IDS) * EOS_IDS,
        position_delta=tuple(delta.shape),
        device=target.device,
        draft_device=execution_device(draft),
        draft_dtype=draft.dtype,
    )


__all__ = ["prefill"]
