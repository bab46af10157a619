"""What `kernel_times.py` measures: each kernel at the shapes of Qwen3-8B, its reference, and what libraries offer.

A case makes inputs, any number of sets of them: calls go through the sets in turn, so that what a kernel reads is not
still in the device's cache from the call before, as it is not when a model's other layers run in between.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import rms_norm as rms_norm_of_torch

import dflash_kernels
from dflash_hf.block.attention import RaggedBlock, attend, mask_repeats
from dflash_kernels import (
    accept_and_prepare,
    add_norm,
    argmax,
    block_attention,
    build_tree,
    context_kv,
    follow_tree,
    gated_linear,
    gumbel_argmax,
    keep_path,
    linears,
    norm_rope_write,
    rms_norm,
    rope_angles,
    silu_mul,
    top_tokens,
)
from dflash_kernels.accept_and_prepare import NUM_FIGURES
from dflash_kernels.ancestors import num_words
from dflash_kernels.build_tree import NODE_PARTS
from dflash_kernels.linears import MAX_ROWS

Inputs = dict[str, Any]
Way = Callable[[Inputs], Any]
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model: query and key heads, head size, block, draft layers, width, MLP, vocabulary."""

    heads: int = 32
    groups: int = 8
    size: int = 128
    width: int = 16
    layers: int = 5
    hidden: int = 4096
    mlp: int = 12288
    vocab: int = 151936


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the record.

    Args:
        kernel, batch, context: What and where.
        make: Returns a set of inputs, random by the seed given.
        num_bytes (`int`): Bytes that a call has to read and write, once each.
        ways: Ways to compute it by name; `"kernel"` and `"reference"` first, libraries after them.
        results: What a call has computed, from what it returned and from its inputs: compared with the reference's.
        unavailable: Libraries that cannot be timed here, and why.
    """

    kernel: str
    batch: int
    context: int | None
    make: Callable[[int], Inputs]
    num_bytes: int
    ways: dict[str, Way]
    results: Callable[[Any, Inputs], list[Tensor]]
    unavailable: dict[str, str] = field(default_factory=dict)


def attention_case(
    sizes: Sizes, batch: int, context: int, dtype: torch.dtype, device: torch.device, causal: bool
) -> Case:
    """Attention of one layer: `causal` is a target's verify, otherwise a draft's block."""
    ring = context + sizes.width
    item = dtype.itemsize
    scaling = sizes.size**-0.5

    def make(seed: int) -> Inputs:
        normal = _normal(seed, dtype, device)
        cache = [normal(batch, ring, sizes.groups, sizes.size) for _ in range(2)]
        lengths = torch.full((batch,), context, device=device)
        block = RaggedBlock.at(lengths, sizes.width)
        repeats = mask_repeats(sizes.heads // sizes.groups, sizes.width, ring, device, dtype)
        return {
            "query": normal(batch, sizes.width, sizes.heads, sizes.size).transpose(1, 2),
            "key": cache[0].transpose(1, 2),
            "value": cache[1].transpose(1, 2),
            "lengths": lengths,
            "mask": block.mask(ring, (None, causal, False), repeats, dtype),
        }

    def states(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        return x["query"], x["key"], x["value"]

    ways: dict[str, Way] = {
        "kernel": lambda x: dflash_kernels.block_attention(
            *states(x), x["lengths"], scaling=scaling, causal=causal
        ),
        "reference": lambda x: block_attention.reference(*states(x), x["lengths"], scaling, causal),
        "sdpa": lambda x: attend(*states(x), x["mask"], scaling),
    }
    unavailable: dict[str, str] = {}
    if device.type == "cuda":
        ways["flex_attention"] = _flex(batch, sizes.width, ring, context, scaling, causal, device)
    else:
        unavailable["flex_attention"] = "not available: it is compiled for CUDA only here"
    for name in FLASH_ATTENTION:
        found = flash_attention(name)
        if isinstance(found, str):
            unavailable[name] = found
        else:
            ways[name] = _flash(found, states, sizes.width, scaling, causal)
    tokens = batch * sizes.width * sizes.heads * sizes.size
    part = "verify" if causal else "draft"
    return Case(
        kernel=f"block_attention, {part}",
        batch=batch,
        context=context,
        make=make,
        num_bytes=item * 2 * (batch * ring * sizes.groups * sizes.size + tokens),
        ways=ways,
        results=lambda out, x: [out],
        unavailable=unavailable,
    )


def _flash(
    attention: Callable[..., Any],
    states: Callable[[Inputs], tuple[Tensor, Tensor, Tensor]],
    width: int,
    scaling: float,
    causal: bool,
) -> Way:
    """FlashAttention over the cache, which holds the block already; lengths are read on the device, as by ours."""

    def run(x: Inputs) -> Tensor:
        out = attention(
            *(t.transpose(1, 2) for t in states(x)),
            cache_seqlens=(x["lengths"] + width).to(torch.int32),
            softmax_scale=scaling,
            causal=causal,
        )
        if isinstance(out, tuple):
            return out[0]
        return out

    return run


def _flex(
    batch: int,
    width: int,
    ring: int,
    context: int,
    scaling: float,
    causal: bool,
    device: torch.device,
) -> Way:
    """FlexAttention, compiled, with its mask made beforehand."""

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if causal:
            return k <= q + context
        return k < context + width

    mask = create_block_mask(seen, batch, None, width, ring, device=str(device))
    compiled: Any = torch.compile(flex_attention)
    return lambda x: compiled(
        x["query"], x["key"], x["value"], block_mask=mask, scale=scaling, enable_gqa=True
    ).transpose(1, 2)


# Name of a row -> module that is imported, and the Kernel Hub's repository that is asked for, if it is that.
FLASH_ATTENTION = {
    "flash_attn": ("flash_attn", None),
    "flash_attn_3": ("flash_attn_interface", None),
    "hub flash-attn3": ("kernels", "kernels-community/flash-attn3"),
    "hub flash-attn2": ("kernels", "kernels-community/flash-attn2"),
}


@functools.cache
def flash_attention(name: str) -> Callable[..., Any] | str:
    """Returns `flash_attn_with_kvcache` of one of `FLASH_ATTENTION`, or why there is none.

    The Kernel Hub's are loaded by `kernels`, from its cache or the network: `HF_HUB_OFFLINE=1` keeps it to the cache.
    """
    module_name, repository = FLASH_ATTENTION[name]
    try:
        module: Any = importlib.import_module(module_name)
        if repository is not None:
            module = module.get_kernel(repository)
        return module.flash_attn_with_kvcache
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        return f"not available: {type(error).__name__}: {str(error)[:200]}"


def norm_rope_case(
    sizes: Sizes, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Norm, RoPE and cache write of one layer's block."""
    ring = context + sizes.width
    g = sizes.groups
    e = sizes.size
    w = sizes.width

    def make(seed: int) -> Inputs:
        normal = _normal(seed, dtype, device)
        states = [normal(batch, w, heads, e) for heads in (sizes.heads, g, g)]
        shared = [*states, normal(e), normal(e), normal(batch, w, e), normal(batch, w, e)]
        buffers = [torch.zeros(batch, ring, g, e, dtype=dtype, device=device) for _ in range(2)]
        return {"all": [*shared, torch.full((batch,), context, device=device), *buffers, EPS]}

    ways: dict[str, Way] = {
        "kernel": lambda x: dflash_kernels.norm_rope_write(*x["all"]),
        "reference": lambda x: norm_rope_write.reference(*x["all"]),
    }
    if device.type == "cuda":
        compiled: Any = torch.compile(norm_rope_write.reference)
        ways["torch.compile"] = lambda x: compiled(*x["all"])
    return Case(
        kernel="norm_rope_write",
        batch=batch,
        context=context,
        make=make,
        num_bytes=2 * dtype.itemsize * batch * w * (sizes.heads + 2 * g) * e,
        ways=ways,
        results=lambda out, x: [out, x["all"][8], x["all"][9]],
    )


