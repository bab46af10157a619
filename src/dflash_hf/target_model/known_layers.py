"""This module decides which modules have a fast form, and runs the trial before the first use of a form.

The classes are listed in tables (`layer_tables.py`). A class that is in no table, such as a subclass of the user's,
runs its own forward. A class also runs its own forward if its fast form gives other numbers on a small random block.
The reason may be that a function of the modeling file was replaced, as liger does, or that another release of
Transformers computes something else.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import Cache, DynamicCache

from dflash_hf import ops
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import LayerShape
from dflash_hf.target_model.layer_tables import (
    ATTENTIONS,
    GATED_MLPS,
    LAYERS,
    NORMS,
    ROTARIES,
    SILUS,
)
from dflash_hf.target_model.reentry import KEYWORD, RAGGED_BLOCK
from dflash_hf.target_model.user_code import Code, is_published

logger = logging.getLogger(__name__)

# The names of the submodules of these classes.
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_GATED_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_FREQUENCIES = frozenset({"inv_freq", "original_inv_freq"})
# Types of RoPE whose frequencies never change. The frequencies of the other types depend on the length of a text.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
# A fast form is compared in these dtypes and in the dtype of the target.
_DTYPES = (torch.float32, *ops.HALF)
# Sizes of the small copies: hidden size, inner size of a gated MLP, query heads, key/value heads, tokens of a row.
# Norms keep their own size, and so do states that go through the norms of a layer, because sums depend on the size.
_HIDDEN = 16
_INNER = 12
_HEADS = 4
_GROUPS = 2
_WIDTH = 4
# The errors that a forward may raise if it is called in another way than it expects.
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Returns random numbers of a shape, on the CPU and in the dtype of a trial.
Draw = Callable[..., Tensor]
# Draws a block, and returns the results of the class and of the fast form.
Compare = Callable[[Draw], tuple[Any, Any]]
# Runs a layer, or its attention, on states, a cache and the keywords of the call.
Run = Callable[[Tensor, Any, dict[str, Any]], Any]


def is_norm(module: Any) -> bool:
    """Returns True for an RMS norm that is in the table and has a plain weight."""
    if not _is_listed(module, NORMS):
        return False
    # Some models add a bias or a submodule to a norm. The fast form does not have these.
    has_weight_alone = list(module._parameters) == ["weight"] and not module._modules
    if not has_weight_alone:
        return False
    weight = module._parameters["weight"]
    if weight is None or not _is_plain(weight):
        return False
    # An epsilon that is a tensor could change between the trial and a verify.
    has_fixed_epsilon = type(epsilon_of(module)) is float
    return weight.dim() == 1 and has_fixed_epsilon


def is_gated_mlp(module: Any) -> bool:
    """Returns True for a gated MLP that is in the table and whose activation is SiLU."""
    if not _is_listed(module, GATED_MLPS) or module._modules.keys() != _GATED_PARTS:
        return False
    # The class alone is not enough, because a config may name another activation.
    activation = module._modules["act_fn"]
    is_silu = type(activation).__name__ in SILUS
    return is_silu and is_published(activation)


def is_attention(module: Any) -> bool:
    """Returns True for an attention that is in the table.

    Its norms of queries and keys, if any, must have one epsilon.
    """
    if not _is_listed(module, ATTENTIONS):
        return False
    # An adapter or a sink would be one more submodule. Such an attention runs its own forward.
    parts = module._modules.keys()
    if parts not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
        return False
    norms = head_norms(module)
    # The kernel takes one epsilon for both queries and keys.
    epsilons = set(map(epsilon_of, norms))
    return all(map(is_norm, norms)) and len(epsilons) <= 1


def is_layer(module: Any) -> bool:
    """Returns True for a decoder layer that is in the table, with any attention and MLP."""
    if not _is_listed(module, LAYERS) or module._modules.keys() != _LAYER_PARTS:
        return False
    return all(map(is_norm, layer_norms(module)))


def is_rotary(module: Any) -> bool:
    """Returns True for a rotary embedding that is in the table and whose frequencies do not depend
    on a text's length.
    """
    if not _is_listed(module, ROTARIES, _FREQUENCIES) or "inv_freq" not in module._buffers:
        return False
    return has_fixed_angles(module) and _is_plain(module.inv_freq)


def has_fixed_angles(rotary: Any) -> bool:
    """Returns True if a rotary embedding's angles depend only on its frequencies, one factor and the positions."""
    # The instance's own dictionary is read, as in `epsilon_of`.
    settings = rotary.__dict__
    has_fixed_frequencies = settings.get("rope_type") in _FIXED_ROPES
    return has_fixed_frequencies and isinstance(settings.get("attention_scaling"), int | float)


