"""This module checks the arguments of a call with a draft and the draft's options, before any forward runs.

To refuse something means to raise a `ValueError` that names the setting, field or input. The functions are in the
order in which a call uses them. `image_checks.py` checks images. `target_model/support.py` checks targets and pairs.
`generation_config.py` checks the values of options. Some errors show only while a call runs, and are raised there:
results of the user's rules (`iterate.py`), missing memory, and positions or columns that have run out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dflash_hf.block.cache_name import CACHE_NAME, given_cache
from dflash_hf.cache.prefilled import layer_window
from dflash_hf.devices import Inventory, execution_device, execution_devices
from dflash_hf.errors import require
from dflash_hf.generation import float8
from dflash_hf.generation.accept import may_compare_rows
from dflash_hf.generation.arguments import Settings, cached_columns, given_ids, is_given, shape_of
from dflash_hf.generation.cuda_graph import counted_experts
from dflash_hf.generation.request import Request
from dflash_hf.generation_config import DFlashGenerationConfig
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.target_model.parts import Target

# The types must be exact, because a subclass may store anything.
_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
# The settings of `generate` that are refused in every call with a draft, and the reasons.
REFUSED_SETTINGS = {
    "dola_layers": "DoLa changes the target's logits",
    "constraints": "they need beams",
    "force_words_ids": "they need beams",
    "prompt_lookup_num_tokens": "choose one way of drafting",
    "use_mtp": "choose one way of drafting",
    "assistant_early_exit": "choose one way of drafting",
    "assistant_ensemble_weight": "the text would be the draft's in part",
    "output_attentions": "the attention over a ragged cache returns no weights",
}


# ---- Transformers' own path for such drafts


def check_stock(draft: DFlashDraftModel) -> None:
    """Refuses drafts that Transformers' own DFlash path would run wrongly, so that it would accept few tokens."""
    # Transformers' path does not know these fields.
    names = (
        "own_embed_tokens",
        "own_lm_head",
        "sample_from_anchor",
        "window_from_anchor",
        "tap_after_deepstack",
        "markov_rank",
    )
    wrong = ", ".join(name for name in names if getattr(draft.config, name))
    what = "a draft that Transformers' speculation_type='dflash' can run"
    require(not wrong, what, f"{wrong} in its config", "leave speculation_type out")


def check_static_stock() -> None:
    """Refuses static caches if the assisted decoding of the installed Transformers does not support them."""
    require(
        getattr(StaticLayer, "is_croppable", False),
        "a Transformers whose own assisted decoding takes static caches, as 5.24 does",
        transformers.__version__,
        "install a newer one, or leave the static cache out",
    )


# ---- the draft and its options


def check_draft(target: Target, draft: DFlashDraftModel, draft_parts: Inventory) -> None:
    """Refuses drafts on several devices, and options that the draft, the target or the device does not support."""
    options: Any = draft.generation_config
    require(
        isinstance(options, DFlashGenerationConfig),
        "a DFlashGenerationConfig as draft.generation_config",
        type(options).__name__,
        "assign dflash_hf.DFlashGenerationConfig(...)",
    )
    # All buffers of the draft are on one device.
    devices = sorted(map(str, execution_devices(draft_parts)))
    require(
        len(devices) < 2, "a draft on one device", devices, 'load it with device_map={"": device}'
    )
    # The options are checked again, because they are plain attributes that may have been set later.
    options.validate_options(draft.config.block_size, draft.config.sample_from_anchor)
    # A recurrent state follows one sequence of tokens, and a tree would need a state per branch.
    follows_one_path = bool(target.recurrences)
    require(
        not (options.num_tree_nodes and follows_one_path),
        "a target of attention layers alone with num_tree_nodes",
        type(target.model).__name__,
        "recurrent states follow one path, leave num_tree_nodes out",
    )
    if options.draft_dtype:
        check_float8(draft)
    check_capturable(target, draft)


