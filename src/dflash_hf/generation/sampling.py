"""Choosing tokens: logits processors over a block, noise that is keyed by what it is for, rejection of proposals.

Warpers that look at nothing but the scores run once over all positions. Everything else (processors that read the
prefix, unknown ones, stateful ones) is applied position by position, see `accept`.

Random numbers follow from (seed, row, position, stream), not from how many were drawn before. That is what makes a
sampled text the same at every block size: the token at a position is drawn with the same noise whether the position is
verified alone or as the ninth of a block.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dflash_hf import ops

STATELESS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    InfNanRemoveLogitsProcessor,
)


def _ask(function: Callable[[int, Tensor], list[int]], numbers: list[int], index: int, ids: Tensor) -> list[int]:
    """Calls a prefix function for the `index`-th of some rows, with that row's number in the batch."""
    return function(numbers[index], ids)


def _plain(value: object) -> object:
    """A number or switch as it is, a tensor as its values."""
    return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else value


def _temperature_and_top_k(warpers: LogitsProcessorList) -> tuple[float, int | None] | None:
    """Returns what a temperature and a top-k are set to, in this order, if there are no other warpers."""
    rest: list[Any] = list(warpers)
    temperature, top_k = 1.0, None
    if rest and type(rest[0]) is TemperatureLogitsWarper:
        temperature = float(rest.pop(0).temperature)
    if rest and type(rest[0]) is TopKLogitsWarper and rest[0].filter_value == -math.inf:
        top_k = int(rest.pop(0).top_k)
    return None if rest else (temperature, top_k)


class BlockProcessors:
    """A run's processors, split by whether they can be applied to a block at once.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them.
        pad_id (`int`): What stands where a row has no token yet.
    """

    def __init__(self, processors: LogitsProcessorList, pad_id: int = 0) -> None:
        self.processors = processors
        self.pad_id = pad_id
        # Exact types: a subclass may look at anything.
        self.warpers = LogitsProcessorList([p for p in processors if type(p) in STATELESS])
        self.is_stateless = len(self.warpers) == len(processors)
        # Where there is no more than these two, in this order; without a top-k it is None.
        self.temperature_and_top_k = _temperature_and_top_k(self.warpers) if self.is_stateless else None

    def settings(self) -> tuple[object, ...]:
        """Returns the kinds and numbers of the stateless warpers: what a captured step has of them. Reads tensors."""
        return tuple(
            (type(warper), tuple(sorted((name, _plain(value)) for name, value in vars(warper).items())))
            for warper in self.warpers
        )

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Applies all processors to one position: prefixes `[B, S]`, scores `[B, V]`."""
        return self.processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores))

    def at(self, ids: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies all processors to one position; a prefix function is asked about the given rows `[B]` only."""
        for processor in self.processors:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                # It may know nothing about the prefixes that rows standing elsewhere are shown with. It is told the
                # row's number in the whole batch.
                numbers: list[int] = rows.nonzero()[:, 0].tolist()
                allowed = functools.partial(_ask, processor._prefix_allowed_tokens_fn, numbers)
                one = PrefixConstrainedLogitsProcessor(allowed, 1)
                scores[rows] = one(cast(torch.LongTensor, ids[rows]), cast(torch.FloatTensor, scores[rows]))
            else:
                scores = processor(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores))
        return scores

    def warp(self, logits_BKV: Tensor) -> Tensor:
        """Applies the stateless warpers to every position of `[B, K, V]` logits; returns float32 scores.

        Float32 because that is what Transformers hands to processors, so that ties fall the same way.
        """
        scores = logits_BKV.to(torch.float32)
        if not self.warpers:
            return scores
        flat = scores.flatten(0, 1)
        return self.warpers(
            cast(torch.LongTensor, flat.new_empty(flat.shape[0], 0, dtype=torch.long)), cast(torch.FloatTensor, flat)
        ).view_as(scores)


def gumbel_noise(key: Tensor, positions_BK: Tensor, tokens: Tensor, stream: int = 0) -> Tensor:
    """Draws standard Gumbel noise: adding it to log-probabilities and taking the argmax samples from them.

    Arguments as `ops.exponential_noise`. Returns `[B, K, N]`, float32.
    """
    return -torch.log(ops.exponential_noise(key, positions_BK, tokens, stream))


def new_key(device: torch.device) -> Tensor:
    """Draws a run's seed from torch's global generator, so that `torch.manual_seed` makes a run repeatable."""
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device="cpu").to(device)


# Streams of keyed noise: what the target samples with (and, under shared_noise, the draft), what a draft that samples
# on its own draws with, and what a rejection test and the redraw after it use.
TARGET_STREAM, DRAFT_STREAM, REJECT_STREAM, RESIDUAL_STREAM = 0, 1, 2, 3


