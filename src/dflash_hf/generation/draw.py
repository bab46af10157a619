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
# Above the share of the tokens before the first one, and below that of any other.
TINY = torch.finfo(torch.float32).tiny


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
        """Returns the lowest logit `[B, K]` that top-k and min-p leave: all that equal it stay, too.

        `values_BKC` are the [`greatest`] logits of each position. No host sync.
        """
        least = torch.full_like(values_BKC[..., 0], -math.inf)
        if self.top_k > 0:
            least = self._kth(values_BKC)
        if self.min_p > 0.0:
            # A share of the greatest probability is a distance to the greatest logit.
            distance = self.temperature * math.log(self.min_p)
            least = torch.maximum(least, values_BKC[..., 0] + distance)
        return least

    def are_kept(self, values_BKC: Tensor) -> Tensor:
        """Returns which of the [`greatest`] logits of each position may be drawn, bool `[B, K, C]`: the first ones.

        A top-p may end among tokens of one logit: as many of them are kept as Transformers' warper keeps. Of tokens
        that equal the k-th, those beyond `MAX_TIES` are left out of the sum that a top-p is a share of. No host sync.
        """
        are_kept = values_BKC >= self.least(values_BKC)[..., None]
        if self.top_p == 1.0:
            return are_kept
        is_below = values_BKC < self._kth(values_BKC)[..., None]
        among = values_BKC.masked_fill(is_below, -math.inf)
        # A top-p is a share of what temperature and top-k have left.
        probs = torch.softmax(among / self.temperature, dim=-1)
        likelier = probs.cumsum(dim=-1) - probs
        # The very first is kept in any case.
        return are_kept & (likelier < max(self.top_p, TINY))

    def bounds(self, values_BKC: Tensor, tokens_BKC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the lowest logit `[B, K]` that may be drawn, and the first token `[B, K]` of those that equal it.

        All of them may be drawn without a top-p, and there is no first token. Under one, those with the highest ids
        are kept, as a stable sort leaves them. The arguments are what [`greatest`] returns. No host sync.
        """
        if self.top_p == 1.0:
            return self.least(values_BKC), None
        # A NaN is not even kept beside itself.
        num_kept = self.are_kept(values_BKC).sum(dim=-1, keepdim=True).clamp_min(1)
        last = values_BKC.gather(-1, num_kept - 1)
        # Equal ones stand by rising id: the last of them are kept, as many as there are.
        num_greater = (values_BKC > last).sum(dim=-1, keepdim=True)
        end = (values_BKC >= last).sum(dim=-1, keepdim=True)
        at = (end + num_greater - num_kept).clamp_min(0)
        first = tokens_BKC.gather(-1, at)
        return last[..., 0], first[..., 0]

    def _kth(self, values_BKC: Tensor) -> Tensor:
        """Returns the `top_k`-th logit of each position `[B, K]`, or the last one."""
        return values_BKC[..., min(self.top_k, values_BKC.shape[-1]) - 1]

    def greatest(self, logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits that say which tokens may be drawn, falling, and their tokens.

        `[B, K, C]`, float32 and int64, `C` as [`num_values`]. Where kernels run, equal ones stand by rising id, which
        [`bounds`] goes by.
        """
        num = self.num_values(logits_BKV.shape[-1])
        uses_kernels = ops.use_kernel(ops.top_tokens, logits_BKV)
        if uses_kernels and num <= ops.MAX_NUM:
            # The kernel returns log-probabilities; a gather takes the logits themselves.
            _, tokens = ops.top_tokens(logits_BKV[:, :, None], num)
            tokens = tokens[:, :, 0]
            return logits_BKV.gather(-1, tokens).float(), tokens
        values, tokens = logits_BKV.topk(num, dim=-1)
        values = values.float()
        if uses_kernels and self.top_p < 1.0:
            tokens, by_token = tokens.sort(dim=-1)
            values = values.gather(-1, by_token)
            values, by_value = values.sort(dim=-1, descending=True, stable=True)
            tokens = tokens.gather(-1, by_value)
        return values, tokens


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
