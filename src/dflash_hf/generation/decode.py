"""This module is the decoding loop: prefill, then draft, verify, accept and report until every row has ended.

[`decode`] replaces Transformers' own sampling loop, after Transformers has prepared the call. The functions of a step
are in `step.py`. The host reads the outcome of each step there and in `static_step.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.devices import device_errors_explained, eagerly
from dflash_hf.generation.buffers import give_buffers
from dflash_hf.generation.choice_costs import StepTimes
from dflash_hf.generation.cuda_graph import start_engine
from dflash_hf.generation.options import choose_engine, choose_widths
from dflash_hf.generation.prefill import prefill
from dflash_hf.generation.request import Request
from dflash_hf.generation.run import (
    Run,
    drop_finished,
    drops_rows,
    look_at_models,
    make_room,
    tapped,
)
from dflash_hf.generation.stats import DFlashGenerateOutput
from dflash_hf.generation.step import step, verify
from dflash_hf.generation.user_cache import NoUserCache, UserCache
from dflash_hf.generation.widths import WidthChooser, give_chooser
from dflash_hf.generation_config import Engine
from dflash_hf.target_model.fast_layers import fast_whole_run, in_whole_run
from dflash_hf.target_model.parts import Target


def decode(request: Request, inputs: dict[str, Any]) -> DFlashGenerateOutput | torch.LongTensor:
    """Decodes a request with its draft.

    Args:
        request (`Request`): The request.
        inputs (`dict[str, Any]`): Keywords for the target's prefill, as `generate` prepared them.

    Returns:
        Ids `[B, S + longest answer]`, int64, or a `DFlashGenerateOutput` if `return_dict_in_generate` is set.
    """
    draft = request.draft
    target = request.target
    engine = choose_engine(target, draft)
    user_cache = user_cache_of(request)
    # These scopes restore the models and the user's cache, and switch the target's fast layers on. The scopes within
    # them switch gradients off. The prefill keeps gradients on if its cache leaves the call.
    with (
        # Compiled parts run as they were before torch.compile, because compiled code calls no hooks that were added
        # later, and every width would be another shape to compile.
        eagerly(target.parts, request.draft_parts),
        user_cache.restored_on_error(),
        fast_from_prefill(request, engine),
    ):
        # 1. The prompts: both caches are filled, and the first token is committed.
        with gradients_of_prefill(target, user_cache):
            run = prefill(request, inputs, user_cache, keeps_buffers=engine != "eager")
        # 2. The steps, until every row has ended: draft, verify, accept, report.
        try:
            run.chooser = choose_widths(run.generator, run.state, run.keeps_buffers)
            run.watch.lap("rest")  # the choice of widths does not count as time of a step
            with no_gradients(target, request.runs_user_code):
                advance(run, engine)
        finally:
            # A run that was interrupted keeps its statistics and its chooser too.
            draft.last_stats = run.stats
            keep_chooser(run)
        # 3. The end: the texts, and the cache that the call leaves behind.
        sequences = sequences_of(run)
        if isinstance(user_cache, UserCache):
            advance_user_cache(run, user_cache, sequences)
        # If another rank has failed, this raises while the user's cache can still be restored.
        request.ranks.meet()
    # The next call gets the buffers together with the graphs over them. Buffers of a run that failed are not kept,
    # because a graph may have stopped in the middle.
    if run.keeps_buffers:
        give_buffers(draft, target, run.buffers)
    # As in plain `generate`, the streamer ends after everything that may fail.
    if request.streamer is not None:
        request.streamer.end()
    return output_of(run, sequences)


def advance(run: Run, engine: Engine) -> None:
    """Runs steps until every row has ended.

    The caller must have switched gradients off. Tensors that the user gets are created outside this function, because
    inference mode may be on in it.
    """
    with device_errors_explained():
        # If the first token has ended every row, there is no step to capture.
        if engine != "eager" and not run.finished:
            advance_captured(run)
        # Eager steps decode the rest of the answer. That is mostly nothing or the whole answer.
        if run.finished:
            return
        # These two values hold for the whole run.
        drops = drops_rows(run)
        may_change = run.request.calls_user_code
        with tapped_between_steps(run):
            while not run.finished:
                # Between two steps no code refers to a row by its place, so that rows may move.
                if drops:
                    drop_finished(run)
                step(run)
                # User code that was called with the new tokens may have changed modules and hooks.
                if may_change:
                    look_at_models(run)


def advance_captured(run: Run) -> None:
    """Runs captured steps until every row has ended or the fixed buffers are full.

    Runs no step if the run's step cannot be captured.
    """
    # Replays go to the stream of the device of the ids.
    with torch.cuda.device_of(run.state.ids):
        captured = start_engine(run)
        # If the step cannot be captured, the log already says why.
        if captured is not None:
            captured.advance()


def no_gradients(target: Target, runs_user_code: bool) -> AbstractContextManager[Any]:
    """Turns gradients off, by inference mode if all weights of the target are plain tensors and no user code runs.

    Inference mode saves 7 to 9 % of a step on a CPU (docs/log-archive.md). If user code runs (`runs_user_code`), the
    mode is `torch.no_grad`, as in plain `generate`. User code may keep tensors, and autograd never accepts a tensor
    that was made in inference mode.
    """
    if target.takes_inference_mode and not runs_user_code:
        return torch.inference_mode()
    return torch.no_grad()


def gradients_of_prefill(
    target: Target, user_cache: UserCache | NoUserCache
) -> AbstractContextManager[Any]:
    """Turns gradients off if no tensor of the prefill leaves the run and no user code sees one.

    In all other cases the returned scope changes nothing.
    """
    # A RoPE that changes with the length writes its frequencies into the model, which a user may train afterwards.
    stays_here = not user_cache.is_kept and in_whole_run(target) and not target.facts.ropes
    if stays_here:
        return no_gradients(target, runs_user_code=False)
    return nullcontext()


def user_cache_of(request: Request) -> UserCache | NoUserCache:
    """Returns the cache that a request leaves behind: the cache that was passed in, or a new one for dict output."""
    if request.cache is not None:
        return UserCache(request.cache, is_given=True)
    if request.config.return_dict_in_generate:
        return UserCache(DynamicCache(config=request.target.config), is_given=False)
    return NoUserCache()


def fast_from_prefill(request: Request, engine: Engine) -> AbstractContextManager[None]:
    """Makes the target run by fast layers from its prefill on if only the forwards of the run use the target.

    User code that runs between two forwards may call the target itself, and must find it unchanged.
    """
    # A cache of another class may run code of its own in the prefill.
    is_usual_cache = request.cache is None or type(request.cache) is DynamicCache
    nobody_else_uses_target = engine == "eager" and not request.calls_out and is_usual_cache
    if nobody_else_uses_target:
        return fast_whole_run(request.target)
    return nullcontext()


@contextmanager
def tapped_between_steps(run: Run) -> Generator[None]:
    """Keeps the target tapped from step to step, unless code that runs between two steps may use the target."""
    # Such code must find the target as the user left it, so each step taps the target and releases it.
    if run.request.calls_out:
        yield
        return
    with tapped(run):
        yield


def sequences_of(run: Run) -> Tensor:
    """Returns prompts and committed tokens `[B, S + longest answer]`, padded on the right with the pad token."""
    state = run.state
    texts = dict(run.rows.ended)
    # The remaining rows may have another place in the state than in the request.
    ends = state.cursor.tolist()
    for row, number in enumerate(run.rows.numbers):
        texts[number] = state.ids[row, : ends[row]]
    longest = max(map(len, texts.values()))
    shape = (len(texts), longest)
    ids = state.ids.new_full(shape, run.request.processors.pad_id)
    for row, text in texts.items():
        ids[row, : len(text)] = text
    return ids


def advance_user_cache(run: Run, user_cache: UserCache, sequences: Tensor) -> None:
    """Advances the cache that was passed in or asked for. The run cannot go on afterwards.

    Args:
        run (`Run`): The finished run.
        user_cache (`UserCache`): The cache. It is changed in place.
        sequences (`torch.Tensor` of shape `[B, columns + longest answer]`): The ids that `generate` returns.
    """
    request = run.request

    def verify_all(blocks: Iterator[RaggedBlock]) -> None:
        request.ranks.meet()
        without_gradients = no_gradients(request.target, request.runs_user_code)
        with without_gradients, request.ranks.forward(), tapped(run):
            for block in blocks:
                verify(run, block)

    make_room(run)  # for the padding after rows that ended early
    # Padding is fed as a chain that is as wide as the longest path, so that each token follows the one before it.
    run.state.width = run.buffers.shape.path
    run.stats.num_target_forwards += user_cache.finish(
        run.state, run.cache, run.generator, sequences, verify_all, keeps_buffers=run.keeps_buffers
    )


def output_of(run: Run, sequences: Tensor) -> DFlashGenerateOutput | torch.LongTensor:
    """Returns the output of the call: the texts on the prompts' device, or a dict that also holds what was asked for.

    The dict is a `DFlashGenerateOutput`. It is returned if `return_dict_in_generate` is set.
    """
    request = run.request
    sequences = cast(torch.LongTensor, sequences.to(request.given_on))
    run.watch.lap("rest")
    if not request.config.return_dict_in_generate:
        return sequences
    found = run.recorder.collected()
    # As in plain `generate`, scores and logits go to the prompts' device, and hidden states stay on the target's.
    for name in {"scores", "logits"}.intersection(found):
        found[name] = tuple(token.to(request.given_on) for token in found[name])
    cache: dict[str, Any] = {CACHE_NAME: run.user_cache.cache}
    return DFlashGenerateOutput(sequences=sequences, speculative=run.stats, **cache, **found)


def keep_chooser(run: Run) -> None:
    """Keeps a run's chooser of widths for the next run of the pair. `choose_widths` takes it from there.

    For captured steps, the measured costs are kept with the graphs instead.
    """
    request = run.request
    chooser = run.chooser
    # `keeps_buffers` also holds for a run that was to be captured and ended before.
    if run.keeps_buffers or not isinstance(chooser, WidthChooser):
        return
    # Without measured times, every run of the pair must begin alike.
    if isinstance(chooser.costs, StepTimes):
        give_chooser(chooser, request.draft, request.target.model, len(request.input_ids))
