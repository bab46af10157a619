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


def unsupported_code(
    model: PreTrainedModel, layers: list[nn.Module], recurrences: dict[int, Recurrence]
) -> str | None:
    """Names what in the code of a model's modules cannot be run over the ragged cache, as far as it tells."""
    without = "attention that does not go through transformers.AttentionInterface"
    if not type(model)._supports_attention_backend and not recurrences:  # hybrids do not set it
        return without
    if _swallows_keywords(model, layers[0]):
        return "layers that do not hand keywords of the forward down to their attention"
    for layer in (layer for index, layer in enumerate(layers) if index not in recurrences):
        interfaces = [interface for module in layer.modules() for interface in _interfaces_of(type(module))]
        if not interfaces:
            return without
        if any(interface is not ALL_ATTENTION_FUNCTIONS for interface in interfaces):
            return "an attention interface of its own, with masks that follow from the values"
    return None


def _swallows_keywords(model: PreTrainedModel, first: nn.Module) -> bool:
    """Returns True if a module between the model and a layer's attention cannot hand on keywords it does not name.

    A forward that makes a call with `**kwargs` in it can: there is one instruction for that.
    """
    parts = next(name for name, module in model.named_modules() if module is first).split(".")
    for module in (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)):
        if isinstance(module, nn.ModuleList) or "_orig_mod" in module._modules:
            continue
        forward: Any = inspect.unwrap(type(module).forward)
        if all(instruction.opname != "CALL_FUNCTION_EX" for instruction in dis.get_instructions(forward.__code__)):
            return True
    return False


def with_wrapped(function: Any) -> list[Any]:
    """Returns a function, what it wraps if it is a decorator's, what that wraps, and so on; nothing of `None`."""
    found = list[Any]()
    while function is not None:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


@functools.cache
def _interfaces_of(kind: type[nn.Module]) -> tuple[AttentionInterface, ...]:
    """The attention interfaces that the forward of a class refers to."""
    forward: Any = inspect.unwrap(kind.forward)
    found = [forward.__globals__.get(name) for name in forward.__code__.co_names]
    return tuple(value for value in found if isinstance(value, AttentionInterface))
