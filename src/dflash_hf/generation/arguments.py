"""What a call of `generate` was given, by name, and what is done to it before Transformers prepares it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, StoppingCriteriaList, StopStringCriteria

from dflash_hf.block.cache_name import given_cache
from dflash_hf.target_model.parts import Target

_DEFAULTS = GenerationConfig._get_default_generation_params()


@dataclass(frozen=True, slots=True)
class Settings:
    """The generation settings in force, by name: an argument to `generate`, else the config's that was given with
    them, the target's, the default.

    That is the order of `GenerationMixin._prepare_generation_config`, which copies both configs for it.
    """

    model: Any
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a setting."""
        # An argument counts whatever it is, `None` included.
        if name in self.arguments:
            return self.arguments[name]
        given = self.arguments.get("generation_config")
        for config in (given, self.model.generation_config):
            # In a config `None` stands for a setting that was not made.
            value = getattr(config, name, None)
            if value is not None:
                return value
        return _DEFAULTS.get(name)


def is_given(arguments: Mapping[str, Any], name: str) -> bool:
    """Returns True if an argument of `generate` was given; `None` is as good as none."""
    return arguments.get(name) is not None


def given_ids(arguments: Mapping[str, Any]) -> Any:
    """Returns the ids among the arguments of `generate`, which takes them under two names, or `None`."""
    if is_given(arguments, "inputs"):
        return arguments["inputs"]
    return arguments.get("input_ids")


def cached_columns(cache: object) -> int:
    """Returns how many columns a cache has, and 0 of what is none."""
    # Anything else under that name is refused later, with its type in the message.
    if not isinstance(cache, Cache):
        return 0
    return int(cache.get_seq_length())


def are_new(types: Tensor, past: int) -> Tensor:
    """Returns which images of a conversation begin behind its `past` cached columns: bool `[N]`, in order.

    `types` `[B, T]` are 1 for tokens of images.
    """
    is_image = types == 1
    # An image begins where the token before is none of one.
    token_before = torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    starts = is_image & ~token_before
    columns = torch.arange(types.shape[1], device=types.device)
    is_behind = columns >= past
    # Row by row, as a processor lists the images of a batch.
    return is_behind.expand_as(starts)[starts]


def keep_new_images(target: Target, arguments: dict[str, Any]) -> None:
    """Computes the positions of a conversation `[B, T]` and drops the images that its cache has.

    Under M-RoPE a token's positions follow from the sizes of all images before it, and the prefill takes only those
    whose tokens are new. Transformers takes both from one `image_grid_thw`, which can be right for one of the two.

    The arguments of `generate`, which `checks.check_images` has seen, are changed in place: `position_ids` is added;
    `image_grid_thw` `[N, 3]`, patches in time, height and width of all images, and `pixel_values` `[patches, ...]`, of
    all or the new ones, lose those that are in the cache.
    """
    ids = given_ids(arguments)
    past = cached_columns(given_cache(arguments))
    goes_on = past > 0 and isinstance(ids, Tensor)
    # A first turn has all of its images in the prefill, and another family says nothing of token types.
    if not goes_on or not is_given(arguments, "mm_token_type_ids"):
        return
    model: Any = target.model
    # Before anything is dropped: they follow from all images.
    types = arguments["mm_token_type_ids"]
    grids = arguments["image_grid_thw"]
    mask = arguments["attention_mask"]
    if not is_given(arguments, "position_ids"):
        kwargs = {"attention_mask": mask, "mm_token_type_ids": types, "image_grid_thw": grids}
        arguments["position_ids"] = model._prepare_position_ids_for_generation(ids, kwargs)
    is_new = are_new(types.to(grids.device), past)
    sizes = grids.prod(dim=-1)
    has_pixels = is_given(arguments, "pixel_values")
    if has_pixels and len(arguments["pixel_values"]) == int(sizes.sum()):
        # Patches of all images stand one behind the other: an image's mark is repeated for each of its own.
        pixels: Tensor = arguments["pixel_values"]
        is_of_new = is_new.repeat_interleave(sizes)
        arguments["pixel_values"] = pixels[is_of_new.to(pixels.device)]
    arguments["image_grid_thw"] = grids[is_new]
    if not bool(is_new.any()):
        # A forward is not given empty tensors: it would run the vision tower over nothing.
        del arguments["image_grid_thw"]
        arguments.pop("pixel_values", None)


def use_tokenizer(model: Any, settings: Settings, arguments: dict[str, Any]) -> None:
    """Heals the prompts' last tokens and makes a criterion of stop strings: beyond here no tokenizer is handed on.

    `checks.check_settings` has seen that there is one where one of the two is asked for, and ids to be healed.
    """
    tokenizer = arguments.pop("tokenizer", None)
    stop_strings = settings["stop_strings"]
    # Explicit values outweigh the given config and the model's own.
    if settings["token_healing"]:
        name = "inputs" if is_given(arguments, "inputs") else "input_ids"
        ids = arguments[name]
        healed = model.heal_tokens(ids, tokenizer)
        # Plain `generate` infers the mask before it heals, so that a token that begins texts is seen although it
        # becomes padding. Over ids that become longer it fails; they have the mask that is inferred from themselves.
        is_longer = healed.shape[1] > ids.shape[1]
        if not is_longer and not is_given(arguments, "attention_mask"):
            arguments["attention_mask"] = _inferred_mask(settings, ids)
        arguments[name] = healed
        _outweigh(model, arguments, "token_healing", False)
    if stop_strings is not None:
        criteria = [*(arguments.get("stopping_criteria") or [])]
        kinds = {type(criterion) for criterion in criteria}
        # As for plain `generate`, a criterion of the caller's takes the place of one of the same type.
        if StopStringCriteria not in kinds:
            criteria.append(StopStringCriteria(tokenizer, stop_strings))
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
        _outweigh(model, arguments, "stop_strings", None)


def _inferred_mask(settings: Settings, ids: Tensor) -> Tensor:
    """Returns the mask `[B, T]` that `generate` infers from ids `[B, T]`: pad tokens that end no text are padding."""
    pad = settings["pad_token_id"]
    ends = settings["eos_token_id"]
    if pad is None:
        return torch.ones_like(ids)
    ends_text = ends is not None and bool((torch.as_tensor(ends, device="cpu") == int(pad)).any())
    if ends_text:
        return torch.ones_like(ids)
    return (ids != int(pad)).long()


def _outweigh(model: Any, arguments: dict[str, Any], name: str, value: Any) -> None:
    """Sets an option, which counts whatever the given config and the model's own say.

    It goes into a copy of a given config, because arguments beside one are deprecated.
    """
    has_config = is_given(arguments, "generation_config") and name not in arguments
    # In a config, `None` is filled in by the model's own value.
    stays = value is not None or getattr(model.generation_config, name, None) is None
    if not has_config or not stays:
        arguments[name] = value
        return
    config = copy.deepcopy(arguments["generation_config"])
    setattr(config, name, value)
    arguments["generation_config"] = config
