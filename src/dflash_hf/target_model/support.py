"""This module refuses targets, and pairs of target and draft, that are not supported.

This happens before any forward.

`generation/checks.py` checks the call and the draft's options. If a target's code does not show whether it uses the
ragged cache, `RaggedCache.check_passed` finds this out after a verify.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref

from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.prefilled import layer_window
from dflash_hf.cache.recurrence import supported
from dflash_hf.configuration_dflash import LAYER_TYPES, DFlashConfig
from dflash_hf.errors import require
from dflash_hf.layer_configs import layer_values
from dflash_hf.target_model.parts import ChangingRope, Facts, Target, path_to
from dflash_hf.target_model.user_code import is_library_function

# The facts of each model that was found to be supported. They are kept because reading source code takes longer than a
# short answer. If a module or the config changes, there are other facts. The references are weak, so that a model is
# freed as soon as the user drops it.
_supported: weakref.WeakKeyDictionary[PreTrainedModel, Facts] = weakref.WeakKeyDictionary()
KEEP_A_STATE = ("linear", "mamba", "conv", "hybrid", "recurrent")  # in names of layer types


# ---- the target


def check_target(target: Target) -> None:
    """Refuses targets whose attention the ragged cache cannot reproduce exactly.

    Raises `ValueError` with the reason.
    """
    _check_attention(target)
    is_known = _supported.get(target.model) is target.facts
    # Each call checks both recurrent modules and adapters: recurrent modules may be changed in place, and an adapter
    # may leave the modules unchanged.
    if target.recurrences or not is_known:
        _check_recurrences(target)
    reason = _reason_in_adapters(target.model)
    if reason is None and not is_known:
        # The config is checked first, because its reasons are clearer than those from the code.
        reason = (
            _reason_in_layers(target)
            or _reason_in_config(target.config)
            or _reason_in_inputs(target.model)
            or unsupported_code(target)
        )
    if reason:
        name = type(target.model).__name__
        raise ValueError(
            f"expected a target with full or sliding attention, got {name} with {reason}; drop the draft"
        )
    _supported[target.model] = target.facts


def _check_attention(target: Target) -> None:
    """Refuses attention functions of the user, which a verify would replace, and one that leaves out the soft cap."""
    name = target.config._attn_implementation
    # Older releases of Transformers choose "sdpa" for such targets, and then plain `generate` has another text.
    if name == "sdpa" and getattr(target.config, "attn_logit_softcapping", None):
        raise ValueError(
            f"expected {type(target.model).__name__} under an attention implementation that knows its soft cap, got "
            "'sdpa', which older Transformers choose and which leaves it out; call "
            "target.set_attn_implementation('eager')"
        )
    # A kernel of the Hub has the name of its repository, and computes the same attention as Transformers.
    is_hub_kernel = "/" in str(name)
    # "eager" is in no table, because each file of Transformers' models has its own eager function.
    if is_hub_kernel or name not in ALL_ATTENTION_FUNCTIONS:
        return
    function = ALL_ATTENTION_FUNCTIONS[name]
    while isinstance(function, functools.partial):
        function = function.func
    action = "call target.set_attn_implementation('sdpa') or drop the draft"
    what = "a target under one of Transformers' own attentions"
    require(is_library_function(function), what, name, action)


def _check_recurrences(target: Target) -> None:
    """Refuses recurrent layers whose states cannot be restored. A `ValueError` names their kind, or what they lack."""
    kinds = getattr(target.config, "layer_types", None) or []
    recurrences = target.recurrences
    # Layers whose type keeps a state, but in which no module of a known recurrence was found.
    others = {str(kind) for index, kind in enumerate(kinds) if index not in recurrences}
    others = {kind for kind in others if any(word in kind for word in KEEP_A_STATE)}
    has_unknown_states = getattr(target.model, "_is_stateful", False) and not recurrences
    # A known recurrence may still be configured in a way that its rule does not compute.
    whys = [recurrence.rule.why_not(recurrence.module) for recurrence in recurrences.values()]
    reasons = list(filter(None, whys))
    if others or has_unknown_states:
        reasons.insert(0, f"others ({', '.join(sorted(others)) or 'a stateful model'})")
    elif len(recurrences) == len(target.layers):
        # The number of columns in a cache is known only from layers with attention.
        reasons.append("no layer with attention beside them")
    if reasons:
        raise ValueError(
            f"expected a target whose recurrent layers are {supported()}, got {type(target.model).__name__} with "
            f"{reasons[0]}; drop the draft"
        )


def _reason_in_layers(target: Target) -> str | None:
    """Returns a phrase with the types of a target's layers that are not supported, or `None`."""
    kinds = getattr(target.config, "layer_types", None) or []
    attentions = {kind for index, kind in enumerate(kinds) if index not in target.recurrences}
    unknown = attentions - set(LAYER_TYPES)
    # Some targets use chunked attention without a type for it.
    chunk_sizes = layer_values(target.config, "attention_chunk_size")
    if "chunked_attention" in unknown or any(chunk_sizes):
        return "chunked attention (its argument never reaches the attention interface)"
    if unknown:
        return f"layers of type {', '.join(sorted(unknown))}"
    return None