def check_float8(draft: DFlashDraftModel) -> None:
    """Refuses drafting in FP8 if the draft's device does not support FP8 matrix products."""
    dtype = draft.generation_config.draft_dtype
    # This is checked here, with the other options, because the copy is made after Transformers has prepared the call.
    capability = ".".join(map(str, float8.MIN_CAPABILITY))
    what = f"a draft on CUDA of compute capability {capability} or more under draft_dtype={dtype!r}"
    lacking = float8.why_not(execution_device(draft))
    require(not lacking, what, lacking, "leave draft_dtype out")


def check_capturable(target: Target, draft: DFlashDraftModel) -> None:
    """Refuses `engine="cuda_graph"` if no step can be captured and one other setting would help.

    This is so if the target is not on CUDA, or if torch counts the tokens of its experts on the host.
    """
    # Under "auto", the steps run eagerly in these cases, and the log says why.
    is_asked_for = draft.generation_config.engine == "cuda_graph"
    if not is_asked_for:
        return
    device = target.device
    what = "a target on CUDA under engine='cuda_graph'"
    require(device.type == "cuda", what, str(device), "leave engine at 'auto'")
    action = "call target.set_experts_implementation('batched_mm'), or leave engine at 'auto'"
    counted = counted_experts(target)  # needs a target on CUDA
    require(not counted, "experts that need no host under engine='cuda_graph'", counted, action)


# ---- settings of `generate`


def check_settings(settings: Settings) -> None:
    """Refuses generation settings that a call with a draft cannot honour, or that need a missing argument."""
    beams = settings["num_beams"]
    alpha = settings["penalty_alpha"]
    guidance = settings["guidance_scale"]
    cache = settings["cache_implementation"]
    other = settings.arguments.get("custom_generate")
    # Transformers chooses contrastive search by these three settings.
    is_contrastive = bool(alpha) and (settings["top_k"] or 0) > 1 and not settings["do_sample"]
    is_synchronized = _is_synchronized(settings)
    # Each entry says whether the setting is refused, what is expected, what was given, and the reason.
    refused: list[tuple[bool, str, object, str]] = [
        (other is not None, "no custom_generate", other, "choose one way of decoding"),
        ((beams or 1) > 1, "num_beams=1", beams, "beam search has no single text to draft for"),
        (is_contrastive, "no penalty_alpha", alpha, "contrastive search re-ranks candidates"),
        (settings["use_cache"] is False, "use_cache=True", False, "drafting needs the caches"),
        (guidance not in (None, 1), "no guidance_scale", guidance, "it runs a second forward"),
        (cache == "paged", "no paged cache", cache, "use plain generate"),
        (cache == "quantized", "no quantized cache", cache, "drafting keeps exact keys"),
        (is_synchronized, "no ZeRO-3, FSDP or synced_gpus", True, "rows advance at their own pace"),
    ]
    for name, reason in REFUSED_SETTINGS.items():
        refused.append((bool(settings[name]), f"no {name}", settings[name], reason))
    for bad, expected, got, reason in refused:
        require(not bad, f"{expected} with a DFlash draft", got, f"{reason}; or drop the draft")
    _check_num_assistant_tokens(settings.arguments)
    # Transformers would refuse a missing tokenizer later, but `use_tokenizer` needs the tokenizer before that.
    has_tokenizer = is_given(settings.arguments, "tokenizer")
    has_ids = isinstance(given_ids(settings.arguments), Tensor)
    heals = bool(settings["token_healing"])
    stops_at_strings = settings["stop_strings"] is not None
    do = "pass generate(..., tokenizer=tokenizer)"
    can_heal = has_tokenizer and has_ids
    require(can_heal or not heals, "input_ids and tokenizer= with token_healing", None, do)
    require(has_tokenizer or not stops_at_strings, "tokenizer= with stop_strings", None, do)
    if heals:
        _check_healed(settings)


