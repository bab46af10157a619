"""What one row whose end the host knows may see, made in a few operations, is what it may see by definition."""

from __future__ import annotations

import pytest
import torch

from dflash_hf.block.attention import RaggedBlock
from dflash_hf.block.tree import DraftTree, TreeBuilder


@pytest.mark.parametrize("length", [0, 1, 9])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("width", "causal", "is_tree"),
    [(width, causal, False) for width in (1, 2, 16) for causal in (True, False)]
    + [(2, True, True), (16, True, True)],
)
def test_one_row_is_masked_as_a_row_of_many(
    length: int, window: int | None, causal: bool, width: int, is_tree: bool
) -> None:
    torch.manual_seed(length)
    tree = None
    if is_tree:
        nodes = torch.zeros(4, 1, width, dtype=torch.long)
        scores = torch.randn(1, 5, 9)
        TreeBuilder(width, 5, 9, torch.device("cpu")).build(
            scores, nodes, torch.zeros(1, width, dtype=torch.long)
        )
        tree = DraftTree(*nodes[:3])
    bound = length + width
    positions = length + torch.arange(width)[None]
    masks = [
        RaggedBlock(positions, bound, is_exact, tree).mask(
            bound, (window, causal, False), 2, torch.float64
        )
        for is_exact in (False, True)
    ]
    assert masks[0] is not None
    seen = torch.zeros_like(masks[0]) if masks[1] is None else masks[1]
    assert torch.equal(seen, masks[0])
    if causal and width > 1:
        assert torch.isinf(seen).any()
