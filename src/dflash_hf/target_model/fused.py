"""Parts of the target in fewer operations during a verify: norms, gated activations, residual sums, attention.

Where kernels run (`ops.fuses`) by our own: a layer of Qwen3 that launches 55 kernels launches 13 then. On a CPU
(`ops.shortens`) by fewer operations of torch's own and fewer calls (`short_forwards.py`).

Which modules compute what, `formulas.py` finds out. One that is not known runs as it is; so does one that has a
forward of its own, and one that would be passed by while hooks hang on it.

Nothing of the model is changed but for an attribute `forward` on these modules while a verify runs, which acts in the
verifying thread only. Hooks are called outside of `forward`, so taps fire as ever.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_hf import ops
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache_name import CACHE_NAME
from dflash_hf.scopes import undoing
from dflash_hf.target_model.code import Code
from dflash_hf.target_model.formulas import (
    GATED,
    HIDDEN,
    LAYER,
    MARK,
    Draw,
    agrees,
    attention_eps,
    copied,
    facts,
    gated_facts,
    gated_like,
    head_norms,
    is_bare,
    is_harmless,
    is_theirs,
    is_untouched,
    norm_eps,
)
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.reentry import KEYWORD
from dflash_hf.target_model.short_forwards import (
    Forward,
    PreparedLayer,
    ShortLayer,
    attend_ragged,
    by_sdpa,
    cache_of_verify,
    short_forward_of,
)


class FollowingNorm(NamedTuple):
    """A norm whose input is a layer's output."""

    norm: weakref.ref[nn.Module]
    eps: float
    # The module that it is the first part of: the next layer or, behind all layers, the norm itself.
    part_of: weakref.ref[nn.Module]


class NormedAhead(NamedTuple):
    """The norm of a layer's output, computed with the sum that makes the output."""

    norm: nn.Module
    total: Tensor
    normed: Tensor


class _Here(threading.local):
    """The model that this thread runs in fewer operations, if it does, its layers, and whether for a whole run."""

    model: PreTrainedModel | None = None
    layers: Mapping[nn.Module, PreparedLayer] = MappingProxyType({})
    is_whole_run: bool = False
    # By layer, the norm that its output goes into, as far as that is known.
    following: Mapping[weakref.ref[nn.Module], FollowingNorm] = MappingProxyType({})
    # What the last layer has normed for the norm behind it.
    normed: NormedAhead | None = None


class _Plan(NamedTuple):
    """What can be fused in a model, as long as its modules are these."""

    facts: object  # those of the target
    dtype: torch.dtype  # what was checked
    is_kernels: bool  # whether it is fused by kernels, else by torch
    code: Code  # what the classes of its modules compute by
    forwards: list[tuple[weakref.ref[nn.Module], Forward]]  # modules and their forwards
    layers: list[tuple[weakref.ref[nn.Module], ShortLayer]]  # those of them that have to be prepared
    following: Mapping[weakref.ref[nn.Module], FollowingNorm]  # by layer, the norm that its output goes into


_here = _Here()
_patching = threading.Lock()
_users: weakref.WeakKeyDictionary[nn.Module, dict[object, _Plan]] = weakref.WeakKeyDictionary()
_plans: weakref.WeakKeyDictionary[PreTrainedModel, _Plan] = weakref.WeakKeyDictionary()


