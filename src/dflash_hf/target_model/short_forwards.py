"""Layers of the target in fewer operations on a CPU, where calls cost as much as what they compute.

A known decoder layer runs as one function, over the ragged cache and, in a prefill, over Transformers': torch's own
norm instead of six operations, heads that stay where the projections put them, and no call of a module within it. What
it is made of is looked up before a run, and kept for later ones where the whole model is untouched. Projections that
are no plain `nn.Linear`, adapters and quantised ones, are called as ever; hooks and forwards of the user's within a
layer leave it to its class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf import ops
from dflash_hf.attention import attend
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache_name import CACHE_NAME
from dflash_hf.layer_configs import layer_config
from dflash_hf.target_model.formulas import (
    GATED,
    HIDDEN,
    LAYER,
    Draw,
    agrees,
    attention_eps,
    attention_facts,
    attention_like,
    copied,
    facts,
    floats_of,
    gated_facts,
    gated_like,
    head_norms,
    is_bare,
    is_published,
    is_recorder,
    norm_eps,
    over_caches,
    over_prompts,
)
from dflash_hf.target_model.reentry import KEYWORD, ragged_block

# The class's forward, the module, and what it is called with.
Forward = Callable[..., Any]
# From states to states.
Run = Callable[[Tensor], Tensor]
# A module's own parameters by name, as they are: it is replaced where the module's is.
Parameters = dict[str, Any]
Projection = Run | Parameters
# What a decoder layer is called with in a prefill: with anything else its class knows what to do.
PREFILL = {"attention_mask", "position_ids", CACHE_NAME, "use_cache", "position_embeddings"}


def short_forward_of(module: Any, dtype: torch.dtype) -> Forward | ShortLayer | None:
    """Returns the forward in fewer operations of torch of a module whose formula is known, else `None`.

    It is called with the class's forward, the module, and what the module is called with. A [`ShortLayer`] has to be
    prepared for each run, which gives what is called.

    Args:
        module (`nn.Module`): A norm, an attention, or a layer of both and an MLP.
        dtype (`torch.dtype`): Of its weights.
    """
    eps = norm_eps(module, dtype, rms_norm)
    if eps is not None:
        return functools.partial(_norm_forward, eps)
    eps = attention_eps(module, dtype, rms_norm, _attend_by_parts)
    if eps is not None:
        return functools.partial(_attention_forward, eps)
    return ShortLayer.of(module, dtype) if module._modules.keys() == LAYER else None


def cache_of_verify(attention: Any, kwargs: dict[str, Any]) -> RaggedCache | None:
    """Returns the ragged cache of a verify whose keywords are those that [`attend_ragged`] reads, else `None`."""
    cache = kwargs.get(KEYWORD)
    if not isinstance(cache, RaggedCache) or cache is not kwargs.get(CACHE_NAME):
        return None
    return cache if _rotates_all(attention, kwargs) else None


def by_sdpa(config: Any) -> bool:
    """Returns True if the attention of a config's model is Transformers' own SDPA."""
    return config._attn_implementation == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def cache_of_prefill(attention: Any, kwargs: dict[str, Any]) -> DynamicCache | None:
    """Returns the cache of a prefill by Transformers' own attention, else `None`."""
    cache = kwargs.get(CACHE_NAME)
    is_usual = type(cache) is DynamicCache and kwargs.keys() <= PREFILL
    return cache if is_usual and _rotates_all(attention, kwargs) else None


def _rotates_all(attention: Any, kwargs: dict[str, Any]) -> bool:
    """Returns False for heads that are rotated in part: there are fewer angles."""
    angles = kwargs.get("position_embeddings")
    return angles is not None and angles[0].shape[-1] == attention.head_dim