def _check_healed(settings: Settings) -> None:
    """Refuses processors of the prompt with token healing: in plain `generate` they read the prompt before healing."""
    penalty = settings["encoder_repetition_penalty"]
    size = settings["encoder_no_repeat_ngram_size"]
    do = "it would look at the healed prompt, leave one of the two out; or drop the draft"
    require(penalty in (None, 1), "no encoder_repetition_penalty with token_healing", penalty, do)
    require((size or 0) <= 0, "no encoder_no_repeat_ngram_size with token_healing", size, do)


def _check_num_assistant_tokens(arguments: Mapping[str, Any]) -> None:
    """Refuses a number of proposals in the call. As in Transformers, it belongs in the assistant's own config."""
    # A given config is not checked, because pipelines of older Transformers write the default into it.
    given = arguments.get("num_assistant_tokens")
    do = "set draft.generation_config.num_assistant_tokens, as for any assistant in Transformers"
    require(given is None, "no num_assistant_tokens in the call", given, do)


def _is_synchronized(settings: Settings) -> bool:
    """Returns True if forwards wait for other processes, so that the rows of all of them must stay in step."""
    if settings.arguments.get("synced_gpus"):
        return True
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    # Each forward gathers weights from all processes.
    is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(settings.model)
    return is_sharded and torch.distributed.get_world_size() > 1


# ---- inputs


def check_inputs(target: Target, settings: Settings) -> None:
    """Refuses prompts that cannot be decoded, and a cache that the call cannot continue.

    These are refused: an empty prompt or row, a mask over future tokens or with right padding, positions of a dtype
    that plain decoding continues differently, token types for a text target, embeddings in chunks, and a cache that
    belongs to another target or other rows, or that cannot be read and advanced exactly.
    """
    given = settings.arguments
    if is_given(given, "position_ids"):
        _check_position_dtype(given["position_ids"])
    # A target for images has a separate text config. It marks the tokens of images by their types, in the prefill.
    is_text = target.config is target.model.config
    has_types = is_text and is_given(given, "token_type_ids")
    require(not has_types, "no token_type_ids for a target of text", "some", "leave them out")
    has_embeds = is_given(given, "inputs_embeds")
    prompt = given["inputs_embeds"] if has_embeds else given_ids(given)
    # Without a prompt, Transformers makes one of the beginning-of-sequence token.
    begins_with_bos = prompt is None and settings["bos_token_id"] is not None
    if begins_with_bos:
        return
    # As in `generate`, embeddings are the prompt if they are given. Ids beside them are only the text so far.
    name = "inputs_embeds" if has_embeds else "input_ids"
    # A row has one number per token in ids, and one vector per token in embeddings.
    num_dims = 3 if has_embeds else 2
    is_filled = isinstance(prompt, Tensor) and prompt.dim() == num_dims and prompt.numel() > 0
    require(
        is_filled,
        f"{name} [rows, tokens, ...] with at least one token",
        shape_of(prompt),
        "give a prompt",
    )
    assert isinstance(prompt, Tensor)
    # The prompt is repeated later, but a cache must have the repeated rows already.
    rows = prompt.shape[0] * (settings["num_return_sequences"] or 1)
    columns = prompt.shape[1]
    cache = given_cache(given)
    past = cached_columns(cache)
    chunk_size = settings["prefill_chunk_size"]
    is_in_chunks = chunk_size is not None
    if has_embeds and is_in_chunks:
        _check_chunks(given_ids(given), columns, past, chunk_size)
    has_mask = is_given(given, "attention_mask")
    # A call without a mask is checked like a call with a mask of ones.
    mask = given["attention_mask"] if has_mask else torch.ones(prompt.shape[:2], device="cpu")
    # Plain `generate` fails with a mask that has a dimension for queries.
    is_plain = isinstance(mask, Tensor) and mask.dim() == 2
    what = "attention_mask [rows, tokens]"
    require(is_plain, what, shape_of(mask), "say which tokens are padding, and no more")
    _check_mask(mask, columns, past)
    if cache is not None:
        _check_cache(cache, target)
        _check_columns(cache, rows, columns, mask.shape[1])