@contextmanager
def fused_modules(target: Target, takes_prompts: bool = False) -> Generator[None]:
    """Runs modules of the target's decoder whose formula is known in fewer operations, in this thread only.

    Within a whole run, [`short_layers`], nothing is looked up again.

    Args:
        target (`Target`): The target; nothing happens unless its embedding is on a CPU or where kernels run.
        takes_prompts (`bool`): Whether what is called over Transformers' cache is a prefill of ours.
    """
    weight: Any = target.embedding.weight
    is_kernels = ops.fuses(weight)
    if runs_whole(target) or (not is_kernels and not ops.shortens(weight)):
        yield
        return
    plan = _plan(target, weight.dtype, is_kernels)
    user = object()
    before = _here.model, _here.layers, _here.is_whole_run, _here.following

    def put_back() -> None:
        _here.model, _here.layers, _here.is_whole_run, _here.following = before
        _here.normed = None
        with _patching:
            users = _users.setdefault(target.model, {})
            users.pop(user, None)
            if any(other is plan for other in users.values()):
                return
            for weak, _ in plan.forwards:
                module = weak()
                if module is not None and "forward" in vars(module) and not _has_own_forward(module):
                    del module.forward

    with undoing(put_back):
        with _patching:
            _users.setdefault(target.model, {})[user] = plan
            for weak, forward in plan.forwards:
                module = weak()
                # One of the user's stays. Bound, so that a copy of the module has its own.
                if module is not None and not _has_own_forward(module):
                    vars(module)["forward"] = MethodType(forward, module)
        layers = dict[nn.Module, PreparedLayer]()
        # What runs before the layers may change what they are made of.
        is_changed = any(module._forward_pre_hooks for module in (target.model, target.decoder))
        config = target.config if takes_prompts else None
        for weak, short in [] if is_changed else plan.layers:
            module = weak()
            if module is None:
                continue
            layer = short.prepared(module, config, takes_prompts)
            if layer is not None:
                layers[module] = layer
        _here.model = target.model
        _here.layers = layers
        _here.is_whole_run = takes_prompts
        _here.following = plan.following
        yield


def short_layers(target: Target) -> AbstractContextManager[None]:
    """[`fused_modules`] of a run from its prefill on, in which nothing but its forwards uses the target.

    On a CPU only: kernels are for a verify. Not where code of the user's runs within a forward.
    """
    weight: Any = target.embedding.weight
    is_ours = ops.shortens(weight) and by_sdpa(target.config) and is_untouched(target.parts)
    if not is_ours:
        return nullcontext()
    return fused_modules(target, takes_prompts=True)


def runs_whole(target: Target) -> bool:
    """Returns True within [`short_layers`]: no code of the user's runs in the target."""
    return _here.is_whole_run and _here.model is target.model


def _plan(target: Target, dtype: torch.dtype, is_kernels: bool) -> _Plan:
    """What can be fused; found again when modules were replaced, or what their classes compute."""
    plan = _plans.get(target.model)
    kind = (dtype, is_kernels)
    if plan is None or plan[1:3] != kind or plan.facts is not target.facts or not plan.code.is_same():
        found = list[tuple[weakref.ref[nn.Module], Forward]]()
        layers = list[tuple[weakref.ref[nn.Module], ShortLayer]]()
        # What torch.compile has traced is not to be traced again.
        is_compiled = any(module._compiled_call_impl is not None for module in target.parts.modules)
        forward_of = _forward_of if is_kernels else short_forward_of
        within = set[nn.Module]()
        for module in [] if is_compiled else target.decoder.modules():
            if module in within:
                continue
            fused = forward_of(module, dtype)
            if fused is None:
                continue
            weak = weakref.ref(module)
            if isinstance(fused, ShortLayer):
                layers.append((weak, fused))
                found.append((weak, _layer_forward_here))
            else:
                found.append((weak, _switched(fused)))
            if not is_kernels:  # kernels' layers call their parts, short ones do what these would
                within.update(module.modules())
        code = Code({type(module) for module in target.parts.modules})
        following = _following_norms(target, dtype) if is_kernels else {}
        plan = _Plan(target.facts, *kind, code, found, layers, following)
        _plans[target.model] = plan
    return plan


