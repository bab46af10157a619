"""What happens to `model.generate(..., assistant_model=draft)`, which `patching` brings here.

Everything that is not a [`DFlashDraftModel`] passes through untouched. With a draft it is refused what cannot be
honoured, before any forward, and the original `generate` is called with a function as `custom_generate`: Transformers
still prepares inputs, masks, processors, stopping criteria and lengths, which become a [`Request`]. Then `decode`
stands in place of its sampling loop.
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
    check_images,
    check_inputs,
    check_settings,
    check_stock,
)
from dflash_hf.generation.decode import decode
from dflash_hf.generation.ranks import Ranks
from dflash_hf.generation.request import Request
from dflash_hf.generation.sampling import BlockProcessors
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.support import check_pair, check_target
from dflash_hf.undo import calling

logger: Any = logging.get_logger(__name__)
# The newest Transformers that the tests have passed on, as constraints.txt pins it. Nothing is decided by it.
NEWEST_TRANSFORMERS = "5.24.0"
# Kept per function: to find a signature takes longer than to check a call.
_signature = functools.cache(inspect.signature)


def generate_with(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Answers a call of `generate`; one without a DFlash draft goes on to `original`, Transformers' own, as it is.

    Raises `ValueError` if something in the call cannot be honoured.
    """
    arguments = kwargs
    # By name, whatever was passed by position: names are what is checked and changed.
    if args:
        bound = _signature(original).bind(model, *args, **kwargs).arguments
        del bound["self"]
        arguments = {**bound.pop("kwargs", {}), **bound}
    draft = unwrapped(arguments.get("assistant_model"))
    is_stock = Settings(model, arguments)["speculation_type"] == "dflash"
    if isinstance(draft, DFlashDraftModel) and not is_stock:
        return answer_with(decode, functools.partial(original, model), model, draft, arguments)
    # Transformers answers all other calls itself, once it is clear that it would not go wrong over a DFlash draft.
    check_is_no_draft(model)
    if isinstance(draft, DFlashDraftModel):
        check_stock(draft)
    elif draft is not None:
        _check_other_assistant(draft, is_stock)
    return original(model, *args, **kwargs)


def _check_other_assistant(assistant: Any, is_stock: bool) -> None:
    """Refuses assistants that are a DFlash draft in all but their class: Transformers would fail far from the cause.

    `is_stock` says that Transformers' own DFlash path is asked for.
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
    """Returns what torch.compile's wrapper or PEFT's is around, where that is a draft.

    Blocks never go through the forward of a wrapper; adapters are within the draft's own layers.
    """
    bare: Any = getattr(draft, "_orig_mod", draft)
    if not hasattr(bare, "get_base_model"):
        return bare
    base: Any = bare.get_base_model()
    # PEFT's wrapper around any other assistant is Transformers' to deal with.
    if isinstance(base, DFlashDraftModel):
        return base
    return bare


@functools.cache  # both versions stay the same as long as the process runs
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
    """Checks a call with a draft, has Transformers prepare it, and answers it; errors as [`generate_with`].

    Args:
        answer (callable): What is done once everything is prepared: `decode`, or what takes the same.
        generate (callable): `model.generate`, or what it was.
        model (`PreTrainedModel`): The target.
        draft (`DFlashDraftModel`): Its draft.
        arguments (`dict[str, Any]`): What else the user passed to `generate`, by name.
    """
    started = time.perf_counter()
    draft.last_stats = None  # an error leaves none of the call before
    ranks = Ranks(model)
    # A copy, because names are taken out and put in below.
    arguments = dict(arguments)
    _warn_if_newer()
    with calling(), ranks.together():
        arguments.pop("assistant_model", None)
        # Pipelines pass one on where they cannot see that a draft reads and writes the target's tokens.
        arguments.pop("assistant_tokenizer", None)
        # The order of the checks: a target that cannot be driven says so before anything about the call does.
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
            check_images(target, arguments)
        given = given_ids(arguments)
        # Transformers makes processors on the device of the ids, and moves positions and masks only where the ids are
        # not on the model's. This comes before the positions of images, which the model keeps for the next turn.
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                arguments[name] = value.to(target.device)
        if has_images:
            keep_new_images(target, arguments)
        use_tokenizer(model, settings, arguments)
        # The streamer goes both ways: `generate` puts the prompt into it, `decode` the rest. The cache goes as an
        # argument and says here that it is the caller's, not one that `generate` prepared.
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
            """Stands in place of Transformers' own sampling loop."""
            # Transformers' own field: the id after it has looked at all configs.
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
            # What could not be known before: the processors are made by now.
            if is_drawn:
                check_drawn_proposals(request)
            return answer(request, model_kwargs)

        arguments["custom_generate"] = answer_prepared
        return generate(**arguments)
