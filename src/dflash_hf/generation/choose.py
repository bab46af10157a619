"""Choosing the target's tokens for a verified block: at once, or in a walk from token to token.

At once, all tokens are chosen from their logits alone; in a walk a token is chosen only behind the ones before it, by
processors that read them. Either way the chosen tokens of a tree stand in the order of the path that they take, as if
they had been a chain. `accept.py` has the rules that call this.

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

    Returns how many proposals stand under rejection `[B]`, int64; `None` by other rules, for [`accepted`] to count.
    """
    # Columns are computed only where somebody asks for them: each step would launch them.
    if processors.hides:
        logits_BWV = processors.hide(logits_BWV, state.columns_behind_block)
    has_drawn_proposals = state.draft_probs.numel() > 0
    # A block of one token has no proposals; `draft_probs` are then those of an earlier block.
    if has_drawn_proposals and state.width > 1:
        return _choose_by_rejection(state, logits_BWV, processors)
    if state.host.is_sampled:
        # Nodes of a tree that stand equally deep share their noise: the text is that of a chain.
        positions = state.positions_behind_block
        tokens = draw_from_logits(logits_BWV, processors, state.noise_key, positions)
    else:
        tokens = likeliest_from_logits(logits_BWV, processors)
    state.tokens.copy_(tokens)
    tree = state.tree
    if tree is not None:
        # Every node has its token now; those on the path that the tokens take come first.
        report = state.report
        tree.follow(state.block, state.tokens, report.node_ids, report.path)
    return None


def _choose_by_rejection(
    state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors
) -> Tensor:
    """Keeps drawn proposals, or redraws behind them; returns the number accepted `[B]`."""
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
    """Returns how many proposals stand `[B]`: if not given, as many as equal the target's tokens without a gap."""
    if num_accepted is not None:
        return num_accepted
    matches = state.proposals == state.tokens[:, :-1]
    # A product that is 0 from the first mismatch on counts the prefix without a read on the host.
    return matches.cumprod(dim=1).sum(dim=1)


def scores_of_block(state: DecodeState, logits_BWV: Tensor, processors: BlockProcessors) -> Tensor:
    """Returns the processed scores `[B, W, V]`, float32, of tokens that were chosen at once, in their order."""
    in_order = state.along_path(logits_BWV)
    if processors.hides:
        in_order = processors.hide(in_order, state.decided_columns)
    return processors.warp(in_order)


def check_first_draw(state: DecodeState, logits_B1V: Tensor, processors: BlockProcessors) -> None:
    """Refuses a first token that stateless processors leave nothing to draw for; see [`check_drawable`]."""
    if processors.hides:
        logits_B1V = processors.hide(logits_B1V, state.decided_columns)
    # Warpers leave the likeliest token: they are applied only where there is none, as one replaces NaN.
    has_likeliest = bool(logits_B1V.amax(dim=-1).isfinite().all())
    if not has_likeliest:
        check_drawable(processors.warp(logits_B1V)[:, 0])


class ChainWalk:
    """Goes through a chain token by token, where a token is decided only behind the ones before it: nothing moves."""

    def step(self, position: int, tokens_B: Tensor, scores_BWV: Tensor) -> None:
        """Does nothing: what is behind a token of a chain stands behind it."""


class TreeWalk:
    """Goes through a tree token by token, where a token is decided only behind the ones before it.

    The nodes on the way come to stand in the order of the path, as if they had been a chain: in the state's
    `proposals` and the path of its `report`, and in the scores.

    Args:
        state (`DecodeState`): Changed in place.
        tree (`DraftTree`): The tree that it verifies.
        raw_BWV (`torch.Tensor`): The scores of all nodes; they are copied.
    """

    def __init__(self, state: DecodeState, tree: DraftTree, raw_BWV: Tensor) -> None:
        self.state = state
        self.tree = tree
        # Copies, because scores, block and proposals are put in the order of the path meanwhile.
        self.raw = raw_BWV.clone()
        self.block = state.block.clone()
        self.node = torch.zeros_like(state.anchor)
        report = state.report
        report.node_ids.copy_(state.block)
        self.path = report.path.zero_()
        # A token id of -1 matches no token: behind the path's end nothing is accepted.
        state.proposals.fill_(-1)

    def step(self, position: int, tokens_B: Tensor, scores_BWV: Tensor) -> None:
        """Goes on to the child that has the token decided at `position`; where there is none, no proposal matches.

        The column `position + 1` of `scores_BWV` becomes the child's, in place.
        """
        # A row whose path has ended goes on from the anchor: a child found there stands behind a mismatch, and is not
        # accepted.
        self.node, is_found = self.tree.child(self.block, self.node, tokens_B)
        self.path[:, position + 1] = self.node
        self.state.proposals[:, position] = torch.where(is_found, tokens_B, -1)
        scores_BWV[:, position + 1] = along(self.node[:, None], self.raw)[:, 0]


def walk_of(state: DecodeState, raw_BWV: Tensor) -> ChainWalk | TreeWalk:
    """Returns the walk through the verified tokens, whose scores are given; a tree's clears the state's proposals."""
    tree = state.tree
    if tree is None:
        return ChainWalk()
    return TreeWalk(state, tree, raw_BWV)
