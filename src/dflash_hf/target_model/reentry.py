"""Calls inside calls: a hook of the user's may call the model whose forward it hangs on, or its config's other model.

A verify is known by the keyword `ragged`, which goes down to every attention; a forward without it is the user's. A
prefill is Transformers' own call and carries nothing: there the outermost forward is ours.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.block.attention import RaggedMask, attend
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.target_model.parts import Target
from dflash_hf.undo import Current, Hook, hooked, shared

KEYWORD = "ragged"
RAGGED_BLOCK = "ragged_block"
_CONFIG = "config"
_ABSENT = object()  # of a class that has said nothing of a config; `None` is a value that some have


class _Verifies(NamedTuple):
    """The verifies of a target in this thread."""

    # What those of the target's modules that hold a config show instead: with the ragged attention for its text.
    configs: dict[nn.Module, PreTrainedConfig]
    # The forwards of the target that are running, the innermost one last: whether each is a verify's.
    running: list[bool]


_verifying = Current()  # the `_Verifies` of this thread


def _switchable(kind: type[nn.Module]) -> AbstractContextManager[None]:
    """Has the modules of a class show another config than they hold in a verify, to the verifying thread alone.

    What a module holds never changes: other threads, copies, saved files, other models with the same config object,
    and calls of the user's that a verify runs into, see what the user has set. The last run that is over takes the
    descriptor from the class: torch.compile of releases up to 2.11 cannot trace it.
    """

    def put() -> None:
        inherited = inspect.getattr_static(kind, _CONFIG, _ABSENT)
        # A class above it may be switched too, for as long as its own runs take.
        if isinstance(inherited, _SwitchableConfig):
            inherited = inherited.inherited
        own = vars(kind).get(_CONFIG, _ABSENT)
        setattr(kind, _CONFIG, _SwitchableConfig(inherited, own))

    def take() -> None:
        descriptor = vars(kind).get(_CONFIG)
        if not isinstance(descriptor, _SwitchableConfig):
            return
        if descriptor.own is _ABSENT:
            delattr(kind, _CONFIG)
        else:
            setattr(kind, _CONFIG, descriptor.own)

    return shared(kind, put, take)


class _SwitchableConfig:
    """A descriptor: the config of a module, or, in a verify of its target, the one with the ragged attention.

    Args:
        inherited (`Any`): The class's attribute of that name: a property, or what stands for modules that hold no
            config; `_ABSENT` without one.
        own (`Any`): What the class itself has under that name, and gets back; `_ABSENT` if a class above it has it.
    """

    def __init__(self, inherited: Any, own: Any) -> None:
        self.inherited = inherited
        self.own = own

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        # The class itself is asked, as `hasattr` on a class does.
        if module is None:
            return self._of_class(kind)
        scope = _verifying.scope
        if scope is not None:
            verifies: _Verifies = scope[0]
            # The innermost forward decides: a call of the user's inside a verify is the user's.
            is_in_verify = bool(verifies.running) and verifies.running[-1]
            if is_in_verify and module in verifies.configs:
                return verifies.configs[module]
        return self.held_by(module)

    def held_by(self, module: nn.Module) -> Any:
        """Returns the config that a module holds, whatever it shows."""
        if isinstance(self.inherited, property):
            return self.inherited.__get__(module)
        # The module's own dictionary, because `module.config` would come back to this descriptor.
        held = vars(module)
        if _CONFIG in held:
            return held[_CONFIG]
        return self._of_class(type(module))

    def __set__(self, module: nn.Module, config: Any) -> None:
        # What is set in a verify is held, and shown after it.
        if isinstance(self.inherited, property):
            self.inherited.__set__(module, config)
        else:
            vars(module)[_CONFIG] = config

    def __delete__(self, module: nn.Module) -> None:
        if _CONFIG not in vars(module):
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {_CONFIG!r}")
        del vars(module)[_CONFIG]

    def _of_class(self, kind: type[nn.Module]) -> Any:
        if self.inherited is _ABSENT:
            raise AttributeError(f"{kind.__name__!r} has no attribute {_CONFIG!r}")
        return self.inherited


def _held_config(module: nn.Module) -> Any:
    """Returns the config that a module holds, also while it shows another one; `None` without any."""
    of_class = inspect.getattr_static(type(module), _CONFIG, _ABSENT)
    if isinstance(of_class, _SwitchableConfig):
        return of_class.held_by(module)
    return getattr(module, _CONFIG, None)


def _with_ragged_attention(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config that names the ragged attention."""
    ragged = copy.copy(config)
    # Not by the setter: that one changes the configs of a vision tower, too, which the copy shares.
    vars(ragged)["_attn_implementation_internal"] = RAGGED_BLOCK
    if ragged._attn_implementation != RAGGED_BLOCK:
        raise RuntimeError(
            f"expected {type(config).__name__}._attn_implementation to read _attn_implementation_internal, got "
            "another attribute; this release of Transformers is not supported"
        )
    return ragged


def _with_text_config(config: Any, text: PreTrainedConfig, ragged: PreTrainedConfig) -> Any:
    """Returns a config with `ragged` in place of its text config, or the config itself if it has another one or none.

    An image model makes the masks of its text decoder by the text config that is within its own.
    """
    # A text model holds its text config itself.
    if config is text:
        return ragged
    if not isinstance(config, PreTrainedConfig):
        return config
    parts = dict[str, Any]()
    for name, part in vars(config).items():
        shown = _with_text_config(part, text, ragged)
        if shown is not part:
            parts[name] = shown
    if not parts:
        return config
    # A shallow copy, so that the image part stays the object that the vision tower holds.
    shown = copy.copy(config)
    vars(shown).update(parts)
    return shown


