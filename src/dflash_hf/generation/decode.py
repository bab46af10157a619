"""The decoding loop: prefill; while rows run: draft, verify, accept, report.

[`decode`] stands in place of Transformers' own sampling loop, with everything prepared. The steps are in `step.py`;
the host reads there, and in `static_step.py`, what a step has done.
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
    """Decodes with a draft.

    Args:
        request (`Request`): The request.
        inputs (`dict[str, Any]`): Keywords for the target's prefill, as `generate` prepared them.

    Returns:
        Ids `[B, S + new]`, or with them what was asked for.
    """
    draft = request.draft
    target = request.target
    engine = choose_engine(target, draft)
    user_cache = user_cache_of(request)
    # Three nested scopes: what is undone at the end or after an error; the target's fast layers; and gradients, which
    # the prefill keeps on where its cache leaves the call.
    with (
        # Compiled parts run as they were before torch.compile: they call no hooks, and every width is another shape.
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
            run.watch.lap("rest")  # the choice of widths is no step's time
            with no_gradients(target, request.runs_user_code):
                advance(run, engine)
        finally:
            # Also of a run that was interrupted.
            draft.last_stats = run.stats
            keep_chooser(run)
        # 3. The texts, and the cache that the call leaves behind.
        sequences = sequences_of(run)
        if isinstance(user_cache, UserCache):
            advance_user_cache(run, user_cache, sequences)
        # A rank that failed says so here, while the user's cache can still be put back.
        request.ranks.meet()
    # With the graphs over them. Buffers of a run that failed are not kept: a graph may have stopped in the middle.
    if run.keeps_buffers:
        give_buffers(draft, target, run.buffers)
    # The streamer ends behind everything that may fail, as plain `generate` ends it.
    if request.streamer is not None:
        request.streamer.end()
    return output_of(run, sequences)


def advance(run: Run, engine: Engine) -> None:
    """Runs steps until every row has finished.

    To be called without gradients; what is returned to the user is made outside of inference mode.
    """
    with device_errors_explained():
        # Nothing is captured for an answer of one token.
        if engine != "eager" and not run.finished:
            advance_captured(run)
        # What is left of the answer is eager, mostly nothing or all of it.
        if run.finished:
            return
        # These two answers hold for the whole run.
        drops = drops_rows(run)
        may_change = run.request.calls_user_code
        with tapped_between_steps(run):
            while not run.finished:
                # Between two steps nothing refers to a row by its place.
                if drops:
                    drop_finished(run)
                step(run)
                # Code that was called with the new tokens may have changed modules and hooks.
                if may_change:
                    look_at_models(run)


def advance_captured(run: Run) -> None:
    """Runs captured steps, if there are any, until every row has finished or the fixed buffers are full."""
    # Replays go to the stream of the device that ids are on.
    with torch.cuda.device_of(run.state.ids):
        captured = start_engine(run)
        # A step that cannot be captured has said so in the log.
        if captured is not None:
            captured.advance()


def no_gradients(target: Target, runs_user_code: bool) -> AbstractContextManager[Any]:
    """Turns gradients off, by inference mode where the target's weights and whoever sees its tensors are for it.

    That saves 7 to 9 % of a step on a CPU (docs/log-archive.md). Code of the user's (`runs_user_code`) has the mode of
    plain `generate`: autograd takes no tensor of inference mode, also later.
    """
    if target.takes_inference_mode and not runs_user_code:
        return torch.inference_mode()
    return torch.no_grad()


def gradients_of_prefill(
    target: Target, user_cache: UserCache | NoUserCache
) -> AbstractContextManager[Any]:
    """Turns gradients off where what a prefill makes stays here, and nothing of the user's sees a part of it."""
    # A RoPE that changes writes its frequencies into the model, which a user may train afterwards.
    stays_here = not user_cache.is_kept and in_whole_run(target) and not target.facts.ropes
    if stays_here:
        return no_gradients(target, runs_user_code=False)
    return nullcontext()


def user_cache_of(request: Request) -> UserCache | NoUserCache:
    """Returns the cache that a request leaves behind: the one passed in, or a new one if it is asked for."""
    if request.cache is not None:
        return UserCache(request.cache, is_given=True)
    if request.config.return_dict_in_generate:
        return UserCache(DynamicCache(config=request.target.config), is_given=False)
    return NoUserCache()


def fast_from_prefill(request: Request, engine: Engine) -> AbstractContextManager[None]:
    """Has the target run by fast layers from its prefill on, where nothing but the run's forwards uses it.

    Code of the user's between two forwards may call the target itself: it finds it as it left it.
    """
    # A cache of another kind may run code of its own in the prefill.
    is_usual_cache = request.cache is None or type(request.cache) is DynamicCache
    nobody_else_uses_target = engine == "eager" and not request.calls_out and is_usual_cache
    if nobody_else_uses_target:
        return fast_whole_run(request.target)
    return nullcontext()


@contextmanager
def tapped_between_steps(run: Run) -> Generator[None]:
    """Leaves the target tapped from step to step, unless something that runs between two steps may use the target."""
    # It finds the target as the user left it.
    if run.request.calls_out:
        yield
        return
    with tapped(run):
        yield


def sequences_of(run: Run) -> Tensor:
    """Returns prompts and committed tokens `[B, S + longest answer]`, finished rows padded as `generate` pads them."""
    state = run.state
    texts = dict(run.rows.ended)
    # The rows that are left need not stand where they stood in the request.
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
    """Advances the cache that was passed in or asked for; the finished run cannot go on afterwards.

    `sequences` `[B, columns + longest answer]` are what `generate` returns.
    """
    request = run.request

    def verify_all(blocks: Iterator[RaggedBlock]) -> None:
        request.ranks.meet()
        without_gradients = no_gradients(request.target, request.runs_user_code)
        with without_gradients, request.ranks.forward(), tapped(run):
            for block in blocks:
                verify(run, block)

    make_room(run)  # for padding behind rows that ended early
    # A chain as wide as a path: a width that the target has verified before, of one token after another.
    run.state.width = run.buffers.shape.path
    run.stats.num_target_forwards += user_cache.finish(
        run.state, run.cache, run.generator, sequences, verify_all, keeps_buffers=run.keeps_buffers
    )


def output_of(run: Run, sequences: Tensor) -> DFlashGenerateOutput | torch.LongTensor:
    """Returns what the call returns: the texts where the prompts were, or with them what was asked for."""
    request = run.request
    sequences = cast(torch.LongTensor, sequences.to(request.given_on))
    run.watch.lap("rest")
    if not request.config.return_dict_in_generate:
        return sequences
    found = run.recorder.collected()
    # As from plain `generate`; hidden states stay on the target's device there too.
    for name in {"scores", "logits"}.intersection(found):
        found[name] = tuple(token.to(request.given_on) for token in found[name])
    cache: dict[str, Any] = {CACHE_NAME: run.user_cache.cache}
    return DFlashGenerateOutput(sequences=sequences, speculative=run.stats, **cache, **found)


def keep_chooser(run: Run) -> None:
    """Keeps what a run's widths have shown for the next run of the pair, where `choose_widths` finds it.

    Of captured steps the costs are kept with their graphs.
    """
    request = run.request
    chooser = run.chooser
    # A run that was to be captured may have ended before.
    if run.keeps_buffers or not isinstance(chooser, WidthChooser):
        return
    # Where the clock decides nothing, each run begins alike.
    if isinstance(chooser.costs, StepTimes):
        give_chooser(chooser, request.draft, request.target.model, len(request.input_ids))
