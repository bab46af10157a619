"""Whether code of the user's runs in a model: hooks, replaced forwards, classes that are not Transformers'.

[`Code`] also tells whether anything that a model computes by has been replaced since it was looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere

from dflash_hf.devices import Inventory

# An attribute of the forwards that this package puts on modules.
MARK = "_dflash_fast"


def is_unmodified(parts: Inventory) -> bool:
    """Returns True if nothing but code of torch and Transformers runs in a model, on plain weights.

    Code of the user's in there may change what comes behind it, or call the model itself.
    """
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    # The inventory has listed them: to ask every module of a large model takes longer than a step.
    for module in parts.altered:
        own = module.__dict__
        # Another thread's run of the same model has its hooks there at any time.
        hooks = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
        if not all(map(is_harmless, hooks)):
            return False
        is_compiled = own.get("_compiled_call_impl") is not None
        # A run's own fast forms are there by now, also on modules that were listed for a recorder's hook.
        if has_own_forward(module) or is_compiled:
            return False
    # A tensor of a class of its own runs code of that class in every operation.
    kinds_of_weights = {*map(type, parts.weights)}
    if not kinds_of_weights <= {nn.Parameter, type(None)}:
        return False
    model = parts.modules[0]
    # PEFT and others put a method on the model itself.
    prepares_by_itself = "prepare_inputs_for_generation" in vars(model)
    if prepares_by_itself or not is_library(type(model).__module__):
        return False
    kinds = set(map(type, parts.modules))
    return all(map(_has_library_forward, kinds))


def runs_its_class(module: Any) -> bool:
    """Returns True if a call of a module runs its class's forward, or a fast form of it, and nothing else.

    Hooks that record outputs for Transformers do not count. Of what a fast form passes by they record attention
    weights alone, and `output_attentions` is refused with a draft.
    """
    # The dictionary is read itself, here and below: this is asked of several modules in every layer of a step.
    own = module.__dict__
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    if own["_forward_pre_hooks"] or has_own_forward(module):
        return False
    hooks_behind = own["_forward_hooks"]
    return not hooks_behind or all(map(is_recorder, hooks_behind.values()))


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if a module has a forward of its own, as accelerate puts it there, and not one of this package."""
    # Looked up in the instance alone: every class has a forward.
    own = module.__dict__
    return "forward" in own and not hasattr(own["forward"], MARK)


def is_published(module: Any, buffers: frozenset[str] = frozenset()) -> bool:
    """Returns True if a module's forward is torch's or Transformers', and it has no buffers to read but these.

    A forward of the user's may read a class attribute, or a flag that is set later: no trial can show that.
    """
    return _has_library_forward(type(module)) and module._buffers.keys() <= buffers


def is_library(name: str) -> bool:
    """Returns True for the name of a module of torch or Transformers."""
    return name.partition(".")[0] in ("torch", "transformers")


def is_harmless(hook: Any) -> bool:
    """Returns True for hooks that change nothing in a run: Transformers' own, and this package's, which listen.

    Transformers' hooks record outputs, or have gradients begin at the embedding. They stay on a target for good.
    """
    # A hook of any other module may change what a layer returns.
    return getattr(hook, "__module__", None) in (
        "transformers.utils.output_capturing",
        "transformers.modeling_utils",
        "dflash_hf.undo",
    )


def is_recorder(hook: Any) -> bool:
    """Returns True for Transformers' own hook that records a module's output.

    It stays for good once a model was asked for hidden states, in training for instance.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _has_library_forward(kind: type) -> bool:
    return is_library_function(getattr(kind, "forward", None))


def is_library_function(function: Any) -> bool:
    """Returns True if a function and all that it wraps are torch's or Transformers'."""
    # A decorator of Transformers' around a function of the user's is no library's function: all have to be.
    for part in with_wrapped(function):
        defined_in = getattr(part, "__globals__", {}).get("__name__")
        if not is_library(str(defined_in)):
            return False
    return True


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
        self._forwards = {kind: getattr(kind, "forward", None) for kind in kinds}
        # A forward that is inherited, or was replaced, stands in another file than its class.
        names = {getattr(forward, "__module__", None) for forward in self._forwards.values()}
        # A module of Python that was deleted from `sys.modules` cannot be looked at.
        files = [vars(sys.modules[name]) for name in names if name in sys.modules]
        # Nothing else of them is held: a notebook's file has models in it.
        self._files = [(file, _definitions(file)) for file in files]

    def is_same(self) -> bool:
        """Returns True if nothing of it was replaced."""
        for kind, forward in self._forwards.items():
            if getattr(kind, "forward", None) is not forward:
                return False
        # A forward looks its functions up in its file at each call: one that is replaced there counts as well.
        for file, definitions in self._files:
            if any(file.get(name) is not definition for name, definition in definitions.items()):
                return False
        return True


def _definitions(file: dict[str, Any]) -> dict[str, Any]:
    """The functions and classes among a file's names."""
    return {name: value for name, value in file.items() if isinstance(value, FunctionType | type)}
