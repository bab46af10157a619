"""What the classes of a target's modules tell of what they compute, before anything runs.

`RaggedCache.check_passed` sees after a verify whether a target went over the ragged cache; [`unsupported_code`]
refuses it before any forward, as far as it shows.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.cache.recurrence import Recurrence

_DOCSTRING = re.compile(r'"""(?s:.*?)"""')
# `**name` of a signature or of a call, and no power.
_KEYWORDS = re.compile(r"(?<=[(,\s])\*\*[A-Za-z_]")
_TAKEN = inspect.Parameter.VAR_KEYWORD


def unsupported_code(
    model: PreTrainedModel, layers: list[nn.Module], recurrences: dict[int, Recurrence]
) -> str | None:
    """Names what in the code of a model's modules cannot be run over the ragged cache, as far as it tells."""
    without = "attention that does not go through transformers.AttentionInterface"
    if not type(model)._supports_attention_backend and not recurrences:  # hybrids do not set it
        return without
    if not _hands_keywords_on(model, layers[0]):
        return "layers that do not hand keywords of the forward down to their attention"
    for index, layer in enumerate(layers):
        if index in recurrences:
            continue
        interfaces = [interface for module in _attentions_of(layer) for interface in _interfaces_of(type(module))]
        if not interfaces:
            return without
        if any(interface is not ALL_ATTENTION_FUNCTIONS for interface in interfaces):
            return "an attention interface of its own, with masks that follow from the values"
    return None


def _hands_keywords_on(model: PreTrainedModel, first: nn.Module) -> bool:
    """Returns True if the modules from the model to its first layer all hand keywords on to what they call.

    A forward may take `**kwargs` and drop them: Nemotron's layers do, and so did Moshi's decoder. What cannot be read
    is taken to hand them on; the first verify sees whether it does.
    """
    parts = next(name for name, module in model.named_modules() if module is first).split(".")
    for depth in range(len(parts) + 1):
        module = model.get_submodule(".".join(parts[:depth]))
        if isinstance(module, nn.ModuleList) or "_orig_mod" in module._modules:
            continue
        forward = inspect.unwrap(type(module).forward)
        try:
            source = inspect.getsource(forward)
        except (OSError, TypeError):
            continue
        # The source is searched, not parsed: `ast.parse` of Python 3.11 fails where two threads are in it.
        keywords = _KEYWORDS.findall(_DOCSTRING.sub("", source))
        taken = [parameter for parameter in inspect.signature(forward).parameters.values() if parameter.kind is _TAKEN]
        if len(keywords) <= len(taken):
            return False
    return True


def _attentions_of(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that may be attention: they know the number of their layer; else the layer itself."""
    found = [module for module in layer.modules() if module is not layer and hasattr(module, "layer_idx")]
    return found or [layer]


def _interfaces_of(kind: type[nn.Module]) -> list[AttentionInterface]:
    """The attention interfaces in the file that the forward of a class stands in."""
    file = sys.modules.get(kind.forward.__module__)
    values = [] if file is None else vars(file).values()
    return [value for value in values if isinstance(value, AttentionInterface)]


def with_wrapped(function: Any) -> list[Any]:
    """Returns a function, what it wraps if it is a decorator's, what that wraps, and so on; nothing of `None`."""
    found = list[Any]()
    while function is not None:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


class Code:
    """What classes of modules compute by: their forwards, and the functions and classes of the files of these.

    Args:
        kinds (iterable of `type`): The classes.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._forwards = [(kind, getattr(kind, "forward", None)) for kind in kinds]
        names = {getattr(forward, "__module__", None) for _, forward in self._forwards}
        files = [sys.modules[name] for name in names if name in sys.modules]
        # Nothing else of them is held: a notebook's file has models in it.
        self._files = [(vars(file), _definitions(vars(file))) for file in files]

    def is_same(self) -> bool:
        """Returns True if nothing of it was replaced."""
        if any(getattr(kind, "forward", None) is not forward for kind, forward in self._forwards):
            return False
        return all(
            file.get(name) is definition
            for file, definitions in self._files
            for name, definition in definitions.items()
        )

    def functions(self) -> tuple[object, ...]:
        """Returns the forwards, and the functions and classes of the files."""
        forwards = [forward for _, forward in self._forwards]
        return *forwards, *(value for _, definitions in self._files for value in definitions.values())


def _definitions(file: dict[str, Any]) -> dict[str, Any]:
    """The functions and classes among a file's names."""
    return {name: value for name, value in file.items() if isinstance(value, FunctionType | type)}
