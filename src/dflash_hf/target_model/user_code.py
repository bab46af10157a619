"""This module finds out whether code of the user runs in a model: hooks, replaced forwards, classes of other
libraries.

[`Code`] also detects whether the code that a model uses has been replaced since it was last checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere

from dflash_hf.devices import Inventory

# This package's own forwards of modules have an attribute of this name.
MARK = "_dflash_fast"


def is_unmodified(parts: Inventory) -> bool:
    """Returns True if only code of torch and Transformers runs in a model, on plain weights.

    Code of the user in a model may change the code after it, or call the model itself.
    """
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    # The inventory has listed these modules. Checking every module of a large model takes longer than a step.
    for module in parts.altered:
        own = module.__dict__
        # Another thread's run of the same model may have its hooks there at any time.
        hooks = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
        if not all(map(is_harmless, hooks)):
            return False
        is_compiled = own.get("_compiled_call_impl") is not None
        # At this point, a run's own fast forms may be on modules that were listed because of a recorder's hook.
        if has_own_forward(module) or is_compiled:
            return False
    # A tensor subclass runs its own code in every operation.
    kinds_of_weights = {*map(type, parts.weights)}
    if not kinds_of_weights <= {nn.Parameter, type(None)}:
        return False
    model = parts.modules[0]
    # PEFT and other libraries set a method on the model itself.
    prepares_by_itself = "prepare_inputs_for_generation" in vars(model)
    if prepares_by_itself or not is_library(type(model).__module__):
        return False
    kinds = set(map(type, parts.modules))
    return all(map(_has_library_forward, kinds))


def runs_its_class(module: Any) -> bool:
    """Returns True if a call of a module runs only its class's forward, or a fast form of it.

    Hooks that record outputs for Transformers do not count. On the modules that a fast form does not call, these hooks
    record only attention weights, and `output_attentions` is refused with a draft.
    """
    # The dictionary is read directly, here and below, because several modules are checked in every layer of a step.
    own = module.__dict__
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    if own["_forward_pre_hooks"] or has_own_forward(module):
        return False
    hooks_behind = own["_forward_hooks"]
    return not hooks_behind or all(map(is_recorder, hooks_behind.values()))


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if a module has a forward of its own, as accelerate sets it, and this is not one
    of this package.
    """
    # Only the instance is checked, because every class has a forward.
    own = module.__dict__
    return "forward" in own and not hasattr(own["forward"], MARK)


def is_published(module: Any, buffers: frozenset[str] = frozenset()) -> bool:
    """Returns True if a module's forward is torch's or Transformers', and it has no other buffers than these.

    A forward of the user may read a class attribute, or a flag that is set later. No trial can show this.
    """
    return _has_library_forward(type(module)) and module._buffers.keys() <= buffers


def is_library(name: str) -> bool:
    """Returns True for the name of a module of torch or Transformers."""
    return name.partition(".")[0] in ("torch", "transformers")


def is_harmless(hook: Any) -> bool:
    """Returns True for hooks that change nothing in a run: those of Transformers, and those of this package, which
    only listen.

    Transformers' hooks record outputs, or make gradients begin at the embedding. They stay on a target permanently.
    """
    # A hook of any other module may change the output of a layer.
    return getattr(hook, "__module__", None) in (
        "transformers.utils.output_capturing",
        "transformers.modeling_utils",
        "dflash_hf.undo",
    )


def is_recorder(hook: Any) -> bool:
    """Returns True for Transformers' own hook that records a module's output.

    The hook stays permanently once hidden states of a model were requested, for example in training.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _has_library_forward(kind: type) -> bool:
    return is_library_function(getattr(kind, "forward", None))


def is_library_function(function: Any) -> bool:
    """Returns True if a function and all functions that it wraps are torch's or Transformers'."""
    # All of them must be, because a decorator of Transformers may wrap a function of the user.
    for part in with_wrapped(function):
        defined_in = getattr(part, "__globals__", {}).get("__name__")
        if not is_library(str(defined_in)):
            return False
    return True


def with_wrapped(function: Any) -> list[Any]:
    """Returns a function and the chain of functions that it wraps, if it is a decorator's.

    Returns nothing for `None`.
    """
    found = list[Any]()
    while function is not None:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


class Code:
    """An instance records the code of module classes: their forwards, and the functions and classes of the forwards'
    files.

    Args:
        kinds (iterable of `type`): The classes.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._forwards = {kind: getattr(kind, "forward", None) for kind in kinds}
        # An inherited or replaced forward is in another file than its class.
        names = {getattr(forward, "__module__", None) for forward in self._forwards.values()}
        # A Python module that was deleted from `sys.modules` cannot be checked.
        files = [vars(sys.modules[name]) for name in names if name in sys.modules]
        # Nothing else of these files is held, because the file of a notebook contains models.
        self._files = [(file, _definitions(file)) for file in files]

    def is_same(self) -> bool:
        """Returns True if none of this code was replaced."""
        for kind, forward in self._forwards.items():
            if getattr(kind, "forward", None) is not forward:
                return False
        # A forward looks up its functions in its file at each call, so a function that is replaced there counts too.
        for file, definitions in self._files:
            if any(file.get(name) is not definition for name, definition in definitions.items()):
                return False
        return True


def _definitions(file: dict[str, Any]) -> dict[str, Any]:
    """Returns the functions and classes among a file's names."""
    return {name: value for name, value in file.items() if isinstance(value, FunctionType | type)}