def layer_norms(layer: Any) -> list[Any]:
    """Returns the norms before a layer's attention and before its MLP."""
    parts = layer._modules
    return [parts["input_layernorm"], parts["post_attention_layernorm"]]


def head_norms(attention: Any) -> list[Any]:
    """Returns the norms of queries and keys of an attention, or an empty list if it has none."""
    parts = attention._modules
    if "q_norm" not in parts:
        return []
    return [parts["q_norm"], parts["k_norm"]]


def epsilon_of(norm: Any) -> Any:
    """Returns the epsilon of a norm, or `None` if it has none."""
    # The instance's own dictionary is read, because `getattr` of a module searches three more dictionaries, in every
    # layer of a step.
    settings = norm.__dict__
    if "variance_epsilon" in settings:
        return settings["variance_epsilon"]
    return settings.get("eps")


def head_epsilon(attention: Any) -> float:
    """Returns the epsilon of an attention's norms of queries and keys. Without such norms it is 0 and not used."""
    norms = head_norms(attention)
    if not norms:
        return 0.0
    return epsilon_of(norms[0])


def norm_agrees(norm: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(norm, states)` gives the same result as the class of a norm."""
    # The norm keeps its size, because the order of additions in a sum depends on it.
    size = len(norm.weight)
    plain = type(norm).forward

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_copy(norm, draw(size))
        states = draw(2, 3, size)
        return plain(small, states), fast(small, states)

    return _agrees(fast, [norm], dtype, compare)


def gated_mlp_agrees(mlp: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(mlp, states)` gives the same result as the class of a gated MLP."""

    plain = type(mlp).forward
    parts = [mlp, mlp._modules["act_fn"]]

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_gated_mlp(mlp, _HIDDEN, draw)
        states = draw(2, 3, _HIDDEN)
        return plain(small, states), fast(small, states)

    return _agrees(fast, parts, dtype, compare)


def rotary_agrees(rotary: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(rotary, states, positions)` gives the same result as the class of a rotary embedding."""
    plain = type(rotary).forward

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_copy(rotary)
        # The frequencies stay float32 when a model is converted to half precision.
        small._buffers = {"inv_freq": draw(_HIDDEN).float().abs()}
        states = draw(2, _WIDTH, _HIDDEN)
        # One of the rows is far into a text. So angles that are computed in half precision are detected.
        starts = torch.tensor([[3], [123_456]], device="cpu")
        positions = starts + torch.arange(_WIDTH, device="cpu")
        return plain(small, states, positions), fast(small, states, positions)

    return _agrees(fast, [rotary], dtype, compare)


def attention_agrees(attention: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(attention, states, cache, kwargs)` gives the class's result over a ragged cache."""

    parts = [attention, *head_norms(attention)]

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_attention(attention, _HIDDEN, draw)

        # The class finds its cache among the keywords. The fast form gets it as an argument of its own.
        def plain(states: Tensor, cache: Any, kwargs: dict[str, Any]) -> Any:
            return type(attention).forward(small, hidden_states=states, **kwargs)

        fast_of_small = functools.partial(fast, small)
        return _over_ragged(small, _HIDDEN, draw, plain, fast_of_small)

    return _agrees(fast, parts, dtype, compare)


def layer_agrees(layer: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(layer, states, cache, kwargs)` gives the same result as the class of a decoder layer.

    The whole layer is compared at once, over a ragged cache and over Transformers' own cache, which a prompt fills.
    """
    attention = layer._modules["self_attn"]
    mlp = layer._modules["mlp"]
    parts = [layer, attention, *layer_norms(layer), *head_norms(attention)]
    if is_gated_mlp(mlp):
        parts += [mlp, mlp._modules["act_fn"]]

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_layer(layer, draw)
        small_attention = small._modules["self_attn"]

        # A layer gets its states as a positional argument, and an attention only as a keyword.
        def plain(states: Tensor, cache: Any, kwargs: dict[str, Any]) -> Any:
            return type(layer).forward(small, states, **kwargs)

        hidden = len(layer.input_layernorm.weight)
        fast_of_small = functools.partial(fast, small)
        runs = (plain, fast_of_small)
        plain_verify, fast_verify = _over_ragged(small_attention, hidden, draw, *runs)
        plain_prompt, fast_prompt = _over_prompts(small_attention, hidden, draw, *runs)
        return (plain_verify, plain_prompt), (fast_verify, fast_prompt)

    return _agrees(fast, parts, dtype, compare)


def residuals_agree(layer: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(layer, states, kwargs)` gives two tensors whose sum is the result of a layer's class.

    Stand-ins for attention and MLP show whether both call them with the same arguments.
    """

    def compare(draw: Draw) -> tuple[Any, Any]:
        given = list[dict[str, Any]]()

        def attend(**kwargs: Any) -> tuple[Tensor, None]:
            states = kwargs.pop("hidden_states")
            # A class may pass options that are off. The fast form passes on only the keywords that the layer got.
            set_ones = {name: value for name, value in kwargs.items() if _is_set(value)}
            given.append(set_ones)
            return 3 * states.flip(-1), None

        first, second = layer_norms(layer)
        small = _small_copy(
            layer,
            input_layernorm=_small_copy(first, draw(_HIDDEN)),
            self_attn=attend,
            post_attention_layernorm=_small_copy(second, draw(_HIDDEN)),
            mlp=_stand_in_for_mlp,
        )
        states = draw(2, 3, _HIDDEN)
        # The keywords have numbers as values, because attention and MLP only record these values and do not use them.
        kwargs: dict[str, Any] = {
            "attention_mask": None,
            "position_embeddings": 1,
            "position_ids": 2,
        }
        kwargs |= {CACHE_NAME: 3, "use_cache": 4, KEYWORD: 5}
        plain = type(layer).forward(small, states, **kwargs)
        # The caller computes the sum of the two, because it may combine the sum with the next norm.
        total, update = fast(small, states, kwargs)
        given_by_class, given_by_fast = given
        return (plain, given_by_class), (total + update, given_by_fast)

    return _agrees(fast, [layer, *layer_norms(layer)], dtype, compare)


def _is_set(value: object) -> bool:
    return value is not None and value is not False


class _Outcome(NamedTuple):
    """An instance holds the result of a trial, which is valid as long as the code of the classes is the same."""

    code: Code
    agrees: bool


_outcomes: dict[tuple[object, ...], _Outcome] = {}


def _agrees(fast: object, parts: list[Any], dtype: torch.dtype, compare: Compare) -> bool:
    """Returns True if both results of `compare` are the same bit for bit in every dtype.

    The result is stored under the fast form, the dtype, and the classes and settings of the modules.
    """
    kinds = [type(part) for part in parts]
    settings = map(_settings_of, parts)
    key = (fast, dtype, *kinds, *settings)
    outcome = _outcomes.get(key)
    if outcome is None or not outcome.code.is_same():
        code = Code(kinds)  # before the trial, to notice code that is replaced during it
        # All dtypes are tried, because in float32 a form that rounds at another place would agree.
        dtypes = dict.fromkeys((*_DTYPES, dtype))
        agrees = all(_try(kinds[0], dtype, compare) for dtype in dtypes)
        outcome = _Outcome(code, agrees)
        _outcomes[key] = outcome
    return outcome.agrees


def _try(kind: type, dtype: torch.dtype, compare: Compare) -> bool:
    """Returns True if both results are the same in one dtype."""
    # A verify may run under modes that forbid reads or compute nothing.
    with _disable_current_modes(), torch.no_grad():
        # A separate generator does not change the user's random numbers, and makes every trial draw the same numbers.
        generator = torch.Generator("cpu").manual_seed(0)
        draw = functools.partial(_random, generator, dtype)
        try:
            plain, fast = compare(draw)
            if _is_same(plain, fast):
                return True
            logger.debug(
                "%s runs as it is: its fast form computes something else in %s",
                kind.__name__,
                dtype,
            )
        except _ERRORS as error:
            logger.debug("%s runs as it is: %s in its trial in %s", kind.__name__, error, dtype)
    return False


def _is_listed(module: Any, names: frozenset[str], buffers: frozenset[str] = frozenset()) -> bool:
    """Returns True if a module's class is in a table, its forward is the library's, and it has no other buffers."""
    kind = type(module)
    # A class of the user may have the same name.
    is_library_class = kind.__module__.startswith("transformers.models.")
    is_in_table = kind.__name__ in names and is_library_class
    return is_in_table and is_published(module, buffers)


def _is_plain(weight: Tensor) -> bool:
    """Returns True if a weight or buffer is a plain tensor, and not of a class of its own (sharded, quantised)."""
    return type(weight) in (nn.Parameter, Tensor)


def _settings_of(module: Any) -> tuple[object, ...]:
    """Returns the values that a module's forward may read: the sizes of its weights, its settings and its config's
    settings.
    """
    weights = module._parameters.values()
    sizes = [weight.shape for weight in weights if weight is not None]
    plain = (bool, int, float, str, type(None))
    own = vars(module)
    config = dict[str, Any]()
    if "config" in own:
        config = vars(own["config"])
    found = list[tuple[str, object]]()
    for settings in (own, config):
        # Layers of one model differ only in their number, so one trial is enough for all of them.
        found += sorted(
            (name, value)
            for name, value in settings.items()
            if isinstance(value, plain) and name not in ("layer_idx", "training")
        )
    return *sizes, *found


def _small_copy(module: Any, weight: Tensor | None = None, **parts: Any) -> Any:
    """Returns a copy of a module with another weight and other submodules, without hooks.

    Writes to it change only the copy.
    """
    # A shallow copy keeps the class and the settings. The four dictionaries below would still be those of the module.
    small = copy.copy(module)
    small._parameters = {}
    if weight is not None:
        small._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    small._modules = {**module._modules, **parts}
    small._forward_hooks = {}
    small._forward_pre_hooks = {}
    small.__dict__.pop("forward", None)
    small.training = False
    return small


def _small_gated_mlp(mlp: Any, hidden: int, draw: Draw) -> Any:
    """Returns a copy of a gated MLP with random weights, for states of size `hidden`."""
    return _small_copy(
        mlp,
        gate_proj=_projection(draw(_INNER, hidden)),
        up_proj=_projection(draw(_INNER, hidden)),
        down_proj=_projection(draw(hidden, _INNER)),
        act_fn=_small_copy(mlp._modules["act_fn"]),
    )


def _small_attention(attention: Any, hidden: int, draw: Draw) -> Any:
    """Returns a copy of an attention with random weights, few heads and, if it has a window, a short window."""
    size = attention.head_dim
    query_size = _HEADS * size
    key_size = _GROUPS * size
    norms = dict[str, Any]()
    for name in ("q_norm", "k_norm"):
        if name in attention._modules:
            norm = attention._modules[name]
            norms[name] = _small_copy(norm, draw(len(norm.weight)))
    # Some models clip large values. Values that are 64 times larger show whether this model does.
    large_values = 64 * draw(key_size, hidden)
    small = _small_copy(
        attention,
        q_proj=_projection(draw(query_size, hidden)),
        k_proj=_projection(draw(key_size, hidden)),
        v_proj=_projection(large_values),
        o_proj=_projection(draw(hidden, query_size)),
        **norms,
    )
    # The config is copied, because it is changed below and by the runs of the trial.
    small.config = copy.copy(attention.config)
    small.layer_idx = 0
    small.num_key_value_groups = _HEADS // _GROUPS
    for settings in (small, small.config):
        # In Qwen2-MoE, 0 means no window.
        if getattr(settings, "sliding_window", None):
            # A window of 3 already hides keys in rows of 7 tokens.
            settings.sliding_window = 3
    return small


def _small_layer(layer: Any, draw: Draw) -> Any:
    """Returns a copy of a decoder layer. An MLP that is not gated is replaced by a stand-in of its class."""
    first, second = layer_norms(layer)
    mlp = layer._modules["mlp"]
    hidden = len(first.weight)
    if is_gated_mlp(mlp):
        small_mlp = _small_gated_mlp(mlp, hidden, draw)
    else:
        # Experts are large, and both forms call them as a module, so their numbers show nothing.
        small_mlp = _small_copy(mlp)
        small_mlp.forward = _stand_in_for_mlp
    return _small_copy(
        layer,
        input_layernorm=_small_copy(first, draw(hidden)),
        self_attn=_small_attention(layer._modules["self_attn"], hidden, draw),
        post_attention_layernorm=_small_copy(second, draw(hidden)),
        mlp=small_mlp,
    )


def _stand_in_for_mlp(states: Tensor) -> Tensor:
    """Returns other numbers of the same shape."""
    return states.flip(-1) - 1


def _projection(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a projection with random weights, which are scaled so that its outputs are as large as its inputs."""
    num_inputs = weight.shape[1]
    scaled = weight / num_inputs**0.5
    return functools.partial(nn.functional.linear, weight=scaled)


def _over_ragged(attention: Any, hidden: int, draw: Draw, *runs: Run) -> tuple[Any, Any]:
    """Calls both `runs` on the same states `[2, W, hidden]`, each with its own ragged cache and a
    verify's keywords.

    Returns the result of each run, together with the keys and values of its cache.
    """
    size = attention.head_dim
    # The class reads its attention from the copy's own config. The target's config is not changed.
    attention.config._attn_implementation_internal = RAGGED_BLOCK
    device = torch.device("cpu")
    states = draw(2, _WIDTH, hidden)
    cos = draw(2, _WIDTH, size)
    sin = draw(2, _WIDTH, size)
    # The rows have different lengths, so a form that uses one length for all rows is detected.
    lengths = torch.tensor([3, 7], device=device)
    positions = lengths[:, None] + torch.arange(_WIDTH, device=device)
    shape = LayerShape(_GROUPS, size, size, None, states.dtype, states.dtype, device)
    found = list[Any]()
    for run in runs:
        cache = RaggedCache([shape], batch=2, max_length=12, block=_WIDTH)
        cache.begin(RaggedBlock(positions))
        kwargs: dict[str, Any] = {
            "attention_mask": None,
            "position_embeddings": (cos, sin),
            "use_cache": True,
            CACHE_NAME: cache,
            KEYWORD: cache,
        }
        out = run(states, cache, kwargs)
        cache.check_passed()
        # A block that was written to the wrong slots would not change this output, only the output of a later step.
        keys, values = cache.attention[0].buffers()
        found.append((out, keys, values))
    return found[0], found[1]


def _over_prompts(attention: Any, hidden: int, draw: Draw, *runs: Run) -> tuple[Any, Any]:
    """Does the same as [`_over_ragged`] over Transformers' own cache by SDPA.

    A prompt without a mask comes first, then a chunk with a mask.
    """
    size = attention.head_dim
    attention.config._attn_implementation_internal = "sdpa"
    # The second chunk is causal over both chunks, and the first row's first token is padding.
    everything = torch.ones(2, 1, _WIDTH, 2 * _WIDTH, dtype=torch.bool, device="cpu")
    seen = everything.tril(_WIDTH)
    seen[0, :, :, 0] = False
    chunks = list[tuple[Tensor, dict[str, Any]]]()
    for mask in (None, seen):
        states = draw(2, _WIDTH, hidden)
        cos = draw(2, _WIDTH, size)
        sin = draw(2, _WIDTH, size)
        of_chunk = {"attention_mask": mask, "position_embeddings": (cos, sin)}
        chunks.append((states, of_chunk))
    found = list[Any]()
    for run in runs:
        cache: Cache = DynamicCache()
        of_call = {CACHE_NAME: cache, "position_ids": None, "use_cache": True}
        outs = [run(states, cache, of_chunk | of_call) for states, of_chunk in chunks]
        # A key that was cached wrongly would change only the output of a third chunk.
        layer: Any = cache.layers[0]
        found.append((*outs, layer.keys, layer.values))
    return found[0], found[1]


def _is_same(first: Any, second: Any) -> bool:
    """Returns True for tensors that are the same bit for bit, also in tuples."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        if len(first) != len(second):
            return False
        return all(map(_is_same, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        # The dtype is compared too, because `torch.equal` treats bfloat16 and float32 with the same values as equal.
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    # Numbers are drawn in float32 and rounded, so that all dtypes are tried with the same numbers.
    numbers = torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)
    return numbers.to(dtype)