def _reason_in_config(config: PreTrainedConfig) -> str | None:
    """Returns the property of all layers in a config that attention over the ragged cache does not
    support, or `None`.
    """
    position_type = getattr(config, "position_embedding_type", "")
    # The biases depend on the distance of slots. In a ring this is not the distance of tokens.
    if getattr(config, "alibi", False) or position_type == "alibi":
        return "ALiBi position biases"
    # This concerns Llama 4's layers without RoPE. In a verify, the length of the cache is not the length of each row.
    rope_of_layers = getattr(config, "no_rope_layers", None) or []
    if getattr(config, "attn_temperature_tuning", False) and not all(rope_of_layers):
        return "attention scaled by the length of its cache"
    # A layer that reads another layer's keys has no keys of its own to write.
    if getattr(config, "num_kv_shared_layers", None):
        return "shared-K/V layers"
    # Each loop writes other keys under the same layer index.
    num_loops = getattr(config, "n_recurrent_loops", None) or 1
    if num_loops > 1:
        return "layers that run several times in one forward"
    cross_layers = getattr(config, "cross_attention_layers", None)
    # Keys of an image or an encoder have no place in rows of tokens.
    if cross_layers or getattr(config, "add_cross_attention", False):
        return "cross attention"
    return None


def _reason_in_adapters(model: PreTrainedModel) -> str | None:
    """Returns the kind of a PEFT adapter that does more than change the modules' computation, or `None`."""
    # PEFT replaces a method of the model by a method of its wrapper.
    preparing = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(getattr(preparing, "active_peft_config", None), "is_prompt_learning", False):
        return "a PEFT adapter that puts tokens of its own before the prompt"
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        return "an activated LoRA, which counts its tokens from the end of each call"
    return None


def _reason_in_inputs(model: PreTrainedModel) -> str | None:
    """Returns an input of a model of which each token has its own part, or `None`. A verify passes only tokens."""
    # Voxtral Realtime adds the audio of the same time to each token, also to the tokens of the answer.
    if "encoder_inputs_embeds" in inspect.signature(type(model).forward).parameters:
        return "an encoder that goes on with every token of the answer"
    return None


# ---- the target's code

# The source is searched and not parsed, because `ast.parse` of Python 3.11 fails if two threads use it at once.
_DOCSTRING = re.compile(r'"""(?s:.*?)"""')
# Matches `**name` of a signature or of a call, and not a power.
_KEYWORDS = re.compile(r"(?<=[(,\s])\*\*[A-Za-z_]")


def unsupported_code(target: Target) -> str | None:
    """Returns the reason why the code of a target's modules cannot run over the ragged cache, or `None` if none is
    found.
    """
    without = "attention that does not go through transformers.AttentionInterface"
    is_hybrid = bool(target.recurrences)  # hybrid models do not set the flag
    if not type(target.model)._supports_attention_backend and not is_hybrid:
        return without
    if not _hands_keywords_on(target):
        return "layers that do not hand keywords of the forward down to their attention"
    for index, layer in enumerate(target.layers):
        if index in target.recurrences:
            continue
        interfaces = [
            interface
            for module in _attentions_of(layer)
            for interface in _interfaces_of(type(module))
        ]
        if not interfaces:
            return without
        if any(interface is not ALL_ATTENTION_FUNCTIONS for interface in interfaces):
            return "an attention interface of its own, with masks that follow from the values"
    return None


