"""What modules of the target compute, found out by running the forwards of their classes.

No module is known by its name alone. What its class's forward computes is compared with what is to take its place
during a verify (`fused.py`, `short_forwards.py`), once per class, on small random inputs on the CPU, in float32 and
in 16 bits: bit for bit, or the module runs as it is.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.utils._python_dispatch import _disable_current_modes
from transformers import Cache, DynamicCache

from dflash_hf import ops
from dflash_hf.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import LayerShape
from dflash_hf.cache_name import CACHE_NAME
from dflash_hf.devices import Inventory
from dflash_hf.target_model.code import Code, with_wrapped
from dflash_hf.target_model.reentry import KEYWORD, RAGGED_BLOCK

logger = logging.getLogger(__name__)
# On a forward of ours.
MARK = "_dflash_fused"
# Children of the modules that may be known.
GATED = {"gate_proj", "up_proj", "down_proj"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# What is checked, beside the dtype that is asked for.
DTYPES = (torch.float32, *ops.HALF)
# Numbers per token of the states that a copy is tried on, and between the projections of a gated MLP.
HIDDEN = 16
INNER = 12
# What a forward raises that is not called as it expects.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Random numbers of a shape, on the CPU.
Draw = Callable[..., Tensor]
# Attention over a ragged cache: module, epsilon of its norms, cache, states, and the keywords that it is called with.
Attend = Callable[[Any, float, RaggedCache, Tensor, dict[str, Any]], tuple[Tensor, None]]
_known: dict[object, bool] = {}


def is_bare(module: Any) -> bool:
    """Returns True if a call of a module is a call of its class's forward, or of ours, but for what records outputs.

    Of what is passed by, norms, attention and gated MLPs, Transformers records attention weights alone, and those are
    refused with a draft.
    """
    own = module.__dict__
    if own["_forward_pre_hooks"] or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    if "forward" in own and not hasattr(own["forward"], MARK):
        return False
    return not own["_forward_hooks"] or all(map(is_recorder, own["_forward_hooks"].values()))


def is_untouched(parts: Inventory) -> bool:
    """Returns True if nothing but code of torch and Transformers runs in a model, on plain weights.

    Code of the user's in there may change what comes behind it, or call the model itself.
    """
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    for module in parts.altered:
        own = module.__dict__
        if own["_forward_pre_hooks"] or not all(map(is_recorder, own["_forward_hooks"].values())):
            return False
        if "forward" in own or own.get("_compiled_call_impl") is not None:
            return False
    if not {*map(type, parts.weights)} <= {nn.Parameter, type(None)}:
        return False
    model = parts.modules[0]
    is_own = "prepare_inputs_for_generation" in vars(model) or not is_theirs(type(model).__module__)
    return not is_own and all(map(_has_published_forward, set(map(type, parts.modules))))


def is_harmless(hook: Any) -> bool:
    """Returns True for hooks that change nothing: Transformers' own record what was asked for, ours listen."""
    return getattr(hook, "__module__", None) in ("transformers.utils.output_capturing", "dflash_hf.scopes")


