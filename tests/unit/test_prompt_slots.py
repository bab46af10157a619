"""`PromptSlots` against writing token by token: the newest that fit into a ring, whatever the padding."""

from __future__ import annotations

import pytest
import torch

from dflash_hf.cache.prefilled import PromptSlots, RowRun
from dflash_hf.cache.ragged import RaggedLayer
from dflash_hf.cache.size import LayerShape

CPU = torch.device("cpu")


def indices(*rows: tuple[int, int], columns: int) -> torch.Tensor:
    """Positions of left-padded rows, given the length of each and the index of its first token."""
    return torch.tensor(
        [[-1] * (columns - num) + list(range(first, first + num)) for num, first in rows]
    )


@pytest.mark.parametrize("ring", [4, 7, 16])
@pytest.mark.parametrize("num_columns", [3, 6])
@pytest.mark.parametrize(
    ("positions", "is_a_run"),
    [
        (indices((6, 0), columns=6), True),
        (indices((6, 0), (6, 0), columns=6), True),
        (indices((6, 0), (6, 1), columns=6), False),
        (indices((6, 0), (2, 0), columns=6), False),
        (indices((6, 5), columns=6), None),
        (indices((4, 9), (6, 3), columns=6), False),
    ],
)
def test_columns_go_where_each_token_belongs(
    positions: torch.Tensor, is_a_run: bool | None, ring: int, num_columns: int
) -> None:
    shape = LayerShape(2, 3, 5, None, torch.float64, torch.float64, CPU)
    layer = RaggedLayer(shape, len(positions), ring, 0)
    keys = torch.randn(len(positions), num_columns, 2, 3, dtype=torch.float64)
    values = torch.randn(len(positions), num_columns, 2, 5, dtype=torch.float64)
    expected = [torch.zeros_like(layer.key_buffer), torch.zeros_like(layer.value_buffer)]
    newest = positions[:, -num_columns:]
    for row, column in (newest >= 0).nonzero().tolist():
        position = int(newest[row, column])
        if position > int(newest[row].max()) - ring:
            for buffer, states in zip(expected, (keys, values), strict=True):
                buffer[row, position % ring] = states[row, column]
    prompts = PromptSlots(positions)
    layer.write_rows(keys, values, prompts)
    assert torch.equal(layer.key_buffer, expected[0])
    assert torch.equal(layer.value_buffer, expected[1])
    where = prompts.of(ring, num_columns, CPU)
    assert where is prompts.of(ring, num_columns, CPU)
    if is_a_run is False and num_columns == 6:
        assert not isinstance(where, RowRun)
    elif is_a_run and ring >= 6:
        assert isinstance(where, RowRun)
