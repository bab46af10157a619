"""Prefill, then draft, verify, accept until every row has finished: the eager engine.

`decode` is what `generate` calls in place of its own sampling loop. It is the only file of the decode path that reads
tensors on the host, once per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache import RaggedCache
from dflash_hf.devices import eagerly
from dflash_hf.generation import steps
from dflash_hf.generation.acceptance import choose
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator, Rule
from dflash_hf.generation.kept_cache import KeptCache
from dflash_hf.generation.lockstep import Lockstep
from dflash_hf.generation.noise import new_key
from dflash_hf.generation.outputs import DFlashGenerateOutput, Recorder
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.prompts import extra_inputs, position_delta, prompt_positions, run_prefill
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import SpeculativeStats, Stopwatch
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.taps import Taps
from dflash_hf.target import Target, check_length, find_target, ragged_attention

# See `iterate`: proposals [B, W - 1], the target's tokens [B, W] and logits [B, W, V] -> number accepted [B].
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Run:
    """The parts of one run, after its prefill."""

    target: Target
    generator: DFlashCandidateGenerator
    cache: RaggedCache
    processors: BlockProcessors
    state: DecodeState
    criteria: list[StoppingCriteria]
    streamer: BaseStreamer | None
    stats: SpeculativeStats
    watch: Stopwatch
    recorder: Recorder
    lockstep: Lockstep | None
    longest: int
    extra: dict[str, Any]
    kept: KeptCache | None = None
    accept: Accept | None = None
    finished: bool = False

    def next_blocks(self) -> tuple[RaggedBlock, RaggedBlock]:
        """Returns where the next block stands: as the draft writes it, and as far as it will be verified."""
        lengths, size, width = self.state.lengths, self.generator.block_size, self.generator.verify_width
        # With one row the longest row is the row.
        drafted = RaggedBlock(lengths, size, self.longest + size, is_exact=lengths.shape[0] == 1)
        return drafted, drafted if width == size else RaggedBlock(lengths, width, self.longest + max(size, width))

    def calls_out(self) -> bool:
        """Whether code of the user's runs between two verifies, which may want to use the target itself."""
        return bool(self.criteria) or self.streamer is not None or not self.processors.is_stateless


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
        )
        try:
            with torch.inference_mode() if target.takes_inference_mode else torch.no_grad():
                advance(run)
        finally:
            draft.last_stats = run.stats
        sequences = _sequences(run.state, generation_config)
        keep(run, sequences)
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
) -> Run:
    """Runs the target over the prompts with taps on, moves its cache into the ragged one, commits the first token.

    Arguments as [`decode`]; `kept` is the cache that [`keep`] will advance. Reads lengths on the host.

    Raises:
        ValueError: If the run would cross a boundary of the target's RoPE.
        RuntimeError: If the taps did not fire.
    """
    stats = SpeculativeStats()
    waits = draft.generation_config.synchronize
    watch = Stopwatch(stats, started, (input_ids.device, draft.device) if waits else ())
    watch.lap("prepare")
    pad = generation_config._pad_token_tensor
    processors = BlockProcessors(logits_processor, 0 if pad is None else int(pad))
    block_size, width, rule = _widths_and_rule(draft, generation_config, processors)
    positions = prompt_positions(target, input_ids, generation_config, model_kwargs)
    limit = _limit(stopping_criteria, generation_config, input_ids.shape[1])
    longest, past = int(positions[:, -1].max()) + 1, 0 if kept is None else kept.past
    check_length(target, min(longest, past or longest), positions.shape[1] + limit + width - 1)
    delta = position_delta(target, input_ids, model_kwargs, positions)
    generator = DFlashCandidateGenerator(
        draft,
        target,
        processors,
        block_size=block_size,
        verify_width=width,
        rule=rule,
        batch=input_ids.shape[0],
        max_length=longest + limit + max(block_size, width),
    )
    if kept is not None:
        kept.begin(generator, positions, limit)
    outputs, cache = _fill(generator, input_ids, generation_config, model_kwargs, positions, longest + limit, kept)
    state = DecodeState.start(
        input_ids,
        lengths=positions[:, -1] + 1,
        limit=limit,
        width=width,
        position_delta=delta,
        eos_ids=_eos_ids(stopping_criteria, input_ids.device),
        key=new_key(input_ids.device) if generation_config.do_sample else None,
    )
    stats.num_committed, stats.num_accepted = ([[] for _ in range(input_ids.shape[0])] for _ in range(2))
    stats.num_proposed, stats.num_target_forwards = width - 1, 1
    stats.proposal = rule if state.key is not None else "greedy"
    stats.cache_bytes = cache.num_bytes() + generator.cache.num_bytes()
    criteria = [c for c in stopping_criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    recorder = Recorder(generation_config, input_ids.shape[0])
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
        extra=extra_inputs(model_kwargs),
        kept=kept,
    )
    recorder.add_prefill(outputs)
    assert outputs.logits is not None
    _commit_first(run, outputs.logits[:, -1:])
    return run


