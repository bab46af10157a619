"""`norm_rope_write` and `context_kv`: against the draft's own modules, and the kernels against their references."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_hf import DFlashDraftModel
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import LayerShape
from dflash_hf.draft_model.layers import Angles, DFlashAttention, rotate
from dflash_kernels import context_kv, norm_rope_write
from dflash_kernels._dispatch import runs_kernel
from helpers.kernel_checks import (
    CUDA,
    DEVICES,
    DTYPES,
    INTERPRETED,
    Guarded,
    assert_same_writes,
    check_apart,
    check_raises,
    poisoned,
)
from tiny import tiny_draft, tiny_target

EPS = 1e-6
# Rows, width, query heads, key heads, head size, rings of the layers, lengths.
Shape = tuple[int, int, int, int, list[int], list[int]]
SHAPES: dict[str, Shape] = {
    "several rows": (3, 4, 2, 16, [20, 20], [0, 5, 16]),
    "one of each": (1, 1, 1, 2, [1], [0]),
    "a wrapping ring": (4, 4, 1, 8, [7, 30, 4], [5, 25]),
    "size no power of two": (2, 6, 3, 20, [9], [3, 7]),
    "negative lengths": (3, 2, 1, 8, [6, 9], [-1, -5, 4]),
}
REAL: dict[str, Shape] = {
    "qwen3-8b": (16, 32, 8, 128, [2064, 2064, 528, 2064, 2064], [0, 2048, 511]),
    "many rows": (16, 32, 8, 128, [600], list(range(32))),
}


class Inputs:
    """Random states, weights, angles and a guarded cache with NaN where nothing was written."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: str, buffer_dtype: torch.dtype | None = None
    ) -> None:
        width, heads, groups, size, rings, lengths = shape
        generator = torch.Generator().manual_seed(width)
        batch = len(lengths)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(device, dtype)

        # One fused product, of which queries, keys and values are views.
        fused = normal(batch, width, (heads + 2 * groups) * size)
        self.states = [
            t.unflatten(-1, (-1, size))
            for t in fused.split([n * size for n in (heads, groups, groups)], -1)
        ]
        self.projected = normal(batch, width, len(rings) * 2 * groups * size).view(
            batch, width, len(rings), 2, groups, size
        )
        # No weights: heads that are not normed.
        self.weights: Any = normal(2, size)
        self.weight_LE = normal(len(rings), size)
        # As the draft computes them: [B, W, 1, E] with an extra dimension.
        self.cos, self.sin = (
            normal(batch, width, 1, size)[:, :, 0],
            normal(batch, width, 1, size)[:, :, 0],
        )
        self.lengths = torch.tensor(lengths, device=device)
        self.cache = {
            f"{name}{layer}": Guarded(
                normal(batch, ring, groups, size).fill_(torch.nan).to(buffer_dtype or dtype)
            )
            for name in ("keys", "values")
            for layer, ring in enumerate(rings)
        }

    def buffers(self, cache: dict[str, Guarded]) -> tuple[list[Tensor], list[Tensor]]:
        """Key and value buffers of all layers."""
        keys, values = (
            [g.tensor for n, g in cache.items() if n.startswith(name)]
            for name in ("keys", "values")
        )
        return keys, values

    def check_block(self) -> None:
        """`norm_rope_write` of the first layer."""
        ours, wanted = ({n: g.copy() for n, g in self.cache.items()} for _ in range(2))
        shared = (*self.states, *self.weights, self.cos, self.sin, self.lengths)
        assert runs_kernel(self.states[0])
        with poisoned():
            out = norm_rope_write(*shared, ours["keys0"].tensor, ours["values0"].tensor, EPS)
        query = norm_rope_write.reference(
            *shared, wanted["keys0"].tensor, wanted["values0"].tensor, EPS
        )
        tolerance = 4 * torch.finfo(query.dtype).eps
        # Sums of squares in another order and `rsqrt` of another unit: to the scale of what is normed.
        torch.testing.assert_close(
            out, query, rtol=tolerance, atol=tolerance * float(query.abs().max())
        )
        assert out.is_contiguous()
        assert_same_writes(ours, wanted, tolerance)

    def check_context(self) -> None:
        """`context_kv` of all layers."""
        ours, wanted = ({n: g.copy() for n, g in self.cache.items()} for _ in range(2))
        shared = (self.projected, self.weight_LE, self.cos, self.sin, self.lengths)
        assert runs_kernel(self.projected)
        context_kv(*shared, *self.buffers(ours), EPS)
        context_kv.reference(*shared, *self.buffers(wanted), EPS)
        assert_same_writes(ours, wanted, 4 * torch.finfo(self.projected.dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        *(("a wrapping ring", dtype) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_kernels_write_what_the_references_write(
    shape: str, dtype: torch.dtype, device: str
) -> None:
    inputs = Inputs(SHAPES[shape], dtype, device)
    inputs.check_block()
    inputs.check_context()
    inputs.weights = (None, None)
    inputs.check_block()


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", REAL)
def test_kernels_write_what_the_references_write_at_real_sizes(
    shape: str, dtype: torch.dtype, device: str
) -> None:
    inputs = Inputs(REAL[shape], dtype, device)
    inputs.check_block()
    inputs.check_context()
    inputs.weights = (None, None)
    inputs.check_block()


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_of_another_dtype_is_written_in_its_own(device: str) -> None:
    inputs = Inputs(SHAPES["one of each"], torch.float32, device, torch.float16)
    inputs.check_block()
    inputs.check_context()


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    inputs = Inputs(SHAPES["several rows"], torch.float32, device)
    inputs.projected = inputs.projected.transpose(1, 4).contiguous().transpose(1, 4)
    inputs.weight_LE = inputs.weight_LE.mT.contiguous().mT
    inputs.cos, inputs.sin = (t.mT.contiguous().mT for t in (inputs.cos, inputs.sin))
    inputs.lengths = inputs.lengths.to(torch.int32).repeat_interleave(2)[::2]
    inputs.states[0] = inputs.states[0].mT.contiguous().mT
    inputs.check_block()
    inputs.check_context()


@pytest.mark.parametrize("device", [INTERPRETED])
def test_heads_are_written_more_than_2_to_the_31_apart(device: str) -> None:
    def check() -> None:
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(1, 4, 3, 16, generator=generator).half() for _ in range(3)]
        angles = [torch.randn(1, 4, 16, generator=generator).half() for _ in range(2)]
        shape = (1, 20, 3, 16)
        stride = 2**30 + 16
        # 6.4 GB of addresses, of which hardly any are written and so take memory.
        far = torch.empty_strided(shape, (3 * stride, 16, stride, 1), dtype=torch.float16).fill_(
            5.0
        )
        keys = torch.full(shape, 5.0, dtype=torch.float16)
        values = keys.clone()
        shared = (*states, None, None, *angles, torch.tensor([5]))
        norm_rope_write(*shared, keys, values, 1e-6)
        norm_rope_write(*shared, far, values.clone(), 1e-6)
        assert torch.equal(far.contiguous(), keys)
        far.fill_(5.0)
        norm_rope_write(*shared, keys.clone(), far, 1e-6)
        assert torch.equal(far.contiguous(), values)

    check_apart(check)


def test_a_layer_of_a_wider_buffer_is_written_alone() -> None:
    """Strided buffers of one layer: two layers side by side, of which the second one stays as it is."""
    inputs = Inputs(SHAPES["several rows"], torch.float32, "cpu")
    shared = (*inputs.states, *inputs.weights, inputs.cos, inputs.sin, inputs.lengths)
    keys, values = inputs.cache["keys0"].tensor.clone(), inputs.cache["values0"].tensor.clone()
    both = torch.full((2, *keys.shape[:2], 4, 16), 5.0)
    norm_rope_write(*shared, keys, values, EPS)
    norm_rope_write(*shared, both[0, :, :, :2], both[1, :, :, 2:], EPS)
    written = ~keys.isnan()
    assert torch.equal(both[0, :, :, :2][written], keys[written])
    assert torch.equal(both[1, :, :, 2:][written], values[written])
    assert bool((both[0, :, :, 2:] == 5).all())
    assert bool((both[0, :, :, :2][~written] == 5).all())


def draft_and_states() -> tuple[DFlashDraftModel, Tensor, RaggedBlock, RaggedCache]:
    """A draft of two kinds of layers in bfloat16, states of a block, and an empty cache."""
    torch.manual_seed(0)
    target = tiny_target("qwen3")
    draft = tiny_draft(
        target, 6, layer_types=["full_attention", "sliding_attention"], sliding_window=4
    )
    draft = draft.to(torch.bfloat16)
    for module in draft.modules():
        if isinstance(module, DFlashAttention):
            torch.nn.init.normal_(module.k_norm.weight)
            torch.nn.init.normal_(module.q_norm.weight)
    block = RaggedBlock.at(torch.tensor([0, 7, 13]), 6)
    hidden = torch.randn(3, 6, draft.config.hidden_size).to(torch.bfloat16)
    return draft, hidden, block, empty_cache(draft.cache_shapes())


def empty_cache(shapes: list[LayerShape]) -> RaggedCache:
    """A cache of three rows of 24 tokens."""
    return RaggedCache(shapes, batch=3, max_length=24, block=6)


def assert_same_caches(ours: RaggedCache, wanted: RaggedCache) -> None:
    """Bit for bit."""
    for a, b in zip(ours.layers, wanted.layers, strict=True):
        assert torch.equal(a.key_buffer, b.key_buffer)
        assert torch.equal(a.value_buffer, b.value_buffer)
        assert bool(b.key_buffer.any())


@torch.no_grad()
def test_references_are_the_drafts_own_modules() -> None:
    """What `context_kv` writes is what `write_context` does, and likewise a block's, rounding included."""
    draft, hidden, block, cache = draft_and_states()
    attentions: list[Any] = [layer.self_attn for layer in draft.layers]
    cos, sin = draft.rotary_emb(block.positions, hidden)
    angles = Angles.of((cos, sin))
    ours = empty_cache(draft.cache_shapes())
    for index, attention in enumerate(attentions):
        cache.attention[index].write(*attention.project_kv(hidden, angles), block)
    product = torch.stack([f(hidden) for a in attentions for f in (a.k_proj, a.v_proj)], dim=2)
    projected = product.unflatten(2, (-1, 2)).unflatten(-1, (-1, draft.config.head_dim))
    weights = torch.stack([a.k_norm.weight for a in attentions])
    buffers = [
        [getattr(layer, name) for layer in ours.layers] for name in ("key_buffer", "value_buffer")
    ]
    context_kv.reference(
        projected, weights, cos[:, :, 0], sin[:, :, 0], block.lengths, *buffers, EPS
    )
    assert_same_caches(ours, cache)

    again = empty_cache(draft.cache_shapes())
    for attention, layer in zip(attentions, again.layers, strict=True):
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = [
            project(hidden).unflatten(-1, (-1, draft.config.head_dim)) for project in projections
        ]
        query = norm_rope_write.reference(
            *heads,
            attention.q_norm.weight,
            attention.k_norm.weight,
            cos[:, :, 0],
            sin[:, :, 0],
            block.lengths,
            layer.key_buffer,
            layer.value_buffer,
            EPS,
        )
        assert torch.equal(query, rotate(attention.q_norm(heads[0]), angles))
    assert_same_caches(again, cache)


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_each_with_a_true_schema(device: str) -> None:
    inputs = Inputs((2, 2, 1, 4, [3, 5], [0, 2]), torch.float32, device)
    keys, values = ([t.nan_to_num() for t in side] for side in inputs.buffers(inputs.cache))
    block = (
        *inputs.states,
        *inputs.weights,
        inputs.cos,
        inputs.sin,
        inputs.lengths,
        keys[0],
        values[0],
        EPS,
    )
    torch.library.opcheck(norm_rope_write.op, block)
    torch.library.opcheck(norm_rope_write.op, (*block[:3], None, None, *block[5:]))
    context = (
        inputs.projected,
        inputs.weight_LE,
        inputs.cos,
        inputs.sin,
        inputs.lengths,
        keys,
        values,
        EPS,
    )
    torch.library.opcheck(context_kv.op, context)


def test_bad_input() -> None:
    inputs = Inputs(SHAPES["several rows"], torch.float32, "cpu")
    keys, values = inputs.buffers(inputs.cache)
    block: list[Any] = [
        *inputs.states,
        *inputs.weights,
        inputs.cos,
        inputs.sin,
        inputs.lengths,
        keys[0],
        values[0],
        EPS,
    ]
    for at, bad, word in (
        (1, block[1][:, :2], "key_BWGE"),
        (3, block[3][:8], "query_weight_E"),
        (4, block[4].half(), "float16"),
        (4, None, "one weight"),
        (7, block[7][:2], "lengths_B"),
        (8, keys[0][:, :2], "value_buffer_BRGE"),
    ):
        changed = [*block[:at], bad, *block[at + 1 :]]
        check_raises(lambda changed=changed: norm_rope_write(*changed), word)
    short = [*block[:8], keys[0][:, :2], values[0][:, :2], EPS]
    check_raises(lambda: norm_rope_write(*short), "R 2", "W 3")
    context: list[Any] = [
        inputs.projected,
        inputs.weight_LE,
        inputs.cos,
        inputs.sin,
        inputs.lengths,
        keys,
        values,
        EPS,
    ]
    for at, bad, word in (
        (1, context[1][:1], "weight_LE"),
        (2, context[2].double(), "cos_BWE"),
        (4, context[4][:2], "lengths_B"),
        (5, keys[:1], "2 layers"),
        (6, [values[0], values[1][:, :, :1]], "R"),
        (6, [values[0], torch.empty(3, 20, 16, 2).mT], "contiguous"),
    ):
        changed = [*context[:at], bad, *context[at + 1 :]]
        check_raises(lambda changed=changed: context_kv(*changed), word)
