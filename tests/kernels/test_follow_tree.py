"""`follow_tree`: the kernel against its definition. The definition node by node is in unit/test_tree.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_kernels import follow_tree
from helpers.kernel_checks import DEVICES, Guarded, ancestors_of, assert_same_writes, check_raises

WRITTEN = ("block_BN", "tokens_BN", "node_ids_BN", "path_BN")


def tree(num: int, batch: int, seed: int) -> dict[str, Tensor]:
    """Random trees whose siblings differ, and what a target says, which often is one of the children."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths, block, tokens = torch.zeros(4, batch, num, dtype=torch.long)
    for row in range(batch):
        for node in range(1, num):
            parent = max(0, node - int(torch.randint(1, 4, (), generator=generator)))
            parents[row, node], depths[row, node] = parent, depths[row, parent] + 1
            block[row, node] = int((parents[row, :node] == parent).sum()) + 10
            if torch.rand((), generator=generator) < 0.6:
                tokens[row, parent] = block[row, node]
    return {
        "parents_BN": parents,
        "depths_BN": depths,
        "ancestors_BNA": ancestors_of(parents),
        "block_BN": block,
        "tokens_BN": tokens,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num", [1, 2, 3, 8, 16, 31, 64, 65, 100, 128, 129, 192, 256])
def test_the_kernel_goes_the_path_of_the_definition(num: int, device: str) -> None:
    ends: set[int] = set()
    for seed in range(4):
        given = {name: tensor.to(device) for name, tensor in tree(num, 3, seed).items()}
        wanted = {name: Guarded(given[name]) for name in WRITTEN[:2]}
        wanted |= {name: Guarded(torch.full_like(given["block_BN"], 7)) for name in WRITTEN[2:]}
        ours = {name: guarded.copy() for name, guarded in wanted.items()}
        for operation, written in ((follow_tree.reference, wanted), (follow_tree, ours)):
            operation(**(given | {name: guarded.tensor for name, guarded in written.items()}))
        assert_same_writes(ours, wanted)
        ends |= set((ours["path_BN"].tensor > 0).sum(dim=1).tolist())
    assert len(ends) > 1 or num == 1


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_wider_tensors(device: str) -> None:
    """As a step has them: the first nodes of the widest verify, and a path beside what else the host is told."""
    given = {name: tensor.to(device) for name, tensor in tree(16, 2, 1).items()}
    wanted, ours = (
        {name: tensor.clone()[:, :6] for name, tensor in given.items()} for _ in range(2)
    )
    for operation, written in ((follow_tree.reference, wanted), (follow_tree, ours)):
        written["node_ids_BN"] = torch.full((2, 16), 7, device=device)[:, :6]
        written["path_BN"] = torch.full((20, 2), 7, device=device)[5:11].T
        operation(**written)
    for name, tensor in ours.items():
        assert torch.equal(tensor, wanted[name]), name


def test_bad_input() -> None:
    given = tree(8, 2, 0)
    given |= {name: torch.zeros(2, 8, dtype=torch.long) for name in WRITTEN[2:]}
    check_raises(lambda: follow_tree(**(given | {"path_BN": given["path_BN"].int()})), "path_BN")
    check_raises(
        lambda: follow_tree(**(given | {"tokens_BN": given["tokens_BN"][:, :7]})), "tokens_BN"
    )
    check_raises(
        lambda: follow_tree(**(given | {"block_BN": given["block_BN"].T.contiguous().T})),
        "unit stride",
    )
    wide = {name: torch.zeros(1, 257, dtype=torch.long) for name in given}
    wide["ancestors_BNA"] = torch.zeros(1, 257, 5, dtype=torch.long)
    check_raises(lambda: follow_tree(**wide), "1 to 256 nodes")
    more_words = given["ancestors_BNA"].repeat(1, 1, 2)
    check_raises(
        lambda: follow_tree(**(given | {"ancestors_BNA": more_words})), "1 words of ancestors"
    )