def is_recorder(hook: Any) -> bool:
    """Returns True for Transformers' own hook that records a module's output.

    It stays for good once a model was asked for hidden states, in training for instance.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def is_published(module: Any) -> bool:
    """Returns True if a module's forward is torch's or Transformers', and nothing it reads is out of sight.

    What a forward of the user's reads besides (a class attribute, a flag set later) no trial can show.
    """
    return _has_published_forward(type(module)) and not module._buffers


def _has_published_forward(kind: type) -> bool:
    functions = with_wrapped(getattr(kind, "forward", None))
    return all(is_theirs(str(getattr(function, "__globals__", {}).get("__name__"))) for function in functions)


def is_theirs(name: str) -> bool:
    """Returns True for the name of a module of torch's or Transformers'."""
    return name.partition(".")[0] in ("torch", "transformers")


def head_norms(module: Any) -> list[Any]:
    """Returns the norms of queries and keys, of an attention that has them."""
    parts = module._modules
    return [parts["q_norm"], parts["k_norm"]] if "q_norm" in parts else []


def floats_of(module: Any) -> list[float]:
    """Returns the settings of a module that may be an epsilon."""
    return [value for value in vars(module).values() if isinstance(value, float)]


def norm_eps(module: Any, dtype: torch.dtype, norm: Callable[..., Tensor] = ops.rms_norm.reference) -> float | None:
    """Returns the epsilon of a module that computes what a norm does, else `None`.

    Args:
        module (`nn.Module`): Any.
        dtype (`torch.dtype`): Checked beside float32 and 16 bits.
        norm (callable): Called with states, weight and epsilon.
    """
    numbers = floats_of(module)
    if module._modules or module._buffers or list(module._parameters) != ["weight"] or len(numbers) != 1:
        return None
    weight = module._parameters["weight"]
    if weight is None or not _is_plain(weight) or weight.dim() != 1:
        return None
    eps = numbers[0]
    size = len(weight)

    def both(draw: Draw) -> tuple[Any, Any]:
        like = copied(module, weight=draw(size))
        states = draw(2, 3, size)
        return type(module).forward(like, states), norm(states, like.weight, eps)

    return eps if agrees((norm, size, *facts(module)), dtype, both) else None


def attention_eps(module: Any, dtype: torch.dtype, norm: Callable[..., Tensor], attend: Attend) -> float | None:
    """Returns the epsilon of an attention's norms, 0 without any, if they compute `norm` and all of it `attend`."""
    if module._modules.keys() not in (ATTENTION, ATTENTION | HEAD_NORMS):
        return None
    epsilons = {norm_eps(part, dtype, norm) for part in head_norms(module)} or {0.0}
    eps = epsilons.pop()
    if eps is None or epsilons or not {"head_dim", "config"} <= vars(module).keys():
        return None

    def both(draw: Draw) -> tuple[Any, Any]:
        like = attention_like(module, draw)
        return over_caches(
            like,
            draw,
            lambda states, cache, given: type(module).forward(like, hidden_states=states, **given),
            lambda states, cache, given: attend(like, eps, cache, states, given),
        )

    return eps if agrees((attend, eps, *attention_facts(module)), dtype, both) else None


def attention_facts(module: Any) -> tuple[object, ...]:
    """[`facts`] of an attention and its config."""
    return module.head_dim, *facts(module), *facts(module.config)


def attention_like(module: Any, draw: Draw) -> Any:
    """Returns a copy of an attention with random weights and few heads, for [`over_caches`]."""
    size = module.head_dim
    groups = 2
    sizes = {"q_proj": (2 * groups * size, HIDDEN), "k_proj": (groups * size, HIDDEN)}
    sizes |= {"v_proj": (groups * size, HIDDEN), "o_proj": (HIDDEN, 2 * groups * size)}
    weights = {name: draw(*pair) for name, pair in sizes.items()}
    weights["v_proj"] *= 16  # some models clip what is large
    projections = {name: linear(weight) for name, weight in weights.items()}
    norms = [copied(norm, weight=draw(len(norm.weight))) for norm in head_norms(module)]
    like = copied(module, **projections, **dict(zip(("q_norm", "k_norm"), norms, strict=False)))
    like.config = copy.copy(module.config)
    like.config._attn_implementation_internal = RAGGED_BLOCK
    like.layer_idx = 0
    like.num_key_value_groups = 2
    for settings in (like, like.config):
        if getattr(settings, "sliding_window", None) is not None:
            settings.sliding_window = 3
    return like


