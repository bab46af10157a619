"""This module checks the images of a call with a draft against its tokens, before any forward runs.

The positions and the prefill of a conversation follow from its images. To refuse means to raise a `ValueError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dflash_hf.block.cache_name import CACHE_NAME, given_cache
from dflash_hf.errors import require
from dflash_hf.generation.arguments import (
    Settings,
    are_new,
    cached_columns,
    given_ids,
    is_given,
    shape_of,
)
from dflash_hf.target_model.parts import Target


def check_images(target: Target, settings: Settings) -> None:
    """Refuses images that do not fit the tokens of a prompt or conversation, before the images are used."""
    arguments = settings.arguments
    ids = given_ids(arguments)
    past = cached_columns(given_cache(arguments))
    if not isinstance(ids, Tensor):
        return
    if not past and not is_given(arguments, "inputs_embeds"):
        _check_images_of_prompt(target, ids, arguments)
    if past and is_given(arguments, "mm_token_type_ids"):
        _check_images_of_conversation(ids, past, settings)


def _check_images_of_prompt(target: Target, ids: Tensor, arguments: Mapping[str, Any]) -> None:
    """Refuses images that do not fit the tokens of prompts `[B, T]`, in a call without cached tokens.

    This is checked only in Qwen's family, where `image_grid_thw` gives the number of an image's tokens, and without
    videos (GLM uses image tokens for videos). Other targets check in their own forward. Image tokens without any image
    are treated as text, as in plain `generate`.
    """
    model: Any = target.model
    grids = arguments["image_grid_thw"]
    inner: Any = getattr(model, "model", None)
    if not hasattr(inner, "get_rope_index") or is_given(arguments, "video_grid_thw"):
        return
    # HunYuan has such a method too, but without videos and with more tokens per image.
    if "video_grid_thw" not in inspect.signature(inner.get_rope_index).parameters:
        return
    token = model.config.image_token_id
    num_patches = int(grids.prod(dim=-1).sum())
    num_tokens = int((ids == token).sum())
    # The vision tower merges squares of patches into one token.
    patches_per_token = model.config.vision_config.spatial_merge_size**2
    wanted = num_patches // patches_per_token
    what = f"{wanted} image tokens ({token}) for the {len(grids)} images of image_grid_thw"
    require(
        num_tokens == wanted,
        what,
        num_tokens,
        "pass what the processor made of text and images together",
    )
    # Newer Transformers also take images that were encoded before, in the place of their patches.
    encoded: Mapping[str, Any] = arguments.get("mm_encoder_outputs") or {}
    if encoded.get("image") is not None:
        return
    patches = len(arguments["pixel_values"]) if is_given(arguments, "pixel_values") else None
    what = f"pixel_values of {num_patches} patches, as image_grid_thw says"
    require(patches == num_patches, what, patches, "pass what the processor made of the images")


def _check_images_of_conversation(ids: Tensor, past: int, settings: Settings) -> None:
    """Refuses images from which the positions of a conversation `[B, T]` with `past` cached columns do not follow.

    Under M-RoPE, positions need the sizes of all images. The prefill needs the patches of the new images. New images
    are refused together with `num_return_sequences`.
    """
    arguments = settings.arguments
    types = arguments["mm_token_type_ids"]
    grids = arguments["image_grid_thw"]
    # Transformers computes the positions from these three tensors, token by token.
    shapes = [shape_of(tensor) for tensor in (ids, types, arguments.get("attention_mask"))]
    if len(set(shapes)) > 1 or ids.shape[1] <= past:
        raise ValueError(
            f"expected input_ids, mm_token_type_ids and attention_mask of the whole conversation, its {past} cached "
            f"columns too, beside image_grid_thw, got shapes {shapes}; pass what the processor made of all messages"
        )
    # Tokens of videos have type 2.
    highest = int(types.max())
    require(
        highest < 2, "no videos in a conversation with a cache", highest, f"leave out {CACHE_NAME}"
    )
    is_new = are_new(types.to(grids.device), past)
    what = f"image_grid_thw of all {len(is_new)} images of the conversation (positions follow from them)"
    require(
        len(grids) == len(is_new), what, len(grids), "pixel_values may be those of the new images"
    )
    # Transformers repeats images by the image tokens of whole rows. If only some of the images are new, rows would get
    # images of other rows.
    num_sequences = settings["num_return_sequences"] or 1
    are_some_new = bool(is_new.any()) and not bool(is_new.all())
    is_repeated = num_sequences > 1 and are_some_new
    what = f"no num_return_sequences beside both cached and new images in {CACHE_NAME}"
    do = f"repeat the rows before the processor's call, or leave out {CACHE_NAME}"
    require(not is_repeated, what, num_sequences, do)
    if is_given(arguments, "pixel_values"):
        sizes = grids.prod(dim=-1)
        num_all = int(sizes.sum())
        num_new = int(sizes[is_new].sum())
        num = len(arguments["pixel_values"])
        what = f"pixel_values of {num_all} patches (all images) or {num_new} (the new ones)"
        require(
            num in (num_all, num_new), what, num, "pass what the processor made of the conversation"
        )
