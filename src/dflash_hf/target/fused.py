"""Parts of the target in fewer operations during a verify: norms, gated activations, residual sums, attention.

Where kernels run (`ops.fuses`) by our own: a layer of Qwen3 that launches 55 kernels launches 14 then. On a CPU
(`ops.shortens`) norms and attention by fewer operations of torch's own.

No module is known by its name alone. What its class's forward computes is compared with what takes its place, or
with the kernel's reference, once per class, on small random inputs on the CPU, in float32 and in 16 bits: bit for bit,
or the module runs as it is. So does one that has a forward of its own, and one that would be passed by while hooks
hang on it.

Nothing of the model is changed but for an attribute `forward` on these modules while a verify runs, which acts in the
verifying thread only. Hooks are called outside of `forward`, so taps fire as ever.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from dflash_hf import ops
from dflash_hf.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import LayerShape
from dflash_hf.scopes import undoing
from dflash_hf.target.parts import Target
from dflash_hf.target.reentry import KEYWORD, RAGGED_BLOCK, ragged_block

logger = logging.getLogger(__name__)
_MARK = "_dflash_fused"
# On a forward that is compiled: what torch.compile traces is its classes' own.
COMPILED = "_dflash_compiled"
# What is checked, beside the dtype that is asked for.
DTYPES = (torch.float32, *ops.HALF)
_GATED = {"gate_proj", "up_proj", "down_proj"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# What a forward raises that is not called as it expects.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# The class's forward, the module, and what it is called with.
Forward = Callable[..., Any]
# Random numbers of a shape, on the CPU.
Draw = Callable[..., Tensor]


class _Here(threading.local):
    """Whether this thread verifies."""

    is_on: bool = False


class _Plan(NamedTuple):
    """What can be fused in a model, as long as its modules are these.

    Args:
        modules (list of weak references): Those of the target.
        dtype (`torch.dtype`): What was checked.
        is_kernels (`bool`): Whether it is fused by kernels, else by torch.
        classes (`dict`): The forward that each class of module had.
        forwards (list of `(weak reference, callable)`): Modules and their forwards.
    """

    modules: list[weakref.ref[nn.Module]]
    dtype: torch.dtype
    is_kernels: bool
    classes: dict[type, Forward]
    forwards: list[tuple[weakref.ref[nn.Module], Forward]]


_here = _Here()
_patching = threading.Lock()
_users: weakref.WeakKeyDictionary[nn.Module, set[object]] = weakref.WeakKeyDictionary()
_plans: weakref.WeakKeyDictionary[PreTrainedModel, _Plan] = weakref.WeakKeyDictionary()
_known: dict[object, bool] = {}


@contextmanager
def fused_modules(target: Target) -> Generator[None]:
    """Runs modules of the target's decoder whose formula is known in fewer operations, in this thread only.

    Args:
        target (`Target`): The target; nothing happens unless its embedding is on a CPU or where kernels run.
    """
    weight: Any = target.embedding.weight
    is_kernels = ops.fuses(weight)
    if not is_kernels and not ops.shortens(weight):
        yield
        return
    forwards, user, before = _plan(target, weight.dtype, is_kernels).forwards, object(), _here.is_on

    def put_back() -> None:
        _here.is_on = before
        with _patching:
            users = _users.setdefault(target.model, set())
            users.discard(user)
            for module in [] if users else target.modules:
                if hasattr(vars(module).get("forward"), _MARK):
                    del module.forward

    with undoing(put_back):
        with _patching:
            users = _users.setdefault(target.model, set())
            users.add(user)
            compiled = [layer for layer in target.layers if hasattr(vars(layer).get("forward"), COMPILED)]
            traced = {part for layer in compiled for part in layer.modules()}
            for weak, forward in forwards:
                module = weak()
                if module is not None and module not in traced:
                    # One that is there already stays. Bound, so that a copy of the module has its own.
                    vars(module).setdefault("forward", MethodType(forward, module))
        _here.is_on = True
        yield


def fused_attention(target: Target) -> list[nn.Module]:
    """Returns the attention modules that a verify runs by kernels, in no order; none where no kernels run."""
    weight: Any = target.embedding.weight
    modules = [module() for module, _ in _plan(target, weight.dtype, True).forwards] if ops.fuses(weight) else []
    return [module for module in modules if module is not None and module._modules.keys() >= _ATTENTION]


def _plan(target: Target, dtype: torch.dtype, is_kernels: bool) -> _Plan:
    """What can be fused; found again when modules were replaced, or what their classes compute."""
    plan, kind = _plans.get(target.model), (dtype, is_kernels)
    if (
        plan is None
        or plan[1:3] != kind
        or any(known.forward is not forward for known, forward in plan.classes.items())
        or [module() for module in plan.modules] != target.modules
    ):
        found = list[tuple[weakref.ref[nn.Module], Forward]]()
        # What torch.compile has traced is not to be traced again.
        is_compiled = any(module._compiled_call_impl is not None for module in target.modules)
        for module in [] if is_compiled else target.decoder.modules():
            fused = _forward_of(module, dtype) if is_kernels else _short_forward_of(module, dtype)
            if fused is not None:
                found.append((weakref.ref(module), _switched(module, fused)))
        classes: dict[type, Forward] = {type(module): type(module).forward for module in target.modules}
        plan = _Plan([weakref.ref(module) for module in target.modules], *kind, classes, found)
        _plans[target.model] = plan
    return plan


def _switched(module: nn.Module, fused: Forward) -> Forward:
    """A forward for a module, to be bound: the fused one in a verifying thread, elsewhere its class's."""
    plain = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fused(plain, self, *args, **kwargs) if _here.is_on else plain(self, *args, **kwargs)

    setattr(forward, _MARK, True)
    return forward