def _check_position_dtype(position_ids: object) -> None:
    """Refuses positions of a small integer or floating dtype, because plain `generate` counts on in this dtype."""
    dtype = getattr(position_ids, "dtype", type(position_ids).__name__)
    counts_alike = dtype in (torch.int64, torch.int32)
    do = "plain generate counts on in their dtype, pass position_ids.long()"
    require(counts_alike, "position_ids of dtype int64 or int32", dtype, do)


def _check_chunks(ids: object, columns: int, past: int, chunk_size: int) -> None:
    """Refuses embeddings of `columns` columns that would be cut into chunks.

    Plain `generate` cuts only ids and positions. It then fails, or runs the whole prompt once per chunk.
    """
    has_ids = isinstance(ids, Tensor) and ids.shape[1] == columns
    is_one_chunk = has_ids and columns <= chunk_size and not past
    what = f"no prefill_chunk_size beside inputs_embeds of {columns} columns"
    require(is_one_chunk, what, chunk_size, "embeddings cannot be cut into chunks, leave it out")


def _check_mask(mask: Tensor, columns: int, past: int) -> None:
    """Refuses masks `[B, T]` with zeros after the prompt's columns, with an empty row, or with right padding."""
    if not past:
        what = f"ones behind the {columns} columns of the prompt in attention_mask"
        do = "they hide tokens to come, leave these columns out"
        require(bool(mask[:, columns:].all()), what, "zeros", do)
        mask = mask[:, :columns]
    # The most frequent mask has only ones, and needs only this one read from the device.
    if bool(mask.all()):
        return
    is_empty = bool((mask.sum(dim=-1) == 0).any())
    require(not is_empty, "a real token in every row", "an attention_mask row of zeros", "fill it")
    is_left = bool(mask[:, -1].all())
    got = "an attention_mask with a zero in its last column"
    require(is_left, "left-padded prompts", got, "tokenize with padding_side='left'")


def _check_cache(cache: object, target: Target) -> None:
    """Refuses a cache of another target, and a cache or layer that cannot be read and advanced exactly."""
    # A cache for an encoder and a decoder has no such attribute.
    offloading = getattr(cache, "offloading", "unknown")
    kind = "an offloaded cache" if offloading is True else type(cache).__name__
    # A subclass with its own `update` may store anything.
    is_plain = (
        isinstance(cache, Cache) and type(cache).update is Cache.update and offloading is False
    )
    require(
        is_plain,
        f"a DynamicCache or StaticCache on the target's device as {CACHE_NAME}",
        kind,
        "use one",
    )
    assert isinstance(cache, Cache)
    references = DynamicCache(config=target.config).layers
    num = len(cache.layers)
    is_hybrid = any(isinstance(layer, LinearAttentionLayer) for layer in references)
    # A cache that was made without a config adds layers of full attention when they are first used.
    fills_itself = not num and not is_hybrid and cache.layer_class_to_replicate is DynamicLayer
    fits = num == len(references) or fills_itself
    make = "make it with DynamicCache(config=model.config)"
    require(fits, f"{CACHE_NAME} with {len(references)} layers (the target's)", num, make)
    for index, (layer, reference) in enumerate(zip(cache.layers, references, strict=False)):
        _check_layer(layer, reference, index)