def _hands_keywords_on(target: Target) -> bool:
    """Returns True if all modules from the model to its first layer pass keywords on to the modules that they call.

    A forward may accept `**kwargs` and drop them. Nemotron's layers do so, and so did Moshi's decoder. If the code
    cannot be read, the result is True, and the first verify finds out whether this is right.
    """
    for module in path_to(target.model, target.layers[0]):
        is_compiled = "_orig_mod" in module._modules
        if isinstance(module, nn.ModuleList) or is_compiled:
            continue
        source = _source_of_forward(type(module))
        if not source:
            continue
        num_named = len(_KEYWORDS.findall(_DOCSTRING.sub("", source)))
        forward = inspect.unwrap(type(module).forward)
        kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
        # One `**` is in the signature. Keywords that are passed on add further ones.
        if num_named <= kinds.count(inspect.Parameter.VAR_KEYWORD):
            return False
    return True


def _source_of_forward(kind: type[nn.Module]) -> str:
    """Returns the code of a class's forward, or an empty string if it cannot be read."""
    try:
        return inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return ""


def _attentions_of(layer: nn.Module) -> list[nn.Module]:
    """Returns the modules of a layer that may be attention, or the layer itself if there are none.

    These modules have an attribute `layer_idx`.
    """
    found = [
        module for module in layer.modules() if module is not layer and hasattr(module, "layer_idx")
    ]
    return found or [layer]


def _interfaces_of(kind: type[nn.Module]) -> list[AttentionInterface]:
    """Returns the attention interfaces in the file that contains the forward of a class."""
    module = kind.forward.__module__
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return [value for value in names.values() if isinstance(value, AttentionInterface)]


def _only_masks_know_windows(target: Target) -> bool:
    """Returns True if only the decoder's masks know the window, and the attention is not given it.

    This is so in PhiMoE and Qwen2-MoE. Moshi's masks hide nothing: only its cache has a window.
    """
    masks = _source_of_forward(type(target.decoder))
    # Layers share a few classes, and reading source code takes long.
    kinds = {type(module) for layer in target.layers for module in _attentions_of(layer)}
    is_told = any("sliding_window=" in _source_of_forward(kind) for kind in kinds)
    return "create_sliding_window_causal_mask" in masks and not is_told


# ---- the target's cache


def check_windows(target: Target, cache: Cache, num_columns: int) -> None:
    """Refuses runs of `num_columns` columns that exceed a window which the passed cache does not
    know (`ValueError`).

    A verify has no masks. If only the masks know the window, the attention in a verify uses the window of the cache.
    """
    # A query sees as many columns as the window has, including its own.
    exceeded = {
        index: window
        for index, window in _windows_of(DynamicCache(config=target.config)).items()
        if window < num_columns
    }
    # A cache that was made without a config has no layers before the prefill, and no sliding layers after it.
    known = _windows_of(cache)
    unknown = [window for index, window in exceeded.items() if index not in known]
    if not unknown or not _only_masks_know_windows(target):
        return
    raise ValueError(
        f"expected {CACHE_NAME} that slides over the target's window of {unknown[0]} tokens in a run of "
        f"{num_columns} columns, got one that keeps all tokens; make it with DynamicCache(config=model.config)"
    )


def _windows_of(cache: Cache) -> dict[int, int]:
    """Returns the windows of the sliding layers by layer index. Layers that record their past keep everything."""
    windows = dict[int, int]()
    for index, layer in enumerate(cache.layers):
        # Recurrent layers have no attributes about windows.
        slides = getattr(layer, "is_sliding", False) and not getattr(layer, "record_past", False)
        window = layer_window(layer) if slides else None
        if window is not None:
            windows[index] = window
    return windows


# ---- the pair


def check_no_stop_strings(model: PreTrainedModel) -> None:
    """Raises `ValueError` if a target ends its texts at stop strings.

    The caller reads answers only up to end tokens.
    """
    # A target on a server may have no config of its own
    config = getattr(model, "generation_config", None)
    strings = getattr(config, "stop_strings", None)
    what = "a target without stop_strings in its generation_config"
    action = "take them out of a copy of its generation_config.json"
    require(strings is None, what, strings, action)