def _forward_of(module: Any, dtype: torch.dtype) -> Forward | None:
    """The fused forward of a module whose formula is known, else `None`."""
    children = module._modules.keys()
    if (eps := norm_eps(module, dtype)) is not None:
        return functools.partial(_norm_forward, eps)
    if children - {"act_fn"} == _GATED and _is_gated(module, dtype):
        return _gated_forward
    if (eps := _attention_eps(module, dtype, ops.rms_norm.reference, _attend_by_reference)) is not None:
        return functools.partial(_attention_forward, eps)
    if children == _LAYER:
        eps = norm_eps(module.post_attention_layernorm, dtype)
        if eps is not None and _is_layer(module, eps, dtype):
            return functools.partial(_layer_forward, eps)
    return None


def _short_forward_of(module: Any, dtype: torch.dtype) -> Forward | None:
    """The forward in fewer operations of torch of a module whose formula is known, else `None`."""
    if (eps := norm_eps(module, dtype, _rms_norm)) is not None:
        return functools.partial(_short_norm_forward, eps)
    if (eps := _attention_eps(module, dtype, _rms_norm, _attend_by_torch)) is not None:
        return functools.partial(_short_attention_forward, eps)
    return None


def _is_bare(module: Any) -> bool:
    """Returns True if a call of a module is a call of its class's forward, or of ours: nothing is lost without it."""
    own = vars(module).get("forward")
    hooks = module._forward_hooks or module._forward_pre_hooks or everywhere._global_forward_hooks
    return (own is None or hasattr(own, _MARK)) and not (hooks or everywhere._global_forward_pre_hooks)


# ---- what runs instead


def _norm_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not ops.fuses(args[0], module.weight):
        return plain(module, *args, **kwargs)
    return ops.rms_norm(args[0], module.weight, eps)


