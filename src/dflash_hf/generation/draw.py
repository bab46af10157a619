"""What temperature, top-k, top-p and min-p leave of a position's tokens, told from its greatest logits alone.

Shapes: `B` rows, `K` positions, `V` vocabulary, `C` greatest logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_hf import ops

# The warpers of a [`Draw`], in its order.
DRAW_ORDER = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# How many tokens are looked for that equal the k-th likeliest: all of them may be drawn.
MAX_TIES = 8


class Draw(NamedTuple):
    """Values of temperature, top-k, top-p and min-p, applied in this order; the defaults do nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def leaves_out(self) -> bool:
        """Whether there are tokens that may not be drawn."""
        return self.top_k > 0 or self.min_p > 0.0

    def num_values(self, vocab_size: int) -> int:
        """Returns how many of the greatest logits of a position say which tokens may be drawn."""
        if self.top_k == 0:
            return 1
        return min(self.top_k + MAX_TIES, vocab_size)

    def least(self, values_BKC: Tensor) -> Tensor:
        """Returns the lowest logit `[B, K]` that may be drawn: all that equal it may be, too.

        Of tokens that equal the k-th, those beyond `MAX_TIES` are left out of the sum that a top-p is a share of.
        `values_BKC` are the greatest [`num_values`] logits of each position, falling, float32. No host sync.
        """
        least = torch.full_like(values_BKC[..., 0], -math.inf)
        if self.top_k > 0:
            least = values_BKC[..., min(self.top_k, values_BKC.shape[-1]) - 1]
            if self.top_p < 1.0:
                least = self._least_of_top_p(values_BKC, least)
        if self.min_p > 0.0:
            # A share of the greatest probability is a distance to the greatest logit.
            distance = self.temperature * math.log(self.min_p)
            least = torch.maximum(least, values_BKC[..., 0] + distance)
        return least

    def _least_of_top_p(self, values_BKC: Tensor, least_BK: Tensor) -> Tensor:
        """Returns the lowest logit that top-p leaves of those that are not below `least_BK`."""
        among = values_BKC.masked_fill(values_BKC < least_BK[..., None], -math.inf)
        # A top-p is a share of what temperature and top-k have left.
        probs = torch.softmax(among / self.temperature, dim=-1)
        likelier = probs.cumsum(dim=-1) - probs
        # Falling values are kept from the first one on, and the very first always.
        is_kept = likelier < self.top_p
        num_kept = is_kept.sum(dim=-1, keepdim=True).clamp_min(1)
        last_kept = values_BKC.gather(-1, num_kept - 1)
        return torch.maximum(least_BK, last_kept[..., 0])


def draw_of(warpers: Sequence[Any]) -> Draw | None:
    """Returns the values of the warpers where they are a [`Draw`]'s, in its order, else `None`."""
    kinds = [type(warper) for warper in warpers]
    if kinds != [kind for kind in DRAW_ORDER if kind in kinds]:
        return None
    # A top-p without a top-k before it looks at the whole vocabulary.
    if TopPLogitsWarper in kinds and TopKLogitsWarper not in kinds:
        return None
    draw = Draw()
    for warper in warpers:
        if isinstance(warper, TemperatureLogitsWarper):
            draw = draw._replace(temperature=float(warper.temperature))
            continue
        # A warper may fill in another value, or keep more tokens in any case.
        if warper.filter_value != -math.inf or warper.min_tokens_to_keep != 1:
            return None
        if isinstance(warper, TopKLogitsWarper):
            draw = draw._replace(top_k=int(warper.top_k))
        elif isinstance(warper, TopPLogitsWarper):
            draw = draw._replace(top_p=float(warper.top_p))
        else:
            draw = draw._replace(min_p=float(warper.min_p))
    return draw


def greatest(logits_BKV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns the greatest logits of each position, falling, and their tokens: `[B, K, num]`, float32 and int64."""
    if num > ops.MAX_NUM or not ops.use_kernel(ops.top_tokens, logits_BKV):
        values, tokens = logits_BKV.topk(num, dim=-1)
        return values.float(), tokens
    # The kernel returns log-probabilities; a gather takes the logits themselves.
    _, tokens = ops.top_tokens(logits_BKV[:, :, None], num)
    tokens = tokens[:, :, 0]
    return logits_BKV.gather(-1, tokens).float(), tokens
