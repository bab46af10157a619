"""This module defines the fast forms for devices on which kernels run. They replace the forwards of modules.

There are fast forms of norms, gated activations, residual sums, attention and RoPE's angles. A layer of Qwen3, which
launches 55 kernels, launches 13 in its fast form.
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

from dflash_hf import joint_products, ops
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.target_model.fast_on_cpu import FastForward, cache_of_verify, window_of
from dflash_hf.target_model.known_layers import (
    attention_agrees,
    epsilon_of,
    gated_mlp_agrees,
    has_fixed_angles,
    head_epsilon,
    head_norms,
    is_attention,
    is_gated_mlp,
    is_layer,
    is_norm,
    is_rotary,
    norm_agrees,
    residuals_agree,
    rotary_agrees,
)
from dflash_hf.target_model.parts import Target
from dflash_hf.target_model.reentry import ragged_block
from dflash_hf.target_model.user_code import is_harmless, is_library, runs_its_class


class FollowingNorm(NamedTuple):
    """An instance describes a norm whose input is a layer's output."""

    norm: weakref.ref[nn.Module]
    eps: float
    # The module whose first part is this norm: the next layer, or the norm itself if it comes after all layers.
    part_of: weakref.ref[nn.Module]

    @classmethod
    def of(cls, norm: nn.Module, part_of: nn.Module) -> FollowingNorm:
        """Returns the description of a norm. The norm is referenced weakly, so the model can still be freed."""
        return cls(weakref.ref(norm), epsilon_of(norm), weakref.ref(part_of))


class NormedAhead(NamedTuple):
    """An instance holds the normed output of a layer, which was computed together with the sum that
    makes the output.
    """

    norm: nn.Module
    total: Tensor
    normed: Tensor


# The state is kept per thread, because threads may run different models, or one model at the same time.
class _Ahead(threading.local):
    """This holds the output that this thread's last layer has normed for the norm after it."""

    normed: NormedAhead | None = None


_ahead = _Ahead()


def forget_normed_ahead() -> None:
    """Drops the output that a layer has normed for a norm that was not called."""
    _ahead.normed = None


def fast_forward_of(
    module: Any, dtype: torch.dtype, following: FollowingNorm | None = None
) -> FastForward | None:
    """Returns the fast forward of a norm, gated MLP, attention, decoder layer or rotary embedding, or `None` for
    others.

    The fast forward takes the class's forward, the module, and the arguments of the module's call.

    Args:
        module (`nn.Module`): Any module.
        dtype (`torch.dtype`): The dtype of its weights.
        following (`FollowingNorm`, *optional*): For a layer, the norm of its output, if that norm is known.
    """
    # The trials run the definitions of the kernels on the CPU. The tests check that a kernel agrees with its
    # definition.
    if _is_fast_norm(module, dtype):
        return functools.partial(_norm_forward, epsilon_of(module))
    if is_gated_mlp(module) and gated_mlp_agrees(module, _run_gated_mlp_by_reference, dtype):
        return _gated_mlp_forward
    if is_attention(module) and attention_agrees(module, _run_attention_by_reference, dtype):
        # These are the epsilons of the trial. A call with other epsilons runs the class's forward.
        epsilons = [epsilon_of(norm) for norm in head_norms(module)]
        return functools.partial(_attention_forward, epsilons)
    if is_layer(module) and residuals_agree(module, _residuals_by_reference, dtype):
        eps = epsilon_of(module.post_attention_layernorm)
        return functools.partial(_layer_forward, eps, following)
    if is_rotary(module) and rotary_agrees(module, _run_rotary_by_reference, dtype):
        return _rotary_forward
    return None


def following_norms(target: Target, dtype: torch.dtype) -> dict[nn.Module, FollowingNorm]:
    """Returns for each layer the norm of its output: the first norm of the next layer, or the norm
    after all layers.

    The result is empty for a decoder that is not Transformers' own. Its code may change the states between two layers.
    """
    if not is_library(type(target.decoder).__module__):
        return {}
    found = dict[nn.Module, FollowingNorm]()
    for layer, following in itertools.pairwise(target.layers):
        if not is_layer(following):
            continue
        norm: Any = following.input_layernorm
        if _is_fast_norm(norm, dtype):
            found[layer] = FollowingNorm.of(norm, part_of=following)
    # Decoders of Transformers call the norm after their layers `norm`. Under another name, it gets no normed states.
    last_norm = target.decoder._modules.get("norm")
    if last_norm is not None and _is_fast_norm(last_norm, dtype):
        last_layer = target.layers[-1]
        found[last_layer] = FollowingNorm.of(last_norm, part_of=last_norm)
    return found