def _gated_forward(plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or (isinstance(module.act_fn, nn.Module) and not _is_bare(module.act_fn)):
        return plain(module, *args, **kwargs)
    gate, up = module.gate_proj(args[0]), module.up_proj(args[0])
    return module.down_proj(ops.silu_mul(gate, up) if ops.fuses(gate, up) else module.act_fn(gate) * up)


def _short_norm_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or args[0].dtype != module.weight.dtype or args[0].device.type != "cpu":
        return plain(module, *args, **kwargs)
    return _rms_norm(args[0], module.weight, eps)


def _rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `ops.rms_norm.reference` computes; in float32 torch's own operation rounds as it does."""
    if states.dtype == torch.float32:
        return nn.functional.rms_norm(states, weight.shape, weight, eps)
    return ops.rms_norm.reference(states, weight, eps)


def _attention_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if (cache := _cache_of_verify(module, args, kwargs)) is not None:
        buffers, norms = cache.buffers_of(module.layer_idx), _head_norms(module)
        taken = [kwargs["hidden_states"], *(norm.weight for norm in norms), *kwargs["position_embeddings"]]
        if all(map(_is_bare, norms)) and ops.writes(taken, buffers):
            return _attend_by(ops.norm_rope_write, module, eps, cache, kwargs)
    return plain(module, *args, **kwargs)


def _short_attention_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if (cache := _cache_of_verify(module, args, kwargs)) is not None:
        hidden, norms = kwargs["hidden_states"], _head_norms(module)
        is_alike = hidden.device.type == "cpu" and all(norm.weight.dtype == hidden.dtype for norm in norms)
        if is_alike and all(map(_is_bare, norms)):
            return _attend_by_torch(module, eps, cache, kwargs)
    return plain(module, *args, **kwargs)


def _cache_of_verify(module: Any, args: Any, kwargs: dict[str, Any]) -> RaggedCache | None:
    """The ragged cache of a verify that calls an attention as [`_attend_by`] reads its keywords, else `None`."""
    cache, angles = kwargs.get(KEYWORD), kwargs.get("position_embeddings")
    is_verify = isinstance(cache, RaggedCache) and cache is kwargs.get("past_key_values") and not args
    # Of heads that are rotated in part there are fewer angles.
    if not is_verify or angles is None or angles[0].shape[-1] != module.head_dim or "hidden_states" not in kwargs:
        return None
    return cache


def _attend_by(
    write: Callable[..., Tensor], module: Any, eps: float, cache: RaggedCache, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attention over the ragged cache, its queries, keys and values by `norm_rope_write` or its reference."""
    assert cache.block is not None
    hidden, index = kwargs["hidden_states"], module.layer_idx
    shape = (*hidden.shape[:-1], -1, module.head_dim)
    heads = [project(hidden).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj)]
    cos, sin = (part.expand(len(hidden), -1, -1) for part in kwargs["position_embeddings"])
    buffers = cache.buffers_of(index)
    lengths = cache.block.on(hidden.device).lengths
    weights = [norm.weight for norm in _head_norms(module)] or [None, None]
    query = write(*heads, *weights, cos, sin, lengths, *buffers, eps)
    return _attend(module, query, *cache.read(index), cache, kwargs)


def _attend_by_reference(module: Any, eps: float, cache: RaggedCache, kwargs: dict[str, Any]) -> tuple[Tensor, None]:
    return _attend_by(ops.norm_rope_write.reference, module, eps, cache, kwargs)


def _attend_by_torch(module: Any, eps: float, cache: RaggedCache, kwargs: dict[str, Any]) -> tuple[Tensor, None]:
    """Attention over the ragged cache; heads stay where the projections put them, nothing is transposed for RoPE."""
    hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
    shape, cos, sin = (*hidden.shape[:-1], -1, module.head_dim), cos[:, :, None], sin[:, :, None]
    query, key = module.q_proj(hidden).view(shape), module.k_proj(hidden).view(shape)
    if norms := _head_norms(module):
        query, key = _rms_norm(query, norms[0].weight, eps), _rms_norm(key, norms[1].weight, eps)
    query, key = (ops.norm_and_rotate(states, None, cos, sin, eps) for states in (query, key))
    keys, values = cache.extend(module.layer_idx, key, module.v_proj(hidden).view(shape))
    return _attend(module, query, keys, values, cache, kwargs)


def _attend(
    module: Any, query: Tensor, keys: Tensor, values: Tensor, cache: RaggedCache, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attention with queries `[B, W, H, E]`, and the projection behind it."""
    out, _ = ragged_block(
        module,
        query.transpose(1, 2),
        keys,
        values,
        kwargs.get("attention_mask"),
        module.scaling,
        module.attention_dropout if module.training else 0.0,
        getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)),
        ragged=cache,
    )
    return module.o_proj(out.flatten(2)), None


def _head_norms(module: Any) -> list[Any]:
    """The norms of queries and keys, of an attention that has them."""
    return [module.q_norm, module.k_norm] if "q_norm" in module._modules else []