def _following_norms(target: Target, dtype: torch.dtype) -> dict[weakref.ref[nn.Module], FollowingNorm]:
    """Returns, by layer, the norm that takes its output: the next layer's first one, or the one behind all layers.

    None in a decoder that is not Transformers' own: its code may change between two layers what one hands to the next.
    """
    if not is_theirs(type(target.decoder).__module__):
        return {}
    found = dict[weakref.ref[nn.Module], FollowingNorm]()

    def add(layer: nn.Module, norm: nn.Module | None, part_of: nn.Module) -> None:
        if norm is None:
            return
        eps = norm_eps(norm, dtype)
        if eps is not None:
            found[weakref.ref(layer)] = FollowingNorm(weakref.ref(norm), eps, weakref.ref(part_of))

    for layer, following in itertools.pairwise(target.layers):
        if following._modules.keys() == LAYER:
            add(layer, following._modules["input_layernorm"], following)
    last = target.decoder._modules.get("norm")
    if last is not None:
        add(target.layers[-1], last, last)
    return found


def _has_own_forward(module: nn.Module) -> bool:
    """Returns True if a module has a forward of its own, which is not ours."""
    own = vars(module).get("forward")
    return own is not None and not hasattr(own, MARK)


def _switched(fused: Forward) -> Forward:
    """A forward for a module, to be bound: the fused one in a verifying thread, elsewhere its class's."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = type(self).forward
        if _here.model is None:
            return plain(self, *args, **kwargs)
        return fused(plain, self, *args, **kwargs)

    setattr(forward, MARK, True)
    return forward


def _layer_forward_here(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A forward for a layer, to be bound: as one function where this thread has prepared it, elsewhere its class's."""
    layer = _here.layers.get(self)
    if layer is not None:
        out = layer.answer(self, args, kwargs)
        if out is not None:
            return out
    return type(self).forward(self, *args, **kwargs)


setattr(_layer_forward_here, MARK, True)


def _forward_of(module: Any, dtype: torch.dtype) -> Forward | None:
    """The fused forward of a module whose formula is known, else `None`."""
    children = module._modules.keys()
    eps = norm_eps(module, dtype)
    if eps is not None:
        return functools.partial(_norm_forward, eps)
    if children - {"act_fn"} == GATED and _is_gated(module, dtype):
        return _gated_forward
    eps = attention_eps(module, dtype, ops.rms_norm.reference, _attend_by_reference)
    if eps is not None:
        return functools.partial(_attention_forward, eps)
    if children == LAYER:
        eps = norm_eps(module.post_attention_layernorm, dtype)
        if eps is not None and _is_layer(module, eps, dtype):
            return functools.partial(_layer_forward, eps)
    return None


def _norm_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not ops.fuses(args[0], module.weight):
        return plain(module, *args, **kwargs)
    ahead = _here.normed
    _here.normed = None
    if ahead is not None and ahead.norm is module and ahead.total is args[0]:
        return ahead.normed
    return ops.rms_norm(args[0], module.weight, eps)


