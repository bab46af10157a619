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

from dflash_hf.attention import RaggedBlock
from dflash_hf.devices import eagerly
from dflash_hf.generation.buffers import give_buffers
from dflash_hf.generation.capture import device_errors_explained
from dflash_hf.generation.cuda_graph import choose_engine, start_engine
from dflash_hf.generation.prefill import prefill
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.run import Run, make_room, tapped
from dflash_hf.generation.state import DecodeState
from dflash_hf.generation.stats import DFlashGenerateOutput
from dflash_hf.generation.step import step, verify
from dflash_hf.generation.user_cache import UserCache
from dflash_hf.generation.widths import give_chooser
from dflash_hf.generation_config import Engine
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.parts import Target


def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    target: Target,
    draft: DFlashDraftModel,
    ranks: Ranks,
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
        target (`Target`): Its parts.
        draft (`DFlashDraftModel`): The draft; `draft.generation_config` holds its options.
        ranks (`Ranks`): The target's.
        streamer (`BaseStreamer`, *optional*): Gets every accepted run; `generate` has put the prompt.
        given_cache (`Cache`, *optional*): `past_key_values` that the caller passed; advanced in place.
        started (`float`, *optional*): `time.perf_counter()` at the user's call; default now.
        model_kwargs: Forwarded to the target's prefill.

    Returns:
        `torch.LongTensor` `[B, S + new]`, or a [`DFlashGenerateOutput`].
    """
    started = time.perf_counter() if started is None else started
    draft.last_stats = None
    given_on, device = input_ids.device, target.device
    input_ids = cast(torch.LongTensor, input_ids.to(device))
    engine = choose_engine(target, draft)
    kept = UserCache.find(target, given_cache, bool(generation_config.return_dict_in_generate))
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
            ranks,
            kept,
            keeps_buffers=engine != "eager",
        )
        try:
            with torch.inference_mode() if target.takes_inference_mode else torch.no_grad():
                advance(run, engine)
        finally:
            draft.last_stats = run.stats
        sequences = _sequences(run.state, generation_config)
        keep(run, sequences)
        ranks.meet()
    if run.keeps_buffers:
        give_buffers(draft, run.buffers)
    elif run.chooser is not None:
        give_chooser(run.chooser, draft, model, run.state.ids.shape[0])
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
    """Runs steps until every row has finished.

    Under inference mode, which saves 7 to 9 % of a step on a CPU (docs/log.md); what is returned to the user is made
    outside it.
    """
    with device_errors_explained():
        # Nothing is captured for an answer of one token.
        captured = None if run.finished else start_engine(run, engine)
        if captured is not None:
            with captured.on_device():
                captured.advance()
        if run.finished:
            return
        # Processors, criteria and streamers may call the target themselves: they find it as they left it.
        with nullcontext() if run.calls_out() else tapped(run) as taps:
            while not run.finished:
                step(run, taps)


def keep(run: Run, sequences: Tensor) -> None:
    """Advances the cache that was passed in or asked for, if there is one, after the run has finished.

    Args:
        run (`Run`): Finished; it cannot go on afterwards.
        sequences (`torch.Tensor` of shape `[B, columns + longest answer]`): What `generate` returns.
    """

    @torch.inference_mode()
    def verify_all(blocks: Iterator[RaggedBlock]) -> None:
        run.ranks.meet()
        with run.ranks.forward(), tapped(run) as taps:
            for block in blocks:
                verify(run, block, taps)

    if run.kept is not None:
        make_room(run)  # for padding behind rows that ended early
        run.state.width = run.generator.verify_width
        run.stats.num_target_forwards += run.kept.finish(
            run.state, run.cache, run.generator, sequences, verify_all, keeps_buffers=run.keeps_buffers
        )


def _sequences(state: DecodeState, generation_config: GenerationConfig) -> torch.LongTensor:
    """Prompts and committed tokens `[B, S + longest answer]`, finished rows padded as `generate` pads them."""
    num_columns = state.columns + int(state.num_new.max())
    ids = state.ids[:, :num_columns].clone()
    beyond = torch.arange(num_columns, device=ids.device) >= state.cursor[:, None]
    pad = generation_config._pad_token_tensor
    if pad is not None:
        ids = torch.where(beyond, pad.to(ids.device), ids)
    return cast(torch.LongTensor, ids)


__all__ = ["advance", "decode", "keep"]