def _layer_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    norm = module.post_attention_layernorm
    if len(args) != 1 or not _is_bare(norm) or not ops.fuses(args[0], norm.weight):
        return plain(module, *args, **kwargs)
    return _residuals(module, eps, args[0], kwargs, ops.add_norm)


def _residuals(
    module: Any, eps: float, hidden: Tensor, kwargs: dict[str, Any], add_norm: Callable[..., Tensor]
) -> Tensor:
    """A layer with pre-norms, its first sum and second norm by `add_norm` or its reference."""
    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden), **kwargs)
    total, normed = add_norm(hidden, attended, module.post_attention_layernorm.weight, eps).unbind()
    return total + module.mlp(normed)


# ---- whether that is what a module computes


def norm_eps(module: Any, dtype: torch.dtype, norm: Callable[..., Tensor] = ops.rms_norm.reference) -> float | None:
    """Returns the epsilon of a module that computes what a norm does, else `None`.

    Args:
        module (`nn.Module`): Any.
        dtype (`torch.dtype`): Checked beside float32 and 16 bits.
        norm (callable): Called with states, weight and epsilon.
    """
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    if module._modules or module._buffers or list(module._parameters) != ["weight"] or len(numbers) != 1:
        return None
    weight = module._parameters["weight"]
    if weight is None or not _is_plain(weight) or weight.dim() != 1:
        return None
    eps, size = numbers[0], len(weight)

    def both(draw: Draw) -> tuple[Any, Any]:
        clone, states = _clone(module, weight=draw(size)), draw(2, 3, size)
        return type(module).forward(clone, states), norm(states, clone.weight, eps)

    return eps if _agrees((norm, size, *_facts(module)), dtype, both) else None


def _is_gated(module: Any, dtype: torch.dtype) -> bool:
    def both(draw: Draw) -> tuple[Any, Any]:
        gate, up, down = (_linear(draw(*sizes)) for sizes in ((12, 8), (12, 8), (8, 12)))
        clone, states = _clone(module, gate_proj=gate, up_proj=up, down_proj=down), draw(2, 3, 8)
        return type(module).forward(clone, states), down(ops.silu_mul.reference(gate(states), up(states)))

    activation = getattr(module, "act_fn", None)
    kind = type(activation) if isinstance(activation, nn.Module) else activation
    return _agrees(("gated", kind, *_facts(module)), dtype, both)


def _attention_eps(
    module: Any, dtype: torch.dtype, norm: Callable[..., Tensor], attend: Callable[..., Any]
) -> float | None:
    """Returns the epsilon of an attention's norms, 0 without any, if they compute `norm` and all of it `attend`."""
    if module._modules.keys() not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):
        return None
    epsilons = {norm_eps(part, dtype, norm) for part in _head_norms(module)} or {0.0}
    eps = epsilons.pop()
    is_known = eps is not None and not epsilons and {"head_dim", "config"} <= vars(module).keys()
    return eps if is_known and eps is not None and _is_attention(module, eps, dtype, attend) else None


def _is_attention(module: Any, eps: float, dtype: torch.dtype, attend: Callable[..., Any]) -> bool:
    size, width, groups = module.head_dim, 4, 2

    def both(draw: Draw) -> tuple[Any, Any]:
        sizes = {"q_proj": (2 * groups * size, 16), "k_proj": (groups * size, 16), "v_proj": (groups * size, 16)}
        sizes |= {"o_proj": (16, 2 * groups * size)}
        weights = {name: draw(*pair) for name, pair in sizes.items()}
        weights["v_proj"] *= 16  # some models clip what is large
        projections = {name: _linear(weight) for name, weight in weights.items()}
        norms = [_clone(norm, weight=draw(len(norm.weight))) for norm in _head_norms(module)]
        clone = _clone(module, **projections, **dict(zip(("q_norm", "k_norm"), norms, strict=False)))
        clone.config = copy.copy(module.config)
        clone.config._attn_implementation_internal = RAGGED_BLOCK
        clone.layer_idx = 0
        for settings in (clone, clone.config):
            if getattr(settings, "sliding_window", None) is not None:
                settings.sliding_window = 3
        hidden, angles = draw(2, width, 16), (draw(2, width, size), draw(2, width, size))
        lengths, found = torch.tensor([3, 7], device="cpu"), []
        for is_ours in (False, True):
            shapes = [LayerShape(num_heads=groups, key_size=size, value_size=size, window=None)]
            device = torch.device("cpu")
            cache = RaggedCache(shapes, batch=2, max_length=12, block=width, dtype=hidden.dtype, device=device)
            cache.begin(RaggedBlock(lengths[:, None] + torch.arange(width, device="cpu")))
            given: dict[str, Any] = {"attention_mask": None, "past_key_values": cache, KEYWORD: cache}
            given |= {"hidden_states": hidden, "position_embeddings": angles, "use_cache": True}
            out, shares = attend(clone, eps, cache, given) if is_ours else type(module).forward(clone, **given)
            cache.check_passed()
            found.append((out, shares, *cache.buffers_of(0)))
        return found[0], found[1]

    return _agrees((attend, size, eps, *_facts(module), *_facts(module.config)), dtype, both)


