"""Layers of the target in fewer operations on a CPU, where calls cost as much as what they compute.

A known decoder layer runs as one function: torch's own norm instead of six operations, heads that stay where the
projections put them, and no call of a module within it. Projections that are no plain `nn.Linear`, adapters and
quantised ones, are called as ever; hooks and forwards of the user's within a layer leave it to its class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dflash_hf import ops
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.target.formulas import (
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
    gated_facts,
    gated_like,
    head_norms,
    is_bare,
    norm_eps,
    over_caches,
)
from dflash_hf.target.reentry import KEYWORD, ragged_block

# The class's forward, the module, and what it is called with.
Forward = Callable[..., Any]
_LINEAR = nn.Linear.forward


def short_forward_of(module: Any, dtype: torch.dtype) -> Forward | None:
    """Returns the forward in fewer operations of torch of a module whose formula is known, else `None`.

    It is called with the class's forward, the module, and what the module is called with.

    Args:
        module (`nn.Module`): A norm, an attention, or a layer of both and an MLP.
        dtype (`torch.dtype`): Of its weights.
    """
    if (eps := norm_eps(module, dtype, rms_norm)) is not None:
        return functools.partial(_norm_forward, eps)
    if (eps := attention_eps(module, dtype, rms_norm, _attend)) is not None:
        return functools.partial(_attention_forward, eps)
    return _layer_forward_of(module, dtype) if module._modules.keys() == LAYER else None


def cache_of_verify(attention: Any, kwargs: dict[str, Any]) -> RaggedCache | None:
    """Returns the ragged cache of a verify whose keywords are those that [`attend_ragged`] reads, else `None`."""
    cache, angles = kwargs.get(KEYWORD), kwargs.get("position_embeddings")
    if not isinstance(cache, RaggedCache) or cache is not kwargs.get("past_key_values"):
        return None
    # Of heads that are rotated in part there are fewer angles.
    return cache if angles is not None and angles[0].shape[-1] == attention.head_dim else None


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
        getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)),
        ragged=cache,
    )
    return project(module._modules["o_proj"], out.flatten(2)), None


def project(linear: Any, states: Tensor) -> Tensor:
    """Calls a projection; torch's own is not worth a call of a module."""
    if type(linear) is not nn.Linear or nn.Linear.forward is not _LINEAR or not is_bare(linear):
        return linear(states)
    parameters = linear._parameters
    return nn.functional.linear(states, parameters["weight"], parameters["bias"])  # pyright: ignore[reportArgumentType]


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns what `ops.rms_norm.reference` computes; in float32 torch's own operation rounds as it does."""
    if states.dtype == torch.float32:
        return torch.rms_norm(states, weight.shape, weight, eps)
    return ops.rms_norm.reference(states, weight, eps)


def _norm_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not _is_alike(args[0], module):
        return plain(module, *args, **kwargs)
    return rms_norm(args[0], module.weight, eps)


def _attention_forward(eps: float, plain: Forward, module: Any, *args: Any, **kwargs: Any) -> Any:
    cache, states = cache_of_verify(module, kwargs), kwargs.get("hidden_states")
    if args or cache is None or states is None or not _are_bare(states, *head_norms(module)):
        return plain(module, *args, **kwargs)
    return _attend(module, eps, cache, states, kwargs)


