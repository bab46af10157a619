"""Which targets, and which pairs of target and draft, DFlash cannot drive: refused by name, before any forward."""

from __future__ import annotations

from transformers import PreTrainedModel

from dflash_hf.cache.recurrence import supported
from dflash_hf.configuration_dflash import LAYER_TYPES, DFlashConfig
from dflash_hf.errors import require
from dflash_hf.layer_configs import layer_values
from dflash_hf.target.parts import Target

KEEP_A_STATE = ("linear", "mamba", "conv", "hybrid", "recurrent")  # in names of layer types


def check_target(target: Target) -> None:
    """Refuses targets whose attention the ragged cache cannot reproduce exactly: `ValueError` names why."""
    config, name = target.config, type(target.model).__name__
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        raise ValueError(
            f"expected {name} under an attention implementation that knows its soft cap, got 'sdpa', which older "
            "Transformers choose and which leaves it out; call target.set_attn_implementation('eager')"
        )
    _check_recurrences(target)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    unknown = sorted({kind for i, kind in enumerate(layer_types) if i not in target.recurrences} - set(LAYER_TYPES))
    if "chunked_attention" in unknown or any(layer_values(config, "attention_chunk_size")):
        reason = "chunked attention (its argument never reaches the attention interface)"
    elif unknown:
        reason = f"layers of type {', '.join(unknown)}"
    elif getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        reason = "ALiBi position biases"
    elif getattr(config, "num_kv_shared_layers", None):
        reason = "shared-K/V layers"
    elif getattr(config, "cross_attention_layers", None) or getattr(config, "add_cross_attention", False):
        reason = "cross attention"
    elif (adapter := _adapter_reason(target.model)) is not None:
        reason = adapter
    else:
        reason = target.facts.unsupported
    if reason is not None:
        raise ValueError(f"expected a target with full or sliding attention, got {name} with {reason}; drop the draft")


def _check_recurrences(target: Target) -> None:
    """Refuses recurrent layers that cannot be taken back: a `ValueError` names their kind, or what they lack."""
    kinds, recurrences = getattr(target.config, "layer_types", None) or [], target.recurrences
    others = {str(kind) for index, kind in enumerate(kinds) if index not in recurrences}
    others = {kind for kind in others if any(word in kind for word in KEEP_A_STATE)}
    reasons = [found for each in recurrences.values() if (found := each.rule.why_not(each.module)) is not None]
    if others or (getattr(target.model, "_is_stateful", False) and not recurrences):
        reasons.insert(0, f"others ({', '.join(sorted(others)) or 'a stateful model'})")
    elif len(recurrences) == len(target.layers):
        reasons.append("no layer with attention beside them")
    if reasons:
        raise ValueError(
            f"expected a target whose recurrent layers are {supported()}, got {type(target.model).__name__} with "
            f"{reasons[0]}; drop the draft"
        )


def _adapter_reason(model: PreTrainedModel) -> str | None:
    """Names the kinds of PEFT adapters that do more than change what modules compute."""
    preparing = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(getattr(preparing, "active_peft_config", None), "is_prompt_learning", False):
        return "a PEFT adapter that puts tokens of its own before the prompt"
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        return "an activated LoRA, which counts its tokens from the end of each call"
    return None


def check_pair(target: Target, config: DFlashConfig) -> None:
    """Raises `ValueError` unless a draft fits a target: width, mask token, and depth and vocabulary where stated."""
    text, depth, rows = target.config, len(target.layers), target.vocab_size
    other = "load the draft that was trained for this target"
    for width in (config.hidden_size, config.target_hidden_size):
        what = f"a draft for hidden size {text.hidden_size} (the target's)"
        require(width == text.hidden_size, what, width, other)
    taps, mask, size = config.target_layer_ids, config.mask_token_id, config.vocab_size
    require(max(taps) < depth, f"taps below {depth} (the target's depth)", taps, other)
    stated = config.num_target_layers or depth
    require(stated == depth, f"a draft for {depth} layers (the target's depth)", stated, other)
    require(mask < rows, f"mask_token_id below {rows} (the target's embedding)", mask, other)
    if size is not None:
        require(size == text.vocab_size, f"a draft for a vocabulary of {text.vocab_size} (the target's)", size, other)


def changing_ropes(target: Target) -> list[str]:
    """Returns the types of RoPE in a target's layers whose frequencies follow the longest row of a call."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(kind.get("rope_type") for kind in rope.values() if isinstance(kind, dict))}
    return [kind for kind in ("dynamic", "longrope") if kind in kinds]


def check_length(target: Target, longest_prompt: int, max_length: int) -> None:
    """Refuses, by `ValueError`, runs during which a RoPE that depends on the call's length may change its frequencies.

    A verify also sees the proposals, so it would switch up to a block earlier than plain decoding does. Lengths are
    the real tokens of the longest row, and the columns that a verify may reach: the output's and one block.
    """
    rope, kinds = getattr(target.config, "rope_parameters", None) or {}, changing_ropes(target)
    if not kinds:
        return
    original = rope.get("original_max_position_embeddings") or getattr(
        target.config, "original_max_position_embeddings", None
    )
    original = int(original or target.config.max_position_embeddings)
    if max_length <= original or ("dynamic" not in kinds and longest_prompt > original):
        return
    raise ValueError(
        f"expected a run that stays within {original} tokens, a block included, or starts beyond them (the target's "
        f"RoPE {kinds} changes there), got a prompt of {longest_prompt} tokens and "
        f"up to {max_length} with what is generated and a block; lower max_new_tokens or drop assistant_model"
    )
