"""Which targets, and which pairs of target and draft, DFlash cannot drive: refused by name, before any forward."""

from __future__ import annotations

from transformers import PreTrainedModel

from dflash_hf.cache.recurrence import Recurrence, supported
from dflash_hf.configuration_dflash import LAYER_TYPES, DFlashConfig
from dflash_hf.target.parts import Target

LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")


def check_target(target: Target) -> None:
    """Refuses targets whose attention the ragged cache cannot reproduce exactly.

    Raises:
        ValueError: Naming the mechanism: chunked, ALiBi, shared-K/V or cross attention, recurrent layers of a kind
            that cannot be taken back or that lack what that needs, or a model that does not use Transformers'
            attention interface.
    """
    config, name = target.config, type(target.model).__name__
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        raise ValueError(
            f"expected {name} under an attention implementation that knows its soft cap, got 'sdpa', which older "
            "Transformers choose and which leaves it out; call target.set_attn_implementation('eager')"
        )
    recurrences = target.recurrences
    _check_recurrences(target, recurrences)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    unknown = sorted({kind for i, kind in enumerate(layer_types) if i not in recurrences} - set(LAYER_TYPES))
    if "chunked_attention" in unknown or getattr(config, "attention_chunk_size", None):
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
        reason = target.unsupported
    if reason is None:
        return
    raise ValueError(f"expected a target with full or sliding attention, got {name} with {reason}; drop the draft")


def _check_recurrences(target: Target, recurrences: dict[int, Recurrence]) -> None:
    """Refuses recurrent layers that cannot be taken back.

    Raises:
        ValueError: Naming their kind, or what they lack.
    """
    kinds = getattr(target.config, "layer_types", None) or []
    others = {str(kind) for index, kind in enumerate(kinds) if index not in recurrences}
    others = {kind for kind in others if _is_recurrent(kind)}
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


def _is_recurrent(kind: object) -> bool:
    """Returns True if a layer type of a config means that a state is kept."""
    return any(word in str(kind) for word in ("linear", "mamba", "conv", "hybrid", "recurrent"))


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
    """Checks that a draft fits a target.

    Raises:
        ValueError: On another width, depth or vocabulary (as far as the draft states them), or a mask token outside
            the embedding.
    """
    text = target.config
    if config.target_hidden_size != text.hidden_size or config.hidden_size != text.hidden_size:
        raise ValueError(
            f"expected a draft for hidden size {text.hidden_size} (the target's), got one for {config.hidden_size}; "
            "load the draft that was trained for this target"
        )
    depth = len(target.layers)
    if max(config.target_layer_ids) >= depth or (config.num_target_layers or depth) != depth:
        raise ValueError(
            f"expected taps below {depth} (the target's depth), got target_layer_ids {config.target_layer_ids} made "
            f"for {config.num_target_layers} layers; load the draft that was trained for this target"
        )
    if config.mask_token_id >= target.vocab_size:
        raise ValueError(
            f"expected mask_token_id below {target.vocab_size} (the target's embedding), got {config.mask_token_id}; "
            "load the draft that was trained for this target"
        )
    if config.vocab_size is not None and config.vocab_size != text.vocab_size:
        raise ValueError(
            f"expected a draft for a vocabulary of {text.vocab_size} (the target's), got {config.vocab_size}; "
            "load the draft that was trained for this target"
        )


def rope_kinds(target: Target) -> set[str]:
    """Returns the types of RoPE that a target's layers use."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    kinds = [rope.get("rope_type"), *(kind.get("rope_type") for kind in rope.values() if isinstance(kind, dict))]
    return {kind for kind in kinds if kind is not None}


def has_fixed_rope(target: Target) -> bool:
    """Returns True unless the frequencies of a target's RoPE follow the longest row of a call; it keeps those then."""
    return not rope_kinds(target) & set(LENGTH_DEPENDENT_ROPE)


def check_length(target: Target, longest_prompt: int, max_length: int) -> None:
    """Refuses runs during which a RoPE that depends on the length of the call would change its frequencies.

    A verify also sees the proposals, so it would switch up to a block earlier than plain decoding does.

    Args:
        target (`Target`): The target.
        longest_prompt (`int`): Real tokens of the longest row.
        max_length (`int`): Columns that a verify may reach: the output's and one block.

    Raises:
        ValueError: If the run may cross the boundary.
    """
    if has_fixed_rope(target):
        return
    rope, kinds = getattr(target.config, "rope_parameters", None) or {}, rope_kinds(target)
    original = rope.get("original_max_position_embeddings") or getattr(
        target.config, "original_max_position_embeddings", None
    )
    original = int(original or target.config.max_position_embeddings)
    if max_length <= original or ("dynamic" not in kinds and longest_prompt > original):
        return
    raise ValueError(
        f"expected a run that stays within {original} tokens, a block included, or starts beyond them (the target's "
        f"RoPE {sorted(str(kind) for kind in kinds)} changes there), got a prompt of {longest_prompt} tokens and "
        f"up to {max_length} with what is generated and a block; lower max_new_tokens or drop assistant_model"
    )
