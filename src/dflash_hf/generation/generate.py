"""What happens to `model.generate(..., assistant_model=draft)`, which `registration` brings here.

Everything that is not a [`DFlashDraftModel`] passes through untouched. With a draft it is refused what cannot be
honoured, before any forward, and the original `generate` is called with a [`Call`] as `custom_generate`: Transformers
still prepares inputs, masks, processors, stopping criteria and lengths. Then `decode` stands in place of its sampling
loop. Here, and in `StaticStep`, the host reads what a step has done; the steps themselves read nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList, StopStringCriteria

from dflash_hf.attention import RaggedBlock
from dflash_hf.cache_name import CACHE_NAME, given_cache
from dflash_hf.checkpoints import explain_foreign_draft
from dflash_hf.devices import Inventory, eagerly, execution_devices
from dflash_hf.errors import require
from dflash_hf.generation.buffers import give_buffers
from dflash_hf.generation.checks import Settings, check_images, check_inputs, check_settings, check_stock
from dflash_hf.generation.cuda_graph import check_capturable, choose_engine, device_errors_explained, start_engine
from dflash_hf.generation.float8 import check_float8
from dflash_hf.generation.prefill import keep_new_images, prefill
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.run import Call, Run, drop_finished, drops_rows, make_room, tapped
from dflash_hf.generation.stats import DFlashGenerateOutput
from dflash_hf.generation.step import step, verify
from dflash_hf.generation.user_cache import UserCache
from dflash_hf.generation.widths import give_chooser
from dflash_hf.generation_config import DFlashGenerationConfig, Engine
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.fused import runs_whole, short_layers
from dflash_hf.target.parts import find_target
from dflash_hf.target.support import changing_ropes, check_pair, check_target
from dflash_hf.tested import warn_if_newer

_signature = functools.cache(inspect.signature)


def generate_with(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Answers a call of `generate`; one without a DFlash draft goes on to `original`, Transformers' own, as it is.

    Raises `ValueError` if something in the call cannot be honoured.
    """
    arguments = kwargs
    if args:
        bound = _signature(original).bind(model, *args, **kwargs).arguments
        del bound["self"]
        arguments = {**bound.pop("kwargs", {}), **bound}
    draft = unwrapped(arguments.get("assistant_model"))
    if not isinstance(draft, DFlashDraftModel):
        if foreign := explain_foreign_draft(draft):
            raise ValueError(foreign)
        return original(model, *args, **kwargs)
    if Settings(model, arguments)["speculation_type"] == "dflash":
        check_stock(draft)
        return original(model, *args, **kwargs)
    return answer_with(decode, functools.partial(original, model), model, draft, arguments)


def unwrapped(draft: Any) -> Any:
    """Returns what torch.compile's wrapper or PEFT's is around, where that is a draft.

    Blocks never go through the forward of a wrapper; adapters are within the draft's own layers.
    """
    bare: Any = getattr(draft, "_orig_mod", draft)
    base: Any = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    return base if isinstance(base, DFlashDraftModel) else bare


