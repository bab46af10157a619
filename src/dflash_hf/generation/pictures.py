"""Pictures in the prompt: that they fit its tokens, and that of those in a cache none is looked at again.

Under M-RoPE a token's positions follow from the sizes of all pictures before it, and the prefill takes only those
whose tokens are new. Transformers takes both from one `image_grid_thw`, which can be right for one of the two only;
here they are taken apart before it is called.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from dflash_hf.target import Target


def check_pictures(target: Target, input_ids: Tensor, arguments: dict[str, Any]) -> None:
    """Refuses pictures that do not fit the prompts' tokens, before anything looks at them.

    Only where a picture is as many tokens as `image_grid_thw` says, in Qwen's family, and without videos (GLM spells
    those with tokens of pictures); others check in their own forward. Tokens of pictures without any are text like any
    other, as in plain `generate`.

    Args:
        target (`Target`): The target.
        input_ids (`torch.Tensor` of shape `[B, T]`): Prompts without anything cached.
        arguments (`dict`): Of `generate`.

    Raises:
        ValueError: If the numbers of tokens, sizes and patches do not fit.
    """
    model: Any = target.model
    grids, pixels = arguments.get("image_grid_thw"), arguments.get("pixel_values")
    rule = getattr(getattr(model, "model", None), "get_rope_index", None)
    if rule is None or "video_grid_thw" not in inspect.signature(rule).parameters:  # HunYuan: more tokens
        return
    if grids is None or arguments.get("video_grid_thw") is not None:
        return
    token = model.config.image_token_id
    num_patches, num_tokens = int(grids.prod(dim=-1).sum()), int((input_ids == token).sum())
    wanted = num_patches // model.config.vision_config.spatial_merge_size**2
    if num_tokens != wanted:
        raise ValueError(
            f"expected {wanted} image tokens ({token}) for the {len(grids)} images of image_grid_thw, got "
            f"{num_tokens} in input_ids; pass what the processor made of text and images together"
        )
    if pixels is None or pixels.shape[0] != num_patches:
        raise ValueError(
            f"expected pixel_values of {num_patches} patches, as image_grid_thw says, got "
            f"{None if pixels is None else pixels.shape[0]}; pass what the processor made of the images"
        )


def keep_new_pictures(target: Target, input_ids: Tensor, past: int, arguments: dict[str, Any]) -> None:
    """Computes the positions of a conversation and drops the pictures that its cache has already.

    Does nothing unless there is a cache and sizes of pictures are given.

    Args:
        target (`Target`): The target.
        input_ids (`torch.Tensor` of shape `[B, T]`): The whole conversation.
        past (`int`): Columns of it in the cache.
        arguments (`dict`): Of `generate`, changed in place: `position_ids` is added; `image_grid_thw` `[N, 3]`,
            patches in time, height and width of all pictures, and `pixel_values` `[patches, ...]`, of all or the new
            ones, lose those that are in the cache.

    Raises:
        ValueError: If the numbers of pictures, sizes and patches do not fit, there are videos, or a mask of the whole
            conversation is missing.
    """
    types, grids = arguments.get("mm_token_type_ids"), arguments.get("image_grid_thw")
    if not past or types is None or grids is None:
        return
    mask = arguments.get("attention_mask")
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (input_ids, types, mask)]
    if len(set(shapes)) > 1 or input_ids.shape[1] <= past:
        raise ValueError(
            f"expected input_ids, mm_token_type_ids and attention_mask of the whole conversation, its {past} cached "
            f"columns too, beside image_grid_thw, got shapes {shapes}; pass what the processor made of all messages"
        )
    if bool((types > 1).any()):
        raise ValueError("expected no videos in a conversation with a cache, got some; leave out past_key_values")
    is_image = types.to(grids.device) == 1
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    is_new = (torch.arange(types.shape[1], device=grids.device) >= past).expand_as(starts)[starts]
    if len(grids) != len(is_new):
        raise ValueError(
            f"expected image_grid_thw of all {len(is_new)} images of the conversation (positions follow from them), "
            f"got {len(grids)}; pass the whole conversation's, pixel_values may be those of the new images"
        )
    model: Any = target.model
    kwargs = {"attention_mask": mask, "mm_token_type_ids": types, "image_grid_thw": grids}
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = model._prepare_position_ids_for_generation(input_ids, kwargs)
    pixels = arguments.get("pixel_values")
    sizes = grids.prod(dim=-1)
    num_all, num_new = int(sizes.sum()), int(sizes[is_new].sum())
    if pixels is not None and pixels.shape[0] not in (num_all, num_new):
        raise ValueError(
            f"expected pixel_values of {num_all} patches (all images) or {num_new} (the new ones), got "
            f"{pixels.shape[0]}; pass what the processor made of the conversation"
        )
    if pixels is not None and pixels.shape[0] == num_all:
        pixels = pixels[is_new.repeat_interleave(sizes).to(pixels.device)]
    if num_new:
        arguments["image_grid_thw"], arguments["pixel_values"] = grids[is_new], pixels
    else:
        arguments.pop("image_grid_thw")
        arguments.pop("pixel_values", None)


__all__ = ["check_pictures", "keep_new_pictures"]