def _configs_in_verify(target: Target) -> dict[nn.Module, PreTrainedConfig]:
    """Returns what the target's modules show in a verify, where that is not what they hold."""
    ragged = _with_ragged_attention(target.config)
    # Not the model itself: what the user's code asks in a verify is the config that the user has set.
    inside = target.parts.modules
    if target.model is not target.decoder:
        inside = inside[1:]
    shown_by_id = dict[int, Any]()  # nearly all modules hold one of a few
    configs = dict[nn.Module, PreTrainedConfig]()
    # Nearly all modules hold their config themselves; of the others, those whose class has one are asked.
    kinds = set(map(type, inside))
    asked = {kind for kind in kinds if hasattr(kind, _CONFIG)}
    for module in inside:
        held = vars(module).get(_CONFIG)
        if held is None and type(module) in asked:
            held = _held_config(module)
        if held is None:
            continue
        # Configs have no hash; by their identity each of them is copied once.
        if id(held) not in shown_by_id:
            shown_by_id[id(held)] = _with_text_config(held, target.config, ragged)
        shown = shown_by_id[id(held)]
        # A vision tower holds a config without a text part, and shows it as ever.
        if shown is not held:
            configs[module] = shown
    return configs


@contextmanager
def ragged_attention(target: Target) -> Generator[None]:
    """Runs the target's text decoder under the ragged attention, in this thread only.

    Other threads may run the same model, or another one with the same config object, at the same time, and so may the
    user's hooks inside of a verify.
    """
    verifies = _Verifies(_configs_in_verify(target), [])
    kinds = set(map(type, verifies.configs))

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # The keyword is what tells a verify from a forward of the user's.
        verifies.running.append(KEYWORD in kwargs)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        verifies.running.pop()

    # First of all, and also after an error: each forward that has begun ends.
    at_begin = {"prepend": True, "with_kwargs": True}
    at_end = {"always_call": True}
    hooks = list[Hook]()
    for module in target.path:
        hooks.append(Hook(module, begin, before=True, options=at_begin))
        hooks.append(Hook(module, end, options=at_end))
    with ExitStack() as switches:
        for kind in kinds:
            switches.enter_context(_switchable(kind))
        with hooked(*hooks), _verifying.doing(verifies):
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

    # The user's own hooks come between the first and the second pre-hook, and between the two behind the forward.
    first = {"prepend": True}
    first_also_after_error = {"prepend": True, "always_call": True}
    also_after_error = {"always_call": True}
    hooks: list[Hook] = []
    for module in running:
        hooks.append(Hook(module, begin, before=True, options=first))
        hooks.append(Hook(module, run, before=True))
        hooks.append(Hook(module, stop, options=first_also_after_error))
        hooks.append(Hook(module, end, options=also_after_error))

    def is_outermost() -> bool:
        # Two entries are a call inside a call, and `False` is a hook around the forward.
        return all(calls == [True] for calls in running.values())

    with hooked(*hooks):
        yield is_outermost


def mask_of_layer(ragged: RaggedCache, key: Tensor, window: int | None) -> RaggedMask:
    """Returns the mask of a target's layer in a verify: causal, within the layer's window or, without, its cache's.

    `key` `[B, G, R, E]` are the keys that the cache has handed out; that attention runs over them is recorded.
    """
    # Some layers do not pass their window: then the cache's layer knows it from the config.
    block, window_of_cache = ragged.note_attention(key)
    if window is None:
        window = window_of_cache
    return RaggedMask(block.on(key.device), (window, True, False))


def _attention_of_user(module: nn.Module) -> Callable[..., Any]:
    """Returns the attention function that a module's config names; raises `ValueError` if that is the ragged one."""
    name = _held_config(module)._attn_implementation
    if name == RAGGED_BLOCK:
        raise ValueError(
            f"expected the keyword ragged in attention {RAGGED_BLOCK!r}, got none; it is set by dflash_hf during "
            "decoding only and cannot be selected by hand: set another attention"
        )
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    # "eager" is in no table: each file of Transformers' models has its own, beside the forward that calls it.
    file = sys.modules[type(module).forward.__module__]
    return vars(file)["eager_attention_forward"]


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

    Returns the output `[B, K, H, E]`, and no attention weights. A call without `ragged` is the user's, whose hook in a
    verify calls a layer itself: it goes by the attention that the user has set.
    """
    if ragged is None:
        # The arguments that were named here go back under their names; `None` may mean something else there.
        named = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: value for name, value in named.items() if value is not None}
        attend_as_set = _attention_of_user(module)
        return attend_as_set(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if attention_mask is not None:
        raise ValueError(
            f"expected no attention mask under {RAGGED_BLOCK!r}, got one of shape {tuple(attention_mask.shape)}; "
            "this target builds masks of its own and is not supported"
        )
    mask = mask_of_layer(ragged, key, sliding_window)
    out = attend(query, key, value, mask, scaling, softcap=softcap, sinks=s_aux, dropout=dropout)
    return out, None


AttentionInterface.register(RAGGED_BLOCK, ragged_block)
