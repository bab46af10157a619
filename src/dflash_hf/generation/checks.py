"""What a call with a draft cannot honour, refused before any forward runs: settings, prompts, images, caches.

Every refusal is a `ValueError` that names the setting, field or input. Whether DFlash can drive a target at all, and
whether a draft fits it, is in `target_model.support`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dflash_hf.cache.ragged import layer_window
from dflash_hf.cache_name import CACHE_NAME, given_cache
from dflash_hf.errors import require
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target

_DEFAULTS = GenerationConfig._get_default_generation_params()
# Exact types: a subclass may store anything.
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer)


def check_stock(draft: DFlashDraftModel) -> None:
    """Refuses drafts that Transformers' own DFlash path would run wrongly, with hardly a token accepted."""
    names = ("own_embed_tokens", "own_lm_head", "sample_from_anchor", "window_from_anchor", "tap_after_deepstack")
    wrong = ", ".join(name for name in names if getattr(draft.config, name))
    what = "a draft that Transformers' speculation_type='dflash' can run"
    require(not wrong, what, f"{wrong} in its config", "leave speculation_type out")


def check_static_stock() -> None:
    """Refuses, by `ValueError`, static caches in a Transformers whose own assisted decoding does not take them."""
    require(
        getattr(StaticLayer, "is_croppable", False),
        "a Transformers whose own assisted decoding takes static caches, as 5.24 does",
        transformers.__version__,
        "install a newer one, or leave the static cache out",
    )


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
        if name in self.arguments:
            return self.arguments[name]
        for config in (self.arguments.get("generation_config"), self.model.generation_config):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return _DEFAULTS.get(name)


