"""This module reads the arguments of a call of `generate`, and changes them before Transformers prepares the call."""

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
    """Looks up the generation settings of a call by name.

    The value comes from the first of these places that has one: the arguments of `generate`, the generation config
    among the arguments, the target's generation config, Transformers' defaults. This is the order of
    `GenerationMixin._prepare_generation_config`, which copies both configs for it.
    """

    model: Any
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a setting."""
        # An argument counts even if it is `None`.
        if name in self.arguments:
            return self.arguments[name]
        given = self.arguments.get("generation_config")
        for config in (given, self.model.generation_config):
            # In a config, `None` means that the setting was not made.
            value = getattr(config, name, None)
            if value is not None:
                return value
        return _DEFAULTS.get(name)


def is_given(arguments: Mapping[str, Any], name: str) -> bool:
    """Returns True if an argument of `generate` was given and is not `None`."""
    return arguments.get(name) is not None


def given_ids(arguments: Mapping[str, Any]) -> Any:
    """Returns the ids among the arguments of `generate`, or `None`. Their name is `inputs` or `input_ids`."""
    if is_given(arguments, "inputs"):
        return arguments["inputs"]
    return arguments.get("input_ids")


def shape_of(value: object) -> object:
    """Returns the shape of a tensor, and any other value unchanged."""
    return tuple(value.shape) if isinstance(value, Tensor) else value


def cached_columns(cache: object) -> int:
    """Returns the number of columns in a cache, or 0 for an object that is not a cache."""
    # A later check refuses such an object, with its type in the message.
    if not isinstance(cache, Cache):
        return 0
    return int(cache.get_seq_length())


def are_new(types: Tensor, past: int) -> Tensor:
    """Returns which images of a conversation begin after its `past` cached columns: bool `[N]`, in order.

    `types` `[B, T]` is 1 for tokens of images.
    """
    is_image = types == 1
    # An image begins at each image token that follows a token of another type.
    token_before = torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    starts = is_image & ~token_before
    columns = torch.arange(types.shape[1], device=types.device)
    is_behind = columns >= past
    # The images are in the order of the rows, as a processor lists the images of a batch.
    return is_behind.expand_as(starts)[starts]


def keep_new_images(target: Target, arguments: dict[str, Any]) -> None:
    """Computes the positions of a conversation, and drops the images whose tokens are in its cache.

    Under M-RoPE a token's positions follow from the sizes of all images before it. The prefill needs only the images
    whose tokens are new. Transformers uses one `image_grid_thw` for both, which can be right for one of them only.

    Args:
        target (`Target`): The target.
        arguments (`dict[str, Any]`): The arguments of `generate`, which `image_checks.check_images` has checked. They
            are changed in place. `position_ids` is added. Images in the cache are removed from `image_grid_thw` `[N,
            3]`, which holds the patches in time, height and width of all images. They are also removed from
            `pixel_values` `[patches, ...]`, which holds the patches of all images or of the new ones.
    """
    ids = given_ids(arguments)
    past = cached_columns(given_cache(arguments))
    goes_on = past > 0 and isinstance(ids, Tensor)
    # In a first turn, the prefill needs all images. Other families of targets have no token types.
    if not goes_on or not is_given(arguments, "mm_token_type_ids"):
        return
    model: Any = target.model
    # The positions follow from all images, so they are computed before images are dropped.
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
        # The patches of all images are in one tensor, so the mark of each image is repeated for each of its patches.
        pixels: Tensor = arguments["pixel_values"]
        is_of_new = is_new.repeat_interleave(sizes)
        arguments["pixel_values"] = pixels[is_of_new.to(pixels.device)]
    arguments["image_grid_thw"] = grids[is_new]
    if not bool(is_new.any()):
        # Empty tensors are removed, because the forward would run the vision tower over them.
        del arguments["image_grid_thw"]
        arguments.pop("pixel_values", None)


def use_tokenizer(model: Any, settings: Settings, arguments: dict[str, Any]) -> None:
    """Heals the prompts' last tokens, turns stop strings into a criterion, and removes the tokenizer from the call.

    `checks.check_settings` has checked that a tokenizer is given if one of the two is asked for, and that token
    healing gets ids.
    """
    tokenizer = arguments.pop("tokenizer", None)
    stop_strings = settings["stop_strings"]
    # Both settings are switched off afterwards, so that Transformers does not apply them again without a tokenizer.
    if settings["token_healing"]:
        name = "inputs" if is_given(arguments, "inputs") else "input_ids"
        ids = arguments[name]
        healed = model.heal_tokens(ids, tokenizer)
        # Plain `generate` infers the mask before it heals, so that a token that begins a text is attended to although
        # healing makes it padding. If healing makes the ids longer, plain `generate` fails. Here such ids get the mask
        # that is inferred from the healed ids.
        is_longer = healed.shape[1] > ids.shape[1]
        if not is_longer and not is_given(arguments, "attention_mask"):
            arguments["attention_mask"] = _inferred_mask(settings, ids)
        arguments[name] = healed
        _outweigh(model, arguments, "token_healing", False)
    if stop_strings is not None:
        criteria = [*(arguments.get("stopping_criteria") or [])]
        kinds = {type(criterion) for criterion in criteria}
        # As in plain `generate`, a criterion of the caller replaces one of the same type.
        if StopStringCriteria not in kinds:
            criteria.append(StopStringCriteria(tokenizer, stop_strings))
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
        _outweigh(model, arguments, "stop_strings", None)


def _inferred_mask(settings: Settings, ids: Tensor) -> Tensor:
    """Returns the mask `[B, T]` that `generate` infers from ids `[B, T]`.

    Pad tokens are padding, unless the pad token is also an end token.
    """
    pad = settings["pad_token_id"]
    ends = settings["eos_token_id"]
    if pad is None:
        return torch.ones_like(ids)
    ends_text = ends is not None and bool((torch.as_tensor(ends, device="cpu") == int(pad)).any())
    if ends_text:
        return torch.ones_like(ids)
    return (ids != int(pad)).long()


def _outweigh(model: Any, arguments: dict[str, Any], name: str, value: Any) -> None:
    """Sets an option of a call, whatever the given config and the model's own config say.

    If a config was given, the option is set in a copy of it, because arguments beside a config are deprecated.
    """
    has_config = is_given(arguments, "generation_config") and name not in arguments
    # In a config, `None` does not overrule the model's own value.
    stays = value is not None or getattr(model.generation_config, name, None) is None
    if not has_config or not stays:
        arguments[name] = value
        return
    config = copy.deepcopy(arguments["generation_config"])
    setattr(config, name, value)
    arguments["generation_config"] = config
