"""What the code of a target's modules tells of whether it can be run over the ragged cache, before anything runs.

`RaggedCache.check_passed` sees the same after a verify; this refuses a target before any forward.
"""

from __future__ import annotations

import dis
import functools
import inspect
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.cache.recurrence import Recurrence

NO_INTERFACE = "attention that does not go through transformers.AttentionInterface"


def unsupported_code(
    model: PreTrainedModel, layers: list[nn.Module], recurrences: dict[int, Recurrence]
) -> str | None:
    """Names what in the code of a model's modules cannot be run over the ragged cache."""
    if not type(model)._supports_attention_backend and not recurrences:  # hybrids do not set it
        return NO_INTERFACE
    if _swallows_keywords(model, layers[0]):
        return "layers that do not hand keywords of the forward down to their attention"
    attention = [layer for index, layer in enumerate(layers) if index not in recurrences]
    return next((reason for layer in attention if (reason := _layer_reason(layer)) is not None), None)


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
    """Returns True if the forward of a class makes a call with `**kwargs` in it: there is one instruction for that."""
    forward: Any = inspect.unwrap(kind.forward)
    return any(instruction.opname == "CALL_FUNCTION_EX" for instruction in dis.get_instructions(forward.__code__))