def over_caches(
    attention: Any, draw: Draw, *runs: Callable[[Tensor, RaggedCache, dict[str, Any]], Any]
) -> tuple[Any, Any]:
    """Calls both on the same states `[2, 4, HIDDEN]`, each with a ragged cache and a verify's keywords of its own.

    Returns what each returns, with its cache's keys and values behind that.
    """
    size = attention.head_dim
    width = 4
    device = torch.device("cpu")
    hidden = draw(2, width, HIDDEN)
    angles = (draw(2, width, size), draw(2, width, size))
    lengths = torch.tensor([3, 7], device=device)
    found = list[tuple[Any, ...]]()
    for run in runs:
        shape = LayerShape(2, size, size, None, hidden.dtype, hidden.dtype, device)
        cache = RaggedCache([shape], batch=2, max_length=12, block=width)
        cache.begin(RaggedBlock(lengths[:, None] + torch.arange(width, device=device)))
        given: dict[str, Any] = {"attention_mask": None, CACHE_NAME: cache, KEYWORD: cache}
        out = run(hidden, cache, given | {"position_embeddings": angles, "use_cache": True})
        cache.check_passed()
        found.append((out, *cache.attention[0].buffers()))
    return found[0], found[1]


def over_prompts(attention: Any, draw: Draw, *runs: Callable[[Tensor, Cache, dict[str, Any]], Any]) -> tuple[Any, Any]:
    """As [`over_caches`], over Transformers' own cache by its SDPA: a prompt without a mask, then more with one."""
    size = attention.head_dim
    width = 4
    attention.config._attn_implementation_internal = "sdpa"
    seen = torch.ones(2, 1, width, 2 * width, dtype=torch.bool, device="cpu").tril(width)
    seen[0, :, :, 0] = False
    chunks = [(draw(2, width, HIDDEN), (draw(2, width, size), draw(2, width, size)), mask) for mask in (None, seen)]
    found = list[tuple[Any, ...]]()
    for run in runs:
        cache = DynamicCache()
        outs = list[Any]()
        for hidden, angles, mask in chunks:
            given = {"attention_mask": mask, CACHE_NAME: cache, "position_embeddings": angles}
            outs.append(run(hidden, cache, given | {"position_ids": None, "use_cache": True}))
        layer: Any = cache.layers[0]
        found.append((*outs, layer.keys, layer.values))
    return found[0], found[1]


def agrees(key: tuple[object, ...], dtype: torch.dtype, both: Callable[[Draw], tuple[Any, Any]]) -> bool:
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


def facts(module: object) -> tuple[object, ...]:
    """Returns a class, and the settings of a module or a config that a forward may look at."""
    plain = (bool, int, float, str, type(None))
    settings = {n: v for n, v in vars(module).items() if isinstance(v, plain) and n not in ("layer_idx", "training")}
    return type(module), *Code([type(module)]).functions(), *sorted(settings.items())


def copied(module: Any, **parts: Any) -> Any:
    """Returns a copy of a module with other parameters and parts; nothing is shared that is written."""
    like = copy.copy(module)
    named = {name: nn.Parameter(part, requires_grad=False) for name, part in parts.items() if isinstance(part, Tensor)}
    modules = {**module._modules, **{name: part for name, part in parts.items() if name not in named}}
    vars(like).update(_parameters=named, _modules=modules)
    vars(like).pop("forward", None)
    like.training = False
    return like


def gated_like(module: Any, draw: Draw) -> Any:
    """Returns a copy of a gated MLP with random weights, for states of `HIDDEN` numbers."""
    gate, up, down = (linear(draw(*sizes)) for sizes in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)))
    return copied(module, gate_proj=gate, up_proj=up, down_proj=down)


def gated_facts(module: Any) -> tuple[object, ...]:
    """[`facts`] of a gated MLP, its activation among them."""
    activation = getattr(module, "act_fn", None)
    return *(facts(activation) if isinstance(activation, nn.Module) else (activation,)), *facts(module)


def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns what stands for a projection in a copy."""
    return functools.partial(nn.functional.linear, weight=weight)


def _is_plain(weight: Tensor) -> bool:
    """Returns True if a weight is no tensor of a class of its own: sharded, quantised."""
    return type(weight) is nn.Parameter


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)