def _gated_forward(plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or (isinstance(module.act_fn, nn.Module) and not is_bare(module.act_fn)):
        return plain(module, *args, **kwargs)
    gate = module.gate_proj(args[0])
    up = module.up_proj(args[0])
    if ops.fuses(gate, up):
        return module.down_proj(ops.silu_mul(gate, up))
    return module.down_proj(module.act_fn(gate) * up)


def _attention_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    cache = cache_of_verify(module, kwargs)
    states = kwargs.get("hidden_states")
    if args or cache is None or states is None:
        return plain(module, *args, **kwargs)
    buffers = cache.attention[module.layer_idx].buffers()
    norms = head_norms(module)
    taken = [states, *(norm.weight for norm in norms), *kwargs["position_embeddings"]]
    if not all(map(is_bare, norms)) or not ops.writes(taken, buffers):
        return plain(module, *args, **kwargs)
    return _attend_by(ops.norm_rope_write, module, eps, cache, states, kwargs)


def _attend_by(
    write: Callable[..., Tensor], module: Any, eps: float, cache: RaggedCache, states: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attention over the ragged cache, its queries, keys and values by `norm_rope_write` or its reference."""
    shape = (*states.shape[:-1], -1, module.head_dim)
    index = module.layer_idx
    heads = [project(states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj)]
    cos, sin = (part.expand(len(states), -1, -1) for part in kwargs["position_embeddings"])
    weights = [norm.weight for norm in head_norms(module)] or [None, None]
    lengths = cache.block.on(states.device).lengths
    query = write(*heads, *weights, cos, sin, lengths, *cache.attention[index].buffers(), eps)
    return attend_ragged(module, query, *cache.read(index), cache, kwargs)


def _attend_by_reference(
    module: Any, eps: float, cache: RaggedCache, states: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    return _attend_by(ops.norm_rope_write.reference, module, eps, cache, states, kwargs)


def _layer_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    norm = module.post_attention_layernorm
    if len(args) != 1 or not is_bare(norm) or not ops.fuses(args[0], norm.weight):
        return plain(module, *args, **kwargs)
    hidden, update = _residuals(module, eps, args[0], kwargs, ops.add_norm)
    behind = _here.following.get(weakref.ref(module))
    if behind is None or not _is_handed_on(module, behind):
        return hidden + update
    norm: Any = behind.norm()
    if not ops.fuses(hidden, update, norm.weight):
        return hidden + update
    total, normed = ops.add_norm(hidden, update, norm.weight, behind.eps).unbind()
    _here.normed = NormedAhead(norm, total, normed)
    return total


def _is_handed_on(module: nn.Module, behind: FollowingNorm) -> bool:
    """Returns True if no hook comes between a layer's output and the norm, that may change the output in place."""
    norm = behind.norm()
    part_of = behind.part_of()
    if norm is None or part_of is None or not is_bare(norm):
        return False
    hooks = [*module._forward_hooks.values(), *part_of._forward_pre_hooks.values()]
    return all(map(is_harmless, hooks))


def _residuals(
    module: Any, eps: float, hidden: Tensor, kwargs: dict[str, Any], add_norm: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """A layer with pre-norms, its first sum and second norm by `add_norm` or its reference.

    Returns the two whose sum is the layer's output.
    """
    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden), **kwargs)
    total, normed = add_norm(hidden, attended, module.post_attention_layernorm.weight, eps).unbind()
    return total, module.mlp(normed)


def _is_gated(module: Any, dtype: torch.dtype) -> bool:
    def both(draw: Draw) -> tuple[Any, Any]:
        like = gated_like(module, draw)
        states = draw(2, 3, HIDDEN)
        gate = like.gate_proj(states)
        up = like.up_proj(states)
        return type(module).forward(like, states), like.down_proj(ops.silu_mul.reference(gate, up))

    return agrees(("gated", *gated_facts(module)), dtype, both)


def _is_layer(module: Any, eps: float, dtype: torch.dtype) -> bool:
    def both(draw: Draw) -> tuple[Any, Any]:
        given = list[dict[str, Any]]()

        def attend(**kwargs: Any) -> tuple[Tensor, None]:
            given.append({name: value for name, value in kwargs.items() if value is not None and value is not False})
            return 3 * given[-1].pop("hidden_states").flip(-1), None

        def run_mlp(states: Tensor) -> Tensor:
            return states.flip(-1) - 1

        names = ("input_layernorm", "post_attention_layernorm")
        norms = {name: copied(getattr(module, name), weight=draw(8)) for name in names}
        clone = copied(module, self_attn=attend, mlp=run_mlp, **norms)
        hidden = draw(2, 3, 8)
        handed: dict[str, Any] = {"attention_mask": None, "position_embeddings": 1, "position_ids": 2}
        handed |= {CACHE_NAME: 3, "use_cache": 4, KEYWORD: 5}
        plain = type(module).forward(clone, hidden, **handed)
        total, update = _residuals(clone, eps, hidden, handed, ops.add_norm.reference)
        return (plain, given[0]), (total + update, given[1])

    if norm_eps(module.input_layernorm, dtype) is None:
        return False
    return agrees(("layer", type(module.input_layernorm), eps, *facts(module)), dtype, both)
