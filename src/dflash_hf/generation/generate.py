"""This module answers `model.generate(..., assistant_model=draft)`. `patching` passes such calls to this module.

A call with any other assistant, or with none, goes to Transformers' `generate` unchanged. A call with a
[`DFlashDraftModel`] is checked first. An error says before any forward what cannot be honoured. Then the original
`generate` is called with a function as `custom_generate`. So Transformers still prepares inputs, masks, processors,
stopping criteria and lengths, which become a [`Request`]. Then `decode` replaces Transformers' sampling loop.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from os import PathLike
from typing import Any, TypeVar, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from dflash_hf.block.cache_name import given_cache
from dflash_hf.checkpoints.formats import check_is_no_draft, explain_foreign_draft
from dflash_hf.devices import Inventory
from dflash_hf.errors import require
from dflash_hf.generation.arguments import (
    Settings,
    given_ids,
    is_given,
    keep_new_images,
    use_tokenizer,
)
from dflash_hf.generation.checks import (
    check_draft,
    check_drawn_proposals,
    check_inputs,
    check_settings,
    check_stock,
)
from dflash_hf.generation.decode import decode
from dflash_hf.generation.image_checks import check_images
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.request import Request
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.support import check_pair, check_target
from dflash_hf.undo import calling

logger: Any = logging.get_logger(__name__)
# The newest Transformers with which the tests have passed, as constraints.txt pins it. It is used in a warning only.
NEWEST_TRANSFORMERS = "5.24.0"
# Signatures are kept per function, because finding a signature takes longer than checking a call.
_signature = functools.cache(inspect.signature)


def generate_with(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Answers a call of `generate`. A call without a DFlash draft goes to `original`, Transformers' own, unchanged.

    Raises `ValueError` if something in the call cannot be honoured.
    """
    arguments = kwargs
    # Arguments that were passed by position get their names, because checks and changes go by name.
    if args:
        bound = _signature(original).bind(model, *args, **kwargs).arguments
        del bound["self"]
        arguments = {**bound.pop("kwargs", {}), **bound}
    draft = unwrapped(arguments.get("assistant_model"))
    is_stock = Settings(model, arguments)["speculation_type"] == "dflash"
    if isinstance(draft, DFlashDraftModel) and not is_stock:
        return answer_with(decode, functools.partial(original, model), model, draft, arguments)
    # Transformers answers all other calls itself. Before that, DFlash drafts that it would handle wrongly are refused.
    check_is_no_draft(model)
    if isinstance(draft, DFlashDraftModel):
        check_stock(draft)
    elif draft is not None:
        _check_other_assistant(draft, is_stock)
    return original(model, *args, **kwargs)


def _check_other_assistant(assistant: Any, is_stock: bool) -> None:
    """Raises `ValueError` for an assistant that is a DFlash draft of another class, or a path instead of a model.

    Without this check, Transformers would fail far from the cause. `is_stock` says whether the call asks for
    Transformers' own DFlash path.
    """
    require(
        not isinstance(assistant, str | PathLike),
        "a loaded model as assistant_model",
        assistant,
        "load a draft with dflash_hf.load_draft(...)",
    )
    foreign = explain_foreign_draft(assistant, is_stock)
    if foreign:
        raise ValueError(foreign)


def unwrapped(draft: Any) -> Any:
    """Returns the draft within a wrapper of torch.compile or PEFT. Any other assistant of PEFT stays wrapped.

    Blocks never go through the forward of a wrapper. PEFT's adapters are within the draft's own layers, so they run.
    """
    bare: Any = getattr(draft, "_orig_mod", draft)
    if not hasattr(bare, "get_base_model"):
        return bare
    base: Any = bare.get_base_model()
    # Transformers handles PEFT's wrapper around any other assistant.
    if isinstance(base, DFlashDraftModel):
        return base
    return bare


def unwrapped_target(model: Any) -> Any:
    """Returns the target within wrappers of torch.compile and PEFT, as their own `generate` passes it to this package.

    The adapters stay, because they are within the target's own layers. A wrapper that puts tokens of its own before
    the prompt is returned as it is, because `check_target` recognises it and refuses it.
    """
    if not hasattr(model, "get_base_model"):
        return getattr(model, "_orig_mod", model)
    if model.active_peft_config.is_prompt_learning:
        return model
    # The model within a wrapper of PEFT may be a compiled one.
    return unwrapped_target(model.get_base_model())


