"""The target's decoder layers through `torch.compile` during a verify: norms, RoPE, activations and residuals fused.

A layer's forward is compiled from its beginning to its attention, and from behind that to its end. The attention
itself runs as it is, because keys, values and the ragged block's notes are changed there by Python code; its norms and
its RoPE are compiled on their own. So every layer of a kind shares a few small graphs, none for each `layer_idx`.

Layers whose attention kernels compute (`target/fused.py`) run by those: compiled they would be more launches.

Nothing of the model is changed but for an attribute `forward` on these modules while a verify runs, which acts in the
verifying thread only. Hooks are called outside of `forward`, so taps fire as ever.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dflash_hf.scopes import Current, shared
from dflash_hf.target.code import attention_modules, with_wrapped
from dflash_hf.target.fused import COMPILED, fused_attention
from dflash_hf.target.parts import Target

# Tests compile with one that is quick.
backend = "inductor"
Shape = tuple[int, int]  # rows, tokens


_here = Current()  # the shape that is verified with compiled layers


@contextmanager
def compiled_layers(target: Target, shape: Shape) -> Generator[None]:
    """Runs the target's decoder layers compiled, in this thread only.

    Recurrent layers, those whose attention kernels compute, and those that carry hooks inside or a forward of their
    own run as they would without. The first verify of a shape compiles: each has graphs of its own. What cannot be
    compiled raises one of `compile_errors` in the body.
    """
    with shared(target.model, lambda: _attach(target), lambda: _detach(target)), _here.doing(shape):
        yield


def compile_errors() -> type[Exception]:
    """Returns what a failed compilation raises; its module is loaded only where something is compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def _attach(target: Target) -> None:
    """Gives the layers, their attention and its norms a forward that asks which thread calls it."""
    by_kernels = set(fused_attention(target))
    for layer in target.layers:
        attentions = attention_modules(layer)
        # A recurrent layer's cache keeps notes in Python code too, and all through the layer.
        if not attentions or layer in attentions or not by_kernels.isdisjoint(attentions) or not _is_plain(layer):
            continue
        for attention in attentions:
            own: Any = attention
            # Behind this no graph goes on; what is called in there may be compiled again.
            own.forward = torch.compiler.disable(_switched(attention, _attention_forward))
            for part in attention.children():
                if not isinstance(part, nn.Linear) and not list(part.children()) and list(part.parameters()):
                    part.forward = _switched(part, _compiled)
        layer.forward = _switched(layer, _compiled)


def _detach(target: Target) -> None:
    """Takes all of it off again."""
    for layer in target.layers:
        for module in layer.modules():
            forward = vars(module).get("forward")
            # `torch.compiler.disable` has wrapped an attention's.
            if hasattr(getattr(forward, "_torchdynamo_orig_callable", forward), COMPILED):
                del module.forward


def _is_plain(layer: nn.Module) -> bool:
    """Returns True if nothing but the classes' own code runs in a layer."""
    return not any(
        {"forward", "_hf_hook"} & vars(part).keys()
        or part._compiled_call_impl is not None
        or (part is not layer and (part._forward_hooks or part._forward_pre_hooks))
        for part in layer.modules()
    )


def _switched(module: nn.Module, change: Callable[[Any, Shape], Callable[..., Any]]) -> Callable[..., Any]:
    """A forward for one module: the changed one in a verifying thread, elsewhere its class's."""
    plain, weak = type(module).forward, weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        chosen = plain if _here.scope is None else change(plain, _here.scope[0])
        return chosen(weak(), *args, **kwargs)

    setattr(forward, COMPILED, True)
    return forward


@functools.cache
def _compiled(function: Any, shape: Shape) -> Callable[..., Any]:
    """A function compiled for one shape of verify.

    Each shape gets a copy of its code: torch gives up on code after a few compilations of it.
    """
    # Rounds where eager code rounds.
    options: dict[str, Any] | None = {"emulate_precision_casts": True} if backend == "inductor" else None
    return torch.compile(_copied(function, {}), dynamic=False, backend=backend, options=options)


@functools.cache
def _attention_forward(function: Any, shape: Shape) -> Callable[..., Any]:
    """An attention's forward that calls compiled RoPE functions, if it finds them by name in its module."""
    ropes = dict[str, Callable[..., Any]]()
    for part in with_wrapped(function):
        names: Sequence[str] = getattr(getattr(part, "__code__", None), "co_names", ())
        for name in names:
            rope = part.__globals__.get(name)
            if "rotary_pos_emb" in name and isinstance(rope, types.FunctionType):
                ropes[name] = _compiled(rope, shape)
    return _copied(function, ropes) if ropes else function


def _copied(function: Any, replaced: dict[str, Any]) -> Any:
    """A copy of a Python function that sees other values under these global names; anything else as it is.

    What a decorator has wrapped is copied with it: Transformers' own stand around forwards, and call them from a cell.
    """
    if not isinstance(function, types.FunctionType):
        return function
    seen = {**function.__globals__, **replaced} if replaced else function.__globals__
    cells = function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if cells is not None and wrapped is not None:
        cells = tuple(_cell_of_copy(cell, wrapped, replaced) for cell in cells)
    code = function.__code__.replace()
    copy = types.FunctionType(code, seen, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _cell_of_copy(cell: types.CellType, wrapped: Any, replaced: dict[str, Any]) -> types.CellType:
    """A cell with the copy of what a decorator has wrapped, if that is what this one holds; else the cell itself."""
    return types.CellType(_copied(wrapped, replaced)) if cell.cell_contents is wrapped else cell
