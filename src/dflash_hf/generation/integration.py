"""What happens to `model.generate(..., assistant_model=draft)`, which `registration` brings here.

Everything that is not a [`DFlashDraftModel`] passes through untouched. With a draft it is refused what cannot be
honoured, before any forward, and the original `generate` is called with `custom_generate=decode`: Transformers still
prepares inputs, masks, processors, stopping criteria and lengths.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

from transformers import StoppingCriteriaList, StopStringCriteria

from dflash_hf.checkpoints import explain_foreign_draft
from dflash_hf.devices import execution_devices
from dflash_hf.generation.checks import (
    Settings,
    check_images,
    check_inputs,
    check_settings,
    check_stock,
)
from dflash_hf.generation.cuda_graph import check_capturable
from dflash_hf.generation.loop import decode
from dflash_hf.generation.prefill import keep_new_images
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target.parts import find_target
from dflash_hf.target.support import check_pair, check_target

_signature = functools.cache(inspect.signature)


def generate_with(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Answers a call of `generate`; one without a DFlash draft goes on as it is.

    Args:
        original (callable): Transformers' own `generate`.
        model (`PreTrainedModel`): The target.
        args, kwargs: What the user passed.

    Raises:
        ValueError: If something in the call cannot be honoured.
    """
    bound = _signature(original).bind(model, *args, **kwargs).arguments
    draft = bound.get("assistant_model")
    # Blocks never go through the forward of a wrapper: torch.compile's, or PEFT's around a draft with adapters.
    draft = getattr(draft, "_orig_mod", draft)
    base: Any = draft.get_base_model() if draft is not None and hasattr(draft, "get_base_model") else draft
    draft = base if isinstance(base, DFlashDraftModel) else draft
    if not isinstance(draft, DFlashDraftModel):
        foreign = None if draft is None else explain_foreign_draft(draft)
        if foreign is not None:
            raise ValueError(foreign)
        return original(model, *args, **kwargs)
    bound.pop("self")
    extra = bound.pop("kwargs", {})
    arguments = {**bound, **extra}
    if Settings(model, arguments)["speculation_type"] == "dflash":
        check_stock(draft)
        return original(model, *args, **kwargs)
    ranks = Ranks(model)
    with ranks.together():
        return original(model, **prepare(model, draft, arguments, functools.partial(decode, ranks=ranks)))


def prepare(
    model: Any, draft: DFlashDraftModel, arguments: dict[str, Any], engine: Callable[..., Any]
) -> dict[str, Any]:
    """Checks a call with a draft and turns it into one for the original `generate`.

    Args:
        model (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): The draft.
        arguments (`dict`): What the user passed to `generate`.
        engine (callable): What `generate` calls once everything is prepared: `decode`, or what takes the same.

    Raises:
        ValueError: If something in the call cannot be honoured.
    """
    started = time.perf_counter()
    arguments = dict(arguments)
    arguments.pop("assistant_model", None)
    # Pipelines pass one on where they cannot see that a draft reads and writes the target's tokens.
    arguments.pop("assistant_tokenizer", None)
    if arguments.get("custom_generate") is not None:
        raise ValueError("expected no custom_generate beside a DFlash draft, got one; drop one of the two")
    options: Any = draft.generation_config
    if not isinstance(options, DFlashGenerationConfig):
        raise ValueError(
            f"expected draft.generation_config to be a DFlashGenerationConfig, got a "
            f"{type(options).__name__}; assign dflash_hf.DFlashGenerationConfig(...)"
        )
    target = find_target(model)
    check_target(target)
    check_pair(target, draft.config)
    if len(devices := execution_devices(draft)) > 1:
        raise ValueError(
            f"expected a draft on one device, got {sorted(str(device) for device in devices)}; load it with "
            'device_map={"": device}'
        )
    options.validate_options(draft.config.block_size, draft.config.sample_from_anchor)
    check_capturable(target, draft)
    settings = Settings(model, arguments)
    check_settings(settings)
    check_inputs(target, settings)
    cache, ids = arguments.get("past_key_values"), arguments.get("inputs")
    ids = arguments.get("input_ids") if ids is None else ids
    past = 0 if cache is None else int(cache.get_seq_length())
    if ids is not None and past:
        keep_new_images(target, ids, past, arguments)
    elif ids is not None and arguments.get("inputs_embeds") is None:
        check_images(target, ids, arguments)
    if settings["token_healing"]:
        _heal_tokens(model, arguments)
    if settings["stop_strings"] is not None:
        _add_stop_strings(settings["stop_strings"], arguments)
    arguments.pop("tokenizer", None)
    # The streamer goes both ways: `generate` puts the prompt into it, `decode` the rest. The cache goes as an argument
    # and says here that it is the caller's, not one that `generate` prepared.
    arguments["custom_generate"] = functools.partial(
        engine,
        target=target,
        draft=draft,
        streamer=arguments.get("streamer"),
        given_cache=cache,
        started=started,
    )
    return arguments


def _heal_tokens(model: Any, arguments: dict[str, Any]) -> None:
    """Heals the prompts' last tokens here, by Transformers' own function: the tokenizer would not reach it.

    Raises:
        ValueError: If there is no tokenizer, or the prompts are embeddings.
    """
    name = "inputs" if arguments.get("inputs") is not None else "input_ids"
    if arguments.get("tokenizer") is None or arguments.get(name) is None:
        raise ValueError(
            "expected input_ids and tokenizer= with token_healing, got none; pass generate(..., tokenizer=tokenizer)"
        )
    arguments[name] = model.heal_tokens(arguments[name], arguments["tokenizer"])
    # An explicit value outweighs the given config and the model's own.
    arguments["token_healing"] = False


def _add_stop_strings(stop_strings: str | list[str], arguments: dict[str, Any]) -> None:
    """Turns `stop_strings` into a criterion here: `tokenizer` would not reach `decode`.

    Raises:
        ValueError: If there is no tokenizer to read them with.
    """
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None:
        raise ValueError("expected tokenizer= with stop_strings, got none; pass generate(..., tokenizer=tokenizer)")
    # An explicit None outweighs the given config and the model's own.
    arguments["stop_strings"] = None
    given = arguments.get("stopping_criteria") or []
    arguments["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(tokenizer, stop_strings)])


__all__ = ["generate_with", "prepare"]
