"""Log-probabilities of an answer's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probabilities of the target's own scores at one position, before temperature and biases.

    Args:
        logprob (`float`): Log-probability of the answer's token.
        top (`list[tuple[int, float]]`): The most likely tokens, the first one first.
    """

    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits: Iterable[Tensor], ids: Iterable[int], num_top: int) -> list[TokenLogprob]:
    """Returns the log-probabilities of tokens; reads on the host.

    Args:
        logits (iterable of `torch.Tensor` of shape `[V]`): The target's own, one per token; more are left out.
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
