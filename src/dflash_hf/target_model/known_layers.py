"""Which classes of Transformers have a fast form, and the trial before its first use.

Classes are found by their names in four tables: norms, gated MLPs, attentions and decoder layers. One that is in none,
as a subclass of the user's, runs as it is. So does one whose fast form gives other numbers than its own forward on a
small random block: a function of the modeling file may have been replaced, as liger does, and another release of
Transformers may compute something else.
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
from dflash_hf.target_model.code import Code
from dflash_hf.target_model.reentry import KEYWORD, RAGGED_BLOCK
from dflash_hf.target_model.user_code import is_published

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# `weight * x / rms(x)`, rounded before the weight.
NORMS = _names("""
    AXK1RMSNorm AXK2RMSNorm Apertus1p5TextRMSNorm ApertusRMSNorm ArceeRMSNorm AriaTextRMSNorm BailingHybridRMSNorm
    BambaRMSNorm BitNetRMSNorm CwmRMSNorm DeepseekV2RMSNorm DeepseekV32RMSNorm DeepseekV3RMSNorm DiffLlamaRMSNorm
    DogeRMSNorm Dots1RMSNorm Ernie4_5RMSNorm Ernie4_5_MoeRMSNorm Exaone4RMSNorm ExaoneMoeRMSNorm FalconH1RMSNorm
    Glm4MoeLiteRMSNorm Glm4MoeRMSNorm Glm4RMSNorm GlmMoeDsaRMSNorm GlmRMSNorm GraniteMoeHybridRMSNorm
    GraniteMoeRMSNorm GraniteMoeSWARMSNorm GraniteMoeSharedRMSNorm GraniteRMSNorm GraniteSWARMSNorm HYV3RMSNorm
    HYV4RMSNorm HunYuanDenseV1RMSNorm HunYuanMoEV1RMSNorm HyperCLOVAXRMSNorm InklingRMSNorm JetMoeRMSNorm
    KimiLinearRMSNorm Kolibri1RMSNorm LagunaRMSNorm Lfm2MoeRMSNorm Lfm2RMSNorm Llama4TextRMSNorm LlamaRMSNorm
    MellumRMSNorm MiMoV2FlashRMSNorm MiniCPM3RMSNorm MiniMaxM2RMSNorm MiniMaxRMSNorm Ministral3RMSNorm
    MinistralRMSNorm MistralRMSNorm MixtralRMSNorm OlmoeRMSNorm Phi3RMSNorm Qwen2MoeRMSNorm Qwen2RMSNorm
    Qwen2VLRMSNorm Qwen2_5_VLRMSNorm Qwen3MoeRMSNorm Qwen3RMSNorm Qwen3VLMoeTextRMSNorm Qwen3VLTextRMSNorm
    SeedOssRMSNorm SmolLM3RMSNorm SolarOpenRMSNorm YoutuRMSNorm ZayaRMSNorm
""")
# `down(silu(gate(x)) * up(x))`.
GATED_MLPS = _names("""
    AXK1MLP AXK2MLP AfmoeMLP AriaSharedExpertsMLP BailingHybridMLP BambaMLP Cohere2MLP CohereMLP CwmMLP
    DeepseekV2MLP DeepseekV32MLP DeepseekV3MLP DiffLlamaMLP DogeMLP Dots1MLP Ernie4_5MLP Ernie4_5_MoeMLP
    Exaone4MLP ExaoneMoeMLP FalconH1MLP FlintMLP Glm4MoeLiteMLP Glm4MoeMLP GlmMoeDsaMLP GraniteMLP GraniteSWAMLP
    HYV3MLP HYV4MLP HeliumMLP HunYuanDenseV1MLP HunYuanMoEV1MLP HyperCLOVAXMLP KimiLinearMLP Kolibri1MLP LagunaMLP
    LaraMiniMLP LlamaMLP MellumMLP MiMoV2FlashMLP MiniCPM3MLP Ministral3MLP MinistralMLP MistralMLP Olmo2MLP
    Olmo3MLP OlmoHybridMLP OlmoMLP OlmoeMLP Qwen2MLP Qwen2MoeMLP Qwen3MLP Qwen3MoeMLP Qwen3NextMLP
    Qwen3VLMoeTextMLP Qwen3VLTextMLP Qwen3_5MLP Qwen3_5MoeMLP SeedOssMLP SmolLM3MLP SolarOpenMLP StableLmMLP
    YoutuMLP