def answer_with(
    answer: Callable[[Call], Any],
    generate: Callable[..., Any],
    model: Any,
    draft: DFlashDraftModel,
    arguments: dict[str, Any],
) -> Any:
    """Checks a call with a draft, has Transformers prepare it, and answers it; errors as [`generate_with`].

    `answer` is what is done once everything is prepared: `decode`, or what takes the same. `generate` is
    `model.generate`, or what it was, and `arguments` are what else the user passed to it, by name.
    """
    started = time.perf_counter()
    ranks = Ranks(model)
    arguments = dict(arguments)
    warn_if_newer()
    with ranks.together():
        arguments.pop("assistant_model", None)
        # Pipelines pass one on where they cannot see that a draft reads and writes the target's tokens.
        arguments.pop("assistant_tokenizer", None)
        given = arguments.get("custom_generate")
        require(given is None, "no custom_generate beside a DFlash draft", given, "drop one of the two")
        options: Any = draft.generation_config
        what = "a DFlashGenerationConfig as draft.generation_config"
        got = type(options).__name__
        require(isinstance(options, DFlashGenerationConfig), what, got, "assign dflash_hf.DFlashGenerationConfig(...)")
        target = find_target(model)
        check_target(target)
        check_pair(target, draft.config)
        draft_parts = Inventory.of(draft)
        devices = sorted(map(str, execution_devices(draft_parts)))
        require(len(devices) < 2, "a draft on one device", devices, 'load it with device_map={"": device}')
        options.validate_options(draft.config.block_size, draft.config.sample_from_anchor)
        check_float8(draft)
        check_capturable(target, draft)
        settings = Settings(model, arguments)
        check_settings(settings)
        check_inputs(target, settings)
        cache = given_cache(arguments)
        ids = arguments.get("inputs")
        ids = arguments.get("input_ids") if ids is None else ids
        past = 0 if cache is None else int(cache.get_seq_length())
        if ids is not None and past:
            keep_new_images(target, ids, past, arguments)
        elif ids is not None and arguments.get("inputs_embeds") is None:
            check_images(target, ids, arguments)
        _use_tokenizer(model, settings, arguments)
        # The streamer goes both ways: `generate` puts the prompt into it, `decode` the rest. The cache goes as an
        # argument and says here that it is the caller's, not one that `generate` prepared.
        arguments["custom_generate"] = Call(
            target=target,
            draft=draft,
            draft_parts=draft_parts,
            ranks=ranks,
            answer=answer,
            streamer=arguments.get("streamer"),
            cache=cache,
            started=started,
        )
        return generate(**arguments)


def _use_tokenizer(model: Any, settings: Settings, arguments: dict[str, Any]) -> None:
    """Heals the prompts' last tokens and makes a criterion of stop strings: beyond here no tokenizer is handed on.

    Raises `ValueError` if one of the two is asked for without a tokenizer, or healing of embeddings.
    """
    tokenizer = arguments.pop("tokenizer", None)
    stop_strings = settings["stop_strings"]
    do = "pass generate(..., tokenizer=tokenizer)"
    # Explicit values outweigh the given config and the model's own.
    if settings["token_healing"]:
        name = "inputs" if arguments.get("inputs") is not None else "input_ids"
        has_both = tokenizer is not None and arguments.get(name) is not None
        require(has_both, "input_ids and tokenizer= with token_healing", None, do)
        arguments[name] = model.heal_tokens(arguments[name], tokenizer)
        _outweigh(model, arguments, "token_healing", False)
    if stop_strings is not None:
        require(tokenizer is not None, "tokenizer= with stop_strings", None, do)
        own = StopStringCriteria(cast(Any, tokenizer), stop_strings)
        criteria = [*(arguments.get("stopping_criteria") or []), own]
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
        _outweigh(model, arguments, "stop_strings", None)


def _outweigh(model: Any, arguments: dict[str, Any], name: str, value: Any) -> None:
    """Sets an option, which counts whatever the given config and the model's own say.

    In a copy of a given config, because arguments beside one are deprecated; not where the model's own value would
    fill in for `None` there.
    """
    config = arguments.get("generation_config")
    is_filled_in = value is None and getattr(model.generation_config, name, None) is not None
    if config is None or name in arguments or is_filled_in:
        arguments[name] = value
        return
    config = copy.deepcopy(config)
    setattr(config, name, value)
    arguments["generation_config"] = config


