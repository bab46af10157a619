"""Trees of proposals: against best-first search by definition, and the path that a target goes through them."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
import torch
from torch import Tensor

from dflash_hf.block.tree import DraftTree, TreeBuilder, along, new_nodes
from dflash_hf.ops import MAX_NODES
from dflash_kernels.ancestors import are_ancestors
from dflash_kernels.build_tree import DOUBT, LEVEL, continuation

CPU = torch.device("cpu")


def best_paths(log_probs_DV: Tensor, num: int) -> set[tuple[int, ...]]:
    """The most likely `num` paths of tokens, one after the other from a heap."""
    values, ids = (tensor.tolist() for tensor in log_probs_DV.sort(dim=-1, descending=True))
    heap: list[tuple[float, tuple[int, ...]]] = [(-values[0][0], (0,))]
    found: set[tuple[int, ...]] = set()
    while len(found) < num:
        cost, ranks = heapq.heappop(heap)
        found.add(tuple(ids[level][rank] for level, rank in enumerate(ranks)))
        level, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < len(values[level]):
            heapq.heappush(
                heap,
                (cost + values[level][rank] - values[level][rank + 1], (*ranks[:-1], rank + 1)),
            )
        if level + 1 < len(values):
            heapq.heappush(heap, (cost - values[level + 1][0], (*ranks, 0)))
    return found


def built(
    trees: TreeBuilder, scores: Tensor, text: tuple[Tensor, ...] = ()
) -> tuple[DraftTree, Tensor, Tensor]:
    """The trees of scores, their tokens with anchors of token 0, and their sources."""
    nodes = new_nodes(scores.shape[0], trees.num_nodes, CPU).fill_(7)
    block = torch.zeros(scores.shape[0], trees.num_nodes, dtype=torch.long)
    trees.build(scores, nodes, block, None, text)
    return DraftTree.of(nodes), block, nodes[1]


def path_to(tree: DraftTree, block: Tensor, row: int, node: int) -> tuple[int, ...]:
    """The tokens from the anchor to a node."""
    if node == 0:
        return ()
    return (*path_to(tree, block, row, int(tree.parents[row, node])), int(block[row, node]))


@pytest.mark.parametrize(
    ("num_nodes", "depth", "vocab"),
    [
        (2, 1, 5),
        (8, 7, 40),
        (16, 15, 40),
        (32, 7, 50),
        (64, 15, 70),
        (65, 15, 70),
        (128, 15, 63),
        (MAX_NODES, 15, 63),
        (5, 1, 4),
        (12, 3, 3),
        (16, 1, 15),
    ],
)
def test_the_nodes_are_the_most_likely_paths(num_nodes: int, depth: int, vocab: int) -> None:
    torch.manual_seed(num_nodes)
    scores = 3 * torch.randn(4, depth, vocab)
    tree, block, _ = built(TreeBuilder(num_nodes, depth, vocab, CPU), scores)
    log_probs = scores.log_softmax(dim=-1)
    is_ancestor = tree.are_ancestors(torch.arange(num_nodes)[None])
    for row in range(4):
        paths = [path_to(tree, block, row, node) for node in range(num_nodes)]
        assert set(paths[1:]) == best_paths(log_probs[row] - LEVEL, num_nodes - 1)
        likely = [
            sum(float(log_probs[row, level, token]) - LEVEL for level, token in enumerate(path))
            for path in paths
        ]
        assert all(a >= b - 1e-5 for a, b in itertools.pairwise(likely)), (
            "so that the first nodes are the best smaller tree"
        )
        assert tree.depths[row].tolist() == [len(path) for path in paths]
        for node, path in enumerate(paths):
            on_path = set(is_ancestor[row, node].nonzero()[:, 0].tolist())
            assert on_path == {paths.index(path[:end]) for end in range(len(path) + 1)}


@pytest.mark.parametrize("num_words", [1, 2, 4])
def test_a_bit_of_a_word_stands_for_each_ancestor(num_words: int) -> None:
    """Of every node of the words alone, the sign among them."""
    num_nodes = 64 * num_words
    nodes = torch.arange(num_nodes)[None]
    for node in (0, 1, 62, 63, num_nodes - 2, num_nodes - 1):
        words = torch.zeros(1, 1, num_words, dtype=torch.long)
        words[0, 0, node // 64] = (
            torch.iinfo(torch.long).min if node % 64 == 63 else 2 ** (node % 64)
        )
        found = are_ancestors(words, nodes)
        assert found.shape == (1, 1, num_nodes)
        assert found.nonzero()[:, 2].tolist() == [node]


def test_a_default_dtype_of_the_users_does_not_count() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert TreeBuilder(8, 7, 30, CPU).follows.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_a_draft_that_is_sure_gives_a_chain() -> None:
    """Also where a probability rounds to one, so that a child is as likely as its parent."""
    scores = torch.zeros(1, 7, 30)
    scores[0, range(7), range(3, 10)] = 200.0
    tree, block, _ = built(TreeBuilder(8, 7, 30, CPU), scores)
    assert block.tolist() == [[0, *range(3, 10)]]
    assert tree.parents.tolist() == [[0, *range(7)]]
    assert tree.depths.tolist() == [list(range(8))]


def test_what_is_forbidden_stands_behind_everything_else() -> None:
    scores = torch.full((1, 2, 12), -math.inf)
    scores[0, :, :3] = 0.0
    _, block, sources = built(TreeBuilder(4, 2, 12, CPU), scores)
    assert set(block[0, 1:].tolist()) <= {0, 1, 2}
    assert not sources.any()


@pytest.mark.parametrize(
    ("num_nodes", "depth", "vocab", "most"),
    [(8, 1, 5, 6), (8, 0, 5, 1), (64, 2, 3, 13), (65, 1, 500, 64), (257, 9, 500, 256)],
)
def test_more_nodes_than_paths_are_refused(
    num_nodes: int, depth: int, vocab: int, most: int
) -> None:
    with pytest.raises(
        ValueError, match=f"expected num_tree_nodes of at most {most} .* got {num_nodes}; lower it"
    ):
        TreeBuilder(num_nodes, depth, vocab, CPU)


def test_the_path_is_the_longest_that_the_target_says() -> None:
    torch.manual_seed(5)
    trees, lengths = TreeBuilder(16, 4, 3, CPU), set[int]()
    for _ in range(40):
        tree, block, _ = built(trees, torch.randn(3, 4, 3))
        tokens = torch.randint(0, 3, block.shape)
        decided, said_next, ids, path = (
            block.clone(),
            tokens.clone(),
            *torch.full((2, *block.shape), 7),
        )
        tree.follow(decided, said_next, ids, path)
        for row in range(3):
            node, nodes = 0, [0]
            while True:
                said = int(tokens[row, node])
                children = [
                    n
                    for n in range(1, 16)
                    if tree.parents[row, n] == node and block[row, n] == said
                ]
                child, found = tree.child(block, torch.full((3,), node), torch.full((3,), said))
                assert [int(child[row])] * int(found[row]) == children
                if not children:
                    break
                node = children[0]
                nodes.append(node)
            said_by_target = torch.tensor([*(int(tokens[row, n]) for n in nodes), 9, 9, 9, 9])[
                None, :4
            ].expand(3, -1)
            assert int(tree.agree(block, said_by_target)[row]) == len(nodes) - 1
            assert path[row].tolist() == nodes + [0] * (16 - len(nodes))
            assert decided[row].tolist() == [*block[row, nodes].tolist(), *[-1] * (16 - len(nodes))]
            lengths.add(len(nodes))
        assert torch.equal(ids, block)
        assert torch.equal(said_next, along(path, tokens))
    assert len(lengths) > 3


def test_paths_whose_transitions_count_are_scored_by_them() -> None:
    """As in DFlash 2: with all paths in the tree, its order is that of the sums of their transitions."""
    torch.manual_seed(6)
    candidates = torch.stack([torch.randperm(20)[:2] for _ in range(3)])[None]
    scores = torch.randn(1, 3, 2, 2)
    scores[:, 0, 1] = scores[:, 0, 0]
    nodes, block = new_nodes(1, 15, CPU), torch.zeros(1, 15, dtype=torch.long)
    TreeBuilder(15, 3, 2, CPU).build(scores, nodes, block, candidates)
    tree, log_probs = DraftTree.of(nodes), scores.log_softmax(dim=-1)
    expected = {}
    for length in (1, 2, 3):
        for choice in itertools.product(range(2), repeat=length):
            steps = zip(range(length), (0, *choice[:-1]), choice, strict=True)
            tokens = tuple(int(candidates[0, level, one]) for level, one in enumerate(choice))
            expected[tokens] = sum(
                float(log_probs[0, level, before, one]) for level, before, one in steps
            )
    paths = [path_to(tree, block, 0, node) for node in range(1, 15)]
    assert paths == sorted(expected, key=lambda path: -expected[path])


def test_the_continuation_is_of_the_latest_longest_match() -> None:
    torch.manual_seed(7)
    found = set[int]()
    for num_columns in (0, 1, 2, 5, 30, 60):
        for _ in range(20):
            ids = torch.randint(0, 4, (num_columns,))
            text = ids.tolist()
            ends = [
                next((n for n in range(4) if n > end or text[end - n] != text[-1 - n]), 4)
                for end in range(num_columns - 1)
            ]
            most = max(ends, default=0)
            found.add(most)
            start = max((end for end, num in enumerate(ends) if num == most), default=0) + 1
            assert continuation(ids, 5, 4) == (text[start : start + 5] if most else [], most)
    assert found == {0, 1, 2, 3, 4}


def test_a_draft_that_is_sure_of_other_tokens_is_followed() -> None:
    """What followed is 1 1 3, likely by 0.8, 0.7 and 0.6."""
    text = (
        torch.tensor([[3, 1, 1, 3]]),
        torch.tensor([4]),
        torch.tensor([[0.0, 0.8], [0.0, 0.87]]).log(),
    )
    trees, sure = TreeBuilder(4, 3, 9, CPU), torch.zeros(1, 3, 9)
    for score, expected in ((12.0, [0, 2, 2, 2]), (2.0, [0, 1, 1, 2])):
        sure[:, :, 2] = score
        assert built(trees, sure, text)[1].tolist() == [expected]


@pytest.mark.parametrize(
    ("num_nodes", "depth", "vocab"), [(8, 7, 6), (16, 5, 4), (32, 15, 40), (3, 1, 4), (128, 9, 40)]
)
def test_a_continuation_counts_where_it_beats_the_draft(
    num_nodes: int, depth: int, vocab: int
) -> None:
    torch.manual_seed(num_nodes)
    trees, shared = TreeBuilder(num_nodes, depth, vocab, CPU), [0, 0]
    for length, share in itertools.product((0, 1, depth), (0.05, 0.5, 0.99)):
        scores = 2 * torch.randn(2, depth, vocab)
        # The text ends in a token that it has had once before: `length` tokens followed, that one the last of them.
        ids = torch.randint(0, vocab, (2, length + 1))
        ids[:, 0] = ids[:, -1] = vocab - 1
        ids[:, 1:-1] %= vocab - 1
        tokens, levels = ids[:, 1:], torch.arange(depth)
        its = math.log(share) + math.log(0.9) * levels - LEVEL * (levels + 1)
        follows = torch.tensor([[0.0, share], [0.0, 0.9]]).log()
        tree, block, sources = built(trees, scores, (ids, torch.full((2,), length + 1), follows))
        log_probs = scores.log_softmax(dim=-1) - LEVEL
        is_ancestor = tree.are_ancestors(torch.arange(num_nodes)[None])
        for row in range(2):
            drafted = {
                path: sum(float(log_probs[row, level, token]) for level, token in enumerate(path))
                for path in best_paths(log_probs[row], num_nodes - 1)
            }
            before_paths, doubt = dict[tuple[int, ...], float](), 0.0
            for end in range(length):
                best, choice = log_probs[row, end].max(dim=-1)
                if doubt == 0 and end < num_nodes - 1 and choice != tokens[row, end]:
                    doubt = DOUBT * math.log1p(-math.exp(best))
                before_paths[tuple(tokens[row, : end + 1].tolist())] = float(its[end]) + doubt
            paths = drafted.keys() | before_paths.keys()
            totals = {
                path: max(drafted.get(path, -99.0), before_paths.get(path, -99.0)) for path in paths
            }
            expected = sorted(totals, key=lambda path: -totals[path])[: num_nodes - 1]
            assert {path_to(tree, block, row, node) for node in range(1, num_nodes)} == set(
                expected
            )
            for node in range(num_nodes):
                path = path_to(tree, block, row, node)
                assert int(tree.depths[row, node]) == len(path)
                assert int(is_ancestor[row, node].sum()) == len(path) + 1
                assert int(tree.parents[row, node]) < max(node, 1)
                from_text = before_paths.get(path, -99.0) > drafted.get(path, -99.0)
                assert int(sources[row, node]) == from_text
                shared[from_text] += 1
    assert min(shared) > 0