""")
# Llama's attention, and Qwen3's with norms of queries and keys: RoPE on whole heads, no caps, no sinks.
ATTENTIONS = _names("""
    Apertus1p5TextAttention ApertusAttention ArceeAttention AriaTextAttention BambaAttention CwmAttention
    Dots1Attention Exaone4Attention ExaoneMoeAttention FalconH1Attention GemmaAttention Glm4MoeAttention
    GraniteAttention GraniteMoeAttention GraniteMoeHybridAttention GraniteMoeSharedAttention HYV3Attention
    HyperCLOVAXAttention Jais2Attention Kolibri1Attention LlamaAttention MellumAttention MiniMaxAttention
    MinistralAttention MistralAttention MixtralAttention NemotronAttention OlmoAttention PhimoeAttention
    Qwen2Attention Qwen2MoeAttention Qwen2VLAttention Qwen2_5_VLAttention Qwen3Attention Qwen3MoeAttention
    Qwen3VLMoeTextAttention Qwen3VLTextAttention SeedOssAttention SmolLM3Attention SolarOpenAttention
    Starcoder2Attention
""")
# `h = x + attention(norm(x))`, then `h + mlp(norm(h))`.
LAYERS = _names("""
    AXK1DecoderLayer ArceeDecoderLayer AriaTextDecoderLayer BitNetDecoderLayer CwmDecoderLayer
    DeepseekV2DecoderLayer DeepseekV32DecoderLayer DeepseekV3DecoderLayer DiffLlamaDecoderLayer Dots1DecoderLayer
    Ernie4_5DecoderLayer Ernie4_5_MoeDecoderLayer ExaoneMoeDecoderLayer Glm4MoeDecoderLayer
    Glm4MoeLiteDecoderLayer GlmDecoderLayer GraniteDecoderLayer GraniteSWADecoderLayer HYV3DecoderLayer
    HunYuanDenseV1DecoderLayer HunYuanMoEV1DecoderLayer LagunaDecoderLayer LlamaDecoderLayer MellumDecoderLayer
    MiMoV2FlashDecoderLayer MiniMaxM2DecoderLayer Ministral3DecoderLayer MinistralDecoderLayer MistralDecoderLayer
    MixtralDecoderLayer OlmoeDecoderLayer Qwen2DecoderLayer Qwen2MoeDecoderLayer Qwen2VLDecoderLayer
    Qwen2_5_VLDecoderLayer Qwen3DecoderLayer Qwen3MoeDecoderLayer Qwen3VLMoeTextDecoderLayer
    Qwen3VLTextDecoderLayer SeedOssDecoderLayer SmolLM3DecoderLayer SolarOpenDecoderLayer YoutuDecoderLayer
""")


# Activations of gated MLPs, of torch and of Transformers.
_SILUS = _names("SiLU SiLUActivation")
# The modules that these classes are made of.
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_GATED_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# A fast form is compared in these, beside the dtype of the target.
_DTYPES = (torch.float32, *ops.HALF)
# Sizes of the small copies: numbers of a token's state and between a gated MLP's projections, heads, tokens of a row.
# Norms have their own size, and so have states that go through the norms of a layer: sums depend on it.
_HIDDEN = 16
_INNER = 12
_HEADS = 4
_GROUPS = 2
_WIDTH = 4
# What a forward raises that is called in another way than it expects.
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Gives random numbers of a shape, on the CPU and in the dtype of a trial.
Draw = Callable[..., Tensor]
# Runs a layer, or its attention, on states, a cache and the keywords that it is called with.
Run = Callable[[Tensor, Any, dict[str, Any]], Any]


def is_norm(module: Any) -> bool:
    """Returns True for an RMS norm of the table, with a plain weight."""
    if not _is_listed(module, NORMS) or module._modules or list(module._parameters) != ["weight"]:
        return False
    weight = module._parameters["weight"]
    return (
        weight is not None
        and _is_plain(weight)
        and weight.dim() == 1
        and type(epsilon_of(module)) is float
    )


def is_gated_mlp(module: Any) -> bool:
    """Returns True for a gated MLP of the table whose activation is SiLU."""
    if not _is_listed(module, GATED_MLPS) or module._modules.keys() != _GATED_PARTS:
        return False
    activation = module._modules["act_fn"]
    return type(activation).__name__ in _SILUS and is_published(activation)


def is_attention(module: Any) -> bool:
    """Returns True for an attention of the table, whose norms of queries and keys, if any, have one epsilon."""
    if not _is_listed(module, ATTENTIONS):
        return False
    if module._modules.keys() not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
        return False
    norms = head_norms(module)
    return all(map(is_norm, norms)) and len(set(map(epsilon_of, norms))) <= 1


def is_layer(module: Any) -> bool:
    """Returns True for a decoder layer of the table, around whatever attention and MLP."""
    if not _is_listed(module, LAYERS) or module._modules.keys() != _LAYER_PARTS:
        return False
    return all(map(is_norm, layer_norms(module)))


def layer_norms(layer: Any) -> list[Any]:
    """Returns the norms before a layer's attention and before its MLP."""
    parts = layer._modules
    return [parts["input_layernorm"], parts["post_attention_layernorm"]]