def _fill(
    generator: DFlashCandidateGenerator,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    positions: Tensor,
    max_length: int,
    kept: KeptCache | None,
) -> tuple[CausalLMOutputWithPast, RaggedCache]:
    """Runs Transformers' own prefill (the user's attention implementation, chunks, images) with taps on.

    The taps are projected to draft context chunk by chunk, so no feature tensor of the whole prompt is kept. Returns
    the target's output (of the last chunk) and the ragged cache, with room for `max_length` tokens and a block; the
    prefill's own cache is emptied, one passed in is not.
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

    assert draft.config.target_layer_ids is not None
    with Taps(target.layers, draft.config.target_layer_ids, sink):
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
    width = generator.verify_width
    cache = RaggedCache.take_prefill(filled, positions, max_length + width, width, keep=given is not None)
    return outputs, cache


def _commit_first(run: Run, logits: Tensor) -> None:
    """Commits the token that the prefill decides: `[B, 1, V]` logits, no proposals, all processors at once."""
    state = run.state
    logits = logits.to(state.ids.device)
    # The anchor is not in the caches: lengths stay where they are, the anchor's index.
    lengths = state.lengths
    if run.lockstep is not None:
        scores = run.lockstep.decide(state, logits, lengths[:, None])
    else:
        scores = run.processors(state.ids[:, : state.columns], logits[:, 0].to(torch.float32, copy=True))[:, None]
        state.tokens.copy_(choose(scores, state.key, lengths[:, None]).expand_as(state.tokens))
        state.num_accepted.zero_()
        steps.accept_step(state)
    state.lengths = lengths
    committed = _read(run, is_prefill=True)
    run.recorder.add(scores, logits, None, committed)


def advance(run: Run) -> None:
    """Drafts, verifies and accepts until every row has finished.

    Under inference mode, which saves 7 to 9 % of a step on a CPU (docs/log.md); what is returned to the user is made
    outside it.
    """
    with ExitStack() as stack:
        # Processors, criteria and streamers may call the target themselves: they find it as they left it.
        held = None if run.calls_out() else stack.enter_context(_tapped(run))
        while not run.finished:
            step(run, held)


def step(run: Run, held: Taps | None = None) -> tuple[Tensor, RaggedBlock, list[int]]:
    """Runs one draft, verify and accept: what `generate` repeats, and what `iterate` does between two yields.

    Args:
        run (`Run`): Changed in place.
        held (`Taps`, *optional*): Taps of a target whose attention is switched already; without them the target is
            tapped and switched for no longer than the verify.

    Returns:
        `tuple[torch.Tensor, RaggedBlock, list[int]]`: The target's logits `[B, W, V]`, the block they belong to, and
        the number of tokens that each row has committed.
    """
    generator, state, stats = run.generator, run.state, run.stats
    drafted_block, block = run.next_blocks()
    steps.draft_step(state, generator, drafted_block)
    stats.num_draft_forwards = generator.num_forwards
    run.watch.lap("draft")
    with nullcontext(held) if held is not None else _tapped(run) as taps:
        outputs = _verify(run, block, taps)
    stats.num_target_forwards += 1
    run.watch.lap("verify")
    assert outputs.logits is not None
    logits = outputs.logits.to(state.ids.device)  # where the head is need not be where ids go in
    if run.lockstep is not None:
        scores = run.lockstep.decide(state, logits, block.positions + 1)
    else:
        scores = _select(run, logits, block)
        steps.accept_step(state)
    committed = _read(run)
    run.recorder.add(scores, logits, outputs.get("hidden_states"), committed)
    return logits, block, committed


def keep(run: Run, sequences: Tensor) -> None:
    """Advances the cache that was passed in or asked for, if there is one, after the run has finished.

    Args:
        run (`Run`): Finished; it cannot go on afterwards.
        sequences (`torch.Tensor` of shape `[B, columns + longest answer]`): What `generate` returns.
    """

    @torch.inference_mode()
    def verify(blocks: Iterator[RaggedBlock]) -> None:
        with _tapped(run) as taps:
            for block in blocks:
                _verify(run, block, taps)

    if run.kept is not None:
        run.stats.num_target_forwards += run.kept.finish(run.state, run.cache, run.generator, sequences, verify)


@contextmanager
def _tapped(run: Run) -> Generator[Taps]:
    """The target with its attention switched and its layers tapped."""
    ids = run.generator.draft.config.target_layer_ids
    assert ids is not None
    with ragged_attention(run.target), Taps(run.target.layers, ids) as taps:
        yield taps


def _verify(run: Run, block: RaggedBlock, taps: Taps) -> CausalLMOutputWithPast:
    """Runs the target over the block, hands its tapped states to the draft."""
    outputs = steps.verify_step(run.state, run.target, run.cache, block, run.extra)
    if block.num_calls != len(run.cache.layers):
        raise RuntimeError(
            f"expected attention over the ragged cache in {len(run.cache.layers)} layers, got it in "
            f"{block.num_calls}; this target does not use Transformers' attention interface throughout"
        )
    steps.context_step(run.generator, taps, block)
    return outputs


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
        at_limit = state.num_new + index + 1 >= state.limit
        return at_limit if state.eos_ids is None else at_limit | torch.isin(tokens, state.eos_ids)

    columns = (state.columns + state.num_new).tolist()
    running = (~state.done).tolist()
    scores, tokens = run.processors.walk(logits, state.proposals, state.ids, columns, running, choose_at, ends)
    steps.accept_scores(state, scores, block, tokens)
    return scores


def _read(run: Run, is_prefill: bool = False) -> list[int]:
    """Reads one step's outcome on the host, in one transfer: stopping criteria, streamer, statistics.

    Returns the number of tokens that each row has committed.
    """
    state = run.state
    rows = torch.stack([state.num_committed, state.num_accepted, state.lengths, state.done.long(), state.num_new])
    committed, accepted, lengths, done, num_new = rows.tolist()
    run.watch.lap("prefill" if is_prefill else "accept")
    if run.criteria and run.lockstep is None:
        _apply_criteria(run, committed, done, num_new)
    if run.streamer is not None and run.lockstep is None and committed[0]:
        # A copy: the next step writes into the same memory, and a streamer may keep what it gets.
        run.streamer.put(state.tokens[0, : committed[0]].to("cpu", copy=True))
    for row, num in enumerate(committed):
        if num and not is_prefill:
            run.stats.num_committed[row].append(num)
            run.stats.num_accepted[row].append(accepted[row])
    run.longest = max(lengths)
    run.finished = all(done)
    run.watch.lap("rest")
    return committed


def _apply_criteria(run: Run, committed: list[int], done: list[int], num_new: list[int]) -> None:
    """Calls the other stopping criteria after each committed token, row by row; nothing past a stop is kept.

    Only those that look at a row's own tokens: with any other, rows go in step (`lockstep`). Changes the state and
    the given lists in place.
    """
    state = run.state
    for row, num in enumerate(committed):
        before = num_new[row] - num
        for extra in range(1, num + 1):
            ids = cast(torch.LongTensor, state.ids[row : row + 1, : state.columns + before + extra])
            if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in run.criteria):
                committed[row], done[row] = extra, 1
                state.num_new[row] = before + extra
                state.lengths[row] -= num - extra
                state.anchor[row] = ids[0, -1]
                state.done[row] = True
                break


def _widths_and_rule(
    draft: DFlashDraftModel, generation_config: GenerationConfig, processors: BlockProcessors
) -> tuple[int, int, Rule]:
    """Resolves the draft's knobs: block size, verify width, proposal rule."""
    knobs = draft.generation_config
    block_size = knobs.block_size or draft.config.block_size
    width = knobs.verify_width or draft.config.num_proposals(block_size) + 1
    rule: Rule = "argmax" if knobs.proposal == "auto" else knobs.proposal
    if rule == "sample" and generation_config.do_sample and not processors.is_stateless:
        raise ValueError(
            "expected only temperature, top-k, top-p and other warpers of single scores under proposal='sample', got "
            f"{[type(p).__name__ for p in processors.processors]}; use proposal='shared_noise'"
        )
    return block_size, width, rule


def _limit(criteria: StoppingCriteriaList, generation_config: GenerationConfig, num_columns: int) -> int:
    """Tokens a row may generate after a prompt of `num_columns` columns."""
    lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    # Plain `generate` looks at the limit after a token, so there is always one.
    return max(1, min(lengths, default=int(generation_config.max_length)) - num_columns)


def _eos_ids(criteria: StoppingCriteriaList, device: torch.device) -> Tensor | None:
    """Every end-of-sequence id that the criteria know."""
    ids = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    return torch.cat([i.reshape(-1) for i in ids]).to(device) if ids else None


def _sequences(state: DecodeState, generation_config: GenerationConfig) -> torch.LongTensor:
    """Prompts and committed tokens `[B, S + longest answer]`, finished rows padded as `generate` pads them."""
    num_columns = state.columns + int(state.num_new.max())
    ids = state.ids[:, :num_columns].clone()
    beyond = torch.arange(num_columns, device=ids.device) >= state.columns + state.num_new[:, None]
    pad = generation_config._pad_token_tensor
    if pad is not None:
        ids = torch.where(beyond, pad.to(ids.device), ids)
    return cast(torch.LongTensor, ids)


__all__ = ["Accept", "Run", "advance", "decode", "keep", "prefill", "step"]
