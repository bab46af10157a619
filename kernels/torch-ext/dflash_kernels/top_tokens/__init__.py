"""The most likely tokens of each row of logits, in two launches that make nothing of the logits' size."""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, operation

# A tree has no more children of a node than this; a program of the kernel holds so many blocks of tokens.
MAX_NUM = 63
# A program of the kernel holds what it knows of all blocks of a row.
MAX_VOCAB = 1 << 20
# The definition looks at the greatest of so many tokens first, where that leaves out most of a row.
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
    """`log_probs, order = log_softmax(scores).topk(num)` over the last dimension, in float32.

    Scores of -inf have a log-probability of -inf, and come last if there are fewer others. A row that has a NaN, an
    inf or nothing but -inf has no log-probabilities: they are NaN, of `num` tokens that differ.

    Args:
        scores_BDSV (`torch.Tensor`): Logits of `V` tokens at each position, in each state. Any strides; float32,
            float16 and bfloat16 of up to 2^20 tokens have a kernel.
        num (`int`): From 1 to 63, and to `V`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The greatest log-probabilities, falling, `[B, D, S, num]` float32, and
        whose they are, int64. Equal ones come in any order, by the kernel the lower index first. No host sync.

    Raises:
        ValueError: If so many are not to be had.
    """
    scores, num_blocks = scores_BDSV.to(torch.float32), scores_BDSV.shape[-1] // BLOCK
    if scores.shape[-1] % BLOCK or num_blocks < 8 * num:
        log_probs, order = torch.log_softmax(scores, dim=-1).topk(num, dim=-1)
        return log_probs, order
    # The same from fewer looks: `num` tokens that no other exceeds are in the `num` blocks with the greatest maxima.
    blocks = scores.unflatten(-1, (num_blocks, BLOCK))
    at = blocks.amax(dim=-1).topk(num, dim=-1).indices
    best, inside = (
        blocks.gather(-2, at[..., None].expand(*at.shape, BLOCK)).flatten(-2).topk(num, dim=-1)
    )
    order = at.gather(-1, inside // BLOCK) * BLOCK + inside % BLOCK
    # At most one copy of all scores: a second one would take longer than all else.
    shifted = scores - best[..., :1] if scores is scores_BDSV else scores.sub_(best[..., :1])
    return best - best[..., :1] - shifted.exp_().sum(dim=-1, keepdim=True).log_(), order


__all__ = ["MAX_NUM", "top_tokens"]