def _check_layer(layer: Any, reference: Any, index: int) -> None:
    """Refuses a cache layer that differs from the target's own in its kind or in the tokens that it keeps."""
    make = "make it with DynamicCache(config=model.config)"
    kind = type(layer).__name__
    what = f"a dynamic or static layer {index} in {CACHE_NAME}"
    require(type(layer) in _LAYERS, what, kind, "use a DynamicCache or drop assistant_model")
    is_recurrent = isinstance(layer, LinearAttentionLayer)
    is_alike = is_recurrent == isinstance(reference, LinearAttentionLayer)
    require(is_alike, f"a {type(reference).__name__} in layer {index} of {CACHE_NAME}", kind, make)
    if is_recurrent:
        what = f"layer {index} of {CACHE_NAME} to keep no more than it needs"
        require(not layer.record_past, what, "one recording its past", "start from a new one")
        return
    kept = layer_window(layer)
    window = layer_window(reference)
    # A static layer that is shorter than the window is not refused here; `check_room` checks its length.
    is_short = isinstance(layer, StaticLayer) and bool(window and kept and kept < window)
    what = f"layer {index} of {CACHE_NAME} to keep {window or 'all'} tokens (the target's window)"
    require(kept in (None, window) or is_short, what, kept, make)


def _check_columns(cache: Cache, rows: int, num_ids: int, num_masked: int) -> None:
    """Refuses a cache whose layers differ in length, or whose rows or columns do not fit the call.

    `rows` includes `num_return_sequences`. `num_ids` and `num_masked` are the columns of `input_ids` and of its mask.
    """
    past = int(cache.get_seq_length())
    layers = list[Any](cache.layers)
    attention = [layer for layer in layers if not isinstance(layer, LinearAttentionLayer)]
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    lengths = {int(layer.get_seq_length()) for layer in attention}
    interrupted = "it comes from a forward that was interrupted, start from a new one"
    require(
        len(lengths) < 2,
        f"{CACHE_NAME} with as many columns in every layer",
        sorted(lengths),
        interrupted,
    )
    # An interrupted forward has written only the first layers.
    states = [all(layer.has_previous_state.values()) for layer in recurrent]
    require(
        set(states) <= {bool(past)},
        f"{CACHE_NAME} with a state wherever there are keys",
        states,
        interrupted,
    )
    # A layer that was never used has no tensors, so that its number of rows is open.
    stored = [layer.keys for layer in attention]
    stored += [state for layer in recurrent for state in layer.conv_states.values()]
    own = {tensor.shape[0] for tensor in stored if isinstance(tensor, Tensor) and tensor.dim() > 1}
    wanted = f"{CACHE_NAME} with {rows} rows (input_ids times num_return_sequences)"
    require(
        own <= {rows},
        wanted,
        sorted(own),
        "call cache.batch_repeat_interleave, or start from a new one",
    )
    # `generate` takes a whole conversation, or only its new tokens if the mask also covers the earlier ones.
    is_whole = num_masked == num_ids and num_ids > past
    is_new = num_masked == past + num_ids
    if past and not is_whole and not is_new:
        got = f"{num_ids} columns"
        if num_masked != num_ids:
            got += f" with an attention_mask of {num_masked}"
        raise ValueError(
            f"expected input_ids of the whole conversation (more than the {past} columns of {CACHE_NAME}), or the new "
            f"tokens with an attention_mask over all, got {got}; pass one of the two"
        )


# ---- the inputs that Transformers has prepared


def check_drawn_proposals(request: Request) -> None:
    """Refuses drawn proposals if rejection sampling cannot be used with the call's processors or with a tree."""
    options = request.draft.generation_config
    processors = request.processors
    # Rejection sampling needs the distributions of all positions at once. Other processors need each prefix.
    require(
        processors.is_stateless,
        "only processors that need no text in front (temperature, top-k, min_new_tokens) under proposal='sample'",
        [type(processor).__name__ for processor in processors.processors],
        "use proposal='shared_noise'",
    )
    require(
        not options.num_tree_nodes,
        "proposal 'argmax' or 'shared_noise' with num_tree_nodes",
        options.proposal,
        "rejection goes along a chain, leave one out",
    )


