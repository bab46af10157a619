"""Trees whose tokens are drawn from the draft, and accepted by rejection.

The children of a node are drawn one after the other without putting back, and the target tests them in that order:
each is kept with probability `min(1, p / q)`, and behind one that is refused `p` is what is left of `p - q`, `q` what
is left of `q`. With one child per node that is a chain's rejection, with the same noise.

How a tree branches must not follow from what was drawn: which draws are tested would then depend on the draws, and the
text would have another distribution. So the shape is that of the tree of the draft's most likely tokens, and the
tokens that are drawn take the nodes' places. Draws of a position are the same behind every node; only one is walked.

Shapes: as in `dflash_hf.tree`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf import ops
from dflash_hf.generation.sampling import DRAFT_STREAM, REJECT_STREAM, RESIDUAL_STREAM, choose, gumbel_noise
from dflash_hf.generation.state import DecodeState
from dflash_hf.tree import DraftTree, TreeBuilder

# How much of a draft's distribution its most likely token takes over from the others, where trees are to branch by it.
TRUST = 0.2
# Below this float32 has no room for a ratio.
TINY = 1e-30


def draw_tree(trees: TreeBuilder, state: DecodeState, scores_BDV: Tensor, positions_BD: Tensor) -> None:
    """Proposes a tree of tokens drawn from `softmax(scores)`. No host sync.

    Args:
        trees (`TreeBuilder`): The run's.
        state (`DecodeState`): Its `nodes`, `proposals` and `draft_probs` are written.
        scores_BDV (`torch.Tensor` of shape `[B, D, V]`, float32): The draft's processed scores.
        positions_BD (`torch.Tensor` of shape `[B, D]`, int64): Index in its row of each token that is drawn.
    """
    assert state.key is not None
    assert state.nodes is not None
    probs = torch.softmax(scores_BDV, dim=-1)
    trees.build(_to_branch_by(probs), state.nodes, state.whole_block)
    tree = state.tree
    assert tree is not None
    tokens = torch.arange(probs.shape[-1], device=probs.device)
    noise = gumbel_noise(state.key, positions_BD, tokens, DRAFT_STREAM)
    draws = (scores_BDV + noise).topk(trees.num_ranks, dim=-1).indices.flatten(1)
    at = (tree.depths - 1).clamp_min(0) * trees.num_ranks + tree.ranks()
    state.proposals.copy_(draws.gather(1, at)[:, 1:])
    # Behind the deepest nodes nothing is drawn, and no matter what stands there.
    state.draft_probs = _of(probs, tree.depths.clamp_max(probs.shape[1] - 1))


def draw_tree_behind(
    trees: TreeBuilder,
    state: DecodeState,
    candidates_BDC: Tensor,
    scores_BDCC: Tensor,
    positions_BD: Tensor,
    vocab: int,
) -> None:
    """Proposes a tree where the distribution depends on the token before, as in DFlash 2. No host sync.

    Args:
        trees, state, positions_BD: As in [`draw_tree`].
        candidates_BDC (`torch.Tensor` of shape `[B, D, C]`, int64): Tokens that each position chooses among.
        scores_BDCC (`torch.Tensor` of shape `[B, D, C, C]`, float32): Processed scores behind each candidate before.
        vocab (`int`): `V`.
    """
    assert state.key is not None
    assert state.nodes is not None
    probs, num, depth = torch.softmax(scores_BDCC, dim=-1), candidates_BDC.shape[-1], candidates_BDC.shape[1]
    trees.build(_to_branch_by(probs), state.nodes, state.whole_block, candidates_BDC)
    tree = state.tree
    assert tree is not None
    noise = gumbel_noise(state.key, positions_BD, candidates_BDC, DRAFT_STREAM)
    draws = (scores_BDCC + noise[:, :, None]).argsort(dim=-1, descending=True).flatten(2)
    at, ranks = torch.zeros_like(tree.depths), tree.ranks()  # which candidate each node is
    for level in range(depth):
        drawn = draws[:, level].gather(1, at.gather(1, tree.parents) * num + ranks)
        at = torch.where(tree.depths == level + 1, drawn, at)
    tokens = candidates_BDC.flatten(1).gather(1, (tree.depths - 1).clamp_min(0) * num + at)
    state.proposals.copy_(tokens[:, 1:])
    behind = tree.depths.clamp_max(depth - 1)
    probs = _of(probs.flatten(1, 2), behind * num + at)
    state.draft_probs = probs.new_zeros(*at.shape, vocab).scatter_(-1, _of(candidates_BDC, behind), probs)


def _to_branch_by(probs: Tensor) -> Tensor:
    """Returns log-probabilities for [`TreeBuilder`] to branch by, from a draft's distributions `[..., V]`.

    A draw is accepted more often than its token is likely: always, where the target has the draft's distribution. So
    what branches as the tokens' probabilities say would be too wide where the draft is right about what is open.
    """
    best, others = probs.argmax(dim=-1, keepdim=True), (1 - TRUST) * probs
    return torch.log(others.scatter_(-1, best, others.gather(-1, best) + TRUST))


def _of(values_BMX: Tensor, index_BN: Tensor) -> Tensor:
    """Returns `values[b, index[b, n]]`, `[B, N, X]`."""
    return values_BMX.gather(1, index_BN[..., None].expand(-1, -1, values_BMX.shape[-1]))


def accept_drawn(state: DecodeState, tree: DraftTree, target_scores_BNV: Tensor, may_read: bool = False) -> Tensor:
    """Decides what of a drawn tree stands. No host sync.

    Args:
        state (`DecodeState`): Its path, block and tokens are written, as by [`DecodeState.follow`].
        tree (`DraftTree`): What was verified.
        target_scores_BNV (`torch.Tensor` of shape `[B, N, V]`): The target's processed scores behind each node.
        may_read (`bool`): Leave out what tests no row, by a look on the host, where that waits for no device.

    Returns:
        `torch.Tensor`: The number accepted `[B]`.
    """
    assert state.draft_probs is not None
    assert state.key is not None
    positions = state.next_positions[:, :1] + tree.depths + 1
    may_read = may_read and positions.device.type == "cpu"
    probs = torch.softmax(target_scores_BNV, dim=-1, dtype=torch.float32)
    stands, token = walk(tree, state.block, probs, state.draft_probs, state.key, positions, may_read)
    # What stands is what is said after its parent.
    said = torch.where(stands & (tree.depths > 0), state.block, -1)
    state.tokens.fill_(-1).scatter_reduce_(1, tree.parents, said, "amax")
    state.follow(tree)
    assert state.path is not None
    num_accepted = (state.path > 0).sum(dim=1)
    # Behind the path's end there is nothing.
    state.tokens[:, :-1] = state.proposals.clamp_min(0)
    state.tokens.scatter_(1, num_accepted[:, None], token)
    return num_accepted


def walk(
    tree: DraftTree,
    block_BN: Tensor,
    probs_BNV: Tensor,
    draft_probs_BNV: Tensor,
    key: Tensor,
    positions_BN: Tensor,
    may_read: bool = False,
) -> tuple[Tensor, Tensor]:
    """Goes from the anchor to the first child that is kept, until none is; then draws from what is left.

    Behind the refusals of some children `p` is `max(p - weight * q, 0)` over its sum: each adds, to the weight, that
    sum over what `q` still had. So two numbers a row are all that goes from one test to the next.

    Args:
        tree (`DraftTree`): As drawn: siblings stand in the order of their draws.
        block_BN (`torch.Tensor` of shape `[B, N]`, int64): The nodes' tokens; siblings differ.
        probs_BNV (`torch.Tensor` of shape `[B, N, V]`, float32): The target's distribution behind each node.
        draft_probs_BNV (`torch.Tensor` of shape `[B, N, V]`, float32): The one that each node's children were drawn
            from, without putting back.
        key (`torch.Tensor`): The run's seed.
        positions_BN (`torch.Tensor` of shape `[B, N]`, int64): Index in its row of the token behind each node.
        may_read (`bool`): Leave out what tests no row, by a look on the host.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The nodes that stand `[B, N]`, bool, and the token behind them `[B, 1]`.

    Source: Leviathan et al., arXiv 2211.17192; without putting back, Jeon et al., arXiv 2402.14160.
    """
    ranks, size = tree.ranks(), probs_BNV.shape[-1]
    pair = tree.parents * size + block_BN
    p, q = (values.flatten(1).gather(1, pair) for values in (probs_BNV, draft_probs_BNV))
    left = _left(tree, pair, q, draft_probs_BNV).masked_fill_((ranks == 0) | (q == 0), 1)
    one = ranks[..., None]
    uniform = -torch.expm1(-ops.exponential_noise(key, positions_BN - 1, one, REJECT_STREAM)[..., 0])
    share = uniform * q / left
    # What could not be drawn is not tested.
    parents = tree.parents.masked_fill(q == 0, -1)
    node, weight, mass = torch.zeros_like(block_BN[:, 0]), torch.zeros_like(q[:, 0]), torch.ones_like(q[:, 0])
    kept = torch.zeros_like(block_BN, dtype=torch.bool)
    kept[:, 0] = True
    for index in range(1, block_BN.shape[1]):
        is_tested = parents[:, index] == node
        if may_read and not bool(is_tested.any()):
            continue
        is_kept = is_tested & (share[:, index] * mass + weight * q[:, index] < p[:, index])
        is_refused = is_tested ^ is_kept
        kept[:, index] = is_kept
        node = node.masked_fill(is_kept, index)
        weight = (weight + is_refused * (mass / left[:, index])).masked_fill(is_kept, 0)
        if may_read and not bool(is_refused.any()):
            mass = mass.masked_fill(is_kept, 1)
            continue
        mass = torch.where(weight > 0, _residual(probs_BNV, draft_probs_BNV, node, weight).sum(dim=-1), 1)
    residual = _residual(probs_BNV, draft_probs_BNV, node, weight)
    at = node[:, None]
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, _of(probs_BNV, at)[:, 0])
    token = choose(torch.log(residual)[:, None], key, positions_BN.gather(1, at), RESIDUAL_STREAM)
    return kept, token


def _left(tree: DraftTree, pair_BN: Tensor, q_BN: Tensor, draft_probs_BNV: Tensor) -> Tensor:
    """What the draft's distribution still had before each node was drawn `[B, N]`: all but its earlier siblings.

    Summed, not subtracted from one: it may be less than float32 has digits for.
    """
    nodes = torch.arange(pair_BN.shape[1], device=pair_BN.device)
    others = draft_probs_BNV.flatten(1).scatter(1, pair_BN[:, 1:], 0).view_as(draft_probs_BNV).sum(dim=-1)
    is_later = (tree.parents[:, :, None] == tree.parents[:, None]) & (nodes >= nodes[:, None]) & (nodes > 0)
    return (others.gather(1, tree.parents) + (is_later * q_BN[:, None]).sum(dim=-1)).clamp_min_(TINY)


def _residual(probs_BNV: Tensor, draft_probs_BNV: Tensor, node_B: Tensor, weight_B: Tensor) -> Tensor:
    """Returns `max(p - weight * q, 0)` behind a node, `[B, V]`."""
    rows = torch.arange(len(node_B), device=node_B.device)
    p, q = probs_BNV[rows, node_B], draft_probs_BNV[rows, node_B]
    return torch.addcmul(p, q, weight_B[:, None], value=-1).clamp_min_(0)


__all__ = ["accept_drawn", "draw_tree", "draw_tree_behind", "walk"]