def check_settings(settings: Settings) -> None:
    """Refuses generation settings that drafting cannot honour."""
    beams = settings["num_beams"]
    alpha = settings["penalty_alpha"]
    guidance = settings["guidance_scale"]
    dola, lookup, cache = (
        settings[name] for name in ("dola_layers", "prompt_lookup_num_tokens", "cache_implementation")
    )
    is_contrastive = bool(alpha) and (settings["top_k"] or 0) > 1 and not settings["do_sample"]
    is_synchronized = bool(settings.arguments.get("synced_gpus"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Forwards that wait for other processes: all rows of all would have to keep step.
        is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(settings.model)
        is_synchronized |= torch.distributed.get_world_size() > 1 and is_sharded
    has_attentions = bool(settings["output_attentions"])
    refused: list[tuple[bool, str, object, str]] = [
        ((beams or 1) > 1, "num_beams=1", beams, "beam search has no single text to draft for"),
        (is_contrastive, "no penalty_alpha", alpha, "contrastive search re-ranks candidates"),
        (bool(dola), "no dola_layers", dola, "DoLa changes the target's logits"),
        (settings["use_cache"] is False, "use_cache=True", False, "drafting needs the caches"),
        (guidance not in (None, 1), "no guidance_scale", guidance, "guidance runs a second forward per token"),
        (bool(lookup), "no prompt_lookup_num_tokens", lookup, "choose one way of drafting"),
        (cache == "paged", "no paged cache", cache, "use plain generate"),
        (is_synchronized, "no ZeRO-3, FSDP or synced_gpus", True, "rows advance at their own pace"),
        (has_attentions, "no output_attentions", True, "the attention over a ragged cache returns no weights"),
    ]
    for bad, expected, got, reason in refused:
        require(not bad, f"{expected} with a DFlash draft", got, f"{reason}; or drop the draft")


def check_inputs(target: Target, settings: Settings) -> None:
    """Refuses prompts that cannot be decoded, and a cache that they cannot go on from.

    That is an empty prompt or row, a mask over tokens to come or with right padding, positions that plain decoding
    counts on in another way, embeddings in chunks, and a cache that is not the target's, not the rows', or cannot be
    read and advanced exactly.
    """
    given = settings.arguments
    _check_positions(given.get("position_ids"))
    ids = given.get("input_ids") if given.get("inputs") is None else given["inputs"]
    embeds = given.get("inputs_embeds")
    name, prompt, dims = ("input_ids", ids, 2) if embeds is None else ("inputs_embeds", embeds, 3)
    if prompt is None and settings["bos_token_id"] is not None:
        return  # `generate` begins with that token
    if not isinstance(prompt, Tensor) or prompt.dim() != dims or prompt.numel() == 0:
        shape = tuple(prompt.shape) if isinstance(prompt, Tensor) else prompt
        raise ValueError(f"expected {name} [rows, tokens, ...] with at least one token, got {shape}; give a prompt")
    mask = given.get("attention_mask")
    cache = given_cache(given)
    columns = prompt.shape[1]
    if embeds is not None:
        _check_chunks(settings["prefill_chunk_size"], ids, columns, cache)
    if mask is not None and mask.dim() == 2:
        if not (isinstance(cache, Cache) and int(cache.get_seq_length())):
            what = f"ones behind the {columns} columns of the prompt in attention_mask"
            do = "they hide tokens to come"
            require(bool(mask[:, columns:].all()), what, "zeros", f"{do}, leave these columns out")
            mask = mask[:, :columns]
        if not bool(mask.all()):
            is_empty = bool((mask.sum(dim=-1) == 0).any())
            got = "an attention_mask row of zeros"
            require(not is_empty, "a real token in every row", got, "fill it")
            is_left = bool(mask[:, -1].all())
            got = "an attention_mask with a zero in its last column"
            require(is_left, "left-padded prompts", got, "tokenize with padding_side='left'")
    if cache is not None:
        _check_cache(cache, target)
        _check_columns(cache, prompt.shape[0] * (settings["num_return_sequences"] or 1), columns, mask)


def _check_positions(position_ids: object) -> None:
    """Refuses positions of a dtype in which plain `generate` counts on otherwise: a small one, or fractions."""
    if position_ids is None:
        return
    dtype = getattr(position_ids, "dtype", type(position_ids).__name__)
    counts_alike = dtype in (torch.int64, torch.int32)
    do = "plain generate counts on in their dtype, pass position_ids.long()"
    require(counts_alike, "position_ids of dtype int64 or int32", dtype, do)


def _check_chunks(chunk_size: int | None, ids: Tensor | None, columns: int, cache: object) -> None:
    """Refuses embeddings that would be cut into chunks: plain `generate` cuts the ids and positions beside them only.

    It fails then, or runs the whole prompt once per chunk. `columns` are the embeddings'.
    """
    if chunk_size is None:
        return
    num_ids = 0 if ids is None else ids.shape[1]
    is_cached = isinstance(cache, Cache) and int(cache.get_seq_length()) > 0
    is_one_chunk = num_ids == columns and columns <= chunk_size and not is_cached
    what = f"no prefill_chunk_size beside inputs_embeds of {columns} columns"
    require(is_one_chunk, what, chunk_size, "embeddings cannot be cut into chunks, leave it out")


def _check_cache(cache: object, target: Target) -> None:
    """Refuses a cache or layer of a kind that cannot be read and advanced exactly, or that is of another target."""
    offloading = getattr(cache, "offloading", None)
    if not isinstance(cache, Cache) or type(cache).update is not Cache.update or offloading is not False:
        kind = "an offloaded cache" if offloading else type(cache).__name__
        raise ValueError(
            f"expected a DynamicCache or StaticCache on the target's device as {CACHE_NAME}, got {kind}; use one"
        )
    references = DynamicCache(config=target.config).layers
    num = len(cache.layers)
    is_hybrid = any(isinstance(layer, LinearAttentionLayer) for layer in references)
    # A cache that was made without a config makes a layer of attention for whatever asks.
    fits = num == len(references) or (not num and not is_hybrid and cache.layer_class_to_replicate is DynamicLayer)
    make = "make it with DynamicCache(config=model.config)"
    require(fits, f"{CACHE_NAME} with {len(references)} layers (the target's)", num, make)
    for index, (layer, reference) in enumerate(zip(cache.layers, references, strict=False)):
        kind = type(layer).__name__
        wanted = type(reference).__name__
        what = f"a dynamic or static layer {index} in {CACHE_NAME}"
        require(type(layer) in _LAYERS, what, kind, "use a DynamicCache or drop assistant_model")
        recurrent = isinstance(layer, LinearAttentionLayer), isinstance(reference, LinearAttentionLayer)
        require(recurrent[0] == recurrent[1], f"a {wanted} in layer {index} of {CACHE_NAME}", kind, make)
        if isinstance(layer, LinearAttentionLayer):
            what = f"layer {index} of {CACHE_NAME} to keep no more than it needs"
            require(not layer.record_past, what, "one recording its past", "start from a new one")
            continue
        kept = layer_window(layer)
        window = layer_window(reference)
        # A static layer that is shorter than the window is a matter of room: see `UserCache.begin`.
        shorter = isinstance(layer, StaticLayer) and window is not None and kept is not None and kept < window
        what = f"layer {index} of {CACHE_NAME} to keep {window or 'all'} tokens (the target's window)"
        require(kept in (None, window) or shorter, what, kept, make)


def _check_columns(cache: Cache, rows: int, num_ids: int, mask: Tensor | None) -> None:
    """Refuses a cache whose layers do not all stand at one column, or whose rows or columns are not the call's.

    The call's rows include `num_return_sequences`; `num_ids` are the columns of `input_ids`.
    """
    past = int(cache.get_seq_length())
    layers = list[Any](cache.layers)
    attention = [layer for layer in layers if not isinstance(layer, LinearAttentionLayer)]
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    lengths = {int(layer.get_seq_length()) for layer in attention}
    interrupted = "it comes from a forward that was interrupted, start from a new one"
    require(len(lengths) < 2, f"{CACHE_NAME} with as many columns in every layer", sorted(lengths), interrupted)
    states = [all(layer.has_previous_state.values()) for layer in recurrent]
    require(set(states) <= {bool(past)}, f"{CACHE_NAME} with a state wherever there are keys", states, interrupted)
    stored = [layer.keys for layer in attention]
    stored += [state for layer in recurrent for state in layer.conv_states.values()]
    own = {tensor.shape[0] for tensor in stored if isinstance(tensor, Tensor) and tensor.dim() > 1}
    wanted = f"{CACHE_NAME} with {rows} rows (input_ids times num_return_sequences)"
    require(own <= {rows}, wanted, sorted(own), "call cache.batch_repeat_interleave, or start from a new one")
    num_columns = num_ids if mask is None or mask.shape[1] == num_ids else past + num_ids
    if past and (num_columns <= past or (mask is not None and mask.shape[1] != num_columns)):
        got = f"{num_ids} columns with {'no' if mask is None else 'an'} attention_mask"
        got += "" if mask is None else f" of {mask.shape[1]}"
        what = f"input_ids of the whole conversation (more than the {past} columns of {CACHE_NAME}), or the new "
        raise ValueError(f"expected {what}tokens with an attention_mask over all, got {got}; pass one of the two")


def check_images(target: Target, input_ids: Tensor, arguments: dict[str, Any]) -> None:
    """Refuses images that do not fit the tokens of prompts `[B, T]` without anything cached.

    Before anything looks at them. Only where an image is as many tokens as `image_grid_thw` says, in Qwen's family,
    and without videos (GLM spells those with tokens of images); others check in their own forward. Tokens of images
    without any are text like any other, as in plain `generate`.
    """
    model: Any = target.model
    grids = arguments.get("image_grid_thw")
    pixels = arguments.get("pixel_values")
    if grids is None or arguments.get("video_grid_thw") is not None:
        return
    rule = getattr(getattr(model, "model", None), "get_rope_index", None)
    if rule is None or "video_grid_thw" not in inspect.signature(rule).parameters:  # HunYuan: more tokens
        return
    token = model.config.image_token_id
    num_patches = int(grids.prod(dim=-1).sum())
    num_tokens = int((input_ids == token).sum())
    wanted = num_patches // model.config.vision_config.spatial_merge_size**2
    what = f"{wanted} image tokens ({token}) for the {len(grids)} images of image_grid_thw"
    require(num_tokens == wanted, what, num_tokens, "pass what the processor made of text and images together")
    patches = None if pixels is None else pixels.shape[0]
    what = f"pixel_values of {num_patches} patches, as image_grid_thw says"
    require(patches == num_patches, what, patches, "pass what the processor made of the images")


def keep_new_images(target: Target, input_ids: Tensor, past: int, arguments: dict[str, Any]) -> None:
    """Computes the positions of a conversation `[B, T]` and drops the images that its cache of `past` columns has.

    Under M-RoPE a token's positions follow from the sizes of all images before it, and the prefill takes only those
    whose tokens are new. Transformers takes both from one `image_grid_thw`, which can be right for one of the two.

    The arguments of `generate` are changed in place: `position_ids` is added; `image_grid_thw` `[N, 3]`, patches in
    time, height and width of all images, and `pixel_values` `[patches, ...]`, of all or the new ones, lose those that
    are in the cache. Raises `ValueError` if the numbers of images, sizes and patches do not fit, there are videos, or
    a mask of the whole conversation is missing.
    """
    types = arguments.get("mm_token_type_ids")
    grids = arguments.get("image_grid_thw")
    if types is None or grids is None:
        return
    mask = arguments.get("attention_mask")
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (input_ids, types, mask)]
    if len(set(shapes)) > 1 or input_ids.shape[1] <= past:
        raise ValueError(
            f"expected input_ids, mm_token_type_ids and attention_mask of the whole conversation, its {past} cached "
            f"columns too, beside image_grid_thw, got shapes {shapes}; pass what the processor made of all messages"
        )
    highest = int(types.max())
    require(highest < 2, "no videos in a conversation with a cache", highest, f"leave out {CACHE_NAME}")
    is_image = types.to(grids.device) == 1
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    is_new = (torch.arange(types.shape[1], device=grids.device) >= past).expand_as(starts)[starts]
    what = f"image_grid_thw of all {len(is_new)} images of the conversation (positions follow from them)"
    require(len(grids) == len(is_new), what, len(grids), "pixel_values may be those of the new images")
    model: Any = target.model
    kwargs = {"attention_mask": mask, "mm_token_type_ids": types, "image_grid_thw": grids}
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = model._prepare_position_ids_for_generation(input_ids, kwargs)
    pixels = arguments.get("pixel_values")
    sizes = grids.prod(dim=-1)
    num_all = int(sizes.sum())
    num_new = int(sizes[is_new].sum())
    if pixels is not None:
        num = pixels.shape[0]
        what = f"pixel_values of {num_all} patches (all images) or {num_new} (the new ones)"
        require(num in (num_all, num_new), what, num, "pass what the processor made of the conversation")
        pixels = pixels[is_new.repeat_interleave(sizes).to(pixels.device)] if num == num_all else pixels
    if num_new:
        arguments |= {"image_grid_thw": grids[is_new], "pixel_values": pixels}
    else:
        del arguments["image_grid_thw"]
        arguments.pop("pixel_values", None)
