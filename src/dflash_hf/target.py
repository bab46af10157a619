"""What is where in a target model: its decoder layers, embedding and head, and whether DFlash can drive it.

Everything is found from the model, never from its name or a key path. Unsupported mechanisms are refused by name.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.attention import RAGGED_BLOCK
from dflash_hf.configuration_dflash import LAYER_TYPES, DFlashConfig
from dflash_hf.devices import execution_device, modules_of
from dflash_hf.recurrence import Recurrence, Rule, find_recurrence, find_recurrences, supported
from dflash_hf.reentry import is_in_verify
from dflash_hf.scopes import undoing

_SETTING = "_attn_implementation"
_MARK = "_dflash_switchable"
NO_INTERFACE = "attention that does not go through transformers.AttentionInterface"
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")


class _Verifying(threading.local):
    """The text config whose model this thread is verifying with, and what stood here before."""

    scope: tuple[PreTrainedConfig, Any] | None = None


_verifying = _Verifying()
_switching = threading.Lock()


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a target that drafting needs.

    Args:
        model (`PreTrainedModel`): The model `generate` was called on.
        modules (`list[nn.Module]`): It and all its parts.
        config (`PreTrainedConfig`): Its text config.
        layers (`tuple[nn.Module, ...]`): Decoder layers; layer `i` is the `i`-th.
        embedding (`nn.Module`): Input embedding of text tokens.
        head (`nn.Module`): Output head, hidden states to logits.
        decoder (`nn.Module`): What holds the list of layers and runs them.
        recurrences (`dict[int, Recurrence]`): The recurrent parts of layers that have one which can be taken back, by
            layer index.
        num_positions (`int`, *optional*): How many positions there are, where they are rows of a table.
        unsupported (`str`, *optional*): What in the code of its modules cannot be run over the ragged cache.
    """

    model: PreTrainedModel
    modules: list[nn.Module]
    config: PreTrainedConfig
    layers: tuple[nn.Module, ...]
    embedding: nn.Module
    head: nn.Module
    decoder: nn.Module
    recurrences: dict[int, Recurrence]
    num_positions: int | None = None
    unsupported: str | None = None

    @property
    def device(self) -> torch.device:
        """Where ids go in: the device on which the embedding computes, also while its weights are offloaded."""
        return execution_device(self.embedding)

    def position_ids(self, indices_BW: Tensor, delta: Tensor) -> Tensor:
        """Returns what a verify passes as positions: `[B, W]`, or `[rows, B, W]` under M-RoPE; no host sync.

        The last row of a table of positions stands for all behind it. Those are of proposals that follow the last
        token which could be looked at, and cannot be kept: see `Run.reach`.

        Args:
            indices_BW (`torch.Tensor` of shape `[B, W]`, int64): Index of each token in its row.
            delta (`torch.Tensor` of shape `[B]` or `[rows, B]`, int64): Position minus index.
        """
        positions = indices_BW + delta[..., None]
        return positions if self.num_positions is None else positions.clamp_max(self.num_positions - 1)

    @property
    def takes_inference_mode(self) -> bool:
        """Returns True if all weights are plain tensors: some quantised ones break in torch's inference mode."""
        kinds = {
            type(tensor)
            for module in self.modules
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
        }
        return kinds <= {torch.Tensor, nn.Parameter, type(None)}

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding (ids that can be looked up)."""
        weight: Any = self.embedding.weight
        return int(weight.shape[0])


class _Facts(NamedTuple):
    """What the modules of a model are, and that it need not be found out again as long as they are the same.

    Args:
        modules (list of weak references): All of them, in order.
        config (`PreTrainedConfig`): The text config.
        layers, decoder (`list[int]`, `int`): Which of them are decoder layers, and which one runs these.
        recurrences (`dict[int, tuple[Rule, int]]`): Per layer, its rule and the module that it is of.
        num_positions, unsupported: See [`Target`].
    """

    modules: list[weakref.ref[nn.Module]]
    config: PreTrainedConfig
    layers: list[int]
    decoder: int
    recurrences: dict[int, tuple[Rule, int]]
    num_positions: int | None
    unsupported: str | None


# Weak on both sides: a model is freed as soon as the user lets go of it.
_known: weakref.WeakKeyDictionary[PreTrainedModel, _Facts] = weakref.WeakKeyDictionary()


def find_target(model: PreTrainedModel) -> Target:
    """Finds the text decoder's layers, the embedding and the head of a causal or vision-language model.

    What follows from its modules is found once, and again when one of them is another one: wrapped, replaced, with an
    adapter.

    Raises:
        ValueError: If one of them cannot be found.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"expected a decoder-only target, got the encoder-decoder {name}; DFlash cannot draft for it")
    config = model.config.get_text_config(decoder=True)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if embedding is None or head is None:
        raise ValueError(
            f"expected a target with an input embedding and an output head, got {name}; "
            "load it with AutoModelForCausalLM or AutoModelForImageTextToText"
        )
    modules, facts = modules_of(model), _known.get(model)
    if facts is None or facts.config is not config or [module() for module in facts.modules] != modules:
        facts = _known[model] = _find_facts(model, modules, config, embedding)
    return Target(
        model=model,
        modules=modules,
        config=config,
        layers=tuple(modules[index] for index in facts.layers),
        embedding=embedding,
        head=head,
        decoder=modules[facts.decoder],
        recurrences={layer: Recurrence(rule, modules[index]) for layer, (rule, index) in facts.recurrences.items()},
        num_positions=facts.num_positions,
        unsupported=facts.unsupported,
    )


