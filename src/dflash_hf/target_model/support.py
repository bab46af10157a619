"""Which targets, and which pairs of target and draft, DFlash cannot drive: refused by name, before any forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from dflash_hf.cache.recurrence import supported
from dflash_hf.configuration_dflash import LAYER_TYPES, DFlashConfig
from dflash_hf.errors import require
from dflash_hf.layer_configs import layer_values
from dflash_hf.target_model.parts import Target

KEEP_A_STATE = ("linear", "mamba", "conv", "hybrid", "recurrent")  # in names of layer types


def check_target(target: Target) -> None:
    """Refuses targets whose attention the ragged cache cannot reproduce exactly: `ValueError` names why."""
    config = target.config
    name = type(target.model).__name__
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
    elif (getattr(config, "n_recurrent_loops", None) or 1) > 1:
        reason = "layers that run several times in one forward"
    elif getattr(config, "cross_attention_layers", None) or getattr(config, "add_cross_attention", False):
        reason = "cross attention"
    else:
        reason = _adapter_reason(target.model) or target.facts.unsupported
    if reason is not None:
        raise ValueError(f"expected a target with full or sliding attention, got {name} with {reason}; drop the draft")


def _check_recurrences(target: Target) -> None:
    """Refuses recurrent layers that cannot be taken back: a `ValueError` names their kind, or what they lack."""
    kinds = getattr(target.config, "layer_types", None) or []
    recurrences = target.recurrences
    others = {str(kind) for index, kind in enumerate(kinds) if index not in recurrences}
    others = {kind for kind in others if any(word in kind for word in KEEP_A_STATE)}
    whys = [recurrence.rule.why_not(recurrence.module) for recurrence in recurrences.values()]
    reasons = [why for why in whys if why is not None]
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
    text = target.config
    depth = len(target.layers)
    rows = target.vocab_size
    other = "load the draft that was trained for this target"
    for width in (config.hidden_size, config.target_hidden_size):
        what = f"a draft for hidden size {text.hidden_size} (the target's)"
        require(width == text.hidden_size, what, width, other)
    taps = config.target_layer_ids
    mask = config.mask_token_id
    size = config.vocab_size
    require(max(taps) < depth, f"taps below {depth} (the target's depth)", taps, other)
    stated = config.num_target_layers or depth
    require(stated == depth, f"a draft for {depth} layers (the target's depth)", stated, other)
    require(mask < rows, f"mask_token_id below {rows} (the target's embedding)", mask, other)
    if size is not None:
        require(size == text.vocab_size, f"a draft for a vocabulary of {text.vocab_size} (the target's)", size, other)


class ChangingRope(NamedTuple):
    """A RoPE whose frequencies follow the largest position of a call, in one kind of a target's layers."""

    kind: str  # its type
    boundary: int  # calls whose positions all lie below have its first frequencies
    is_settled: bool  # whether the frequencies beyond are the same for all calls


def changing_ropes(target: Target) -> list[ChangingRope]:
    """Returns the RoPEs of a target's layers whose frequencies follow the largest position of a call.

    Each kind of layer may have its own. "dynamic" compares that position with `max_position_embeddings`, whatever else
    the config says, "longrope" with the original length. PhiMoE scales its RoPE by one of two numbers in the same way.
    """
    config = target.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    of_layers = [one for one in rope.values() if isinstance(one, dict)]
    found: list[ChangingRope] = []
    for parameters in (rope, *of_layers):
        kind = parameters.get("rope_type") or "default"
        if "dynamic" in kind:
            found.append(ChangingRope(kind, int(config.max_position_embeddings), is_settled=False))
        elif kind == "longrope" or (kind != "default" and "long_mscale" in parameters):
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            boundary = int(original or config.max_position_embeddings)
            found.append(ChangingRope(kind, boundary, is_settled=True))
    return found


def check_length(target: Target, next_positions: Tensor, num_more: int, columns: int, past: int) -> None:
    """Refuses, by `ValueError`, runs during which a RoPE that depends on the call's length may change its frequencies.

    A verify also sees the proposals, so it would switch up to a block earlier than plain decoding does. Transformers
    goes by the largest position of a call, not by its length: positions passed in and masks that are longer than the
    prompt shift it.

    Args:
        target (`Target`): The target.
        next_positions (`torch.Tensor` of shape `[B]` or `[rows, B]`, int64): Position of the first new token.
        num_more (`int`): Tokens behind the prompt that a verify may reach: what is generated and a block.
        columns (`int`): Columns of the prompts, cached ones and padding included.
        past (`int`): How many of them are cached.
    """
    ropes = changing_ropes(target)
    if not ropes:
        return
    # Where a token has several positions they may not all go into the RoPE: every one of them has to lie beyond.
    first = int(next_positions.amax(dim=-1).min())
    last = int(next_positions.max()) + num_more
    for rope in ropes:
        _check_side(rope, "positions", first, last)
        # Phi-3 counts columns too: it computes its cache anew at the one behind the boundary.
        if rope.is_settled and hasattr(target.config, "original_max_position_embeddings"):
            _check_side(rope, "columns", min(columns, past or columns), columns + num_more)


def _check_side(rope: ChangingRope, what: str, first: int, last: int) -> None:
    """Refuses a run from `first` to `last` positions or columns unless it stays on one side of a RoPE's boundary."""
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
