"""This module distinguishes a run's own forwards from calls that the user makes inside them.

A hook of the user may call the model on whose forward it runs, or another model with the same config.

A verify is recognised by the keyword `ragged`, which is passed down to every attention. A forward without this keyword
is the user's. A prefill is Transformers' own call and has no such keyword. In a prefill, the outermost forward is the
run's.
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
_ABSENT = object()  # for a class without a config; `None` is a config that some classes have


class _Verifies(NamedTuple):
    """An instance describes the verifies of a target in this thread."""

    # The config that each module with a config shows in a verify, in which the text part names the ragged attention.
    configs: dict[nn.Module, PreTrainedConfig]
    # For each running forward of the target, whether it is a verify's. The innermost forward is last.
    running: list[bool]


_verifying = Current()  # the `_Verifies` of this thread


def _switchable(kind: type[nn.Module]) -> AbstractContextManager[None]:
    """Makes the modules of a class show another config than they hold, in a verify and only to the
    verifying thread.

    The config that a module holds never changes. So other threads, copies, saved files, other models with the same
    config object, and the user's calls inside a verify see the config that the user has set. The last run that ends
    removes the descriptor from the class, because torch.compile of releases up to 2.11 cannot trace it.
    """

    def put() -> None:
        inherited = inspect.getattr_static(kind, _CONFIG, _ABSENT)
        # A base class may be switched too, for the duration of its own runs.
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
    """This descriptor returns the config of a module or, in a verify of its target, the config with the ragged
    attention.

    Args:
        inherited (`Any`): The class's attribute of this name: a property, or the value for modules that hold no
            config. `_ABSENT` if there is none.
        own (`Any`): The attribute that the class itself has under this name, and gets back afterwards. `_ABSENT` if
            only a base class has it.
    """

    def __init__(self, inherited: Any, own: Any) -> None:
        self.inherited = inherited
        self.own = own

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        # The attribute is read from the class itself, for example by `hasattr` on a class.
        if module is None:
            return self._of_class(kind)
        scope = _verifying.scope
        if scope is not None:
            verifies: _Verifies = scope[0]
            # The innermost forward decides, because a call of the user inside a verify is the user's.
            is_in_verify = bool(verifies.running) and verifies.running[-1]
            if is_in_verify and module in verifies.configs:
                return verifies.configs[module]
        return self.held_by(module)

    def held_by(self, module: nn.Module) -> Any:
        """Returns the config that a module holds, even if it shows another one."""
        if isinstance(self.inherited, property):
            return self.inherited.__get__(module)
        # The module's own dictionary is read, because `module.config` would call this descriptor again.
        held = vars(module)
        if _CONFIG in held:
            return held[_CONFIG]
        return self._of_class(type(module))

    def __set__(self, module: nn.Module, config: Any) -> None:
        # A config that is set in a verify is stored, and shown after the verify.
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
    """Returns the config that a module holds, even while it shows another one, or `None` if it has none."""
    of_class = inspect.getattr_static(type(module), _CONFIG, _ABSENT)
    if isinstance(of_class, _SwitchableConfig):
        return of_class.held_by(module)
    return getattr(module, _CONFIG, None)


def _with_ragged_attention(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config in which the ragged attention is set."""
    ragged = copy.copy(config)
    # The setter is not used, because it would also change the configs of a vision tower, which the copy shares.
    vars(ragged)["_attn_implementation_internal"] = RAGGED_BLOCK
    if ragged._attn_implementation != RAGGED_BLOCK:
        raise RuntimeError(
            f"expected {type(config).__name__}._attn_implementation to read _attn_implementation_internal, got "
            "another attribute; this release of Transformers is not supported"
        )
    return ragged


def _with_text_config(config: Any, text: PreTrainedConfig, ragged: PreTrainedConfig) -> Any:
    """Returns a config with `ragged` in place of its text config `text`, or the config itself if it does not contain
    `text`.

    An image model makes the masks of its text decoder from the text config inside its own config.
    """
    # A text model holds its text config directly.
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
    # This is a shallow copy, so the image part stays the object that the vision tower holds.
    shown = copy.copy(config)
    vars(shown).update(parts)
    return shown


