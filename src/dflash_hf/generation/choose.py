"""This module chooses the target's tokens for a verified block, all at once or one after the other.

At once means that all tokens are chosen from their logits alone. For processors that read the earlier tokens, a walk
goes from token to token, and each token is chosen after the tokens before it. In both cases, the chosen tokens of a
tree are in the order of the path that they take, as if they were a chain. The rules in `accept.py` call this module.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf.block.tree import DraftTree, along
from dflash_hf.generation.sampling import (
    BlockProcessors,
    accept_rejection,
    check_drawable,
    draw_from_logits,
    likeliest_from_logits,
)
from dflash_hf.generation.state import DecodeState


def choose_block(
    state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors
) -> Tensor | None:
    """Chooses the tokens of a block at once and writes `state.tokens`.

    Returns the number of accepted proposals `[B]`, int64, under rejection sampling. Otherwise it returns `None`, and
    [`accepted`] counts the proposals.
    """
    # The columns are computed only if tokens are hidden, because each step would launch this work.
    if processors.hides:
        logits_BWV = processors.hide(logits_BWV, state.columns_behind_block)
    has_drawn_proposals = state.draft_probs.numel() > 0
    # A block of one token has no proposals, and `draft_probs` then belongs to an earlier block.
    if has_drawn_proposals and state.width > 1:
        return _choose_by_rejection(state, logits_BWV, processors)
    if state.host.is_sampled:
        # Nodes of a tree at the same depth have the same noise, so that the text is the same as with a chain.
        positions = state.positions_behind_block
        tokens = draw_from_logits(logits_BWV, processors, state.noise_key, positions)
    else:
        tokens = likeliest_from_logits(logits_BWV, processors)
    state.tokens.copy_(tokens)
    tree = state.tree
    if tree is not None:
        # Each node now has the target's token after it. The tokens along the accepted path are moved to the front.
        report = state.report
        tree.follow(state.block, state.tokens, report.node_ids, report.path)
    return None


def _choose_by_rejection(
    state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors
) -> Tensor:
    """Accepts drawn proposals, or draws another token at the first rejection. Returns the numbers accepted `[B]`."""
    num_accepted, tokens = accept_rejection(
        state.proposals,
        processors.warp(logits_BWV),
        state.draft_probs,
        state.noise_key,
        state.decided_positions,
    )
    state.tokens.copy_(tokens)
    return num_accepted


def accepted(state: DecodeState, num_accepted: Tensor | None) -> Tensor:
    """Returns the number of accepted proposals `[B]`: the given one, or that of the matching prefix."""
    if num_accepted is not None:
        return num_accepted
    matches = state.proposals == state.tokens[:, :-1]
    # The product is 0 from the first mismatch on, so its sum is the length of the prefix, without a read on the host.
    return matches.cumprod(dim=1).sum(dim=1)


def scores_of_block(state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors) -> Tensor:
    """Returns the processed scores `[B, W, V]`, float32, of tokens that were chosen at once, in their order."""
    in_order = state.along_path(logits_BWV)
    if processors.hides:
        in_order = processors.hide(in_order, state.decided_columns)
    return processors.warp(in_order)


def check_first_draw(state: DecodeState, logits_B1V: Tensor, processors: BlockProcessors) -> None:
    """Raises `ValueError` if stateless processors leave no token to draw as the first one; see [`check_drawable`]."""
    if processors.hides:
        logits_B1V = processors.hide(logits_B1V, state.decided_columns)
    # Warpers always keep the most likely token. They are applied only if there is none, because one replaces NaN.
    has_likeliest = bool(logits_B1V.amax(dim=-1).isfinite().all())
    if not has_likeliest:
        check_drawable(processors.warp(logits_B1V)[:, 0])


class ChainWalk:
    """Goes through a chain token by token. It moves nothing, because a chain is already in the order of the path."""

    def step(self, position: int, tokens_B: Tensor, scores_BWV: Tensor) -> None:
        """Does nothing, because the next token of a chain is already at the next position."""


class TreeWalk:
    """Goes through a tree token by token, along the path that the chosen tokens take.

    The walk puts the nodes of the path in the order of a chain: in `proposals` of the state, in the path of its
    `report`, and in the scores.

    Args:
        state (`DecodeState`): Changed in place.
        tree (`DraftTree`): The tree that the state verifies.
        raw_BWV (`torch.Tensor`): The scores of all nodes. They are copied.
    """

    def __init__(self, state: DecodeState, tree: DraftTree, raw_BWV: Tensor) -> None:
        self.state = state
        self.tree = tree
        # Copies, because the walk changes scores, block and proposals.
        self.raw = raw_BWV.clone()
        self.block = state.block.clone()
        self.node = torch.zeros_like(state.anchor)
        report = state.report
        report.node_ids.copy_(state.block)
        self.path = report.path.zero_()
        # A token id of -1 matches no token, so that nothing is accepted after the end of the path.
        state.proposals.fill_(-1)

    def step(self, position: int, tokens_B: Tensor, scores_BWV: Tensor) -> None:
        """Goes to the child that holds the token chosen at `position`. If there is none, no further proposal matches.

        The column `position + 1` of `scores_BWV` is overwritten by the scores of the child.
        """
        # A row whose path has ended continues from the anchor. A child found there comes after a mismatch, and is not
        # accepted.
        self.node, is_found = self.tree.child(self.block, self.node, tokens_B)
        self.path[:, position + 1] = self.node
        self.state.proposals[:, position] = torch.where(is_found, tokens_B, -1)
        scores_BWV[:, position + 1] = along(self.node[:, None], self.raw)[:, 0]


def walk_of(state: DecodeState, raw_BWV: Tensor) -> ChainWalk | TreeWalk:
    """Returns the walk through the verified tokens with these scores. For a tree, it clears the state's proposals."""
    tree = state.tree
    if tree is None:
        return ChainWalk()
    return TreeWalk(state, tree, raw_BWV)