def _attend(
    module: Any, eps: float, cache: RaggedCache, states: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attention over the ragged cache; heads stay where the projections put them, nothing is transposed for RoPE."""
    (cos, sin), parts = kwargs["position_embeddings"], module._modules
    shape, cos, sin = (*states.shape[:-1], -1, module.head_dim), cos[:, :, None], sin[:, :, None]
    query, key, value = (project(parts[name], states).view(shape) for name in ("q_proj", "k_proj", "v_proj"))
    if norms := head_norms(module):
        query, key = rms_norm(query, norms[0].weight, eps), rms_norm(key, norms[1].weight, eps)
    query, key = (ops.norm_and_rotate(heads, None, cos, sin, eps) for heads in (query, key))
    keys, values = cache.extend(module.layer_idx, key, value)
    return attend_ragged(module, query, keys, values, cache, kwargs)


def _layer_forward_of(module: Any, dtype: torch.dtype) -> Forward | None:
    """[`short_forward_of`] for a layer with the parts of Llama's and Qwen3's."""
    norms, attention, mlp = _norms(module), module.self_attn, module.mlp
    epsilons = (
        *(norm_eps(norm, dtype, rms_norm) for norm in norms),
        attention_eps(attention, dtype, rms_norm, _attend),
    )
    if None in epsilons:
        return None
    # A gated MLP is known with its layer or called as it is.
    runs = [_run_gated] if mlp._modules.keys() - {"act_fn"} == GATED else []
    for run_mlp in (*runs, _call):

        def both(draw: Draw, run_mlp: Callable[[Any, Tensor], Tensor] = run_mlp) -> tuple[Any, Any]:
            names = ("input_layernorm", "post_attention_layernorm")
            parts = {name: copied(norm, weight=draw(HIDDEN)) for name, norm in zip(names, norms, strict=True)}
            parts |= {"self_attn": attention_like(attention, draw), "mlp": _Shifted()}
            if run_mlp is _run_gated:
                parts["mlp"] = gated_like(mlp, draw)
            like = copied(module, **parts)
            return over_caches(
                like.self_attn,
                draw,
                lambda states, cache, given: type(module).forward(like, states, **given),
                lambda states, cache, given: _run_layer(epsilons, run_mlp, like, cache, states, given),
            )

        key = (_run_layer, run_mlp, *epsilons, *facts(module), *map(type, norms), *attention_facts(attention))
        if agrees((*key, *(gated_facts(mlp) if run_mlp is _run_gated else ())), dtype, both):
            return functools.partial(_layer_forward, epsilons, run_mlp)
    return None


def _layer_forward(
    epsilons: Any, run_mlp: Callable[[Any, Tensor], Tensor], plain: Forward, module: Any, *args: Any, **kwargs: Any
) -> Any:
    parts = module._modules
    attention, mlp = parts["self_attn"], parts["mlp"]
    cache = cache_of_verify(attention, kwargs)
    if len(args) != 1 or cache is None or not _are_bare(args[0], *_norms(module), *head_norms(attention)):
        return plain(module, *args, **kwargs)
    if not is_bare(attention) or (run_mlp is _run_gated and not all(map(is_bare, (mlp, *_activation(mlp))))):
        return plain(module, *args, **kwargs)
    return _run_layer(epsilons, run_mlp, module, cache, args[0], kwargs)


def _run_layer(
    epsilons: Any,
    run_mlp: Callable[[Any, Tensor], Tensor],
    module: Any,
    cache: RaggedCache,
    states: Tensor,
    kwargs: dict[str, Any],
) -> Tensor:
    """A layer with pre-norms; `epsilons` are of its two norms and of its attention's."""
    first, second = _norms(module)
    normed = rms_norm(states, first.weight, epsilons[0])
    states = states + _attend(module._modules["self_attn"], epsilons[2], cache, normed, kwargs)[0]
    return states + run_mlp(module._modules["mlp"], rms_norm(states, second.weight, epsilons[1]))


def _run_gated(mlp: Any, states: Tensor) -> Tensor:
    """`down(silu(gate(x)) * up(x))`."""
    parts = mlp._modules
    gate, up = project(parts["gate_proj"], states), project(parts["up_proj"], states)
    return project(parts["down_proj"], nn.functional.silu(gate) * up)


def _call(mlp: Any, states: Tensor) -> Tensor:
    """Whatever the MLP is."""
    return mlp(states)


class _Shifted(nn.Module):
    """Stands for an MLP that is called as it is."""

    def forward(self, states: Tensor) -> Tensor:
        """Returns other numbers of the same shape."""
        return states.flip(-1) - 1


def _norms(layer: Any) -> tuple[Any, Any]:
    return layer._modules["input_layernorm"], layer._modules["post_attention_layernorm"]


def _activation(mlp: Any) -> list[Any]:
    return [mlp._modules["act_fn"]] if "act_fn" in mlp._modules else []


def _is_alike(states: Tensor, norm: Any) -> bool:
    """Returns True if a norm's weight has the dtype of states on a CPU: what was checked."""
    return states.device.type == "cpu" and states.dtype == norm._parameters["weight"].dtype


def _are_bare(states: Tensor, *norms: Any) -> bool:
    return all(is_bare(norm) and _is_alike(states, norm) for norm in norms)


__all__ = [
    "Forward",
    "attend_ragged",
    "cache_of_verify",
    "project",
    "rms_norm",
    "short_forward_of",
]