def check_padding(target: Target, mask: Tensor) -> None:
    """Refuses prepared masks `[B, T]` with right padding, or with padding between tokens for sliding windows.

    `check_inputs` has checked a given mask. Without one, `generate` has inferred a mask from pad ids. Padding between
    tokens comes from turns of a conversation in a cache.
    """
    # Every row must end with a token, because the first new token follows from the logits of the last column.
    is_left = bool(mask[:, -1].all())
    got = "padding after the last token (as which every pad token counts)"
    do = "tokenize with padding_side='left' and pass attention_mask"
    require(is_left, "left-padded prompts", got, do)
    has_gaps = bool((mask[:, 1:] < mask[:, :-1]).any())
    # Sliding layers are looked for last, because this needs a new cache object.
    is_refused = has_gaps and any(DynamicCache(config=target.config).is_sliding)
    what = "no padding between tokens with a target that has sliding windows, which plain generate counts in columns"
    do = f"pass the whole conversation left-padded, without {CACHE_NAME}"
    require(not is_refused, what, "some", do)


def check_room(target: Target, cache: Cache, num_columns: int) -> None:
    """Refuses a run that may need more columns (`num_columns`) than a static cache has."""
    # The layers that Transformers would make for the target have its windows.
    references = DynamicCache(config=target.config).layers
    for layer, reference in zip(cache.layers, references, strict=False):
        # A static sliding layer that is as long as the window needs no more columns.
        is_sliding = isinstance(layer, StaticSlidingWindowLayer)
        forgets = is_sliding and layer.max_cache_len == layer_window(reference)
        if isinstance(layer, StaticLayer) and not forgets:
            what = f"a static cache with room for the longest answer ({num_columns} columns)"
            do = "make it longer or lower max_new_tokens"
            require(num_columns <= layer.max_cache_len, what, layer.max_cache_len, do)


# ---- `iterate`


def check_is_draft(draft: object) -> None:
    """Refuses an object that is not a `DFlashDraftModel`."""
    is_draft = isinstance(draft, DFlashDraftModel)
    require(is_draft, "a DFlashDraftModel as draft", type(draft).__name__, "use load_draft")


def check_iterated(draft: object, arguments: Mapping[str, Any]) -> None:
    """Refuses, for `iterate`, an object that is not a draft, and a second draft among the arguments of `generate`."""
    check_is_draft(draft)
    has_second = "assistant_model" in arguments
    require(not has_second, "the draft as second argument", "assistant_model", "drop that keyword")


def check_rules(request: Request, *, has_propose: bool, has_accept: bool) -> None:
    """Refuses options and inputs that `iterate` cannot honour, alone or with the user's own rules."""
    options = request.draft.generation_config
    if has_propose or has_accept:
        what = "proposal 'argmax' or 'shared_noise' beside a rule of your own"
        do = "its acceptance needs the distribution of the proposals, change draft.generation_config.proposal"
        require(options.proposal != "sample", what, options.proposal, do)
        nodes = options.num_tree_nodes
        require(
            not nodes,
            "a chain, no num_tree_nodes, beside a rule of your own",
            nodes,
            "leave it out",
        )
    if has_accept:
        names = [type(processor).__name__ for processor in request.processors.processors]
        what = "only processors that need no text in front (temperature, top-k, min_new_tokens) beside accept"
        do = "the others never see what lies behind a mismatch"
        require(request.processors.is_stateless, what, names, do)
        # Rows of such a call may be synchronized token by token, so that a rule would not see the whole block.
        has_rows = len(request.input_ids) > 1
        own = request.own_criteria
        together = [type(one).__name__ for one in own if has_rows or may_compare_rows(one)]
        if has_rows and request.streamer is not None:
            together.append(type(request.streamer).__name__)
        what = "one row for a streamer, max_time, stop strings or criteria with is_row_wise, no others, beside accept"
        require(not together, what, together, "stop iterating instead")
    do = "a run that may be left half-way cannot advance one, pass the whole conversation instead"
    require(request.cache is None, f"no {CACHE_NAME}", type(request.cache).__name__, do)