def _find_facts(
    model: PreTrainedModel, modules: list[nn.Module], config: PreTrainedConfig, embedding: nn.Module
) -> _Facts:
    name, num_layers = type(model).__name__, getattr(config, "num_hidden_layers", None)
    lists = [
        module
        for module in modules
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and all(_is_decoder_layer(layer) for layer in module)
    ]
    own = [layers for layers in lists if _text_config_of(layers) is config] or lists
    if not own:
        raise ValueError(f"expected a list of {num_layers} decoder layers inside {name}, found none; not supported")
    layers = list(own[0])
    decoder = next(module for module in modules if any(child is own[0] for child in module.children()))
    places = {module: index for index, module in reversed(list(enumerate(modules)))}
    recurrences = find_recurrences(layers)
    return _Facts(
        modules=[weakref.ref(module) for module in modules],
        config=config,
        layers=[places[layer] for layer in layers],
        decoder=places[decoder],
        recurrences={layer: (found.rule, places[found.module]) for layer, found in recurrences.items()},
        num_positions=_num_positions(decoder, config, embedding),
        unsupported=_unsupported(model, layers, recurrences),
    )


def _unsupported(model: PreTrainedModel, layers: list[nn.Module], recurrences: dict[int, Recurrence]) -> str | None:
    """Names what in the code of a model's modules cannot be run over the ragged cache."""
    if not type(model)._supports_attention_backend and not recurrences:  # hybrids do not set it
        return NO_INTERFACE
    if _swallows_keywords(model, layers[0]):
        return "layers that do not hand keywords of the forward down to their attention"
    attention = [layer for index, layer in enumerate(layers) if index not in recurrences]
    return next((reason for layer in attention if (reason := _layer_reason(layer)) is not None), None)


def _num_positions(decoder: nn.Module, config: PreTrainedConfig, embedding: nn.Module) -> int | None:
    """Rows of a decoder's table of positions that can be looked up; `None` where it has none.

    A table is an embedding beside the one for tokens, as wide as the hidden states and as long as the config says.
    """
    for child in decoder.children():
        if isinstance(child, nn.Embedding) and child is not embedding and child.embedding_dim == config.hidden_size:
            num = child.num_embeddings - getattr(child, "offset", 0)  # OPT leaves the first rows out
            if num == getattr(config, "max_position_embeddings", None):
                return num
    return None


def _is_decoder_layer(layer: nn.Module) -> bool:
    return any(hasattr(layer, name) for name in ("self_attn", "attn", "mlp")) or find_recurrence(layer) is not None


