"""Rules of acceptance for rows that end each by tokens of its own.

They are those of `accept.py`; behind the choice a row that has come to one of its end tokens has nothing left to
generate, so that the commit ends it there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_hf.generation.accept import BlockRule, PositionRule
from dflash_hf.generation.choose import accepted
from dflash_hf.generation.sampling import BlockProcessors, ends_row
from dflash_hf.generation.state import DecodeState


class RowBlockRule(BlockRule):
    """A [`BlockRule`] with end tokens for each row `[B, N]`, int64; negative ones are none."""

    def __init__(self, processors: BlockProcessors, end_ids_BN: Tensor) -> None:
        # Rows that join others have no criteria, and nobody asks for their scores.
        super().__init__(processors, [], is_recorded=False)
        self.end_ids = end_ids_BN

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses as [`BlockRule.choose`]."""
        chosen = super().choose(state, logits_BWV)
        # The commit ends every row by the same tokens, and these are each row's own.
        stop_at_ends(state, self.end_ids)
        return chosen


class RowPositionRule(PositionRule):
    """A [`PositionRule`] with end tokens for each row `[B, N]`, int64; negative ones are none."""

    def __init__(self, processors: BlockProcessors, end_ids_BN: Tensor) -> None:
        super().__init__(processors, [])
        self.end_ids = end_ids_BN

    def choose(self, state: DecodeState, logits_BWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Chooses as [`PositionRule.choose`]."""
        chosen = super().choose(state, logits_BWV)
        stop_at_ends(state, self.end_ids)
        return chosen

    def _goes_on(self, state: DecodeState, position: int, chosen_B: Tensor) -> Tensor:
        # A processor must not be shown what is behind an end.
        goes_on = super()._goes_on(state, position, chosen_B)
        return goes_on & ~ends_row(chosen_B, self.end_ids)


def stop_at_ends(state: DecodeState, end_ids_BN: Tensor) -> None:
    """Lowers `state.remaining` `[B]`, in place, of rows whose next tokens hold one of their end tokens; no host sync.

    A negative id in `end_ids_BN` is no token.
    """
    num_committed = accepted(state, None) + 1
    # A row that has ended stays as it is: it may only count as ended while a step is captured.
    num_committed = num_committed.masked_fill(state.done, 0)
    index = torch.arange(state.width, device=state.tokens.device)
    # Each row's tokens are compared with its own ends: [B, W, N].
    is_one = state.tokens[..., None] == end_ids_BN[:, None]
    is_end = is_one.any(dim=-1)
    # An end among tokens that are not committed is none.
    is_end = is_end & (index < num_committed[:, None])
    # Of several ends the first one counts: the least is taken below.
    behind_end = torch.where(is_end, index + 1, state.remaining[:, None])
    num_left = behind_end.amin(dim=1)
    torch.minimum(state.remaining, num_left, out=state.remaining)