def _is_fast_norm(module: Any, dtype: torch.dtype) -> bool:
    return is_norm(module) and norm_agrees(module, _run_norm_by_reference, dtype)


def _norm_forward(
    eps: float, plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    if len(args) != 1 or kwargs:
        return plain(module, *args, **kwargs)
    states = args[0]
    # Under autocast, the dtype of the states may differ from the dtype of the trial.
    is_covered = ops.use_kernel(ops.rms_norm, states, module.weight) and epsilon_of(module) == eps
    if not is_covered:
        return plain(module, states)
    ahead = _ahead.normed
    # The states that were normed ahead are dropped in any case, because the next layer needs their memory.
    _ahead.normed = None
    # The tensor objects are compared, not their numbers: with the same object, nothing came between the sum and the
    # norm.
    if ahead is not None and ahead.norm is module and ahead.total is states:
        return ahead.normed
    return ops.rms_norm(states, module.weight, eps)


def _gated_mlp_forward(plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    # The kernel replaces the activation, so a hook on the activation would not be called.
    if len(args) != 1 or kwargs or not runs_its_class(module.act_fn):
        return plain(module, *args, **kwargs)
    states = args[0]
    gated = _gated(module, states)
    [out] = joint_products.linears(gated, module.down_proj)
    return out


def _gated(module: Any, states: Tensor) -> Tensor:
    """Returns `silu(gate(x)) * up(x)` of a gated MLP."""
    if joint_products.is_gated_jointly(states, module.gate_proj, module.up_proj):
        return ops.gated_linear(states, module.gate_proj.weight, module.up_proj.weight)
    gate = module.gate_proj(states)
    up = module.up_proj(states)
    if ops.use_kernel(ops.silu_mul, gate, up):
        return ops.silu_mul(gate, up)
    return module.act_fn(gate) * up


def _attention_forward(
    epsilons: list[float], plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    cache = cache_of_verify(module, kwargs)
    states = kwargs.get("hidden_states")
    if args or cache is None or states is None:
        return plain(module, *args, **kwargs)
    norms = head_norms(module)
    epsilons_now = [epsilon_of(norm) for norm in norms]
    # The kernel replaces the norms, so a hook on a norm would not be called.
    if not all(map(runs_its_class, norms)) or epsilons_now != epsilons:
        return plain(module, **kwargs)
    weights = [norm.weight for norm in norms]
    floats = [states, *weights, *kwargs["position_embeddings"]]
    buffers = cache.attention[module.layer_idx].buffers()
    if not ops.use_kernel(ops.norm_rope_write, *floats, buffers=buffers):
        return plain(module, **kwargs)
    return _run_attention(ops.norm_rope_write, module, states, cache, kwargs)


def _layer_forward(
    eps: float,
    following: FollowingNorm | None,
    plain: Callable[..., Any],
    module: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if len(args) != 1:
        return plain(module, *args, **kwargs)
    states = args[0]
    norm = module.post_attention_layernorm
    is_same = runs_its_class(norm) and epsilon_of(norm) == eps
    if not is_same or not ops.use_kernel(ops.add_norm, states, norm.weight):
        return plain(module, states, **kwargs)
    hidden, update = _residuals(ops.add_norm, module, states, kwargs)
    # The sum is computed as in the class, because the norm after it is called by other code.
    if following is None or not _is_handed_on(module, following):
        return hidden + update
    # One launch computes the layer's last sum and the next layer's first norm. It returns both in one tensor
    # `[2, B, W, D]`.
    next_norm: Any = following.norm()
    if not ops.use_kernel(ops.add_norm, hidden, update, next_norm.weight):
        return hidden + update
    both = ops.add_norm(hidden, update, next_norm.weight, following.eps)
    total, normed = both.unbind()
    _ahead.normed = NormedAhead(next_norm, total, normed)
    return total


def _rotary_forward(
    plain: Callable[..., Any], module: Any, x: Tensor, position_ids: Tensor, **others: Any
) -> Any:
    inv_freq = module.inv_freq
    is_on_one_device = inv_freq.device == position_ids.device == x.device
    is_covered = ops.use_kernel(ops.rope_angles, x) and is_on_one_device and position_ids.dim() == 2
    if others or not is_covered or not has_fixed_angles(module) or multiplies_in_tf32():
        return plain(module, x, position_ids, **others)
    return _run_rotary(ops.rope_angles, module, x, position_ids)


def multiplies_in_tf32() -> bool:
    """Returns True if GPUs round the inputs of a float32 product to 10 bits of mantissa."""
    # Classes of older releases compute angles by a matrix product, and the prefill has rotated its keys by such
    # angles.
    settings: Any = torch.backends.cuda.matmul
    # torch before 2.9 has one switch. Later releases refuse to read this switch if both ways of setting it were used.
    if hasattr(settings, "fp32_precision"):
        return settings.fp32_precision == "tf32"
    return settings.allow_tf32


def _is_handed_on(module: nn.Module, following: FollowingNorm) -> bool:
    """Returns True if no hook between a layer's output and the norm may change this output in place."""
    # This is checked in every call, because hooks may have been added since the plan was made.
    norm = following.norm()
    part_of = following.part_of()
    # A layer that was replaced may have been freed.
    if norm is None or part_of is None:
        return False
    if not runs_its_class(norm) or epsilon_of(norm) != following.eps:
        return False
    hooks_behind = module._forward_hooks.values()
    hooks_before_next = part_of._forward_pre_hooks.values()
    return all(map(is_harmless, [*hooks_behind, *hooks_before_next]))


def _run_attention(
    write: Callable[..., Tensor],
    module: Any,
    states: Tensor,
    cache: RaggedCache,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Runs attention over the ragged cache.

    `norm_rope_write` or its reference computes its queries, keys and values.
    """
    # Heads are [B, W, H, E], as in the cache and the kernel.
    shape = (*states.shape[:-1], -1, module.head_dim)
    index = module.layer_idx
    # Unless one launch computes all projections, they are called as modules, because they may be adapters or
    # quantised.
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (each.view(shape) for each in joint_products.linears(states, *projections))
    # The angles may be one row for all rows of the batch, but the kernel reads one row for each.
    cos, sin = kwargs["position_embeddings"]
    cos = cos.expand(len(states), -1, -1)
    sin = sin.expand(len(states), -1, -1)
    weights = [norm.weight for norm in head_norms(module)]
    query_weight, key_weight = weights or (None, None)
    eps = head_epsilon(module)
    # Layers may be on several devices.
    lengths = cache.block.on(states.device).lengths
    key_buffer, value_buffer = cache.attention[index].buffers()
    query = write(
        query,
        key,
        value,
        query_weight,
        key_weight,
        cos,
        sin,
        lengths,
        key_buffer,
        value_buffer,
        eps,
    )
    # The kernel has written the block, so the cache's keys are those of the context and the block, `[B, G, R, E]`.
    keys, values = cache.read(index)
    dropout = 0.0
    if module.training:
        dropout = module.attention_dropout
    out, _ = ragged_block(
        module,
        query.transpose(1, 2),
        keys,
        values,
        kwargs.get("attention_mask"),
        module.scaling,
        dropout,
        window_of(module),
        ragged=cache,
    )
    [attended] = joint_products.linears(out.flatten(2), module.o_proj)
    return attended, None


def _run_rotary(
    rope_angles: Callable[..., Tensor], module: Any, x: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines `[B, W, T]` in the dtype of `x`, computed by `rope_angles` or its reference."""
    scaling = float(module.attention_scaling)
    cos, sin = rope_angles(position_ids, module.inv_freq, scaling, x.dtype).unbind()
    return cos, sin


def _residuals(
    add_norm: Callable[..., Tensor], module: Any, hidden: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Runs a layer with pre-norms. `add_norm` or its reference computes its first sum and its second norm.

    Returns the two tensors whose sum is the layer's output.
    """
    # Attention, norms and MLP are called as modules, so that hooks on them fire.
    normed = module.input_layernorm(hidden)
    attended, _ = module.self_attn(hidden_states=normed, **kwargs)
    norm = module.post_attention_layernorm
    both = add_norm(hidden, attended, norm.weight, epsilon_of(norm))
    total, normed = both.unbind()
    return total, module.mlp(normed)


# The functions below run the definitions of the kernels, for the trials.


def _run_norm_by_reference(norm: Any, states: Tensor) -> Tensor:
    return ops.rms_norm.reference(states, norm.weight, epsilon_of(norm))


def _run_gated_mlp_by_reference(mlp: Any, states: Tensor) -> Tensor:
    gate = mlp.gate_proj(states)
    up = mlp.up_proj(states)
    return mlp.down_proj(ops.silu_mul.reference(gate, up))


def _run_attention_by_reference(
    attention: Any, states: Tensor, cache: RaggedCache, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    return _run_attention(ops.norm_rope_write.reference, attention, states, cache, kwargs)


def _run_rotary_by_reference(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    return _run_rotary(ops.rope_angles.reference, module, x, position_ids)


def _residuals_by_reference(
    layer: Any, states: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    return _residuals(ops.add_norm.reference, layer, states, kwargs)
