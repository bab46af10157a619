"""Choosing tokens: logits processors over a block, noise that is keyed by what it is for, rejection of proposals.

Warpers that look at nothing but the scores run once over all positions. Everything else (processors that read the
prefix, unknown ones, stateful ones) is applied position by position, see `accept`.

Random numbers follow from (seed, row, position, stream), not from how many were drawn before. That is what makes a
sampled text the same at every block size: the token at a position is drawn with the same noise whether the position is
verified alone or as the ninth of a block.

Shapes: `B` rows, `W` verified tokens (anchor first), `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

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
# Streams of keyed noise: what the target samples with (and, under shared_noise, the draft), what a draft that samples
# on its own draws with, and what a rejection test and the redraw after it use.
TARGET_STREAM, DRAFT_STREAM, REJECT_STREAM, RESIDUAL_STREAM = 0, 1, 2, 3


class BlockProcessors:
    """A run's processors, split by whether they can be applied to a block at once."""

    def __init__(self, processors: LogitsProcessorList, pad_id: int = 0) -> None:
        self.processors: Any = processors
        self.pad_id = pad_id  # what stands where a row has no token yet
        # Exact types: a subclass may look at anything.
        self.warpers: Any = LogitsProcessorList([p for p in processors if type(p) in STATELESS])
        self.is_stateless = len(self.warpers) == len(processors)

    def settings(self) -> tuple[object, ...]:
        """Returns the kinds and numbers of the stateless warpers: what a captured step has of them. Reads tensors."""
        return tuple(
            (type(warper), name, str(value.tolist()) if isinstance(value, Tensor) else value)
            for warper in self.warpers
            for name, value in [("", None), *sorted(vars(warper).items())]
        )

    def at(self, ids: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies all processors to one position; a prefix function is asked about the given rows `[B]` only."""
        for processor in self.processors:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                # It may know nothing about the prefixes that rows standing elsewhere are shown with. It is told the
                # row's number in the whole batch.
                numbers, ask = rows.nonzero()[:, 0].tolist(), processor._prefix_allowed_tokens_fn

                def allowed(row: int, prefix: Tensor, ask: Any = ask, numbers: list[int] = numbers) -> list[int]:
                    return ask(numbers[row], prefix)

                one: Any = PrefixConstrainedLogitsProcessor(allowed, 1)
                scores[rows] = one(ids[rows], scores[rows])
            else:
                scores = processor(ids, scores)
        return scores

    def warp(self, logits_BKV: Tensor) -> Tensor:
        """Applies the stateless warpers to every position of `[B, K, V]` logits; returns float32 scores.

        Float32 because that is what Transformers hands to processors, so that ties fall the same way.
        """
        scores = logits_BKV.to(torch.float32)
        if not self.warpers:
            return scores
        flat = scores.flatten(0, 1)
        return self.warpers(flat.new_empty(flat.shape[0], 0, dtype=torch.long), flat).view_as(scores)


def gumbel_noise(key: Tensor, positions_BK: Tensor, tokens: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Draws Gumbel noise `[B, K, N]`, float32, as `ops.exponential_noise`: scores plus it have a sample as argmax."""
    return -torch.log(ops.exponential_noise(key, positions_BK, tokens, stream))


def with_noise(
    scores: Tensor, key: Tensor, positions_BK: Tensor, candidates: Tensor | None = None, stream: int = TARGET_STREAM
) -> Tensor:
    """Adds noise to scores of all tokens `[B, K, V]`, or of candidates `[B, K, C]` behind each other `[B, K, C, C]`.

    That of a token at a position is the same behind every predecessor.
    """
    if candidates is None:
        return scores + gumbel_noise(key, positions_BK, torch.arange(scores.shape[-1], device=scores.device), stream)
    return scores + gumbel_noise(key, positions_BK, candidates, stream)[:, :, None]


def new_key(device: torch.device) -> Tensor:
    """Draws a run's seed from torch's global generator, so that `torch.manual_seed` makes a run repeatable."""
    return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device="cpu").to(device)


def choose(scores_BKV: Tensor, key: Tensor | None, positions_BK: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Chooses tokens `[B, K]`, int64, from processed scores (log-probabilities up to a constant).

    The argmax, or a sample by keyed Gumbel noise: `key` is the run's seed, where `None` is greedy; `positions_BK` are
    the indices of the tokens; for `stream` see `ops.exponential_noise`.
    """
    return ops.best(scores_BKV if key is None else with_noise(scores_BKV, key, positions_BK, stream=stream))


def choose_from_logits(
    logits_BKV: Tensor, processors: BlockProcessors, key: Tensor | None, positions_BK: Tensor
) -> Tensor:
    """Chooses tokens as [`choose`] does from the scores that stateless processors make of logits."""
    # As float32 a half's scores are in the same order, those of a double need not be.
    is_plain = not processors.warpers and key is None and logits_BKV.dtype.itemsize <= 4
    return choose(logits_BKV if is_plain else processors.warp(logits_BKV), key, positions_BK)


def accept_rejection(
    proposals: Tensor, target_scores_BWV: Tensor, draft_probs: Tensor, key: Tensor, positions_BW: Tensor
) -> tuple[Tensor, Tensor]:
    """Keeps each proposal with probability `min(1, p / q)`; on the first refusal redraws from `max(p - q, 0)`.

    The proposals `[B, W - 1]` were drawn from `q`, `draft_probs` `[B, W - 1, V]`; the target's scores are processed;
    each position is the index of the token that it decides. Returns the number accepted `[B]`, and tokens `[B, W]`:
    the proposals, with the redrawn or bonus token standing at index `num_accepted`.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    probs = torch.softmax(target_scores_BWV, dim=-1, dtype=torch.float32)
    chosen = proposals[..., None]
    p = probs[:, :-1].gather(-1, chosen)[..., 0]
    q = draft_probs.gather(-1, chosen)[..., 0]
    # Of an exponential number `e`, `1 - exp(-e)` is uniform.
    noise = ops.exponential_noise(key, positions_BW[:, :-1], torch.zeros_like(chosen), REJECT_STREAM)
    num_accepted = (-torch.expm1(-noise[..., 0]) * q < p).cumprod(dim=1).sum(dim=1)
    padded = torch.cat([draft_probs, torch.zeros_like(draft_probs[:, :1])], dim=1)
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    own = probs[rows, num_accepted]
    residual = (own - padded[rows, num_accepted]).clamp_min_(0)
    # What is left there, or all where that is nothing.
    left = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, own)
    redrawn = choose(torch.log(left)[:, None], key, positions_BW.gather(1, num_accepted[:, None]), RESIDUAL_STREAM)
    return num_accepted, torch.cat([proposals, redrawn], dim=1).scatter(1, num_accepted[:, None], redrawn)


def ends_row(tokens: Tensor, eos_ids: Tensor) -> Tensor:
    """Says which tokens, of any shape, are among the end-of-sequence ids `[N]`.

    Not `torch.isin`: with many ids it sorts, and reads how many different ones there are on the host.
    """
    return (tokens[..., None] == eos_ids).any(dim=-1)
