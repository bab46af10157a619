"""This module defines the fast forms on a CPU, where a call of a module costs as much as many of its operations.

A decoder layer like Llama's or Qwen3's runs as one function, over the ragged cache or, in a prefill, over
Transformers' cache. It uses torch's own norm instead of six operations, does not transpose heads for RoPE, and calls
no module. Norms and attention of other layers have fast forms of their own. Projections that are not a plain
`nn.Linear`, such as adapters and quantised layers, are called as modules. If a layer has hooks or forwards of the user
in it, its class's forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf.block.attention import attend
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.devices import num_writes
from dflash_hf.draft_model.layers import Angles, rms_norm, rotate
from dflash_hf.layer_configs import layer_config
from dflash_hf.packed_weights import LINEAR_PARAMETERS, Parameters, linear, linears
from dflash_hf.target_model.known_layers import (
    attention_agrees,
    epsilon_of,
    head_epsilon,
    head_norms,
    is_attention,
    is_gated_mlp,
    is_layer,
    is_norm,
    layer_agrees,
    layer_norms,
    norm_agrees,
)
from dflash_hf.target_model.reentry import KEYWORD, mask_of_layer
from dflash_hf.target_model.user_code import is_harmless, is_published, runs_its_class

# It takes the class's forward, the module, and the arguments of the module's call.
FastForward = Callable[..., Any]
# Maps states to states.
Run = Callable[[Tensor], Tensor]
Projection = Run | Parameters
# Maps states to the outputs of several layers.
RunAll = Callable[[Tensor], Sequence[Tensor]]
# These are the keywords of a decoder layer's call in a prefill. With any other keyword, its class's forward runs.
# LLaVA-OneVision passes `logits_to_keep` to its layers, and all models pass `output_hidden_states`. Layers do not use
# these two. Transformers records states by hooks, which are called after a layer's fast form too.
PREFILL = {
    "attention_mask",
    "position_ids",
    CACHE_NAME,
    "use_cache",
    "position_embeddings",
    "logits_to_keep",
    "output_hidden_states",
}
# Models with experts pass a switch for the logits of their routers to their layers. If it is off, nothing is
# requested.
ROUTERS = "output_router_logits"


class LayerForm(NamedTuple):
    """An instance describes the fast form of a decoder layer: what its class was found to compute."""

    epsilons: list[float]  # epsilons of its two norms, then of its attention's norms
    # Whether its MLP is `down(silu(gate(x)) * up(x))`. Any other MLP is called as a module
    is_gated: bool

    @classmethod
    def of(cls, layer: Any) -> LayerForm:
        """Returns the form of a layer."""
        epsilons = [epsilon_of(norm) for norm in _all_norms(layer)]
        mlp = layer._modules["mlp"]
        return cls(epsilons, is_gated_mlp(mlp))


def fast_forward_of(module: Any, dtype: torch.dtype) -> FastForward | None:
    """Returns the fast forward of a norm, an attention or a linear layer, or `None` for others.

    The fast forward takes the class's forward, the module, and the arguments of the module's call.
    """
    if is_norm(module) and norm_agrees(module, _run_norm, dtype):
        return functools.partial(_norm_forward, epsilon_of(module))
    if is_attention(module) and attention_agrees(module, _run_attention, dtype):
        # These are the epsilons of the trial. A call with other epsilons runs the class's forward.
        epsilons = [epsilon_of(norm) for norm in head_norms(module)]
        return functools.partial(_attention_forward, epsilons)
    if type(module) is nn.Linear and is_published(module):
        return _linear_forward
    return None


def layer_form_of(module: Any, dtype: torch.dtype) -> LayerForm | None:
    """Returns the fast form of a decoder layer, or `None` if it has none. [`prepare`] prepares it for each run."""
    if not is_layer(module) or not is_attention(module._modules["self_attn"]):
        return None
    if not layer_agrees(module, _run_layer, dtype):
        return None
    return LayerForm.of(module)


def prepare(
    layer: Any, form: LayerForm, config: Any, is_unmodified: bool, angles: AnglesOfForward
) -> FastLayer | None:
    """Looks up the values that a layer uses in one run. Returns `None` if the layer runs by its class's forward.

    Args:
        layer (`nn.Module`): The layer.
        form (`LayerForm`): The fast form of the layer.
        config (`PreTrainedConfig`, *optional*): The config whose attention is Transformers' SDPA.
        is_unmodified (`bool`): Whether the whole model was found unmodified. If not, hooks and forwards are checked
            here.
        angles (`AnglesOfForward`): The angles that the layers of the run share.
    """
    attention = layer._modules["self_attn"]
    mlp = layer._modules["mlp"]
    norms = _all_norms(layer)
    weights = [norm._parameters["weight"] for norm in norms]
    dtype = weights[0].dtype
    # Epsilons, dtypes and devices may have been changed since the trial, so each run checks them.
    epsilons = [epsilon_of(norm) for norm in norms]
    if epsilons != form.epsilons:
        return None
    if not all(weight.is_cpu and weight.dtype == dtype for weight in weights):
        return None
    parts = [layer, attention, *norms]
    if form.is_gated:
        parts += [mlp, mlp._modules["act_fn"]]
    # No fast form has the dropout of a model in training.
    if any(part.training for part in parts):
        return None
    if not is_unmodified and not _is_plain_layer(parts, weights):
        return None
    # The config of another attention may name another implementation than SDPA.
    takes_prompts = attention.__dict__["config"] is config
    return FastLayer.of(layer, form, is_unmodified, takes_prompts, angles)


class AnglesOfForward:
    """An instance holds the angles of RoPE in the form that [`rotate`] needs.

    One forward makes them once for all layers.
    """

    def __init__(self) -> None:
        # The pair is held, so that no other pair can have the same address.
        self._cos_sin: tuple[Tensor, Tensor] | None = None
        self._writes: list[int] = []
        self._angles: Angles | None = None

    def of(self, cos_sin: tuple[Tensor, Tensor]) -> Angles:
        """Returns the angles of cosines and sines `[B, W, E]`. A decoder passes the same pair to all its layers."""
        # A hook of the user may write into the pair between two layers.
        writes = list(map(num_writes, cos_sin))
        is_same = self._cos_sin is cos_sin and self._writes == writes
        if self._angles is None or not is_same:
            cos, sin = cos_sin
            # Angles are [B, W, 1, E], because the dimension of heads comes after the tokens.
            self._angles = Angles.of((cos.unsqueeze(2), sin.unsqueeze(2)))
            self._cos_sin = cos_sin
            self._writes = writes
        return self._angles


class FastAttention(NamedTuple):
    """An instance holds the values that an attention uses in a run: projections, parameters of its norms, settings."""

    project: RunAll  # computes queries, keys and values
    out: Projection
    norms: list[Parameters]  # for queries and for keys, or empty
    eps: float  # of both norms
    size: int  # size of a head
    scaling: float  # of the scores
    window: int | None  # number of tokens that a query sees, `None` for all
    angles: AnglesOfForward

    @classmethod
    def of(cls, module: Any, is_unmodified: bool, angles: AnglesOfForward) -> FastAttention:
        """Looks up the values that an attention module uses."""
        parts = module._modules
        query_key_value = [parts["q_proj"], parts["k_proj"], parts["v_proj"]]
        return cls(
            _projections(query_key_value, is_unmodified),
            _projection(parts["o_proj"], is_unmodified),
            [norm._parameters for norm in head_norms(module)],
            head_epsilon(module),
            module.head_dim,
            module.scaling,
            window_of(module),
            angles,
        )

    def run(self, module: Any, states: Tensor, cache: Cache, kwargs: dict[str, Any]) -> Tensor:
        """Returns the attention output `[B, W, D]` of states `[B, W, D]` over a cache.

        Heads stay in the order of the projections' output, so nothing is transposed for RoPE.
        """
        # Heads are [B, W, H, E] here. Transformers' modules have [B, H, W, E].
        shape = (*states.shape[:-1], -1, self.size)
        query, key, value = self.project(states)
        query = query.view(shape)
        key = key.view(shape)
        value = value.view(shape)
        if self.norms:
            query_norm, key_norm = self.norms
            query = rms_norm(query, query_norm["weight"], self.eps)
            key = rms_norm(key, key_norm["weight"], self.eps)
        angles = self.angles.of(kwargs["position_embeddings"])
        query = rotate(query, angles)
        key = rotate(key, angles)
        # Keys and values are not transposed, because the ragged cache is token-major too.
        query = query.transpose(1, 2)
        if isinstance(cache, RaggedCache):
            heads = self._over_ragged(module, query, key, value, cache)
        else:
            heads = self._over_prompt(module, query, key, value, cache, kwargs)
        return _project(heads.flatten(2), self.out)

    def _over_ragged(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, cache: RaggedCache
    ) -> Tensor:
        """Runs attention over the ragged cache, with the mask that follows from the cache."""
        keys, values = cache.extend(module.layer_idx, key, value)
        mask = mask_of_layer(cache, keys, self.window)
        return attend(query, keys, values, mask, self.scaling)

    def _over_prompt(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Runs Transformers' own attention, with the mask that the decoder made."""
        # Transformers' cache has the shape [B, G, S, E].
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        keys, values = cache.update(key, value, module.layer_idx)
        mask = kwargs.get("attention_mask")
        # The function reads from the module whether heads are repeated, and how often.
        heads, _ = sdpa_attention_forward(module, query, keys, values, mask, scaling=self.scaling)
        return heads


