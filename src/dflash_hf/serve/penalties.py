"""This module contains OpenAI's two penalties on tokens that an answer already contains."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessor


class SaidPenalty(LogitsProcessor):
    """Lowers the scores of tokens that are already in the answer. Tokens of the prompt do not count.

    Args:
        frequency (`float`): Subtracted once for each time that the token is in the answer.
        presence (`float`): Subtracted once if the token is in the answer.
        num_columns (`int`): Columns of the prompt.
    """

    is_row_wise = True

    def __init__(self, frequency: float, presence: float, num_columns: int) -> None:
        self.frequency = frequency
        self.presence = presence
        self.num_columns = num_columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> torch.FloatTensor:
        """Returns the lowered scores `[B, V]`. `input_ids` `[B, T]` are the tokens so far."""
        said = input_ids[:, self.num_columns :]
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
        lowered = scores - self.frequency * counts - self.presence * (counts > 0)
        return cast(torch.FloatTensor, lowered)