def _text_config_of(layers: nn.ModuleList) -> object:
    """The config that the layers' attention holds, to tell a text decoder from a vision tower of the same depth."""
    for module in layers.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            return config
    return None


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
    others = {str(kind) for index, kind in enumerate(kinds) if index not in recurrences and _is_recurrent(kind)}
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
    """Whether a layer type of a config means that a state is kept."""
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


def _layer_reason(layer: nn.Module) -> str | None:
    """Says why a layer's attention cannot be run over the ragged cache, as far as its code tells."""
    interfaces = [interface for module in layer.modules() for interface in _interfaces_of(type(module))]
    if not interfaces:
        return NO_INTERFACE
    if any(interface is not ALL_ATTENTION_FUNCTIONS for interface in interfaces):
        return "an attention interface of its own, with masks that follow from the values"
    return None


def _swallows_keywords(model: PreTrainedModel, first: nn.Module) -> bool:
    """Returns True if a module between the model and a layer's attention cannot hand on keywords it does not name."""
    layer = next(name for name, module in model.named_modules() if module is first)
    parts = layer.split(".")
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    callers = [
        module for module in above if not isinstance(module, nn.ModuleList) and "_orig_mod" not in module._modules
    ]
    return not all(_hands_on_keywords(type(module)) for module in callers)


def attention_modules(layer: nn.Module) -> list[nn.Module]:
    """Returns the modules of a layer whose forward calls Transformers' attention interface."""
    return [module for module in layer.modules() if _interfaces_of(type(module))]


@functools.cache
def _interfaces_of(kind: type[nn.Module]) -> tuple[AttentionInterface, ...]:
    """The attention interfaces that the forward of a class refers to."""
    forward: Any = inspect.unwrap(kind.forward)
    found = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    return tuple(value for value in found if isinstance(value, AttentionInterface))


@functools.cache
def _hands_on_keywords(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class makes a call with `**kwargs` in it: there is one instruction for that."""
    forward: Any = inspect.unwrap(kind.forward)
    return any(instruction.opname == "CALL_FUNCTION_EX" for instruction in dis.get_instructions(forward.__code__))


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
    rope, kinds = getattr(target.config, "rope_parameters", None) or {}, rope_kinds(target)
    if not kinds & set(LENGTH_DEPENDENT_ROPE):
        return
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


def _make_switchable(kind: type[PreTrainedConfig]) -> None:
    """Lets a class of configs answer a verify, and only it, with the ragged attention.

    The value that is stored in a config never changes: other threads, copies, saved files, and calls of the user's
    that a verify runs into, see what the user set.
    The getter stays on the class, without effect outside a verify.

    Raises:
        RuntimeError: If Transformers does not keep the setting in a property.
    """
    setting = inspect.getattr_static(kind, _SETTING, None)
    if not isinstance(setting, property) or setting.fget is None:
        raise RuntimeError(
            f"expected a property {kind.__name__}._attn_implementation, got {setting!r}; this release of Transformers "
            "is not supported"
        )
    read = setting.fget
    if hasattr(read, _MARK):
        return

    def switched(config: PreTrainedConfig) -> Any:
        scope = _verifying.scope
        return RAGGED_BLOCK if scope is not None and scope[0] is config and is_in_verify() else read(config)

    setattr(switched, _MARK, True)
    setattr(kind, _SETTING, property(switched, setting.fset))


@contextmanager
def ragged_attention(target: Target) -> Generator[None]:
    """Runs the target's text decoder under the ragged attention, in this thread only.

    Other threads may run the same model, or another one with the same config object, at the same time.
    """
    with _switching:
        _make_switchable(type(target.config))
    scope = (target.config, _verifying.scope)

    def put_back() -> None:
        if _verifying.scope is scope:  # this may come late, in another verify or thread
            _verifying.scope = scope[1]

    with undoing(put_back):
        _verifying.scope = scope
        yield


__all__ = [
    "Target",
    "attention_modules",
    "check_length",
    "check_pair",
    "check_target",
    "find_target",
    "ragged_attention",
    "rope_kinds",
]
