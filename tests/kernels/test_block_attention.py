"""`block_attention`: the reference against the package's own attention, the kernel against the reference."""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_hf.block.attention import RaggedBlock, TreeBlock, attend
from dflash_hf.block.tree import DraftTree
from dflash_kernels import block_attention
from dflash_kernels._dispatch import runs_kernel
from helpers.kernel_checks import (
    CUDA,
    DEVICES,
    DTYPES,
    INTERPRETED,
    ancestors_of,
    check_apart,
    check_raises,
    poisoned,
)

Case = dict[str, Any]
BASE: Case = {
    "heads": 4,
    "groups": 2,
    "width": 4,
    "size": 16,
    "ring": 70,
    "lengths": [0, 33, 66],
    "causal": True,
    "window": None,
    "from_anchor": False,
    "softcap": None,
    "has_sinks": False,
    "splits": None,
}
# A tile of the kernel has 16 to 64 slots; 64 in 16 bits.
CASES: dict[str, Case] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "one split": {"splits": 1, "has_sinks": True},
    "more splits than tiles": {"splits": 7, "has_sinks": True},
    "most splits": {
        "splits": 128,
        "heads": 1,
        "groups": 1,
        "width": 2,
        "ring": 2100,
        "lengths": [2090],
    },
    "lengths around a tile": {"width": 1, "lengths": [0, 62, 63, 64, 65], "heads": 2, "ring": 66},
    "lengths around two tiles": {
        "width": 2,
        "lengths": [126, 127, 1],
        "heads": 2,
        "ring": 130,
        "splits": 2,
    },
    "one token, one head": {"width": 1, "heads": 1, "groups": 1, "size": 8},
    "eight query heads of one": {"heads": 8, "groups": 1, "width": 2, "lengths": [5]},
    "rows of more than one tile": {
        "heads": 5,
        "groups": 1,
        "width": 16,
        "lengths": [3],
        "ring": 40,
        "splits": 1,
    },
    "three query heads of each": {"heads": 6, "groups": 2, "width": 3, "size": 24},
    "window": {"window": 5},
    "window, bidirectional": {"window": 3, "causal": False},
    "window in a long buffer": {"window": 9, "ring": 200, "lengths": [0, 180, 100]},
    "window of the last token": {"window": 1},
    "ring that has wrapped": {"window": 9, "ring": 13, "lengths": [9, 40, 131]},
    "ring, bidirectional": {"window": 9, "ring": 13, "lengths": [9, 40, 131], "causal": False},
    "ring without a window": {"ring": 70, "lengths": [66, 100, 171]},
    "window from the anchor": {
        "window": 6,
        "from_anchor": True,
        "causal": False,
        "ring": 12,
        "lengths": [0, 3, 50],
    },
    "empty window from the anchor": {"window": 0, "from_anchor": True, "causal": False},
    "window that sees nothing": {"window": 0, "splits": 2},
    "soft cap": {"softcap": 2.0},
    "soft cap and sinks": {"softcap": 2.0, "has_sinks": True, "window": 7},
    "negative length": {"lengths": [-2, -9, 4]},
    "values of another size": {"size": 24, "value_size": 16},
    "tree": {"width": 9, "tree": True},
    "tree, splits and sinks": {
        "width": 16,
        "tree": True,
        "heads": 2,
        "groups": 1,
        "splits": 3,
        "has_sinks": True,
        "lengths": [0, 54, 20],
    },
    "tree in a window": {"width": 12, "tree": True, "window": 4, "heads": 2},
    "tree in a ring that has wrapped": {
        "width": 8,
        "tree": True,
        "window": 9,
        "ring": 17,
        "lengths": [9, 40, 131],
    },
    "tree of a whole word": {
        "width": 64,
        "tree": True,
        "heads": 1,
        "groups": 1,
        "ring": 130,
        "lengths": [66, 3],
    },
    "tree of a word and a node": {
        "width": 65,
        "tree": True,
        "heads": 2,
        "groups": 1,
        "ring": 131,
        "lengths": [66, 3],
        "splits": 2,
    },
    "tree of 128 in a ring that has wrapped": {
        "width": 128,
        "tree": True,
        "heads": 1,
        "groups": 1,
        "window": 5,
        "ring": 133,
        "lengths": [0, 140, 1001],
    },
    "tree of three words": {
        "width": 150,
        "tree": True,
        "heads": 1,
        "groups": 1,
        "ring": 300,
        "lengths": [150],
        "has_sinks": True,
    },
    "largest tree": {
        "width": 256,
        "tree": True,
        "heads": 1,
        "groups": 1,
        "ring": 321,
        "lengths": [64],
    },
}
QWEN: Case = {"heads": 32, "groups": 8, "width": 16, "size": 128}
REAL: dict[str, Case] = {
    "qwen3-8b": QWEN | {"ring": 2064, "lengths": [2048, 1, 1000]},
    "qwen3-8b, 32k": QWEN | {"ring": 32784, "lengths": [32768]},
    "qwen3-8b, many rows": QWEN | {"width": 6, "ring": 700, "lengths": list(range(0, 690, 22))},
    "qwen3-8b draft": QWEN | {"ring": 4100, "lengths": [4000, 63], "causal": False},
    "one key head": QWEN | {"groups": 1, "ring": 999, "lengths": [900, 7]},
    "no grouping": QWEN | {"heads": 16, "groups": 16, "size": 80, "ring": 999, "lengths": [900, 7]},
    "one key head, 64k": QWEN | {"groups": 1, "heads": 4, "ring": 65552, "lengths": [65500]},
    "gemma2": QWEN
    | {
        "heads": 16,
        "size": 256,
        "ring": 4112,
        "lengths": [9000, 40],
        "window": 4096,
        "softcap": 50.0,
    },
    "gpt-oss": QWEN
    | {
        "heads": 64,
        "width": 8,
        "size": 64,
        "ring": 136,
        "lengths": [5000, 4],
        "window": 128,
        "has_sinks": True,
    },
}


