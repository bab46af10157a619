"""`build_tree`: the kernel against its definition. The definition against a search by heap is in unit/test_tree.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_hf.block.tree import FOLLOWS, GOES_ON
from dflash_kernels import build_tree
from helpers.half import half
from helpers.kernel_checks import DEVICES, Guarded, ancestors_of, assert_same_writes, check_raises

BATCH, TOKENS = 2, 200
Given = dict[str, Any]


def draft(
    num_nodes: int,
    depth: int,
    vocab: int,
    has_states: bool,
    seed: int,
    spread: float = 2.0,
    batch: int = BATCH,
) -> Given:
    """Random scores by rank; with states a selector's, behind each of `vocab` candidates."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(
        batch, depth, vocab if has_states else 1, vocab, generator=generator
    )
    best, order = scores.log_softmax(dim=-1).topk(min(vocab, num_nodes - 1), dim=-1)
    found = {"log_probs_BDSR": best, "order_BDSR": order}
    if has_states:
        order = torch.rand(batch, depth, TOKENS, generator=generator).argsort(dim=-1)
        found["candidates_BDC"] = order[..., :vocab].contiguous()
    return found


def text(kind: str, vocab: int, seed: int, batch: int = BATCH) -> Given:
    """Rows of different lengths, of few tokens, so that ends come again, or of none that do."""
    generator = torch.Generator().manual_seed(seed)
    num_columns = 90
    follows = torch.tensor((FOLLOWS, GOES_ON)).log()
    ids = torch.randint(0, min(vocab, 4), (BATCH, num_columns), generator=generator)
    cursor = torch.tensor([num_columns, num_columns // 2])
    if kind == "nothing before":
        ids = torch.arange(num_columns).expand(BATCH, -1).clone()
    elif kind == "at the beginning":  # the first token follows itself, which is all that there is
        ids[:], cursor = 1, torch.tensor([2, 1])
    elif kind == "likely":
        follows = torch.tensor([[0.0, 0.97, 0.98], [0.0, 0.99, 0.99]]).log()
    elif kind == "one token":
        follows = follows[:, :2]
    return {"ids_BT": ids[:batch], "cursor_B": cursor[:batch], "follows_FM": follows}


def agreed(num_nodes: int, given: Given, device: str) -> Tensor:
    """Runs both over the same, checks that they write the same and nothing around, and returns the nodes."""
    given = {name: tensor.to(device) for name, tensor in given.items()}
    batch = given["order_BDSR"].shape[0]
    num_parts = 3 + -(-num_nodes // 64)
    nodes = torch.full((num_parts, batch, num_nodes), 7)
    block = torch.arange(batch * num_nodes).view(batch, num_nodes)
    wanted = {"nodes_XBN": Guarded(nodes.to(device)), "block_BN": Guarded(block.to(device))}
    ours = {name: guarded.copy() for name, guarded in wanted.items()}
    for operation, written in ((build_tree.reference, wanted), (build_tree, ours)):
        operation(**given, **{name: guarded.tensor for name, guarded in written.items()})
    assert_same_writes(ours, wanted)
    found = ours["nodes_XBN"].tensor.cpu()
    parents, _, depths = found[:3]
    assert torch.equal(found[3:].permute(1, 2, 0), ancestors_of(parents))
    assert torch.equal(depths[:, 1:], depths.gather(1, parents)[:, 1:] + 1)
    assert torch.all(parents[:, 1:] < torch.arange(1, num_nodes))
    return found


# Nodes, positions, tokens to choose among.
SHAPES = [
    (2, 1, 5),
    (3, 4, 3),
    (8, 7, 40),
    (16, 15, 40),
    (5, 1, 4),
    (12, 3, 3),
    (33, 7, 6),
    (9, 31, 12),
    (64, 6, 70),
    (65, 6, 70),
    (128, 15, 63),
    (130, 5, 12),
    (256, 7, 9),
]
# From so many on a shape is tested with tokens or with candidates, in turn; the others are `slow`.
MANY = 60


def shapes_and_states() -> list[Any]:
    """Every shape with tokens and with candidates."""
    found: list[Any] = []
    for place, (num_nodes, depth, vocab) in enumerate(SHAPES):
        for has_states in (False, True):
            is_its_turn = has_states == bool(place % 2)
            marks = [] if num_nodes < MANY or is_its_turn else [pytest.mark.slow]
            kind = "candidates" if has_states else "tokens"
            name = f"{num_nodes}-{depth}-{vocab}-{kind}"
            found.append(pytest.param(num_nodes, depth, vocab, has_states, id=name, marks=marks))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_nodes", "depth", "vocab", "has_states"), shapes_and_states())
def test_the_kernel_builds_what_the_definition_says(
    num_nodes: int, depth: int, vocab: int, has_states: bool, device: str
) -> None:
    # A row is a program of its own, and one of a large tree takes the interpreter seconds.
    batch = 1 if num_nodes > 30 else BATCH
    given = draft(num_nodes, depth, vocab, has_states, num_nodes, batch=batch)
    agreed(num_nodes, given, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "has_states"),
    half(
        ["as usual", "likely", "one token", "nothing before", "at the beginning"],
        {"tokens": False, "candidates": True},
    ),
)
def test_and_with_what_the_text_has_said_before(kind: str, has_states: bool, device: str) -> None:
    changed = 0
    # Interpreted, a tree costs by its nodes: one kind of text meets two words of ancestors.
    shapes = [(2, 1, 5), (8, 7, 9), (16, 5, 4), (12, 9, 12)]
    if kind == "as usual":
        shapes.append((70, 9, 12))
    for seed, (num_nodes, depth, vocab) in enumerate(shapes):
        batch = 1 if num_nodes > 30 else BATCH
        spread = 0.7 + seed % 2
        given = draft(num_nodes, depth, vocab, has_states, seed, spread, batch)
        # Candidates among the text's few tokens too, so that both say the same in places
        if has_states:
            given["candidates_BDC"] = torch.arange(vocab).expand(batch, depth, -1).contiguous()
        without = torch.zeros(3 + -(-num_nodes // 64), batch, num_nodes, dtype=torch.long)
        build_tree.reference(**given, nodes_XBN=without, block_BN=without[0].clone())
        nodes = agreed(num_nodes, given | text(kind, vocab, seed, batch), device)
        changed += not torch.equal(nodes, without)
    assert (changed > 0) == (kind != "nothing before")


@pytest.mark.parametrize("device", DEVICES)
def test_a_long_text_is_looked_through_in_parts(device: str) -> None:
    """The latest of the longest, wherever a part of 1,024 columns ends."""
    for at in (0, 1020, 1024, 2047):
        ids = torch.arange(5000, 8000).expand(BATCH, -1).clone()
        ids[:, at : at + 6] = torch.arange(6)
        ids[:, 300:303] = torch.tensor([7, 2, 3])  # shares one token less
        ids[:, 2700:2703] = torch.arange(3)
        follows = torch.tensor([[0.0, 0.9, 0.9, 0.9], [0.0, 0.9, 0.9, 0.9]]).log()
        given = draft(6, 3, 9, False, at) | {"ids_BT": ids, "cursor_B": torch.tensor([2703, 2703])}
        agreed(6, given | {"follows_FM": follows}, device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_forbidden_or_not_a_number_ends(device: str) -> None:
    for value in (-torch.inf, torch.nan):
        given = draft(16, 5, 20, False, 3)
        given["log_probs_BDSR"][:, :, :, 2:] = value
        given = {name: tensor.to(device) for name, tensor in given.items()}
        nodes, block = (
            torch.full(size, 7, device=device) for size in ((4, BATCH, 16), (BATCH, 16))
        )
        build_tree(**given, nodes_XBN=nodes, block_BN=block)
        assert torch.all(nodes[0, :, 1:] < torch.arange(1, 16, device=device))


def test_bad_input() -> None:
    nodes, block = (
        torch.zeros(4, BATCH, 4, dtype=torch.long),
        torch.zeros(BATCH, 4, dtype=torch.long),
    )
    given = (
        draft(4, 3, 9, True, 0) | text("as usual", 9, 0) | {"nodes_XBN": nodes, "block_BN": block}
    )
    build_tree(**given)

    def refuses(words: str, **changed: Any) -> None:
        check_raises(lambda: build_tree(**(given | changed)), words)

    refuses("order_BDSR", order_BDSR=given["order_BDSR"].int())
    refuses("log_probs_BDSR", log_probs_BDSR=given["log_probs_BDSR"].double())
    refuses(
        "contiguous", order_BDSR=given["order_BDSR"].transpose(1, 2).contiguous().transpose(1, 2)
    )
    refuses("block_BN", block_BN=block[:, :3])
    refuses("unit stride", ids_BT=given["ids_BT"].T.contiguous().T)
    refuses("nodes_XBN", nodes_XBN=nodes[:3])
    refuses("nodes_XBN", nodes_XBN=nodes[:, :, :1], block_BN=block[:, :1])
    many = {
        "nodes_XBN": torch.zeros(8, BATCH, 257, dtype=torch.long),
        "block_BN": torch.zeros(BATCH, 257, dtype=torch.long),
    }
    refuses("N from 2 to 256", **many)
    refuses("a state per candidate", candidates_BDC=given["candidates_BDC"][..., :5].contiguous())
    refuses("a state per candidate", candidates_BDC=None)
    refuses("ids_BT and follows_FM", cursor_B=None)
    few = draft(4, 1, 2, False, 0)
    check_raises(
        lambda: build_tree(**few, nodes_XBN=nodes, block_BN=block), "2 ranks over 1 levels"
    )