@functools.cache  # one check is enough, because neither version changes within a process
def _warn_if_newer() -> None:
    """Logs one line, once, if the installed Transformers is newer than the newest one that was tested."""
    if Version(transformers.__version__) > Version(NEWEST_TRANSFORMERS):
        logger.warning(
            f"DFlash drafts were tested with Transformers up to {NEWEST_TRANSFORMERS}; this is "
            f"{transformers.__version__}, which may have changed what they rely on"
        )


Answer = TypeVar("Answer")


def answer_with(
    answer: Callable[[Request, dict[str, Any]], Answer],
    generate: Callable[..., Any],
    model: Any,
    draft: DFlashDraftModel,
    arguments: dict[str, Any],
) -> Answer:
    """Checks a call with a draft, lets Transformers prepare it, and answers it.

    Args:
        answer (callable): The function that answers the prepared call: `decode`, or another one with its arguments.
        generate (callable): The target's `generate`, or Transformers' own, bound to the target.
        model (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        arguments (`dict[str, Any]`): The other arguments that the user passed to `generate`, by name.

    Returns:
        What `answer` returns.

    Raises:
        ValueError: If something in the call cannot be honoured.
    """
    started = time.perf_counter()
    draft.last_stats = None  # so that no statistics of an earlier call are left after an error
    ranks = Ranks(model)
    # A copy, because names are removed from it and added to it below.
    arguments = dict(arguments)
    _warn_if_newer()
    with calling(), ranks.together():
        arguments.pop("assistant_model", None)
        # Some pipelines pass an assistant tokenizer, because they do not know that a draft uses the target's tokens.
        arguments.pop("assistant_tokenizer", None)
        # Some processors and collators make labels. Plain `generate` passes them to no forward.
        arguments.pop("labels", None)
        # The checks of the target come first. So an unsupported target is named before any fault of the call.
        target = find_target(model)
        draft_parts = Inventory.of(draft)
        check_target(target)
        check_pair(target, draft.config)
        check_draft(target, draft, draft_parts)
        settings = Settings(model, arguments)
        check_settings(settings)
        check_inputs(target, settings)
        has_images = is_given(arguments, "image_grid_thw")
        if has_images:
            check_images(target, settings)
        given = given_ids(arguments)
        # All tensors go to the target's device: Transformers makes processors on the device of the ids, and moves
        # positions and masks only if the ids are on another device than the model. The tensors are moved before the
        # positions of images are computed, because the model keeps these positions for the next turn.
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                arguments[name] = value.to(target.device)
        if has_images:
            keep_new_images(target, arguments)
        use_tokenizer(model, settings, arguments)
        # Both functions use the streamer: `generate` puts the prompt into it, and `decode` puts the new tokens. The
        # cache stays in the arguments too. It is read here to know that it is the caller's and not one that `generate`
        # has prepared.
        streamer = arguments.get("streamer")
        cache = given_cache(arguments)

        def answer_prepared(
            model: Any,
            input_ids: torch.LongTensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Answer:
            """Makes a request of the prepared inputs and answers it, in place of Transformers' own sampling loop."""
            # Transformers' own field holds the pad id that results from all configs.
            pad: Any = generation_config._pad_token_tensor
            pad_id = 0 if pad is None else int(pad)
            given_on = given.device if isinstance(given, Tensor) else input_ids.device
            request = Request(
                target=target,
                draft=draft,
                draft_parts=draft_parts,
                ranks=ranks,
                streamer=streamer,
                cache=cache,
                started=started,
                input_ids=cast(torch.LongTensor, input_ids.to(target.device)),
                given_on=given_on,
                processors=BlockProcessors(logits_processor, pad_id),
                criteria=stopping_criteria,
                config=generation_config,
            )
            is_drawn = generation_config.do_sample and draft.generation_config.proposal == "sample"
            # This check needs the processors, which Transformers has made by now.
            if is_drawn:
                check_drawn_proposals(request)
            return answer(request, model_kwargs)

        arguments["custom_generate"] = answer_prepared
        return generate(**arguments)