def _configs_in_verify(target: Target) -> dict[nn.Module, PreTrainedConfig]:
    """Returns the configs that the target's modules show in a verify, where these differ from the configs that they
    hold.
    """
    ragged = _with_ragged_attention(target.config)
    # The model itself is left out, so that the user's code in a verify reads the config that the user has set.
    inside = target.parts.modules
    if target.model is not target.decoder:
        inside = inside[1:]
    shown_by_id = dict[int, Any]()  # nearly all modules hold one of a few configs
    configs = dict[nn.Module, PreTrainedConfig]()
    # Nearly all modules hold their config themselves. Of the others, only modules whose class has a config are asked.
    kinds = set(map(type, inside))
    asked = {kind for kind in kinds if hasattr(kind, _CONFIG)}
    for module in inside:
        held = vars(module).get(_CONFIG)
        if held is None and type(module) in asked:
            held = _held_config(module)
        if held is None:
            continue
        # Configs have no hash, so they are stored by identity, and each of them is copied once.
        if id(held) not in shown_by_id:
            shown_by_id[id(held)] = _with_text_config(held, target.config, ragged)
        shown = shown_by_id[id(held)]
        # The config of a vision tower has no text part, so it is shown unchanged.
        if shown is not held:
            configs[module] = shown
    return configs


@contextmanager
def ragged_attention(target: Target) -> Generator[None]:
    """Runs the target's text decoder with the ragged attention, in this thread only.

    At the same time, other threads may run the same model or another one with the same config object, and the user's
    hooks may do so inside a verify.
    """
    verifies = _Verifies(_configs_in_verify(target), [])
    kinds = set(map(type, verifies.configs))

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # The keyword distinguishes a verify from a forward of the user.
        verifies.running.append(KEYWORD in kwargs)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        verifies.running.pop()

    # The first hook runs before all others, and the second one runs after an error too. So each forward that has begun
    # also ends.
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
    """Watches modules in this thread.

    It yields a function that returns True if each of them runs, and not inside itself.

    Hooks around a module's forward do not count as its running, because the user's calls there are not the run's.
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

    # The user's own hooks run between the first and the second pre-hook, and between the two hooks after the forward.
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
        # Two entries mean a call inside a call, and `False` means a hook around the forward.
        return all(calls == [True] for calls in running.values())

    with hooked(*hooks):
        yield is_outermost


def mask_of_layer(ragged: RaggedCache, key: Tensor, window: int | None) -> RaggedMask:
    """Returns the mask of a target's layer in a verify: causal, and within the layer's window or else its cache's
    window.

    `key` `[B, G, R, E]` are the keys that the cache has returned. The function records that attention runs over them.
    """
    # Some layers do not pass their window. Then the layer of the cache knows it from the config.
    block, window_of_cache = ragged.note_attention(key)
    if window is None:
        window = window_of_cache
    return RaggedMask(block.on(key.device), (window, True, False))


def _attention_of_user(module: nn.Module) -> Callable[..., Any]:
    """Returns the attention function that a module's config names.

    Raises `ValueError` if it is the ragged attention.
    """
    name = _held_config(module)._attn_implementation
    if name == RAGGED_BLOCK:
        raise ValueError(
            f"expected the keyword ragged in attention {RAGGED_BLOCK!r}, got none; it is set by dflash_hf during "
            "decoding only and cannot be selected by hand: set another attention"
        )
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    # "eager" is in no table. Each file of Transformers' models has its own eager function, beside the forward that
    # calls it.
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
    """Runs a target layer's attention over the ragged cache. Unmodified modelling code of Transformers calls it.

    Args:
        module (`nn.Module`): The attention layer. It is used only for calls without `ragged`.
        query, key, value (`torch.Tensor`): Queries `[B, H, K, E]`, and the keys and values that `RaggedCache.update`
            has returned.
        attention_mask (`torch.Tensor`, *optional*): Must be `None`, because the mask follows from `ragged`.
        scaling, dropout, sliding_window, softcap, s_aux: The values that Transformers passes. `s_aux` are gpt-oss's
            sinks.
        ragged (`RaggedCache`): The cache, which is passed to the target's forward as a keyword and from there to this
            function.
        kwargs: Arguments of other attention implementations. They are ignored in a verify.

    Returns the output `[B, K, H, E]`, and no attention weights. Raises `ValueError` for an attention mask in a verify.
    A call without `ragged` is the user's, whose hook in a verify calls a layer itself. It runs the attention that the
    user has set.
    """
    if ragged is None:
        # The named arguments are passed on under their names. They are left out if they are `None`, because `None` may
        # have another meaning there.
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
