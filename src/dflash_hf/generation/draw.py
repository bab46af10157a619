"""This module finds the tokens that temperature, top-k, top-p and min-p keep, from a position's greatest logits only.

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
# The number of further logits that are read after the k-th greatest, because tokens with an equal logit may be drawn.
MAX_TIES = 8
# A number above the probability before the first token, which is 0, and below the probability before any other token.
TINY = torch.finfo(torch.float32).tiny


class Draw(NamedTuple):
    """Holds the values of temperature, top-k, top-p and min-p. They apply in this order. The defaults do nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def leaves_out(self) -> bool:
        """Whether top-k or min-p may exclude tokens. A top-p is set only together with a top-k."""
        return self.top_k > 0 or self.min_p > 0.0

    def num_values(self, vocab_size: int) -> int:
        """Returns `C`, the number of greatest logits that determine which tokens of a position may be drawn."""
        if self.top_k == 0:
            return 1
        return min(self.top_k + MAX_TIES, vocab_size)

    def least(self, values_BKC: Tensor) -> Tensor:
        """Returns the lowest logit `[B, K]` that top-k and min-p keep. They keep all tokens with an equal logit.

        `values_BKC` are the [`greatest`] logits of each position. There is no host sync.
        """
        least = torch.full_like(values_BKC[..., 0], -math.inf)
        if self.top_k > 0:
            least = self._kth(values_BKC)
        if self.min_p > 0.0:
            # Min-p is a share of the greatest probability, which is a distance from the greatest logit.
            distance = self.temperature * math.log(self.min_p)
            least = torch.maximum(least, values_BKC[..., 0] + distance)
        return least

    def are_kept(self, values_BKC: Tensor) -> Tensor:
        """Returns which of the [`greatest`] logits of each position may be drawn, bool `[B, K, C]`.

        These are always the first ones. If a top-p ends among tokens with one logit, the number of kept tokens is that
        of Transformers' warper. The probabilities for a top-p include at most `MAX_TIES` tokens after the k-th one.
        There is no host sync.
        """
        are_kept = values_BKC >= self.least(values_BKC)[..., None]
        if self.top_p == 1.0:
            return are_kept
        is_below = values_BKC < self._kth(values_BKC)[..., None]
        among = values_BKC.masked_fill(is_below, -math.inf)
        # A top-p applies to the probabilities after temperature and top-k.
        probs = torch.softmax(among / self.temperature, dim=-1)
        likelier = probs.cumsum(dim=-1) - probs
        # The first token is always kept.
        return are_kept & (likelier < max(self.top_p, TINY))

    def bounds(self, values_BKC: Tensor, tokens_BKC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the lowest logit `[B, K]` that may be drawn, and the first kept token `[B, K]` with this logit.

        Without a top-p, all tokens with this logit may be drawn, and the second result is `None`. With a top-p, the
        tokens with the highest ids are kept, as after a stable sort. The arguments are the results of [`greatest`].
        There is no host sync.
        """
        if self.top_p == 1.0:
            return self.least(values_BKC), None
        # If the logits are NaN, no token counts as kept. The minimum of 1 keeps the index valid.
        num_kept = self.are_kept(values_BKC).sum(dim=-1, keepdim=True).clamp_min(1)
        last = values_BKC.gather(-1, num_kept - 1)
        # Tokens with equal logits are sorted by rising id, and the last of them are kept.
        num_greater = (values_BKC > last).sum(dim=-1, keepdim=True)
        end = (values_BKC >= last).sum(dim=-1, keepdim=True)
        at = (end + num_greater - num_kept).clamp_min(0)
        first = tokens_BKC.gather(-1, at)
        return last[..., 0], first[..., 0]

    def _kth(self, values_BKC: Tensor) -> Tensor:
        """Returns the `top_k`-th greatest logit of each position `[B, K]`, or the last one if there are fewer."""
        return values_BKC[..., min(self.top_k, values_BKC.shape[-1]) - 1]

    def greatest(self, logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the greatest logits of each position in falling order, and their tokens.

        Both are `[B, K, C]`, in float32 and int64, with `C` from [`num_values`]. If kernels run, tokens with equal
        logits are sorted by rising id, as [`bounds`] requires.
        """
        num = self.num_values(logits_BKV.shape[-1])
        uses_kernels = ops.use_kernel(ops.top_tokens, logits_BKV)
        if uses_kernels and num <= ops.MAX_NUM:
            # The kernel returns log-probabilities. The gather reads the logits themselves.
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
    """Returns the values of the warpers, or `None` if they are not those of a [`Draw`] in its order."""
    kinds = [type(warper) for warper in warpers]
    if kinds != [kind for kind in DRAW_ORDER if kind in kinds]:
        return None
    # A top-p without a top-k before it needs the whole vocabulary.
    if TopPLogitsWarper in kinds and TopKLogitsWarper not in kinds:
        return None
    draw = Draw()
    for warper in warpers:
        if isinstance(warper, TemperatureLogitsWarper):
            draw = draw._replace(temperature=float(warper.temperature))
            continue
        # A warper with another fill value or another minimum number of tokens is not supported.
        if warper.filter_value != -math.inf or warper.min_tokens_to_keep != 1:
            return None
        if isinstance(warper, TopKLogitsWarper):
            draw = draw._replace(top_k=int(warper.top_k))
        elif isinstance(warper, TopPLogitsWarper):
            draw = draw._replace(top_p=float(warper.top_p))
        else:
            draw = draw._replace(min_p=float(warper.min_p))
    return draw
