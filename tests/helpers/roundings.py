"""Texts of half precision, where a verify is a wider forward than plain decoding's and rounds in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def num_same_rows(
    target: Any, inputs: dict[str, Tensor], ours: Tensor, plain: Tensor, dtype: torch.dtype
) -> int:
    """Returns how many rows are plain `generate`'s; holds the other ones to it up to their first tie.

    That is the first token at which the target's two best logits, computed plainly, are closer than the roundings of
    `dtype`.

    Args:
        target: The target; autocast, where it was on, is on still.
        inputs (`dict`): The left-padded prompts.
        ours (`torch.Tensor`, `[B, S]`), plain (`torch.Tensor`, `[B, S]`): The texts, prompts included.
        dtype (`torch.dtype`): What the target computes in.

    Raises:
        AssertionError: If a row differs where there is no tie.
    """
    assert ours.shape == plain.shape
    num_same = 0
    for row, (our, true) in enumerate(zip(ours, plain, strict=True)):
        wrong = (our != true).nonzero()
        if not len(wrong):
            num_same += 1
            continue
        at = int(wrong[0])
        start = int(inputs["attention_mask"][row].argmax())
        logits = target(true[None, start:at]).logits[0, -1].double()
        gap = logits.max() - logits[our[at]]
        assert gap < 8 * torch.finfo(dtype).eps * logits.abs().max(), (row, at)
    return num_same