def inputs(
    case: Case, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[list[Tensor], dict[str, Any]]:
    """Random tensors as the model hands them over: queries and cache token-major, NaN where nothing was written."""
    case = BASE | case
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    batch, size = len(case["lengths"]), case["size"]
    query = normal(batch, case["width"], case["heads"], size).transpose(1, 2)
    key = normal(batch, case["ring"], case["groups"], size)
    value = normal(batch, case["ring"], case["groups"], case.get("value_size", size))
    for row, length in enumerate(case["lengths"]):
        key[row, max(length + case["width"], 0) :] = torch.nan
        value[row, max(length + case["width"], 0) :] = torch.nan
    lengths = torch.tensor(case["lengths"], device=device)
    options = {name: case[name] for name in ("causal", "window", "from_anchor", "softcap")}
    sinks = normal(case["heads"]) if case["has_sinks"] else None
    options |= {"scaling": size**-0.5, "sinks_H": sinks}
    if case.get("tree"):
        width = case["width"]
        nodes = random_trees(batch, width, generator).to(device)
        # As a step has them: parts of a wider tensor.
        num_parts = 3 + -(-width // 64)
        tree = DraftTree.of(nodes[:num_parts, :, :width])
        options |= {"depths_BW": tree.depths, "ancestors_BWA": tree.ancestors}
    return [query, key.transpose(1, 2), value.transpose(1, 2), lengths], options


def random_trees(batch: int, width: int, generator: torch.Generator) -> Tensor:
    """The nodes of random trees, `[8, B, width + 2]`: parents, zeros, depths and the words of ancestors."""
    nodes = torch.zeros(8, batch, width + 2, dtype=torch.long)
    for row in range(batch):
        for node in range(1, width):
            parent = int(torch.randint(max(node - 3, 0), node, (), generator=generator))
            nodes[0, row, node], nodes[2, row, node] = parent, nodes[2, row, parent] + 1
    words = ancestors_of(nodes[0, :, :width]).permute(2, 0, 1)
    nodes[3 : 3 + len(words), :, :width] = words
    return nodes


def assert_near(out: Tensor, wanted: Tensor, value: Tensor) -> None:
    """Half a unit in the last place for the rounded weights, as much for the output, of the greatest value.

    In float32 sums run in another order: a few units.
    """
    assert out.dtype == wanted.dtype
    assert out.is_contiguous()
    scale = float(value.nan_to_num().abs().max())
    bound = (
        40 * torch.finfo(torch.float32).eps
        if out.dtype == torch.float32
        else torch.finfo(out.dtype).eps
    )
    torch.testing.assert_close(out, wanted, rtol=0, atol=bound * scale)


def check(tensors: list[Tensor], options: dict[str, Any], splits: int | None) -> None:
    """The kernel gives what the reference gives, from poisoned memory."""
    assert runs_kernel(tensors[0])
    kernel = importlib.import_module("dflash_kernels.block_attention.kernel")
    chosen = {} if splits is None else {"return_value": splits}
    with (
        poisoned(),
        mock.patch.object(kernel, "choose_num_splits", wraps=kernel.choose_num_splits, **chosen),
    ):
        out = block_attention(*tensors, **options)
    assert_near(out, block_attention.reference(*tensors, **options), tensors[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference(case: str, device: str) -> None:
    check(*inputs(CASES[case], torch.float32, device), CASES[case].get("splits"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "case", ["causal", "lengths around a tile", "ring, bidirectional", "soft cap and sinks"]
)
def test_kernel_equals_reference_in_16_bits(case: str, dtype: torch.dtype, device: str) -> None:
    check(*inputs(CASES[case], dtype, device), CASES[case].get("splits"))


# Compiling a variant takes seconds: the other dtypes at some of them only.
@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.bfloat16) for case in REAL),
        *((case, d) for case in ("qwen3-8b", "gpt-oss") for d in DTYPES[:2]),
    ],
    ids=str,
)
def test_kernel_equals_reference_at_real_sizes(case: str, dtype: torch.dtype, device: str) -> None:
    check(*inputs(REAL[case], dtype, device), None)


@pytest.mark.parametrize("device", [INTERPRETED])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernel_equals_reference_anywhere(device: str, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 5), "width")
    groups = data.draw(st.integers(1, 3), "groups")
    window = data.draw(st.none() | st.integers(0, 20), "window")
    ring = data.draw(st.integers(width, 90), "ring") if window is None else window + width
    # Without a window rows end with their buffer; with one they go round.
    longest = ring - width if window is None else 200
    case = {
        "width": width,
        "groups": groups,
        "heads": groups * data.draw(st.integers(1, 4), "heads per key head"),
        "size": data.draw(st.sampled_from([4, 16, 20]), "size"),
        "ring": ring,
        "lengths": data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=2), "lengths"),
        "causal": data.draw(st.booleans(), "causal"),
        "window": window,
        "from_anchor": window is not None and data.draw(st.booleans(), "from anchor"),
        "softcap": data.draw(st.none() | st.just(1.5), "soft cap"),
        "has_sinks": data.draw(st.booleans(), "sinks"),
    }
    check(*inputs(case, torch.float32, device, seed=width), data.draw(st.integers(1, 3), "splits"))


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    (query, key, value, lengths), options = inputs(
        {"lengths": [20, 3], "has_sinks": True}, torch.float32, device
    )
    wanted = block_attention.reference(query, key, value, lengths, **options)
    wide = torch.zeros(2, 4, 4, 40, device=device)
    wide[..., 3:35:2] = query
    # Keys behind one another in a fused buffer, sinks and lengths as every other entry of something.
    fused = torch.cat([key, value], dim=-1)
    options["sinks_H"] = options["sinks_H"].repeat_interleave(2)[::2]
    views = (
        wide[..., 3:35:2],
        fused[..., :16],
        fused[..., 16:],
        lengths.to(torch.int32).repeat_interleave(2)[::2],
    )
    assert_near(block_attention(*views, **options), wanted, value)
    longer = torch.cat([value.mT.contiguous(), value.mT], dim=-1)[..., : value.shape[2]].mT
    assert longer.stride(-1) != 1
    assert_near(block_attention(query, key, longer, lengths, **options), wanted, value)


