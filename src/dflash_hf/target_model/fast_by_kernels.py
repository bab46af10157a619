"""The fast forms where kernels run: norms, gated activations, residual sums, attention; called module by module.

A layer of Qwen3 that launches 55 kernels launches 13 then.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_hf import ops
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.target_model.fast_on_cpu import FastForward, cache_of_verify, window_of
from dflash_hf.target_model.known_layers import (
    attention_agrees,
    epsilon_of,
    gated_mlp_agrees,
    head_norms,
    is_attention,
    is_gated_mlp,
    is_layer,
    is_norm,
    norm_agrees,
    residuals_agree,
)
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.reentry import ragged_block
from dflash_hf.target_model.user_code import is_harmless, is_library, runs_its_class


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


class _Ahead(threading.local):
    """What this thread's last layer has normed for the norm behind it."""

    normed: NormedAhead | None = None


_ahead = _Ahead()


def forget_normed_ahead() -> None:
    """Lets go of what a layer has normed for a norm that was not called."""
    _ahead.normed = None


def fast_forward_of(
    module: Any, dtype: torch.dtype, following: FollowingNorm | None = None
) -> FastForward | None:
    """Returns the fast forward of a norm, a gated MLP, an attention or a decoder layer, else `None`.

    It is called with the class's forward, the module, and what the module is called with.

    Args:
        module (`nn.Module`): Any.
        dtype (`torch.dtype`): Of its weights.
        following (`FollowingNorm`, *optional*): For a layer, the norm that takes its output, if it is known.
    """
    if _is_fast_norm(module, dtype):
        return functools.partial(_norm_forward, epsilon_of(module))
    if is_gated_mlp(module) and gated_mlp_agrees(module, _run_gated_mlp_by_reference, dtype):
        return _gated_mlp_forward
    if is_attention(module) and attention_agrees(module, _run_attention_by_reference, dtype):
        return functools.partial(_attention_forward, list(map(epsilon_of, head_norms(module))))
    if is_layer(module) and residuals_agree(module, _residuals_by_reference, dtype):
        return functools.partial(
            _layer_forward, epsilon_of(module.post_attention_layernorm), following
        )
    return None


def following_norms(target: Target, dtype: torch.dtype) -> dict[nn.Module, FollowingNorm]:
    """Returns, by layer, the norm that takes its output: the next layer's first one, or the one behind all layers.

    None in a decoder that is not Transformers' own: its code may change between two layers what one hands to the next.
    """
    if not is_library(type(target.decoder).__module__):
        return {}
    found = dict[nn.Module, FollowingNorm]()
    for layer, following in itertools.pairwise(target.layers):
        if is_layer(following):
            norm: Any = following.input_layernorm
            if _is_fast_norm(norm, dtype):
                found[layer] = FollowingNorm(
                    weakref.ref(norm), epsilon_of(norm), weakref.ref(following)
                )
    last = target.decoder._modules.get("norm")
    if last is not None and _is_fast_norm(last, dtype):
        found[target.layers[-1]] = FollowingNorm(
            weakref.ref(last), epsilon_of(last), weakref.ref(last)
        )
    return found


def _is_fast_norm(module: Any, dtype: torch.dtype) -> bool:
    return is_norm(module) and norm_agrees(module, _run_norm_by_reference, dtype)


