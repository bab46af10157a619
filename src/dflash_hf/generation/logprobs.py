"""This module computes the log-probabilities of an answer's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probabilities at one position, computed from the target's own scores, before temperature and biases.

    Args:
        logprob (`float`): Log-probability of the answer's token.
        top (`list[tuple[int, float]]`): The most likely tokens with their log-probabilities, the most likely first.
    """

    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits: Iterable[Tensor], ids: Iterable[int], num_top: int) -> list[TokenLogprob]:
    """Returns the log-probabilities of tokens; copies them to the host.

    Args:
        logits (iterable of `torch.Tensor` of shape `[V]`): The target's own logits, one tensor per token. Tensors
            without a token are ignored.
        ids (iterable of `int`): The tokens.
        num_top (`int`): Number of most likely tokens that each [`TokenLogprob`] also has.
    """
    found: list[TokenLogprob] = []
    for token, scores in zip(ids, logits, strict=False):
        logprobs = torch.log_softmax(scores.float(), dim=-1)
        top = torch.topk(logprobs, num_top)
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        found.append(TokenLogprob(logprob=float(logprobs[token]), top=pairs))
    return found