def _is_layer(module: Any, eps: float, dtype: torch.dtype) -> bool:
    def both(draw: Draw) -> tuple[Any, Any]:
        given = list[dict[str, Any]]()

        def attend(**kwargs: Any) -> tuple[Tensor, None]:
            given.append({name: value for name, value in kwargs.items() if value is not None and value is not False})
            return 3 * given[-1].pop("hidden_states").flip(-1), None

        def run_mlp(states: Tensor) -> Tensor:
            return states.flip(-1) - 1

        names = ("input_layernorm", "post_attention_layernorm")
        norms = {name: _clone(getattr(module, name), weight=draw(8)) for name in names}
        clone, hidden = _clone(module, self_attn=attend, mlp=run_mlp, **norms), draw(2, 3, 8)
        handed: dict[str, Any] = {"attention_mask": None, "position_embeddings": 1, "position_ids": 2}
        handed |= {"past_key_values": 3, "use_cache": 4, KEYWORD: 5}
        plain = type(module).forward(clone, hidden, **handed)
        ours = _residuals(clone, eps, hidden, handed, ops.add_norm.reference)
        return (plain, given[0]), (ours, given[1])

    if norm_eps(module.input_layernorm, dtype) is None:
        return False
    return _agrees(("layer", type(module.input_layernorm), eps, *_facts(module)), dtype, both)


def _is_plain(weight: Tensor) -> bool:
    """Returns True if a weight is no tensor of a class of its own: sharded, quantised."""
    return type(weight) is nn.Parameter


def _agrees(key: tuple[object, ...], dtype: torch.dtype, both: Callable[[Draw], tuple[Any, Any]]) -> bool:
    """Returns True if both results are the same bit for bit in every dtype; asked once for a key."""
    for asked in dict.fromkeys((*DTYPES, dtype)):
        if (key, asked) not in _known:
            try:
                # A verify may run under modes that forbid reads, or that compute nothing.
                with _disable_current_modes(), torch.no_grad():
                    generator = torch.Generator("cpu").manual_seed(0)
                    _known[key, asked] = _same(*both(functools.partial(_random, generator, asked)))
            except _ERRORS as error:
                logger.debug("%s runs as it is: %s", key, error)
                _known[key, asked] = False
        if not _known[key, asked]:
            return False
    return True


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _facts(module: object) -> tuple[object, ...]:
    """A class, and the settings of a module or a config that a forward may look at."""
    plain = (bool, int, float, str, type(None))
    settings = {n: v for n, v in vars(module).items() if isinstance(v, plain) and n not in ("layer_idx", "training")}
    return type(module), getattr(type(module), "forward", None), *sorted(settings.items())


def _clone(module: Any, **parts: Any) -> Any:
    """A copy of a module with other parameters and parts; nothing is shared that is written."""
    clone = copy.copy(module)
    named = {name: nn.Parameter(part, requires_grad=False) for name, part in parts.items() if isinstance(part, Tensor)}
    modules = {**module._modules, **{name: part for name, part in parts.items() if name not in named}}
    vars(clone).update(_parameters=named, _modules=modules)
    vars(clone).pop("forward", None)
    clone.training = False
    return clone


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def _linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return functools.partial(nn.functional.linear, weight=weight)


__all__ = ["COMPILED", "fused_attention", "fused_modules", "norm_eps"]