@pytest.mark.parametrize("device", DEVICES)
def test_a_shorter_view_of_an_unwrapped_row_is_the_same(device: str) -> None:
    (query, key, value, lengths), options = inputs({"lengths": [20, 3]}, torch.float32, device)
    narrow = [t.narrow(2, 0, 24) for t in (key, value)]
    out = block_attention(query, *narrow, lengths, **options)
    assert_near(out, block_attention.reference(query, key, value, lengths, **options), value)


@pytest.mark.parametrize("device", [INTERPRETED])
def test_heads_may_lie_more_than_2_to_the_31_apart(device: str) -> None:
    """As expanded keys of a long context do."""

    def compare() -> None:
        stride = 2**30 + 16
        shape, strides = (1, 3, 80, 16), (3 * stride, stride, 16, 1)
        # 6.4 GB of addresses, of which hardly any are written and so take memory.
        states = torch.empty_strided(shape, strides, dtype=torch.float16)
        states.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        query = states[:, :, :4].contiguous()
        near = states.contiguous()
        rule = (torch.tensor([70]), 0.25, True)
        out = block_attention(query, states, states, *rule)
        wanted = block_attention.reference(query, near, near, *rule)
        torch.testing.assert_close(out, wanted, rtol=0, atol=4e-3)

    check_apart(compare)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_reference_equals_the_package(data: st.DataObject) -> None:
    """One definition of masks: the kernels' own equals `RaggedBlock`'s, in float64, where a query sees anything."""
    width = data.draw(st.integers(1, 6), "width")
    window = data.draw(st.none() | st.integers(1, 12), "window")
    from_anchor = window is not None and data.draw(st.booleans(), "from anchor")
    causal = data.draw(st.booleans(), "causal")
    ring = data.draw(st.integers(width, 40), "ring") if window is None else window + width
    longest = ring - width if window is None else 100
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=3), "lengths")
    case = {
        "width": width,
        "ring": ring,
        "lengths": lengths,
        "has_sinks": data.draw(st.booleans(), "sinks"),
    }
    case |= {"softcap": data.draw(st.none() | st.just(1.5), "soft cap")}
    case |= {"tree": causal and not from_anchor and data.draw(st.booleans(), "tree")}
    (query, key, value, rows), options = inputs(case, torch.float64, "cpu", seed=ring)
    options |= {"window": window, "from_anchor": from_anchor, "causal": causal}
    block = RaggedBlock.at(rows, width)
    if case["tree"]:
        depths, ancestors = options["depths_BW"], options["ancestors_BWA"]
        block = TreeBlock(
            block.positions, tree=DraftTree(torch.zeros_like(depths), depths, ancestors)
        )
    mask = block.mask(ring, (window, causal, from_anchor), 1, torch.float64)
    key, value = key.nan_to_num(), value.nan_to_num()
    wanted = attend(
        query, key, value, mask, options["scaling"], options["softcap"], options["sinks_H"]
    )
    torch.testing.assert_close(
        block_attention.reference(query, key, value, rows, **options), wanted
    )


