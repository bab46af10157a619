"""Whether code of the user's runs in a model: hooks, replaced forwards, classes that are not Transformers'."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as everywhere

from dflash_hf.devices import Inventory
from dflash_hf.target_model.code import with_wrapped

# An attribute of the forwards that this package puts on modules.
MARK = "_dflash_fast"


def is_unmodified(parts: Inventory) -> bool:
    """Returns True if nothing but code of torch and Transformers runs in a model, on plain weights.

    Code of the user's in there may change what comes behind it, or call the model itself.
    """
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    for module in parts.altered:
        own = module.__dict__
        if own["_forward_pre_hooks"] or not all(map(is_recorder, own["_forward_hooks"].values())):
            return False
        if "forward" in own or own.get("_compiled_call_impl") is not None:
            return False
    if not {*map(type, parts.weights)} <= {nn.Parameter, type(None)}:
        return False
    model = parts.modules[0]
    if "prepare_inputs_for_generation" in vars(model) or not is_library(type(model).__module__):
        return False
    return all(map(_has_library_forward, set(map(type, parts.modules))))


def runs_its_class(module: Any) -> bool:
    """Returns True if a call of a module runs its class's forward, or a fast form of it, and nothing else.

    Hooks that record outputs for Transformers do not count. Of what a fast form passes by they record attention
    weights alone, and `output_attentions` is refused with a draft.
    """
    own = module.__dict__
    if (
        own["_forward_pre_hooks"]
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
    ):
        return False
    if has_own_forward(module):
        return False
    return not own["_forward_hooks"] or all(map(is_recorder, own["_forward_hooks"].values()))


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if a module has a forward of its own, as accelerate puts it there, and not one of this package."""
    own = module.__dict__
    return "forward" in own and not hasattr(own["forward"], MARK)


def is_published(module: Any) -> bool:
    """Returns True if a module's forward is torch's or Transformers', and it has no buffers to read.

    A forward of the user's may read a class attribute, or a flag that is set later: no trial can show that.
    """
    return _has_library_forward(type(module)) and not module._buffers


def is_library(name: str) -> bool:
    """Returns True for the name of a module of torch or Transformers."""
    return name.partition(".")[0] in ("torch", "transformers")


def is_harmless(hook: Any) -> bool:
    """Returns True for hooks that change nothing: Transformers' recorders, and this package's, which listen."""
    return getattr(hook, "__module__", None) in (
        "transformers.utils.output_capturing",
        "dflash_hf.undo",
    )


def is_recorder(hook: Any) -> bool:
    """Returns True for Transformers' own hook that records a module's output.

    It stays for good once a model was asked for hidden states, in training for instance.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _has_library_forward(kind: type) -> bool:
    functions = with_wrapped(getattr(kind, "forward", None))
    return all(
        is_library(str(getattr(function, "__globals__", {}).get("__name__")))
        for function in functions
    )