def attend_ragged(
    module: Any, query: Tensor, keys: Tensor, values: Tensor, cache: RaggedCache, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Returns attention with queries `[B, W, H, E]` over what a ragged cache holds, and the projection behind it."""
    out, _ = ragged_block(
        module,
        query.transpose(1, 2),
        keys,
        values,
        kwargs.get("attention_mask"),
        module.scaling,
        module.attention_dropout if module.training else 0.0,
        _window_of(module),
        ragged=cache,
    )
    return module.o_proj(out.flatten(2)), None


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns what `ops.rms_norm.reference` computes; in float32 torch's own operation rounds as it does."""
    if states.dtype == torch.float32:
        return torch.rms_norm(states, weight.shape, weight, eps)
    return ops.rms_norm.reference(states, weight, eps)


def _norm_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not _is_alike(args[0], module) or floats_of(module) != [eps]:
        return plain(module, *args, **kwargs)
    return rms_norm(args[0], module.weight, eps)


def _attention_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    cache = cache_of_verify(module, kwargs)
    states = kwargs.get("hidden_states")
    if args or cache is None or states is None or kwargs.get("attention_mask") is not None or module.training:
        return plain(module, *args, **kwargs)
    if not all(is_bare(norm) and _is_alike(states, norm) and floats_of(norm) == [eps] for norm in head_norms(module)):
        return plain(module, *args, **kwargs)
    return _attend_by_parts(module, eps, cache, states, kwargs)


def _attend_by_parts(
    module: Any, eps: float, cache: RaggedCache, states: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    return _Attention.of(module, eps).run(module, states, cache, kwargs), None


class _Attention(NamedTuple):
    """An attention: its projections, the parameters of its norms, if it has any, and settings."""

    query: Projection
    key: Projection
    value: Projection
    out: Projection
    norms: list[Parameters]
    eps: float
    size: int
    scaling: float
    window: int | None

    @classmethod
    def of(cls, module: Any, eps: float, is_untouched: bool = False) -> _Attention:
        """Looks up what a module is made of."""
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        query, key, value, out = (_projection(module._modules[name], is_untouched) for name in names)
        norms = [norm._parameters for norm in head_norms(module)]
        return cls(query, key, value, out, norms, eps, *_settings(module))

    def run(self, module: Any, states: Tensor, cache: Cache, kwargs: dict[str, Any]) -> Tensor:
        """Attends over a cache; heads stay where the projections put them, nothing is transposed for RoPE."""
        shape = (*states.shape[:-1], -1, self.size)
        cos, sin = (part.unsqueeze(2) for part in kwargs["position_embeddings"])
        query, key, value = (_project(states, by).view(shape) for by in (self.query, self.key, self.value))
        if self.norms:
            query, key = (
                rms_norm(heads, norm["weight"], self.eps) for heads, norm in zip((query, key), self.norms, strict=True)
            )
        query = ops.norm_and_rotate(query, None, cos, sin, self.eps).transpose(1, 2)
        key = ops.norm_and_rotate(key, None, cos, sin, self.eps)
        over = self._over_ragged if isinstance(cache, RaggedCache) else self._over_prompt
        return _project(over(module, query, key, value, cache, kwargs).flatten(2), self.out)

    def _over_ragged(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attention over the ragged cache, with the mask that follows from it."""
        keys, values = cache.extend(module.layer_idx, key, value)
        block, window = cache.attend(keys)
        window = window if self.window is None else self.window
        mask = block.on(keys.device).mask(keys.shape[2], (window, True, False), 1, query.dtype)
        return attend(query, keys, values, mask, self.scaling)

    def _over_prompt(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attention as Transformers' own, with the mask that the decoder made."""
        keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), module.layer_idx)
        mask = kwargs.get("attention_mask")
        return sdpa_attention_forward(module, query, keys, values, mask, scaling=self.scaling)[0]


def _settings(attention: Any) -> tuple[int, float, int | None]:
    """Returns the size of an attention's heads, its scaling and its window."""
    return attention.head_dim, attention.scaling, _window_of(attention)


def _window_of(attention: Any) -> int | None:
    """Returns an attention's window: some say it in their config alone, and to ask a config takes time."""
    own = vars(attention)
    if "sliding_window" in own:
        return own["sliding_window"]
    return getattr(layer_config(own["config"], own["layer_idx"]), "sliding_window", None)


class PreparedLayer(NamedTuple):
    """What a layer with pre-norms is made of: parameters and epsilons of its norms, its attention, its MLP.

    Parameters are looked up where they are used, so that one may be replaced.
    """

    first: Parameters
    second: Parameters
    attention: _Attention
    mlp: Run
    epsilons: list[float]
    takes_prompts: bool

    @classmethod
    def of(
        cls,
        module: Any,
        epsilons: list[float],
        is_gated: bool,
        is_untouched: bool = False,
        takes_prompts: bool = False,
    ) -> PreparedLayer:
        """Looks up what a module is made of; `epsilons` are of its two norms and of its attention's."""
        parts = module._modules
        mlp = parts["mlp"]
        if is_gated:
            mlp = functools.partial(_run_gated, *[_projection(part, is_untouched) for part in _gated(mlp)])
        first, second = (norm._parameters for norm in _norms(module))
        attention = _Attention.of(parts["self_attn"], epsilons[2], is_untouched)
        return cls(first, second, attention, mlp, epsilons, takes_prompts)

    def answer(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Runs the layer on what it is called with; `None` where its class has to: it is another call than ours."""
        attention = module._modules["self_attn"]
        cache = None
        if KEYWORD not in kwargs:
            cache = cache_of_prefill(attention, kwargs) if self.takes_prompts else None
        elif kwargs.get("attention_mask") is None:
            cache = cache_of_verify(attention, kwargs)
        if cache is None or len(args) != 1 or args[0].dtype != self.first["weight"].dtype or not args[0].is_cpu:
            return None
        return self.run(attention, args[0], cache, kwargs)

    def run(self, attention: Any, states: Tensor, cache: Cache, kwargs: dict[str, Any]) -> Tensor:
        """Returns the states `[B, W, D]` behind the layer, whose attention is given."""
        normed = rms_norm(states, self.first["weight"], self.epsilons[0])
        states = states + self.attention.run(attention, normed, cache, kwargs)
        return states + self.mlp(rms_norm(states, self.second["weight"], self.epsilons[1]))


class ShortLayer:
    """What is known of a layer with the parts of Llama's and Qwen3's: that it may run as one function.

    Args:
        module (`nn.Module`): The layer.
        epsilons (sequence of `float`): Of its two norms and of its attention's.
        is_gated (`bool`): Whether its MLP is `down(silu(gate(x)) * up(x))`; any other is called.
        takes_prompts (`bool`): Whether the same holds over Transformers' cache, by its SDPA.
    """

    def __init__(self, module: Any, epsilons: list[float], is_gated: bool, takes_prompts: bool) -> None:
        self.epsilons = epsilons
        self.is_gated = is_gated
        self.takes_prompts = takes_prompts
        norms = [*_norms(module), *head_norms(module.self_attn)]
        # What each norm calls its epsilon.
        self._names = [next(n for n, v in vars(norm).items() if isinstance(v, float)) for norm in norms]
        self._wanted = [*epsilons[:2], *epsilons[2:] * (len(norms) - 2)]
        # What the layer of an untouched model was made of, by which settings, and what may end.
        self._kept: PreparedLayer | None = None
        self._settings: tuple[object, ...] = ()
        self._products = list[Parameters]()
        self._parts = list[weakref.ref[nn.Module]]()

    @classmethod
    def of(cls, module: Any, dtype: torch.dtype) -> ShortLayer | None:
        """Returns one if a module computes this."""
        norms = _norms(module)
        attention = module.self_attn
        mlp = module.mlp
        if not all(map(is_published, (module, attention, *norms, *head_norms(attention)))):
            return None
        found = [norm_eps(norm, dtype, rms_norm) for norm in norms]
        found.append(attention_eps(attention, dtype, rms_norm, _attend_by_parts))
        epsilons = [eps for eps in found if eps is not None]
        if len(epsilons) < len(found):
            return None
        may_be_gated = mlp._modules.keys() - {"act_fn"} == GATED and all(map(is_published, (mlp, *_activation(mlp))))
        for is_gated in (True, False)[not may_be_gated :]:

            def both(draw: Draw, over: Callable[..., Any], is_gated: bool = is_gated) -> tuple[Any, Any]:
                names = ("input_layernorm", "post_attention_layernorm")
                parts = {name: copied(norm, weight=draw(HIDDEN)) for name, norm in zip(names, norms, strict=True)}
                parts |= {"self_attn": attention_like(attention, draw)}
                like = copied(module, **parts, mlp=gated_like(mlp, draw) if is_gated else _other_like(mlp))
                return over(
                    like.self_attn,
                    draw,
                    lambda states, cache, given: type(module).forward(like, states, **given),
                    lambda states, cache, given: PreparedLayer.of(like, epsilons, is_gated).run(
                        like.self_attn, states, cache, given
                    ),
                )

            key = (cls, is_gated, *epsilons, *facts(module), *map(type, norms), *attention_facts(attention))
            key = (*key, *(gated_facts(mlp) if is_gated else ()))
            if agrees(key, dtype, functools.partial(both, over=over_caches)):
                takes_prompts = agrees((over_prompts, *key), dtype, functools.partial(both, over=over_prompts))
                return cls(module, epsilons, is_gated, takes_prompts)
        return None

    def prepared(self, module: Any, config: Any, is_untouched: bool = False) -> PreparedLayer | None:
        """Looks up what the layer is made of; `None` where it runs as its class does it.

        Args:
            module (`nn.Module`): The layer.
            config (`PreTrainedConfig`, *optional*): The one whose attention is Transformers' SDPA.
            is_untouched (`bool`): Whether the whole model was found so; else hooks and forwards are looked for here.
        """
        attention = module._modules["self_attn"]
        mlp = module._modules["mlp"]
        norms = [*_norms(module), *head_norms(attention)]
        weights = [norm._parameters["weight"] for norm in norms]
        dtype = weights[0].dtype
        # Settings of a norm may be others than they were; what a hook on the layer changes is not looked up again.
        epsilons = [vars(norm).get(name) for norm, name in zip(norms, self._names, strict=True)]
        if epsilons != self._wanted or not all(w.is_cpu and w.dtype == dtype for w in weights):
            return None
        takes_prompts = self.takes_prompts and vars(attention)["config"] is config
        parts = [module, attention, *norms, *((mlp, *_activation(mlp)) if self.is_gated else ())]
        if any(part.training for part in parts) or not (is_untouched or _is_bare_layer(parts, weights)):
            return None
        if not is_untouched:
            return self._look_up(module, False, takes_prompts)
        kept = self._kept
        settings = (takes_prompts, *_settings(attention))
        if kept is None or settings != self._settings or any(len(held) != 2 for held in self._products):
            kept = self._look_up(module, True, takes_prompts)
            self._settings = settings
            self._keep(kept, module, attention, mlp)
        return kept

    def _look_up(self, module: Any, is_untouched: bool, takes_prompts: bool) -> PreparedLayer:
        return PreparedLayer.of(module, self.epsilons, self.is_gated, is_untouched, takes_prompts)

    def _keep(self, layer: PreparedLayer, module: Any, attention: Any, mlp: Any) -> None:
        """Keeps what was looked up for later runs, if all of it is parameters, and until one of their modules ends."""
        held = [*layer.attention[:4], *(layer.mlp.args if isinstance(layer.mlp, functools.partial) else (layer.mlp,))]
        self._products = [parameters for parameters in held if isinstance(parameters, dict)]
        self._kept = layer if len(self._products) == len(held) else None
        parts = [*attention._modules.values(), *mlp._modules.values(), *_norms(module)] if self._kept else []
        self._parts = [weakref.ref(part, self._forget) for part in parts]

    def _forget(self, _: object) -> None:
        self._kept = None
        self._products = []


def _is_bare_layer(parts: list[Any], weights: list[Any]) -> bool:
    """Returns True if the weights of a layer's norms are plain, and hooks only record."""
    is_recorded = all(map(is_recorder, parts[0]._forward_hooks.values()))
    is_plain = {*map(type, weights)} == {nn.Parameter} and not parts[0]._forward_pre_hooks
    return is_plain and is_recorded and all(map(is_bare, parts[1:]))


def _projection(linear: Any, is_untouched: bool) -> Projection:
    """The parameters of torch's own projection, which is not worth a call of a module; else what is to be called."""
    is_torchs = type(linear) is nn.Linear and nn.Linear.forward.__globals__["__name__"] == nn.Linear.__module__
    is_product = is_torchs and linear._parameters.keys() == {"weight", "bias"}
    return linear._parameters if is_product and (is_untouched or is_bare(linear)) else linear


def _project(states: Tensor, by: Projection) -> Tensor:
    return nn.functional.linear(states, **by) if isinstance(by, dict) else by(states)


def _run_gated(gate: Projection, up: Projection, down: Projection, states: Tensor) -> Tensor:
    """`down(silu(gate(x)) * up(x))`."""
    return _project(nn.functional.silu(_project(states, gate)) * _project(states, up), down)


def _other_like(mlp: Any) -> Any:
    """A copy of an MLP of the same class, that gives other numbers of the shape it is given."""
    like = copied(mlp)
    like.forward = lambda states: states.flip(-1) - 1
    return like


def _norms(layer: Any) -> tuple[Any, Any]:
    return layer._modules["input_layernorm"], layer._modules["post_attention_layernorm"]


def _gated(mlp: Any) -> list[Any]:
    return [mlp._modules[name] for name in ("gate_proj", "up_proj", "down_proj")]


def _activation(mlp: Any) -> list[Any]:
    return [mlp._modules["act_fn"]] if "act_fn" in mlp._modules else []


def _is_alike(states: Tensor, norm: Any) -> bool:
    """Returns True if a norm's weight has the dtype of states on a CPU: what was checked."""
    return states.device.type == "cpu" and states.dtype == norm.weight.dtype
