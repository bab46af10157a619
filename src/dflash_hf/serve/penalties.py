"""OpenAI's two penalties on what an answer has said already."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessor


class SaidPenalty(LogitsProcessor):
    """Lowers the scores of tokens that an answer has said; the prompt does not count.

    Args:
        frequency (`float`): Taken off for each time that a token was said.
        presence (`float`): Taken off once if it was.
        num_columns (`int`): Columns of the prompt.
    """

    is_row_wise = True

    def __init__(self, frequency: float, presence: float, num_columns: int) -> None:
        self.frequency = frequency
        self.presence = presence
        self.num_columns = num_columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> torch.FloatTensor:
        """Returns the lowered scores `[B, V]`; `input_ids` are the tokens so far `[B, T]`."""
        said = input_ids[:, self.num_columns :]
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        lowered = scores - self.frequency * counts - self.presence * (counts > 0)
        return cast(torch.FloatTensor, lowered)