def choose(scores_BKV: Tensor, key: Tensor | None, positions_BK: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Chooses a token from processed scores: the argmax, or a sample by keyed Gumbel noise.

    Args:
        scores_BKV (`torch.Tensor` of shape `[B, K, V]`): Processed scores (log-probabilities up to a constant).
        key (`torch.Tensor`, *optional*): The run's seed; `None` is greedy.
        positions_BK (`torch.Tensor` of shape `[B, K]`): Index of the token being chosen.
        stream (`int`): See `ops.exponential_noise`.

    Returns:
        `torch.Tensor` of shape `[B, K]`, int64.
    """
    if key is not None:
        tokens = torch.arange(scores_BKV.shape[-1], device=scores_BKV.device)
        scores_BKV = scores_BKV + gumbel_noise(key, positions_BK, tokens, stream)
    return ops.best(scores_BKV)


def choose_from_logits(
    logits_BKV: Tensor,
    processors: BlockProcessors,
    key: Tensor | None,
    positions_BK: Tensor,
    stream: int = TARGET_STREAM,
) -> Tensor:
    """Chooses tokens as [`choose`] does from the scores that stateless processors make of logits.

    By one kernel, which makes neither scores nor noise, where there is one and the processors are a temperature and a
    top-k at most. What is below the k-th logit is not drawn; all that equal it may be.
    """
    warp = processors.temperature_and_top_k
    if key is None or warp is None or not ops.picks(logits_BKV):
        # As float32 a half's scores are in the same order, those of a double need not be.
        is_plain = not processors.warpers and key is None and logits_BKV.dtype.itemsize <= 4
        return choose(logits_BKV if is_plain else processors.warp(logits_BKV), key, positions_BK, stream)
    temperature, top_k = warp
    least = None if top_k is None else logits_BKV.topk(min(top_k, logits_BKV.shape[-1])).values[..., -1].float()
    return ops.gumbel_argmax(logits_BKV, key, positions_BK, least, temperature, stream)


def accept_rejection(
    proposals: Tensor, target_scores_BWV: Tensor, draft_probs: Tensor, key: Tensor, positions_BW: Tensor
) -> tuple[Tensor, Tensor]:
    """Keeps each proposal with probability `min(1, p / q)`; on the first refusal redraws from `max(p - q, 0)`.

    Args:
        proposals (`torch.Tensor` of shape `[B, W - 1]`): Tokens drawn from `draft_probs`.
        target_scores_BWV (`torch.Tensor` of shape `[B, W, V]`): The target's processed scores.
        draft_probs (`torch.Tensor` of shape `[B, W - 1, V]`): The distribution `q` the proposals were drawn from.
        key (`torch.Tensor`): The run's seed.
        positions_BW (`torch.Tensor` of shape `[B, W]`): Index of the token that each position decides.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Number accepted `[B]`, and tokens `[B, W]`: the proposals, with the
        redrawn or bonus token standing at index `num_accepted`.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    probs = torch.softmax(target_scores_BWV, dim=-1, dtype=torch.float32)
    chosen = proposals[..., None]
    p = probs[:, :-1].gather(-1, chosen)[..., 0]
    q = draft_probs.gather(-1, chosen)[..., 0]
    # u < p / q for uniform u, written with an exponential e = -log(1 - u).
    one = torch.zeros(1, dtype=torch.long, device=key.device)
    uniform = -torch.expm1(-ops.exponential_noise(key, positions_BW[:, :-1], one, REJECT_STREAM)[..., 0])
    num_accepted = (uniform * q < p).cumprod(dim=1).sum(dim=1)
    padded = torch.cat([draft_probs, torch.zeros_like(draft_probs[:, :1])], dim=1)
    at = num_accepted[:, None]
    residual = (probs - padded).clamp_min_(0).gather(1, at[..., None].expand(-1, -1, probs.shape[-1]))
    own = probs.gather(1, at[..., None].expand(-1, -1, probs.shape[-1]))
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, own)
    redrawn = choose(torch.log(residual), key, positions_BW.gather(1, at), RESIDUAL_STREAM)
    return num_accepted, torch.cat([proposals, redrawn], dim=1).scatter(1, at, redrawn)


def ends_row(tokens: Tensor, eos_ids: Tensor) -> Tensor:
    """Says which tokens, of any shape, are among the end-of-sequence ids `[N]`.

    Not `torch.isin`: with many ids it sorts, and reads how many different ones there are on the host.
    """
    return (tokens[..., None] == eos_ids).any(dim=-1)


__all__ = [
    "BlockProcessors",
    "accept_rejection",
    "choose",
    "choose_from_logits",
    "ends_row",
    "gumbel_noise",
    "new_key",
]