def check_pair(target: Target, config: DFlashConfig) -> None:
    """Raises `ValueError` unless a draft fits a target in widths, taps, mask token and, if stated, depth and
    vocabulary.
    """
    text = target.config
    depth = len(target.layers)
    rows = target.vocab_size
    other = "load the draft that was trained for this target"
    # The draft reads states of the target, and may use the target's own embedding and head.
    hidden_size = text.hidden_size
    for width in (config.hidden_size, config.target_hidden_size):
        what = f"a draft for hidden size {hidden_size} (the target's)"
        require(width == hidden_size, what, width, other)
    # OPT-350m has projections between its embedding and its layers. Modules of adapters may lack these attributes.
    own = "use a draft that has its own embedding and its own head"
    if not config.own_embed_tokens:
        width = getattr(target.embedding, "embedding_dim", hidden_size)
        what = f"an embedding of width {hidden_size} (as the target's hidden states)"
        require(width == hidden_size, what, width, own)
    if not config.own_lm_head:
        width = getattr(target.head, "in_features", hidden_size)
        what = f"a head of width {hidden_size} (as the target's hidden states)"
        require(width == hidden_size, what, width, own)
    taps = config.target_layer_ids
    mask = config.mask_token_id
    size = config.vocab_size
    require(max(taps) < depth, f"taps below {depth} (the target's depth)", taps, other)
    stated = config.num_target_layers or depth
    require(stated == depth, f"a draft for {depth} layers (the target's depth)", stated, other)
    require(mask < rows, f"mask_token_id below {rows} (the target's embedding)", mask, other)
    # Not every checkpoint format states a vocabulary.
    is_alike = size in (None, text.vocab_size)
    require(is_alike, f"a draft for a vocabulary of {text.vocab_size} (the target's)", size, other)


# ---- the target's positions


def check_takes_positions(target: Target, position_ids: Tensor | None) -> None:
    """Refuses targets that ignore the positions which `generate` has prepared for a step, and count positions
    themselves.

    `position_ids` are the positions after the target's own preparation, which has to be called to find this out.
    """
    counts = f"{type(target.model).__name__}, which counts them itself"
    require(
        position_ids is not None,
        "a target that takes its positions from generate",
        counts,
        "drop the draft",
    )


def check_length(
    target: Target, next_positions: Tensor, num_more: int, columns: int, past: int
) -> None:
    """Refuses runs in which a RoPE that depends on the call's length may change its frequencies (`ValueError`).

    A verify also includes the proposals, so it would change the frequencies up to a block earlier than plain decoding.
    Transformers uses the largest position of a call and not its length. So passed positions, and masks that are longer
    than the prompt, shift the change.

    Args:
        target (`Target`): The target, which has such a RoPE (`Facts.ropes`).
        next_positions (`torch.Tensor` of shape `[B]` or `[rows, B]`, int64): Position of the first new token.
        num_more (`int`): Number of tokens after the prompt that a verify may reach: the generated tokens and a block.
        columns (`int`): Number of columns of the prompts, including cached columns and padding.
        past (`int`): Number of these columns that are cached.
    """
    # If a token has several positions, not all of them may be used by the RoPE. So each of them must be beyond the
    # boundary.
    first = int(next_positions.amax(dim=-1).min())
    last = int(next_positions.max()) + num_more
    for rope in target.facts.ropes:
        _check_side(rope, "positions", first, last)
        # Phi-3 counts columns too. It computes its cache again at the first column beyond the boundary.
        if rope.is_settled and hasattr(target.config, "original_max_position_embeddings"):
            _check_side(rope, "columns", min(columns, past or columns), columns + num_more)


def _check_side(rope: ChangingRope, what: str, first: int, last: int) -> None:
    """Refuses a run from `first` to `last` positions or columns if it does not stay on one side of
    a RoPE's boundary.
    """
    stays_below = last <= rope.boundary
    stays_beyond = rope.is_settled and first > rope.boundary
    if stays_below or stays_beyond:
        return
    beyond = ", or starts beyond them" if rope.is_settled else ""
    raise ValueError(
        f"expected a run that stays within {rope.boundary} {what}, a block included{beyond} (the target's RoPE of "
        f"type '{rope.kind}' changes there), got a prompt up to {first} and with what is generated and a block up to "
        f"{last}; lower max_new_tokens or drop assistant_model"
    )
