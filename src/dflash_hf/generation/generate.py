"""What happens to `model.generate(..., assistant_model=draft)`, which `registration` brings here.

Everything that is not a [`DFlashDraftModel`] passes through untouched. With a draft it is refused what cannot be
honoured, before any forward, and the original `generate` is called with a function as `custom_generate`: Transformers
still prepares inputs, masks, processors, stopping criteria and lengths, which become a [`Request`]. Then `decode`
stands in place of its sampling loop.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from dflash_hf.cache_name import given_cache
from dflash_hf.checkpoints import explain_foreign_draft
from dflash_hf.devices import Inventory, execution_devices
from dflash_hf.errors import require
from dflash_hf.generation.checks import (
    Settings,
    check_images,
    check_inputs,
    check_settings,
    check_stock,
    keep_new_images,
)
from dflash_hf.generation.cuda_graph import check_capturable
from dflash_hf.generation.decode import decode
from dflash_hf.generation.float8 import check_float8
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.run import Request
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.scopes import calling
from dflash_hf.target_model.parts import Target, find_target
from dflash_hf.target_model.support import check_pair, check_target
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
        foreign = explain_foreign_draft(draft)
        if foreign:
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


Answer = TypeVar("Answer")


def answer_with(
    answer: Callable[[Request, dict[str, Any]], Answer],
    generate: Callable[..., Any],
    model: Any,
    draft: DFlashDraftModel,
    arguments: dict[str, Any],
) -> Answer:
    """Checks a call with a draft, has Transformers prepare it, and answers it; errors as [`generate_with`].

    Args:
        answer (callable): What is done once everything is prepared: `decode`, or what takes the same.
        generate (callable): `model.generate`, or what it was.
        model (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        arguments (`dict[str, Any]`): What else the user passed to `generate`, by name.
    """
    started = time.perf_counter()
    ranks = Ranks(model)
    arguments = dict(arguments)
    warn_if_newer()
    with calling(), ranks.together():
        arguments.pop("assistant_model", None)
        # Pipelines pass one on where they cannot see that a draft reads and writes the target's tokens.
        arguments.pop("assistant_tokenizer", None)
        given = arguments.get("custom_generate")
        require(given is None, "no custom_generate beside a DFlash draft", given, "drop one of the two")
        target = find_target(model)
        draft_parts = Inventory.of(draft)
        check_models(target, draft, draft_parts)
        settings = Settings(model, arguments)
        check_settings(settings)
        check_inputs(target, settings)
        cache = given_cache(arguments)
        _use_images(target, cache, arguments)
        _use_tokenizer(model, settings, arguments)
        # The streamer goes both ways: `generate` puts the prompt into it, `decode` the rest. The cache goes as an
        # argument and says here that it is the caller's, not one that `generate` prepared.
        streamer = arguments.get("streamer")

        def answer_prepared(
            model: Any,
            input_ids: torch.LongTensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Answer:
            """Stands in place of Transformers' own sampling loop."""
            pad: Any = generation_config._pad_token_tensor
            request = Request(
                target=target,
                draft=draft,
                draft_parts=draft_parts,
                ranks=ranks,
                streamer=streamer,
                cache=cache,
                started=started,
                input_ids=cast(torch.LongTensor, input_ids.to(target.device)),
                given_on=input_ids.device,
                processors=BlockProcessors(logits_processor, 0 if pad is None else int(pad)),
                criteria=stopping_criteria,
                config=generation_config,
            )
            return answer(request, model_kwargs)

        arguments["custom_generate"] = answer_prepared
        return generate(**arguments)


def check_models(target: Target, draft: DFlashDraftModel, draft_parts: Inventory) -> None:
    """Refuses a target that cannot be driven, a draft that does not fit it, and options that it cannot have."""
    options: Any = draft.generation_config
    require(
        isinstance(options, DFlashGenerationConfig),
        "a DFlashGenerationConfig as draft.generation_config",
        type(options).__name__,
        "assign dflash_hf.DFlashGenerationConfig(...)",
    )
    check_target(target)
    check_pair(target, draft.config)
    devices = sorted(map(str, execution_devices(draft_parts)))
    require(len(devices) < 2, "a draft on one device", devices, 'load it with device_map={"": device}')
    options.validate_options(draft.config.block_size, draft.config.sample_from_anchor)
    check_float8(draft)
    check_capturable(target, draft)


def _use_images(target: Target, cache: Any, arguments: dict[str, Any]) -> None:
    """Checks the images of a call, and drops those that its cache has; the arguments are changed in place."""
    ids = arguments.get("inputs")
    if ids is None:
        ids = arguments.get("input_ids")
    if ids is None:
        return
    past = 0 if cache is None else int(cache.get_seq_length())
    if past:
        keep_new_images(target, ids, past, arguments)
    elif arguments.get("inputs_embeds") is None:
        check_images(target, ids, arguments)


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
