"""`keep_path`: the reference by hand, the kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels import keep_path
from helpers.kernel_checks import DEVICES, DTYPES, check_raises


def inputs(
    shapes: list[tuple[int, int, int]],
    lengths: list[int],
    num: int,
    dtype: torch.dtype,
    device: str,
) -> Any:
    """Random paths, some of them short, and buffers `[B, R, G, E]`."""
    generator = torch.Generator().manual_seed(num)
    path = torch.zeros(len(lengths), num + 2, dtype=torch.long)
    for row in range(len(lengths)):
        end = int(torch.randint(0, num, (), generator=generator))
        nodes = 1 + torch.randperm(2 * num, generator=generator)[:end].sort().values
        path[row, 1 : 1 + end] = nodes
    buffers = [
        torch.randn(len(lengths), *shape, generator=generator).to(device, dtype) for shape in shapes
    ]
    # As a step has them: parts of wider tensors.
    return path.to(device)[:, :num], torch.tensor(lengths, device=device), buffers


def moved(path: Tensor, lengths: Tensor, buffer: Tensor) -> dict[tuple[int, int], Tensor]:
    """What must stand in each slot up to the end of each row's path, and before the anchor."""
    found: dict[tuple[int, int], Tensor] = {}
    ring, width = buffer.shape[1], 2 * path.shape[1] + 1
    for row, length in enumerate(lengths.tolist()):
        for index in range(max(length + width - ring, 0), length + 1):
            found[row, index % ring] = buffer[row, index % ring].clone()
        for depth, node in enumerate(path[row].tolist()):
            if depth and node:
                found[row, (length + depth) % ring] = buffer[row, (length + node) % ring].clone()
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [DTYPES[0], torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shapes", "lengths", "num"),
    [
        ([(40, 2, 8), (40, 2, 8)], [0, 7, 20], 4),
        ([(90, 2, 24), (25, 2, 24), (90, 1, 16)], [50, 3], 8),
        ([(70, 1, 8)] * 35, [31], 12),
        ([(40, 8, 160)], [5], 16),
        ([(9, 1, 8)], [3, 200], 1),
    ],
)
def test_the_path_stands_where_a_chain_would(
    shapes: list[tuple[int, int, int]],
    lengths: list[int],
    num: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    for move in (keep_path.reference, keep_path):
        path, rows, buffers = inputs(shapes, lengths, num, dtype, device)
        wanted = [moved(path, rows, buffer) for buffer in buffers]
        move(path, rows, buffers)
        for buffer, found in zip(buffers, wanted, strict=True):
            for (row, slot), states in found.items():
                assert torch.equal(buffer[row, slot], states)


def test_bad_input() -> None:
    path, lengths, buffers = inputs([(40, 2, 8)], [3, 4], 4, torch.float32, "cpu")
    check_raises(lambda: keep_path(path.int(), lengths, buffers), "path_BN")
    check_raises(lambda: keep_path(path, lengths[:1], buffers), "lengths_B")
    check_raises(lambda: keep_path(path, lengths, [buffers[0][:, :3]]), "contiguous buffers")
    check_raises(
        lambda: keep_path(path, lengths, [buffers[0][:1].contiguous()]), "contiguous buffers"
    )
    check_raises(
        lambda: keep_path(path, lengths, [buffers[0].transpose(2, 3)]), "contiguous buffers"
    )
