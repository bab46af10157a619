"""Anchors are valid, random and reproducible, and the one mask rule equals loops written from its definition."""

import pytest
import torch

from dflash_hf.training.anchors import (
    Anchors,
    BlockMaskRule,
    all_anchors,
    sample_anchors,
    valid_anchors,
)
from dflash_hf.training.collators import Batch

# (window, causal, from_anchor)
KINDS = [
    *(
        (window, causal, False)
        for window, causal in [(None, False), (None, True), (3, True), (3, False), (8, True)]
    ),
    *((8, False, False), (1, False, False), (3, True, True), (3, False, True), (1, True, True)),
]


def defined_mask(
    real: list[bool],
    anchors: list[int],
    block: int,
    window: int | None,
    causal: bool,
    from_anchor: bool,
) -> torch.Tensor:
    """Mask `[A * K, S + A * K]` of one row, straight from the definition."""
    num_context, num_queries = len(real), len(anchors) * block
    mask = torch.zeros(num_queries, num_context + num_queries, dtype=torch.bool)
    for query in range(num_queries):
        block_of_query, offset = divmod(query, block)
        anchor = anchors[block_of_query]
        for column in range(num_context):
            near = window is None or (
                anchor + offset - column < window if not from_anchor else column >= anchor - window
            )
            mask[query, column] = real[column] and column < anchor and near
        for other in range(num_queries):
            block_of_key, key_offset = divmod(other, block)
            if block_of_key != block_of_query or (causal and key_offset > offset):
                continue
            mask[query, num_context + other] = (
                window is None or from_anchor or abs(offset - key_offset) < window
            )
    return mask


@pytest.mark.parametrize("kind", KINDS)
def test_mask_equals_the_definition(kind: tuple[int | None, bool, bool], batch: Batch) -> None:
    anchors = sample_anchors(batch.loss_mask, 4, 5, torch.Generator().manual_seed(0))
    assert not anchors.keep.all(), "no row with a missing anchor: the case is not covered"
    mask = BlockMaskRule(batch.attention_mask, anchors).dense(kind)
    assert mask.shape == (3, 1, 20, batch.input_ids.shape[1] + 20)
    for row in range(3):
        expected = defined_mask(
            batch.attention_mask[row].tolist(), anchors.indices[row].tolist(), 5, *kind
        )
        assert torch.equal(mask[row, 0], expected)
    assert mask.any(dim=-1).all(), "a query that sees nothing gives NaN"


@pytest.mark.parametrize("kind", KINDS)
def test_flex_mask_is_the_dense_one(kind: tuple[int | None, bool, bool], batch: Batch) -> None:
    anchors = sample_anchors(batch.loss_mask, 4, 5, torch.Generator().manual_seed(0))
    rule = BlockMaskRule(batch.attention_mask, anchors)
    block_mask, dense = rule.block_mask(kind), rule.dense(kind)
    rows, queries, keys = (torch.arange(size) for size in rule.shape)
    seen = block_mask.mask_mod(rows[:, None, None], torch.tensor(0), queries[:, None], keys)
    assert torch.equal(seen, dense[:, 0])
    assert torch.equal(block_mask.to_dense().bool().amax(dim=(2, 3)), dense.amax(dim=(2, 3)))


def test_anchors_are_answer_tokens_with_a_successor() -> None:
    loss_mask = torch.tensor([[0, 1, 1, 1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0, 1]]).bool()
    expected = torch.tensor([[0, 1, 1, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    assert torch.equal(valid_anchors(loss_mask), expected)


def test_sampled_anchors_are_distinct_valid_sorted_and_seeded(batch: Batch) -> None:
    valid = valid_anchors(batch.loss_mask)
    drawn = [
        sample_anchors(batch.loss_mask, 4, 5, torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    for anchors in drawn:
        assert anchors.keep.sum(dim=1).tolist() == [4, 2, 4]
        for row in range(3):
            kept = anchors.indices[row][anchors.keep[row]].tolist()
            assert kept == sorted(set(kept))
            assert valid[row, kept].all()
            assert not anchors.indices[row][~anchors.keep[row]].any()
    assert torch.equal(drawn[0].indices, drawn[1].indices)
    assert not torch.equal(drawn[0].indices, drawn[2].indices)


def test_sampling_is_uniform_over_the_valid_anchors() -> None:
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]]).bool().expand(4000, -1)
    anchors = sample_anchors(loss_mask, 1, 4, torch.Generator().manual_seed(0))
    counts = anchors.indices.flatten().bincount(minlength=8)
    assert counts[[0, 1, 6, 7]].sum() == 0
    # 1000 expected each; the standard deviation is 27.
    assert ((counts[2:6] - 1000).abs() < 140).all()


def test_all_anchors_are_all_of_them(batch: Batch) -> None:
    anchors = all_anchors(batch.loss_mask, 5)
    for row, expected in enumerate((range(4, 12), range(7, 9), range(1, 14))):
        assert anchors.indices[row][anchors.keep[row]].tolist() == list(expected)


def test_rows_without_any_anchor_are_kept_empty() -> None:
    loss_mask = torch.zeros(2, 5, dtype=torch.bool)
    for anchors in (sample_anchors(loss_mask, 3, 4), all_anchors(loss_mask, 4)):
        assert anchors.indices.shape == (2, 1)
        assert not anchors.keep.any()
        mask = BlockMaskRule(torch.ones(2, 5, dtype=torch.bool), anchors).dense(
            (None, False, False)
        )
        assert not mask[..., :5].any()


def test_positions_and_selection() -> None:
    anchors = Anchors(
        indices=torch.tensor([[2, 5, 9]]), keep=torch.ones(1, 3, dtype=torch.bool), block_size=3
    )
    assert anchors.positions.tolist() == [[[2, 3, 4], [5, 6, 7], [9, 10, 11]]]
    assert anchors.select(1, 5).positions.tolist() == [[[5, 6, 7], [9, 10, 11]]]