def _norm_forward(
    eps: float, plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    if (
        len(args) != 1
        or kwargs
        or not ops.use_kernel(ops.rms_norm, args[0], module.weight)
        or epsilon_of(module) != eps
    ):
        return plain(module, *args, **kwargs)
    ahead = _ahead.normed
    _ahead.normed = None
    if ahead is not None and ahead.norm is module and ahead.total is args[0]:
        return ahead.normed
    return ops.rms_norm(args[0], module.weight, eps)


def _gated_mlp_forward(plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not runs_its_class(module.act_fn):
        return plain(module, *args, **kwargs)
    gate = module.gate_proj(args[0])
    up = module.up_proj(args[0])
    if ops.use_kernel(ops.silu_mul, gate, up):
        return module.down_proj(ops.silu_mul(gate, up))
    return module.down_proj(module.act_fn(gate) * up)


def _attention_forward(
    epsilons: list[float], plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    cache = cache_of_verify(module, kwargs)
    states = kwargs.get("hidden_states")
    if args or cache is None or states is None:
        return plain(module, *args, **kwargs)
    norms = head_norms(module)
    if not all(map(runs_its_class, norms)) or [epsilon_of(norm) for norm in norms] != epsilons:
        return plain(module, *args, **kwargs)
    taken = [states, *(norm.weight for norm in norms), *kwargs["position_embeddings"]]
    if not ops.use_kernel(
        ops.norm_rope_write, *taken, buffers=cache.attention[module.layer_idx].buffers()
    ):
        return plain(module, *args, **kwargs)
    return _run_attention(ops.norm_rope_write, module, states, cache, kwargs)


def _layer_forward(
    eps: float,
    following: FollowingNorm | None,
    plain: Callable[..., Any],
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    norm = module.post_attention_layernorm
    if (
        len(args) != 1
        or not runs_its_class(norm)
        or epsilon_of(norm) != eps
        or not ops.use_kernel(ops.add_norm, args[0], norm.weight)
    ):
        return plain(module, *args, **kwargs)
    hidden, update = _residuals(ops.add_norm, module, args[0], kwargs)
    if following is None or not _is_handed_on(module, following):
        return hidden + update
    behind: Any = following.norm()
    if not ops.use_kernel(ops.add_norm, hidden, update, behind.weight):
        return hidden + update
    total, normed = ops.add_norm(hidden, update, behind.weight, following.eps).unbind()
    _ahead.normed = NormedAhead(behind, total, normed)
    return total


def _is_handed_on(module: nn.Module, following: FollowingNorm) -> bool:
    """Returns True if no hook comes between a layer's output and the norm, that may change the output in place."""
    norm = following.norm()
    part_of = following.part_of()
    if (
        norm is None
        or part_of is None
        or not runs_its_class(norm)
        or epsilon_of(norm) != following.eps
    ):
        return False
    hooks = [*module._forward_hooks.values(), *part_of._forward_pre_hooks.values()]
    return all(map(is_harmless, hooks))


def _run_attention(
    write: Callable[..., Tensor],
    module: Any,
    states: Tensor,
    cache: RaggedCache,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention over the ragged cache, its queries, keys and values by `norm_rope_write` or its reference."""
    shape = (*states.shape[:-1], -1, module.head_dim)
    index = module.layer_idx
    heads = [
        project(states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj)
    ]
    cos, sin = (part.expand(len(states), -1, -1) for part in kwargs["position_embeddings"])
    norms = head_norms(module)
    weights = [norm.weight for norm in norms] or [None, None]
    eps = epsilon_of(norms[0]) if norms else 0.0
    lengths = cache.block.on(states.device).lengths
    query = write(*heads, *weights, cos, sin, lengths, *cache.attention[index].buffers(), eps)
    out, _ = ragged_block(
        module,
        query.transpose(1, 2),
        *cache.read(index),
        kwargs.get("attention_mask"),
        module.scaling,
        module.attention_dropout if module.training else 0.0,
        window_of(module),
        ragged=cache,
    )
    return module.o_proj(out.flatten(2)), None


def _residuals(
    add_norm: Callable[..., Tensor], module: Any, hidden: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """A layer with pre-norms, its first sum and second norm by `add_norm` or its reference.

    Returns the two whose sum is the layer's output.
    """
    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden), **kwargs)
    norm = module.post_attention_layernorm
    total, normed = add_norm(hidden, attended, norm.weight, epsilon_of(norm)).unbind()
    return total, module.mlp(normed)


# What the kernels are defined to compute, for the trials.


def _run_norm_by_reference(norm: Any, states: Tensor) -> Tensor:
    return ops.rms_norm.reference(states, norm.weight, epsilon_of(norm))


def _run_gated_mlp_by_reference(mlp: Any, states: Tensor) -> Tensor:
    return mlp.down_proj(ops.silu_mul.reference(mlp.gate_proj(states), mlp.up_proj(states)))


def _run_attention_by_reference(
    attention: Any, states: Tensor, cache: RaggedCache, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    return _run_attention(ops.norm_rope_write.reference, attention, states, cache, kwargs)


def _residuals_by_reference(
    layer: Any, states: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    return _residuals(ops.add_norm.reference, layer, states, kwargs)
