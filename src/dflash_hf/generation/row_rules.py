"""This module defines acceptance rules for rows that have their own end tokens.

The rules choose tokens as those of `accept.py` do. After the choice, a row that has reached one of its end tokens has
no further tokens to generate, so the commit ends it there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf.generation.accept import BlockRule, PositionRule
from dflash_hf.generation.choose import accepted
from dflash_hf.generation.sampling import BlockProcessors, ends_row
from dflash_hf.generation.state import DecodeState


class RowBlockRule(BlockRule):
    """A [`BlockRule`] with end tokens for each row, `[B, N]`, int64; negative ids are padding."""

    def __init__(self, processors: BlockProcessors, end_ids_BN: Tensor) -> None:
        # Rows of a running batch have no criteria, and their scores are not recorded.
        super().__init__(processors, [], is_recorded=False)
        self.end_ids = end_ids_BN

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses tokens as [`BlockRule.choose`] does, and ends rows at their own end tokens."""
        chosen = super().choose(state, logits_BWV)
        # The commit itself ends all rows at the same tokens, but each row has its own end tokens.
        stop_at_ends(state, self.end_ids)
        return chosen


class RowPositionRule(PositionRule):
    """A [`PositionRule`] with end tokens for each row, `[B, N]`, int64; negative ids are padding."""

    def __init__(self, processors: BlockProcessors, end_ids_BN: Tensor) -> None:
        super().__init__(processors, [])
        self.end_ids = end_ids_BN

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses tokens as [`PositionRule.choose`] does, and ends rows at their own end tokens."""
        chosen = super().choose(state, logits_BWV)
        stop_at_ends(state, self.end_ids)
        return chosen

    def _goes_on(self, state: DecodeState, position: int, chosen_B: Tensor) -> Tensor:
        # A processor must not see tokens after the end of a row.
        goes_on = super()._goes_on(state, position, chosen_B)
        return goes_on & ~ends_row(chosen_B, self.end_ids)


def stop_at_ends(state: DecodeState, end_ids_BN: Tensor) -> None:
    """Lowers `state.remaining` `[B]`, in place, of rows whose next tokens contain one of their ends; no host sync.

    A negative id in `end_ids_BN` is padding.
    """
    num_committed = accepted(state, None) + 1
    # A row that has ended must not change. While a step is captured, a row may only seem to have ended.
    num_committed = num_committed.masked_fill(state.done, 0)
    index = torch.arange(state.width, device=state.tokens.device)
    # Each row's tokens are compared with its own ends: [B, W, N].
    is_one = state.tokens[..., None] == end_ids_BN[:, None]
    is_end = is_one.any(dim=-1)
    # An end token that is not committed does not count.
    is_end = is_end & (index < num_committed[:, None])
    # If a row has several end tokens, the first one counts, so the minimum is taken below.
    behind_end = torch.where(is_end, index + 1, state.remaining[:, None])
    num_left = behind_end.amin(dim=1)
    torch.minimum(state.remaining, num_left, out=state.remaining)