def decode(call: Call) -> DFlashGenerateOutput | torch.LongTensor:
    """Decodes with a draft, with everything prepared; returns ids `[B, S + new]`, or with them what was asked for."""
    target = call.target
    draft = call.draft
    config = call.config
    draft.last_stats = None
    engine = choose_engine(target, draft)
    kept = None if call.cache is None else UserCache(call.cache, given=True)
    if kept is None and config.return_dict_in_generate:
        kept = UserCache(DynamicCache(config=target.config), given=False)
    # Code of the user's between two forwards may call the target itself: it finds it as it left it.
    is_ours = engine == "eager" and not call.calls_out and type(call.cache) in (NoneType, DynamicCache)
    no_gradients = torch.inference_mode if target.takes_inference_mode else torch.no_grad
    with (
        eagerly(target.parts, call.draft_parts),
        nullcontext() if kept is None else kept.restored_on_error(),
        short_layers(target) if is_ours else nullcontext(),
    ):
        # What a prefill makes stays here if no cache is kept, and nothing of the user's sees a part of it.
        with no_gradients() if kept is None and runs_whole(target) and not changing_ropes(target) else nullcontext():
            run = prefill(call, kept, keeps_buffers=engine != "eager")
        try:
            with no_gradients():
                advance(run, engine)
        finally:
            draft.last_stats = run.stats
        sequences = _sequences(run, config)
        keep(run, sequences)
        run.call.ranks.meet()
    if run.keeps_buffers:
        give_buffers(draft, target, run.buffers)
    elif run.chooser is not None:
        give_chooser(run.chooser, draft, target.model, len(sequences))
    if run.call.streamer is not None:
        run.call.streamer.end()
    sequences = cast(torch.LongTensor, sequences.to(call.given_on))
    run.watch.lap("rest")
    if not config.return_dict_in_generate:
        return sequences
    cache: dict[str, Any] = {CACHE_NAME: None if kept is None else kept.cache}
    return DFlashGenerateOutput(sequences=sequences, speculative=run.stats, **cache, **run.recorder.collected())


def advance(run: Run, engine: Engine = "eager") -> None:
    """Runs steps until every row has finished.

    Under inference mode, which saves 7 to 9 % of a step on a CPU (docs/log.md); what is returned to the user is made
    outside it.
    """
    with device_errors_explained():
        # Nothing is captured for an answer of one token. Replays go to the stream of the device that ids are on.
        with torch.cuda.device_of(run.state.ids) if engine != "eager" else nullcontext():
            captured = None if run.finished else start_engine(run, engine)
            if captured is not None:
                captured.advance()
        if run.finished:
            return
        drops = drops_rows(run)
        with nullcontext() if run.call.calls_out else tapped(run):
            while not run.finished:
                if drops:
                    drop_finished(run)
                step(run)


def keep(run: Run, sequences: Tensor) -> None:
    """Advances the cache that was passed in or asked for, if there is one; the finished run cannot go on afterwards.

    `sequences` `[B, columns + longest answer]` are what `generate` returns.
    """
    if run.kept is None:
        return

    @torch.inference_mode()
    def verify_all(blocks: Iterator[RaggedBlock]) -> None:
        run.call.ranks.meet()
        with run.call.ranks.forward(), tapped(run):
            for block in blocks:
                verify(run, block)

    make_room(run)  # for padding behind rows that ended early
    run.state.width = run.buffers.shape.path  # of a chain
    run.stats.num_target_forwards += run.kept.finish(
        run.state, run.cache, run.generator, sequences, verify_all, keeps_buffers=run.keeps_buffers
    )


def _sequences(run: Run, generation_config: GenerationConfig) -> torch.LongTensor:
    """Prompts and committed tokens `[B, S + longest answer]`, finished rows padded as `generate` pads them."""
    state = run.state
    pad = generation_config._pad_token_tensor
    ends = zip(run.rows, state.cursor.tolist(), strict=True)
    texts = run.ended | {row: state.ids[index, :end] for index, (row, end) in enumerate(ends)}
    ids = state.ids.new_full((len(texts), max(map(len, texts.values()))), 0 if pad is None else int(pad))
    for row, text in texts.items():
        ids[row, : len(text)] = text
    return cast(torch.LongTensor, ids)
