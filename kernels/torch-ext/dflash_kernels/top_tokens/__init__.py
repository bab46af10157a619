"""This operation finds the most likely tokens of each row of logits, in two launches.

Neither launch makes a tensor of the logits' size.
"""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, operation

# A node of a tree has at most this number of children. A program of the kernel holds this number of blocks of tokens.
MAX_NUM = 63
# A program of the kernel holds one number for each block of a row, so the vocabulary is limited.
MAX_VOCAB = 1 << 20
# The definition first reads the greatest score of each block of this number of tokens, if this leaves out most of a
# row.
BLOCK = 64


def _check(given: Given, size: Sizes) -> None:
    if not 1 <= given["num"] <= min(MAX_NUM, size["V"]):
        raise ValueError(
            f"expected num from 1 to {MAX_NUM} and to the {size['V']} tokens that there are, got {given['num']}; "
            "ask for as many as there are"
        )


def _fake(scores_BDSV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    shape = (*scores_BDSV.shape[:-1], num)
    return scores_BDSV.new_empty(shape, dtype=torch.float32), scores_BDSV.new_empty(
        shape, dtype=torch.int64
    )


@operation(
    check=_check,
    fake=_fake,
    covers=lambda scores_BDSV, num: (
        runs_kernel(scores_BDSV) and scores_BDSV.numel() > 0 and scores_BDSV.shape[-1] <= MAX_VOCAB
    ),
)
def top_tokens(scores_BDSV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns `log_probs, order = log_softmax(scores).topk(num)` over the last dimension, in float32.

    Scores of -inf have a log-probability of -inf, and come last if there are fewer other scores. If a row has a NaN,
    an inf or only -inf, its log-probabilities are NaN, and its `num` tokens still differ.

    Args:
        scores_BDSV (`torch.Tensor`): Logits of `V` tokens at each position and in each state, with any strides. The
            kernel supports float32, float16 and bfloat16 with up to 2^20 tokens.
        num (`int`): Number of tokens, from 1 to 63 and at most `V`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The greatest log-probabilities in falling order, `[B, D, S, num]` float32,
        and their tokens, int64. Equal log-probabilities come in any order. The kernel puts the lower index first. No
        host sync.

    Raises:
        ValueError: If `num` is out of range.
    """
    scores, num_blocks = scores_BDSV.to(torch.float32), scores_BDSV.shape[-1] // BLOCK
    if scores.shape[-1] % BLOCK or num_blocks < 8 * num:
        log_probs, order = torch.log_softmax(scores, dim=-1).topk(num, dim=-1)
        return log_probs, order
    # This gives the same result from fewer reads: `num` tokens that no other token exceeds are in the `num` blocks
    # with the greatest maxima.
    blocks = scores.unflatten(-1, (num_blocks, BLOCK))
    at = blocks.amax(dim=-1).topk(num, dim=-1).indices
    best, inside = (
        blocks.gather(-2, at[..., None].expand(*at.shape, BLOCK)).flatten(-2).topk(num, dim=-1)
    )
    order = at.gather(-1, inside // BLOCK) * BLOCK + inside % BLOCK
    # At most one copy of all scores is made, because a second copy would take longer than everything else.
    shifted = scores - best[..., :1] if scores is scores_BDSV else scores.sub_(best[..., :1])
    return best - best[..., :1] - shifted.exp_().sum(dim=-1, keepdim=True).log_(), order


__all__ = ["MAX_NUM", "top_tokens"]
