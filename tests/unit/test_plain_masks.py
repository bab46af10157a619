"""What one row whose end the host knows may see, made in a few operations, is what it may see by definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.block.attention import RaggedBlock, RaggedMask, TreeBlock, attend, mask_repeats
from dflash_hf.block.tree import DraftTree, TreeBuilder, new_nodes
from dflash_hf.draft_model.layers import CombinedProjector, DFlashAttention, Operands


@pytest.mark.parametrize("length", [0, 1, 9])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("width", "causal", "is_tree"),
    [(width, causal, False) for width in (1, 2, 16) for causal in (True, False)]
    + [(2, True, True), (16, True, True), (100, True, True)],
)
def test_one_row_is_masked_as_a_row_of_many(
    length: int, window: int | None, causal: bool, width: int, is_tree: bool
) -> None:
    torch.manual_seed(length)
    tree = None
    if is_tree:
        nodes = new_nodes(1, width, torch.device("cpu"))
        scores = torch.randn(1, 5, 9)
        TreeBuilder(width, 5, 9, torch.device("cpu")).build(
            scores, nodes, torch.zeros(1, width, dtype=torch.long)
        )
        tree = DraftTree.of(nodes)
    bound = length + width
    positions = length + torch.arange(width)[None]
    masks = []
    for is_exact in (False, True):
        block = RaggedBlock(positions, bound, is_exact)
        if tree is not None:
            block = TreeBlock(positions, bound, is_exact, tree=tree)
        masks.append(block.mask(bound, (window, causal, False), 2, torch.float64))
    assert masks[0] is not None
    seen = torch.zeros_like(masks[0]) if masks[1] is None else masks[1]
    assert torch.equal(seen, masks[0])
    if causal and width > 1:
        assert torch.isinf(seen).any()


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("is_exact", [False, True])
def test_half_precision_attends_as_float32_does(width: int, is_exact: bool) -> None:
    # In half precision the query heads of a key head are packed along the token axis.
    torch.manual_seed(width)
    positions = 11 + torch.arange(width)[None]
    block = RaggedBlock(positions, 11 + width, is_exact)
    mask = RaggedMask(block, (None, True, False))
    query = torch.randn(1, 6, width, 16)
    key = torch.randn(1, 2, 11 + width, 16)
    value = torch.randn(1, 2, 11 + width, 16)
    expected = attend(query, key, value, mask, 0.25)
    packed = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), mask, 0.25)
    assert mask_repeats(3, width, 11 + width, query.device, torch.bfloat16) == 3
    torch.testing.assert_close(packed.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("width", "past", "repeats"),
    [(1, 1023, 1), (2, 1022, 3), (16, 1008, 3), (17, 1007, 1), (2, 1021, 1)],
)
def test_packed_heads_attend_as_others_do(width: int, past: int, repeats: int) -> None:
    torch.manual_seed(width)
    num_keys = past + width
    block = RaggedBlock(past + torch.arange(width)[None], num_keys, is_exact=True)
    mask = RaggedMask(block, (None, True, False))
    query = torch.randn(1, 6, width, 16, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, num_keys, 16, dtype=torch.float64)
    assert mask_repeats(3, width, num_keys, query.device, query.dtype) == repeats
    found = attend(query, key, value, mask, 0.25)
    expected = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(3, dim=1),
        value.repeat_interleave(3, dim=1),
        attn_mask=block.dense_mask(num_keys, mask.kind, 1, query.dtype),
        scale=0.25,
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_a_block_of_another_dtype_than_its_queries_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under autocast a norm with float32 weights makes the queries float32 again.
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
    config = DFlashConfig(
        vocab_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        block_size=4,
        mask_token_id=3,
        num_target_layers=4,
        target_layer_ids=[0, 2],
        **sizes,
    )
    draft = DFlashDraftModel(config)
    embeds = torch.randn(2, 4, 32).bfloat16()
    context = torch.randn(2, 6, 64).bfloat16()
    operands: list[set[torch.dtype]] = []

    def seen(self: CombinedProjector, attention: DFlashAttention, normed: Tensor) -> Operands:
        query, key, value, mask = project(self, attention, normed)
        operands.append({query.dtype, key.dtype, value.dtype})
        return query, key, value, mask

    project = CombinedProjector.project
    monkeypatch.setattr(CombinedProjector, "project", seen)
    with torch.autocast("cpu", torch.bfloat16):
        assert draft(embeds, context).last_hidden_state.shape == (2, 4, 32)
    # FlexAttention takes one dtype, and values are of the autocast's.
    assert operands == [{torch.bfloat16}] * 2