def context_case(
    sizes: Sizes, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Context K/V of all layers."""
    ring = context + sizes.width
    g = sizes.groups
    e = sizes.size
    w = sizes.width
    n = sizes.layers

    def make(seed: int) -> Inputs:
        normal = _normal(seed, dtype, device)
        shared = [
            normal(batch, w, n, 2, g, e),
            normal(n, e),
            normal(batch, w, e),
            normal(batch, w, e),
        ]
        buffers = [
            [torch.zeros(batch, ring, g, e, dtype=dtype, device=device) for _ in range(n)]
            for _ in range(2)
        ]
        return {"all": [*shared, torch.full((batch,), context, device=device), *buffers, EPS]}

    ways: dict[str, Way] = {
        "kernel": lambda x: dflash_kernels.context_kv(*x["all"]),
        "reference": lambda x: context_kv.reference(*x["all"]),
    }
    if device.type == "cuda":
        compiled: Any = torch.compile(context_kv.reference)
        ways["torch.compile"] = lambda x: compiled(*x["all"])
    return Case(
        kernel="context_kv",
        batch=batch,
        context=context,
        make=make,
        num_bytes=2 * dtype.itemsize * batch * w * n * 2 * g * e,
        ways=ways,
        results=lambda out, x: [*x["all"][5], *x["all"][6]],
    )


def path_case(
    sizes: Sizes, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Every second node of a tree to where a chain would stand, in as many layers as the draft has."""
    ring = context + sizes.width
    num = (sizes.width + 1) // 2
    numbers = sizes.layers * sizes.groups * sizes.size

    def make(seed: int) -> Inputs:
        normal = _normal(seed, dtype, device)
        path = 2 * torch.arange(num, device=device).expand(batch, -1)
        buffers = [normal(batch, ring, sizes.groups, sizes.size) for _ in range(2 * sizes.layers)]
        return {"all": [path, torch.full((batch,), context, device=device), buffers]}

    return Case(
        kernel="keep_path",
        batch=batch,
        context=context,
        make=make,
        num_bytes=2 * dtype.itemsize * batch * (num - 1) * 2 * numbers,
        ways={
            "kernel": lambda x: dflash_kernels.keep_path(*x["all"]),
            "reference": lambda x: keep_path.reference(*x["all"]),
        },
        results=lambda out, x: x["all"][2],
    )


def tree_case(
    sizes: Sizes, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """The tree of a block, of as many nodes as the chain has; the best log-probabilities have been found."""
    num = sizes.width
    depth = sizes.width - 1

    def make(seed: int) -> Inputs:
        normal = _normal(seed, torch.float32, device)
        scores = 2 * normal(batch, depth, 1, 1024)
        text = (20 * normal(batch, context)).abs().long()
        best, order = scores.log_softmax(dim=-1).topk(depth, dim=-1)
        nodes, block = (
            torch.zeros(size, dtype=torch.long, device=device)
            for size in ((NODE_PARTS + num_words(num), batch, num), (batch, num))
        )
        follows = torch.full((2, 5), -0.5, device=device)
        return {
            "all": [
                best,
                order,
                nodes,
                block,
                None,
                text,
                torch.full((batch,), context, device=device),
                follows,
            ]
        }

    return Case(
        kernel="build_tree",
        batch=batch,
        context=context,
        make=make,
        num_bytes=batch * (12 * depth * depth + 8 * context + 8 * 5 * num),
        ways={
            "kernel": lambda x: dflash_kernels.build_tree(*x["all"]),
            "reference": lambda x: build_tree.reference(*x["all"]),
        },
        results=lambda out, x: x["all"][2:4],
    )


def follow_case(
    sizes: Sizes, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """A chain as a tree, of which the first half stands."""
    num = sizes.width

    def make(seed: int) -> Inputs:
        nodes = torch.arange(num, device=device).expand(batch, -1)
        tokens = nodes + 1 + (nodes >= num // 2)
        written = [
            nodes.contiguous(),
            tokens.contiguous(),
            torch.zeros_like(tokens),
            torch.zeros_like(tokens),
        ]
        # The bits of all nodes up to each one, in the only word: a block has fewer tokens than that has bits.
        ancestors = ((2 << nodes) - 1)[..., None]
        tree = [(nodes - 1).clamp_min(0), nodes.contiguous(), ancestors]
        return {"all": [*tree, *written]}

    return Case(
        kernel="follow_tree",
        batch=batch,
        context=None,
        make=make,
        num_bytes=8 * 9 * batch * num,
        ways={
            "kernel": lambda x: dflash_kernels.follow_tree(*x["all"]),
            "reference": lambda x: follow_tree.reference(*x["all"]),
        },
        results=lambda out, x: x["all"][3:],
    )


def argmax_case(sizes: Sizes, batch: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Argmax over the vocabulary of a verify's logits; the library is the reference, `torch.argmax`."""
    return Case(
        kernel="argmax",
        batch=batch,
        context=None,
        make=lambda seed: {"logits": _normal(seed, dtype, device)(batch, sizes.width, sizes.vocab)},
        num_bytes=dtype.itemsize * batch * sizes.width * sizes.vocab,
        ways={
            "kernel": lambda x: dflash_kernels.argmax(x["logits"]),
            "reference": lambda x: argmax.reference(x["logits"]),
        },
        results=lambda out, x: [out],
    )


def top_case(sizes: Sizes, batch: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The most likely tokens of a draft's logits, as many as a tree of the chain's size has; equal ones may differ."""
    num = sizes.width - 1
    return Case(
        kernel="top_tokens",
        batch=batch,
        context=None,
        make=lambda seed: {"scores": _normal(seed, dtype, device)(batch, num, 1, sizes.vocab)},
        num_bytes=dtype.itemsize * batch * num * sizes.vocab,
        ways={
            "kernel": lambda x: dflash_kernels.top_tokens(x["scores"], num),
            "reference": lambda x: top_tokens.reference(x["scores"], num),
        },
        results=lambda out, x: [out[0], x["scores"].gather(-1, out[1])],
    )


def pointwise_cases(
    sizes: Sizes, batch: int, dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Norms and activation of one layer over a verify's tokens, and a sample of its logits."""
    tokens = batch * sizes.width
    hidden = sizes.hidden
    item = dtype.itemsize

    def case(
        operation: Any,
        num_bytes: int,
        make: Callable[[Callable[..., Tensor]], list[Any]],
        **more: Way,
    ) -> Case:
        name = operation.reference.__name__
        if device.type == "cuda":
            compiled: Any = torch.compile(operation.reference)
            more["torch.compile"] = lambda x: compiled(*x["all"])
        return Case(
            kernel=name,
            batch=batch,
            context=None,
            make=lambda seed: {"all": make(_normal(seed, dtype, device))},
            num_bytes=num_bytes,
            ways={
                "kernel": lambda x: getattr(dflash_kernels, name)(*x["all"]),
                "reference": lambda x: operation.reference(*x["all"]),
                **more,
            },
            results=lambda out, x: [out],
        )

    def states(normal: Callable[..., Tensor], size: int) -> Tensor:
        return normal(batch, sizes.width, size)

    def drawn(normal: Callable[..., Tensor]) -> list[Any]:
        positions = torch.arange(tokens, device=device).view(batch, sizes.width)
        return [states(normal, sizes.vocab), torch.tensor(7, device=device), positions, None, 0.7]

    def turned(normal: Callable[..., Tensor]) -> list[Any]:
        # The seed's numbers stand for frequencies: sizes alone tell the time.
        inv_freq = normal(sizes.size // 2).float().abs()
        positions = torch.arange(tokens, device=device).view(batch, sizes.width)
        return [positions, inv_freq, 1.0, dtype]

    def library_norm(x: Inputs) -> Tensor:
        return rms_norm_of_torch(x["all"][0], [hidden], *x["all"][1:])

    return [
        case(
            rms_norm,
            item * 2 * tokens * hidden,
            lambda n: [states(n, hidden), n(hidden), EPS],
            **{"F.rms_norm": library_norm},
        ),
        case(
            add_norm,
            item * 4 * tokens * hidden,
            lambda n: [*(states(n, hidden) for _ in "xy"), n(hidden), EPS],
        ),
        case(
            silu_mul, item * 3 * tokens * sizes.mlp, lambda n: [states(n, sizes.mlp) for _ in "xy"]
        ),
        case(rope_angles, 8 * tokens + item * 2 * tokens * sizes.size, turned),
        case(gumbel_argmax, item * tokens * sizes.vocab, drawn),
    ]


def product_cases(sizes: Sizes, batch: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Products of one layer that share an input; the reference is cuBLAS, one weight after the other."""
    tokens = batch * sizes.width
    keys = sizes.groups * sizes.size
    attended = (sizes.heads * sizes.size, keys, keys)
    gated = (sizes.mlp, sizes.mlp)

    def make(seed: int, columns: Sequence[int]) -> Inputs:
        normal = _normal(seed, dtype, device)
        weights = [normal(each, sizes.hidden) / sizes.hidden**0.5 for each in columns]
        return {"states": normal(batch, sizes.width, sizes.hidden), "weights": weights}

    def num_bytes(columns: Sequence[int], num_outs: int) -> int:
        numbers = sum(columns) * sizes.hidden + tokens * (sizes.hidden + num_outs)
        return dtype.itemsize * numbers

    return [
        Case(
            kernel="linears",
            batch=batch,
            context=None,
            make=lambda seed: make(seed, attended),
            num_bytes=num_bytes(attended, sum(attended)),
            ways={
                "kernel": lambda x: dflash_kernels.linears(x["states"], x["weights"], [], None),
                "reference": lambda x: linears.reference(x["states"], x["weights"], [], None),
            },
            results=lambda out, x: out,
        ),
        Case(
            kernel="gated_linear",
            batch=batch,
            context=None,
            make=lambda seed: make(seed, gated),
            num_bytes=num_bytes(gated, sizes.mlp),
            ways={
                "kernel": lambda x: dflash_kernels.gated_linear(x["states"], *x["weights"]),
                "reference": lambda x: gated_linear.reference(x["states"], *x["weights"]),
            },
            results=lambda out, x: [out],
        ),
    ]


def accept_case(sizes: Sizes, batch: int, device: torch.device) -> Case:
    """What follows a verify. Rows are done, so that calls can be repeated: the work is the same."""
    width = sizes.width

    def make(seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randint(4, shape, generator=generator).to(device)

        state = [draw(batch), draw(batch), draw(batch) >= 0, draw(batch, 4096)]
        state += [draw(batch, width), draw(batch, width), draw(NUM_FIGURES + width, batch)]
        return {
            "all": [
                draw(batch, width),
                draw(batch, width),
                *state,
                torch.tensor([9, 10], device=device),
            ]
        }

    return Case(
        kernel="accept_and_prepare",
        batch=batch,
        context=None,
        make=make,
        num_bytes=8 * batch * (6 * width + 12),
        ways={
            "kernel": lambda x: dflash_kernels.accept_and_prepare(*x["all"]),
            "reference": lambda x: accept_and_prepare.reference(*x["all"]),
        },
        results=lambda out, x: [t for t in x["all"] if isinstance(t, Tensor)],
    )


def _normal(seed: int, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=dtype)


def all_cases(
    sizes: Sizes, batches: list[int], contexts: list[int], dtype: torch.dtype, device: torch.device
) -> list[Case]:
    """Every case, attention at every context length, products of as many rows as their kernels take."""
    cases: list[Case] = []
    for batch in batches:
        for context in contexts:
            cases += [
                attention_case(sizes, batch, context, dtype, device, causal)
                for causal in (True, False)
            ]
        makes = (norm_rope_case, context_case, path_case, tree_case, follow_case)
        cases += [make(sizes, batch, contexts[0], dtype, device) for make in makes]
        cases += pointwise_cases(sizes, batch, dtype, device)
        if batch * sizes.width <= MAX_ROWS:
            cases += product_cases(sizes, batch, dtype, device)
        cases += [make(sizes, batch, dtype, device) for make in (argmax_case, top_case)]
        cases.append(accept_case(sizes, batch, device))
    return cases