class FastLayer(NamedTuple):
    """An instance holds the values that a decoder layer uses in a run: parameters and epsilons of its norms,
    attention, MLP.

    Parameters are looked up at each use, so that one may be replaced.
    """

    first: Parameters
    first_eps: float
    second: Parameters
    second_eps: float
    attention: FastAttention
    mlp: Run
    takes_prompts: bool  # whether it also runs over Transformers' cache

    @classmethod
    def of(
        cls,
        layer: Any,
        form: LayerForm,
        is_unmodified: bool,
        takes_prompts: bool,
        angles: AnglesOfForward,
    ) -> FastLayer:
        """Looks up the values that a layer uses."""
        parts = layer._modules
        mlp = parts["mlp"]
        if form.is_gated:
            gate_up = [mlp._modules["gate_proj"], mlp._modules["up_proj"]]
            gate_and_up = _projections(gate_up, is_unmodified)
            down = _projection(mlp._modules["down_proj"], is_unmodified)
            mlp = functools.partial(_run_gated_mlp, gate_and_up, down)
        # These are dictionaries of parameters and not tensors, so that a weight that is replaced within a run is found
        # at its next use.
        first, second = layer_norms(layer)
        first_eps, second_eps, *_ = form.epsilons
        attention = FastAttention.of(parts["self_attn"], is_unmodified, angles)
        return cls(
            first._parameters,
            first_eps,
            second._parameters,
            second_eps,
            attention,
            mlp,
            takes_prompts,
        )

    def answer(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the states `[B, W, D]` after the layer, or `None` if the call is of another kind and the class must
        run.
        """
        attention = module._modules["self_attn"]
        cache: Cache | None = None
        if KEYWORD in kwargs:
            # The mask of a verify follows from its cache. If there is another mask, the class's forward raises the
            # right error.
            if kwargs.get("attention_mask") is None:
                cache = cache_of_verify(attention, kwargs)
        elif self.takes_prompts:
            cache = cache_of_prefill(attention, kwargs)
        if cache is None or len(args) != 1:
            return None
        states = args[0]
        # The trial does not cover autocast, or a layer that was moved to another device.
        was_tried = states.is_cpu and states.dtype == self.first["weight"].dtype
        if not was_tried:
            return None
        return self.run(attention, states, cache, kwargs)

    def run(self, attention: Any, states: Tensor, cache: Cache, kwargs: dict[str, Any]) -> Tensor:
        """Returns the states `[B, W, D]` after the layer. `attention` is the layer's attention module."""
        normed = rms_norm(states, self.first["weight"], self.first_eps)
        states = states + self.attention.run(attention, normed, cache, kwargs)
        normed = rms_norm(states, self.second["weight"], self.second_eps)
        return states + self.mlp(normed)


def by_sdpa(config: Any) -> bool:
    """Returns True if the attention of a config's model is Transformers' own SDPA."""
    # A user may have registered another function under this name.
    is_registered = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    return config._attn_implementation == "sdpa" and is_registered


def cache_of_verify(attention: Any, kwargs: dict[str, Any]) -> RaggedCache | None:
    """Returns the ragged cache of a verify, or `None` if the call's keywords are not those that fast forms read."""
    cache = kwargs.get(KEYWORD)
    # The model must have passed this very cache down, because some models wrap the cache that they get.
    if not isinstance(cache, RaggedCache) or cache is not kwargs.get(CACHE_NAME):
        return None
    if not _rotates_all(attention, kwargs):
        return None
    return cache


def cache_of_prefill(attention: Any, kwargs: dict[str, Any]) -> DynamicCache | None:
    """Returns the cache of a prefill by Transformers' own attention, or `None` for other calls."""
    cache = kwargs.get(CACHE_NAME)
    asked = kwargs.keys() - PREFILL
    if not kwargs.get(ROUTERS):
        asked -= {ROUTERS}
    is_usual = type(cache) is DynamicCache and not asked
    if not is_usual or not _rotates_all(attention, kwargs):
        return None
    return cache


def window_of(attention: Any) -> int | None:
    """Returns an attention's window, or `None` if it has none. Some attentions state it only in their config.

    Reading a config takes time, so the module is read first.
    """
    own = vars(attention)
    if "sliding_window" in own:
        return own["sliding_window"] or None
    config_of_layer = layer_config(own["config"], own["layer_idx"])
    # In Qwen2-MoE, 0 means no window.
    return getattr(config_of_layer, "sliding_window", None) or None


def _rotates_all(attention: Any, kwargs: dict[str, Any]) -> bool:
    """Returns True if whole heads are rotated. If only a part of each head is rotated, there are fewer angles."""
    angles = kwargs.get("position_embeddings")
    if angles is None:
        return False
    cos, _ = angles
    return cos.shape[-1] == attention.head_dim


def _norm_forward(
    eps: float, plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    if len(args) != 1 or kwargs:
        return plain(module, *args, **kwargs)
    states = args[0]
    # The trial had this epsilon, on a CPU, in the weight's dtype.
    was_tried = _is_alike(states, module) and epsilon_of(module) == eps
    if not was_tried:
        return plain(module, states)
    return _run_norm(module, states)


def _attention_forward(
    epsilons: list[float], plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    cache = cache_of_verify(module, kwargs)
    states = kwargs.get("hidden_states")
    # A layer of the table calls its attention only with keywords. Any other call is the user's.
    if args or cache is None or states is None:
        return plain(module, *args, **kwargs)
    has_mask = kwargs.get("attention_mask") is not None
    if has_mask or module.training:
        return plain(module, **kwargs)
    norms = head_norms(module)
    # The fast form calls no norm, so a hook on a norm would not be called.
    if not all(runs_its_class(norm) and _is_alike(states, norm) for norm in norms):
        return plain(module, **kwargs)
    epsilons_now = [epsilon_of(norm) for norm in norms]
    if epsilons_now != epsilons:
        return plain(module, **kwargs)
    return _run_attention(module, states, cache, kwargs)


def _linear_forward(plain: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or module._parameters.keys() != LINEAR_PARAMETERS:
        return plain(module, *args, **kwargs)
    return linear(args[0], **module._parameters)


def _run_norm(norm: Any, states: Tensor) -> Tensor:
    return rms_norm(states, norm.weight, epsilon_of(norm))


def _run_attention(
    attention: Any, states: Tensor, cache: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Runs an attention and returns the values that its class returns: the output, and no attention weights."""
    fast = FastAttention.of(attention, is_unmodified=False, angles=AnglesOfForward())
    return fast.run(attention, states, cache, kwargs), None


def _run_layer(layer: Any, states: Tensor, cache: Any, kwargs: dict[str, Any]) -> Tensor:
    """Runs a layer as one function, for its trial."""
    form = LayerForm.of(layer)
    angles = AnglesOfForward()
    fast = FastLayer.of(layer, form, is_unmodified=False, takes_prompts=True, angles=angles)
    attention = layer._modules["self_attn"]
    return fast.run(attention, states, cache, kwargs)


def _run_gated_mlp(gate_and_up: RunAll, down: Projection, states: Tensor) -> Tensor:
    """Returns `down(silu(gate(x)) * up(x))`."""
    gate, up = gate_and_up(states)
    gated = nn.functional.silu(gate)
    return _project(gated * up, down)


def _projections(layers: list[Any], is_unmodified: bool) -> RunAll:
    """Returns the function that multiplies the same states by several layers.

    If all are torch's own, it is one product.
    """
    found = [_projection(layer, is_unmodified) for layer in layers]
    parameters = [each for each in found if isinstance(each, dict)]
    if len(parameters) == len(found):
        return functools.partial(linears, layers=parameters)
    return functools.partial(_project_each, found)


def _projection(layer: Any, is_unmodified: bool) -> Projection:
    """Returns the parameters of torch's own projection, for which a call of a module would cost too much, or else the
    module.
    """
    # Adapters and quantised layers have classes of their own.
    if type(layer) is not nn.Linear or layer._parameters.keys() != LINEAR_PARAMETERS:
        return layer
    if is_unmodified:
        return layer._parameters
    # Some libraries set a forward of their own on the class, for all models.
    defined_in = nn.Linear.forward.__globals__["__name__"]
    is_torchs = defined_in == nn.Linear.__module__
    if is_torchs and runs_its_class(layer):
        return layer._parameters
    return layer


def _project(states: Tensor, by: Projection) -> Tensor:
    if isinstance(by, dict):
        return linear(states, **by)
    return by(states)


def _project_each(projections: list[Projection], states: Tensor) -> list[Tensor]:
    return [_project(states, by) for by in projections]


def _all_norms(layer: Any) -> list[Any]:
    """Returns the norms of a layer. The norms of its attention come after its own norms."""
    return [*layer_norms(layer), *head_norms(layer._modules["self_attn"])]


def _is_plain_layer(parts: list[Any], weights: list[Any]) -> bool:
    """Returns True if the weights of a layer's norms are plain and no hook changes anything.

    The layer is the first part.
    """
    layer, *inside = parts
    # A hook of the user may change the layer's parts after they have been looked up here.
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    if not all(map(is_harmless, hooks)):
        return False
    has_plain_weights = {*map(type, weights)} == {nn.Parameter}
    return has_plain_weights and all(map(runs_its_class, inside))


def _is_alike(states: Tensor, norm: Any) -> bool:
    """Returns True if states are on a CPU and have the dtype of a norm's weight, as in the trial."""
    return states.device.type == "cpu" and states.dtype == norm.weight.dtype