def head_norms(attention: Any) -> list[Any]:
    """Returns the norms of queries and keys, of an attention that has them."""
    parts = attention._modules
    return [parts["q_norm"], parts["k_norm"]] if "q_norm" in parts else []


def epsilon_of(norm: Any) -> Any:
    """Returns what a norm's epsilon is set to; `None` where it has none."""
    settings = norm.__dict__
    return settings["variance_epsilon"] if "variance_epsilon" in settings else settings.get("eps")


def norm_agrees(norm: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(norm, states)` is what the class of a norm computes."""
    size = len(norm.weight)

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_copy(norm, draw(size))
        states = draw(2, 3, size)
        return type(norm).forward(small, states), fast(small, states)

    return _agrees(fast, [norm], dtype, compare)


def gated_mlp_agrees(mlp: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(mlp, states)` is what the class of a gated MLP computes."""

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_gated_mlp(mlp, _HIDDEN, draw)
        states = draw(2, 3, _HIDDEN)
        return type(mlp).forward(small, states), fast(small, states)

    return _agrees(fast, [mlp, mlp._modules["act_fn"]], dtype, compare)


def attention_agrees(attention: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(attention, states, cache, kwargs)` is what the class computes over a ragged cache."""

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_attention(attention, _HIDDEN, draw)

        def plain(states: Tensor, cache: Any, kwargs: dict[str, Any]) -> Any:
            return type(attention).forward(small, hidden_states=states, **kwargs)

        return _over_ragged(small, _HIDDEN, draw, plain, functools.partial(fast, small))

    return _agrees(fast, [attention, *head_norms(attention)], dtype, compare)


def layer_agrees(layer: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(layer, states, cache, kwargs)` is what the class of a decoder layer computes.

    The whole layer is compared at once, over a ragged cache and over Transformers' own, which a prompt fills.
    """
    attention = layer._modules["self_attn"]
    mlp = layer._modules["mlp"]
    parts = [layer, attention, *layer_norms(layer), *head_norms(attention)]
    if is_gated_mlp(mlp):
        parts += [mlp, mlp._modules["act_fn"]]

    def compare(draw: Draw) -> tuple[Any, Any]:
        small = _small_layer(layer, draw)
        small_attention = small._modules["self_attn"]

        def plain(states: Tensor, cache: Any, kwargs: dict[str, Any]) -> Any:
            return type(layer).forward(small, states, **kwargs)

        hidden = len(layer.input_layernorm.weight)
        runs = (plain, functools.partial(fast, small))
        verifies = _over_ragged(small_attention, hidden, draw, *runs)
        prompts = _over_prompts(small_attention, hidden, draw, *runs)
        return (verifies[0], prompts[0]), (verifies[1], prompts[1])

    return _agrees(fast, parts, dtype, compare)


def residuals_agree(layer: Any, fast: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Returns True if `fast(layer, states, kwargs)` gives the two whose sum is what the class of a layer computes.

    Stand-ins for attention and MLP say whether they are called with the same.
    """

    def compare(draw: Draw) -> tuple[Any, Any]:
        given = list[dict[str, Any]]()

        def attend(**kwargs: Any) -> tuple[Tensor, None]:
            given.append(
                {
                    name: value
                    for name, value in kwargs.items()
                    if value is not None and value is not False
                }
            )
            return 3 * given[-1].pop("hidden_states").flip(-1), None

        first, second = layer_norms(layer)
        small = _small_copy(
            layer,
            input_layernorm=_small_copy(first, draw(_HIDDEN)),
            self_attn=attend,
            post_attention_layernorm=_small_copy(second, draw(_HIDDEN)),
            mlp=_stand_in_for_mlp,
        )
        states = draw(2, 3, _HIDDEN)
        kwargs: dict[str, Any] = {
            "attention_mask": None,
            "position_embeddings": 1,
            "position_ids": 2,
        }
        kwargs |= {CACHE_NAME: 3, "use_cache": 4, KEYWORD: 5}
        plain = type(layer).forward(small, states, **kwargs)
        total, update = fast(small, states, kwargs)
        return (plain, given[0]), (total + update, given[1])

    return _agrees(fast, [layer, *layer_norms(layer)], dtype, compare)


class _Outcome(NamedTuple):
    """What a trial has shown, as long as the code of the classes is the same."""

    code: Code
    agrees: bool


_outcomes: dict[tuple[object, ...], _Outcome] = {}


def _agrees(
    fast: object, parts: list[Any], dtype: torch.dtype, compare: Callable[[Draw], tuple[Any, Any]]
) -> bool:
    """Returns True if both results of `compare` are the same bit for bit in every dtype.

    Remembered by the fast form, the dtype, and the classes and settings of the modules.
    """
    kinds = [type(part) for part in parts]
    key = (fast, dtype, *kinds, *map(_settings_of, parts))
    outcome = _outcomes.get(key)
    if outcome is None or not outcome.code.is_same():
        code = Code(kinds)  # before the trial: what is replaced meanwhile is noticed
        agrees = all(_try(kinds[0], dtype, compare) for dtype in dict.fromkeys((*_DTYPES, dtype)))
        outcome = _Outcome(code, agrees)
        _outcomes[key] = outcome
    return outcome.agrees


def _try(kind: type, dtype: torch.dtype, compare: Callable[[Draw], tuple[Any, Any]]) -> bool:
    """Returns True if both results are the same in one dtype."""
    # A verify may run under modes that forbid reads, or that compute nothing.
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(0)
        try:
            plain, fast = compare(functools.partial(_random, generator, dtype))
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


def _is_listed(module: Any, names: frozenset[str]) -> bool:
    """Returns True if a module's class is in a table, and its forward is the library's."""
    kind = type(module)
    return (
        kind.__name__ in names
        and kind.__module__.startswith("transformers.models.")
        and is_published(module)
    )


def _is_plain(weight: Tensor) -> bool:
    """Returns True if a weight is no tensor of a class of its own: sharded, quantised."""
    return type(weight) is nn.Parameter


def _settings_of(module: Any) -> tuple[object, ...]:
    """Returns what a module's forward may read: the sizes of its weights, its settings and those of its config."""
    sizes = [weight.shape for weight in module._parameters.values() if weight is not None]
    plain = (bool, int, float, str, type(None))
    own = vars(module)
    config = vars(own["config"]) if "config" in own else {}
    found = list[tuple[str, object]]()
    for settings in (own, config):
        found += sorted(
            (name, value) for name, value in settings.items() if isinstance(value, plain)
        )
    return *sizes, *(setting for setting in found if setting[0] not in ("layer_idx", "training"))


def _small_copy(module: Any, weight: Tensor | None = None, **parts: Any) -> Any:
    """Returns a copy of a module with another weight and other parts, without hooks; it shares nothing written."""
    small = copy.copy(module)
    small._parameters = (
        {} if weight is None else {"weight": nn.Parameter(weight, requires_grad=False)}
    )
    small._modules = {**module._modules, **parts}
    small._forward_hooks = {}
    small._forward_pre_hooks = {}
    small.__dict__.pop("forward", None)
    small.training = False
    return small


def _small_gated_mlp(mlp: Any, hidden: int, draw: Draw) -> Any:
    """Returns a copy of a gated MLP with random weights, for states of `hidden` numbers."""
    return _small_copy(
        mlp,
        gate_proj=_projection(draw(_INNER, hidden)),
        up_proj=_projection(draw(_INNER, hidden)),
        down_proj=_projection(draw(hidden, _INNER)),
        act_fn=_small_copy(mlp._modules["act_fn"]),
    )


def _small_attention(attention: Any, hidden: int, draw: Draw) -> Any:
    """Returns a copy of an attention with random weights, few heads and a short window, if it has one."""
    size = attention.head_dim
    norms = {
        name: attention._modules[name]
        for name in ("q_norm", "k_norm")
        if name in attention._modules
    }
    small = _small_copy(
        attention,
        q_proj=_projection(draw(_HEADS * size, hidden)),
        k_proj=_projection(draw(_GROUPS * size, hidden)),
        v_proj=_projection(64 * draw(_GROUPS * size, hidden)),  # some models clip what is large
        o_proj=_projection(draw(hidden, _HEADS * size)),
        **{name: _small_copy(norm, draw(len(norm.weight))) for name, norm in norms.items()},
    )
    small.config = copy.copy(attention.config)
    small.layer_idx = 0
    small.num_key_value_groups = _HEADS // _GROUPS
    for settings in (small, small.config):
        if getattr(settings, "sliding_window", None) is not None:
            settings.sliding_window = 3
    return small


def _small_layer(layer: Any, draw: Draw) -> Any:
    """Returns a copy of a decoder layer; an MLP that is not gated is replaced by a stand-in of its class."""
    first, second = layer_norms(layer)
    mlp = layer._modules["mlp"]
    hidden = len(first.weight)
    if is_gated_mlp(mlp):
        small_mlp = _small_gated_mlp(mlp, hidden, draw)
    else:
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
    """Gives other numbers of the same shape."""
    return states.flip(-1) - 1


def _projection(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a projection by random numbers, scaled so that its outputs are as large as its inputs."""
    return functools.partial(nn.functional.linear, weight=weight / weight.shape[1] ** 0.5)


def _over_ragged(attention: Any, hidden: int, draw: Draw, *runs: Run) -> tuple[Any, Any]:
    """Calls both on the same states `[2, W, hidden]`, each with a ragged cache and a verify's keywords of its own.

    Returns what each returns, with its cache's keys and values behind that.
    """
    size = attention.head_dim
    attention.config._attn_implementation_internal = RAGGED_BLOCK
    device = torch.device("cpu")
    states = draw(2, _WIDTH, hidden)
    angles = (draw(2, _WIDTH, size), draw(2, _WIDTH, size))
    lengths = torch.tensor([3, 7], device=device)
    found = list[Any]()
    for run in runs:
        shape = LayerShape(_GROUPS, size, size, None, states.dtype, states.dtype, device)
        cache = RaggedCache([shape], batch=2, max_length=12, block=_WIDTH)
        cache.begin(RaggedBlock(lengths[:, None] + torch.arange(_WIDTH, device=device)))
        kwargs: dict[str, Any] = {"attention_mask": None, CACHE_NAME: cache, KEYWORD: cache}
        out = run(states, cache, kwargs | {"position_embeddings": angles, "use_cache": True})
        cache.check_passed()
        found.append((out, *cache.attention[0].buffers()))
    return found[0], found[1]


def _over_prompts(attention: Any, hidden: int, draw: Draw, *runs: Run) -> tuple[Any, Any]:
    """As [`_over_ragged`], over Transformers' own cache by its SDPA: a prompt without a mask, then more with one."""
    size = attention.head_dim
    attention.config._attn_implementation_internal = "sdpa"
    seen = torch.ones(2, 1, _WIDTH, 2 * _WIDTH, dtype=torch.bool, device="cpu").tril(_WIDTH)
    seen[0, :, :, 0] = False
    chunks = list[tuple[Tensor, dict[str, Any]]]()
    for mask in (None, seen):
        states = draw(2, _WIDTH, hidden)
        angles = (draw(2, _WIDTH, size), draw(2, _WIDTH, size))
        chunks.append((states, {"attention_mask": mask, "position_embeddings": angles}))
    found = list[Any]()
    for run in runs:
        cache: Cache = DynamicCache()
        fixed = {CACHE_NAME: cache, "position_ids": None, "use_cache": True}
        outs = [run(states, cache, kwargs | fixed) for states, kwargs in chunks]
        layer: Any = cache.layers[0]
        found.append((*outs, layer.keys, layer.values))
    return found[0], found[1]


def _is_same(first: Any, second: Any) -> bool:
    """Returns True for the same tensors bit for bit, also in tuples."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)
