"""Calls inside calls: a hook of the user's may call the model whose forward it hangs on, or its config's other model.

A verify is known by the keyword `ragged`, which goes down to every attention; whatever lacks it is somebody else's. A
prefill is Transformers' own call and carries nothing: there the outermost forward is ours.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from dflash_hf.attention import RaggedMask, attend
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.scopes import Current, Hook, hooked
from dflash_hf.target_model.parts import Target

KEYWORD = "ragged"
RAGGED_BLOCK = "ragged_block"
_SETTING = "_attn_implementation"
_MARK = "_dflash_switchable"


def is_in_verify() -> bool:
    """Returns True if the innermost method with keywords of its own, among those that are running, was given `ragged`.

    That is an attention's forward where it chooses its function, and a decoder's where it makes masks. Asked of the
    stack and not of hooks, because another model with the same config object has none of ours.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_flags & inspect.CO_VARKEYWORDS and code.co_varnames[0] == "self":
            before = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
            return KEYWORD in frame.f_locals[code.co_varnames[before]]
        frame = frame.f_back
    return False


_verifying = Current()  # the text config whose model this thread is verifying with


def _make_switchable(kind: type[PreTrainedConfig]) -> None:
    """Lets a class of configs answer a verify, and only it, with the ragged attention.

    The value that is stored in a config never changes: other threads, copies, saved files, and calls of the user's
    that a verify runs into, see what the user set.
    The getter stays on the class, without effect outside a verify.
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
    _make_switchable(type(target.config))  # two threads at once set the same property twice
    with _verifying.doing(target.config):
        yield


@contextmanager
def outermost(*modules: nn.Module) -> Generator[Callable[[], bool]]:
    """Watches modules in this thread; what it yields says that each of them runs, and not inside itself.

    Hooks around a module's forward do not count as its running: what the user's call there is not ours either.
    """
    running = {module: list[bool]() for module in modules}

    def begin(module: nn.Module, args: Any) -> None:
        running[module].append(False)

    def run(module: nn.Module, args: Any) -> None:
        running[module][-1] = True

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        running[module][-1] = False

    def end(module: nn.Module, args: Any, output: Any) -> None:
        running[module].pop()

    hooks: list[Hook] = []
    for module in running:  # the user's own hooks come between
        hooks.append(Hook(module, begin, before=True, options={"prepend": True}))
        hooks.append(Hook(module, run, before=True))
        hooks.append(Hook(module, stop, options={"prepend": True, "always_call": True}))
        hooks.append(Hook(module, end, options={"always_call": True}))
    with hooked(*hooks):
        yield lambda: all(calls == [True] for calls in running.values())


def ragged_block(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ragged: RaggedCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Runs a target layer's attention over the ragged cache; called by unmodified Transformers modelling code.

    Args:
        module (`nn.Module`): The attention layer; not used.
        query, key, value (`torch.Tensor`): `[B, H, K, E]` and what `RaggedCache.update` returned.
        attention_mask (`torch.Tensor`, *optional*): Must be absent: the mask follows from `ragged`.
        scaling, dropout, sliding_window, softcap, s_aux: As Transformers passes them; `s_aux` are gpt-oss's sinks.
        ragged (`RaggedCache`): Given to the target's forward as a keyword and handed down to here.
        kwargs: What other attention implementations need; ignored.

    Returns the output `[B, K, H, E]`, and no attention weights.
    """
    if ragged is None:
        raise ValueError(
            f"expected the keyword ragged in attention {RAGGED_BLOCK!r}, got none; it is set by dflash_hf during "
            "decoding only: either it was selected by hand, or this target does not hand keywords of its forward down "
            "to its attention and is not supported"
        )
    if attention_mask is not None:
        raise ValueError(
            f"expected no attention mask under {RAGGED_BLOCK!r}, got one of shape {tuple(attention_mask.shape)}; "
            "this target builds masks of its own and is not supported"
        )
    block, window = ragged.attend(key)
    window = window if sliding_window is None else sliding_window
    mask = RaggedMask(block.on(key.device), (window, True, False))
    out = attend(query, key, value, mask, scaling, softcap=softcap, sinks=s_aux, dropout=dropout)
    return out, None


AttentionInterface.register(RAGGED_BLOCK, ragged_block)