@pytest.mark.parametrize("num_processors", [82, 132, 148, 170])
def test_shares_fill_the_places_that_there_are_and_no_more(num_processors: int) -> None:
    """A program too many takes as long again as all the others; a share of one tile is not worth its reduction."""
    kernel = importlib.import_module("dflash_kernels.block_attention.kernel")
    for num_programs in (1, 2, 8, 16, 32, 64, 256, 300, 1000):
        for num_tiles in (1, 2, 3, 33, 516, 2048):
            splits = kernel.choose_num_splits(num_tiles, num_programs, num_processors)
            assert splits == 1 or splits * num_programs <= 2 * num_processors
            assert splits == 1 or splits * kernel.MIN_TILES_PER_SPLIT <= num_tiles
    # Qwen3-8B at 32k on a H200: 8 key heads; batch 2, 4, 8 and 32.
    assert [kernel.choose_num_splits(512, 8 * batch, 132) for batch in (1, 2, 4, 8, 32)] == [
        33,
        16,
        8,
        4,
        1,
    ]
    assert kernel.choose_num_splits(2048, 1, 132) == kernel.MAX_SPLITS == 128


def test_what_sees_nothing_is_zero() -> None:
    tensors, options = inputs(
        {"window": 0, "has_sinks": True, "lengths": [-9, 3]}, torch.float32, "cpu"
    )
    assert not block_attention.reference(*tensors, **options).any()
    assert not block_attention.reference(*tensors, **options | {"sinks_H": None}).any()


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_with_a_true_schema(device: str) -> None:
    tensors, options = inputs(
        {"lengths": [4], "ring": 20, "has_sinks": True}, torch.float32, device
    )
    tensors = [t.nan_to_num() for t in tensors]
    given_as = ("scaling", "causal", "window", "from_anchor", "softcap", "sinks_H")
    torch.library.opcheck(block_attention.op, (*tensors, *(options[name] for name in given_as)))


def test_bad_input_of_trees() -> None:
    tensors, options = inputs({"tree": True}, torch.float32, "cpu")
    for change in (
        {"depths_BW": None},
        {"ancestors_BWA": None},
        {"causal": False},
        {"from_anchor": True, "window": 3},
    ):
        check_raises(
            lambda change=change: block_attention(*tensors, **options | change),
            "expected depths and ancestors together",
        )
    no_words = options["ancestors_BWA"][..., :0]
    fewer_words = options | {"ancestors_BWA": no_words}
    check_raises(lambda: block_attention(*tensors, **fewer_words), "expected 1 words of ancestors")
    wide, options = inputs({"tree": True, "width": 257, "ring": 300}, torch.float32, "cpu")
    check_raises(
        lambda: block_attention(*wide, **options),
        "a causal block of at most 256 tokens, got width 257",
    )


def test_bad_input() -> None:
    (query, key, value, lengths), options = inputs({}, torch.float32, "cpu")
    check_raises(
        lambda: block_attention(query, key[:, :, :, :8], value, lengths, **options), "key_BGRE"
    )
    check_raises(
        lambda: block_attention(query, key, value.half(), lengths, **options),
        "value_BGRF",
        "float16",
    )
    check_raises(
        lambda: block_attention(query[:, :3], key, value, lengths, **options), "multiple of G"
    )
    short = [t[:, :, :3] for t in (key, value)]
    check_raises(lambda: block_attention(query, *short, lengths, **options), "R 3", "W 4")
    check_raises(lambda: block_attention(query, key, value, lengths[:2], **options), "lengths_B")
    check_raises(
        lambda: block_attention(query, key, value, lengths, **options | {"window": -1}), "window"
    )
    check_raises(
        lambda: block_attention(query, key, value, lengths, **options | {"softcap": 0.0}), "softcap"
    )
    check_raises(
        lambda: block_attention(query, key, value, lengths, **options | {"sinks_H": lengths}),
        "sinks_H",
    )
