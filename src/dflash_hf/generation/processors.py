"""Applying a run's logits processors to a whole block, exactly as Transformers would token by token.

Warpers that look at nothing but the scores run once over all positions. Everything else (processors that read the
prefix, unknown ones, stateful ones) runs position by position over the rows that still match, stopping at a row's
first mismatch, so that no processor ever sees a rejected token.
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

    def _at(self, ids: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies all processors to one position; a prefix function is asked about the given rows only."""
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

    def walk(
        self,
        logits_BWV: Tensor,
        proposals: Tensor,
        ids: Tensor,
        columns: list[int],
        running: list[bool],
        choose: Callable[[Tensor, int], Tensor],
        ends: Callable[[Tensor, int], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Applies all processors position by position, to each row as long as its proposals match.

        Args:
            logits_BWV (`torch.Tensor` of shape `[B, W, V]`): The target's logits.
            proposals (`torch.Tensor` of shape `[B, W - 1]`): Proposed tokens.
            ids (`torch.Tensor` of shape `[B, >= max(columns) + W]`): Every row's tokens so far, left-padded; the
                proposals are written behind them, in place.
            columns (`list[int]`): Number of columns of `ids` that each row has filled.
            running (`list[bool]`): Rows that have not finished.
            choose (callable): Turns scores `[B, V]` at a position into tokens `[B]`.
            ends (callable): Says which of the tokens `[B]` chosen at a position end their rows.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Scores `[B, W, V]` (raw beyond a row's first mismatch) and the tokens
            chosen from them `[B, W]`.
        """
        scores = logits_BWV.to(torch.float32, copy=True)
        tokens = torch.zeros(scores.shape[:2], dtype=torch.long, device=scores.device)
        filled = torch.tensor(columns, device=ids.device)
        active = torch.tensor(running, device=ids.device)
        for position in range(scores.shape[1]):
            lengths = filled + position
            for length in sorted({n + position for n, on in zip(columns, active.tolist(), strict=True) if on}):
                rows = active & (lengths == length)
                # All rows every time, because processors hold settings per row; rows that stand elsewhere show their
                # own committed tokens, then padding, and what comes back for them is dropped.
                seen = torch.minimum(torch.where(active, lengths, filled), torch.tensor(length, device=ids.device))
                prefix = ids[:, :length].clone()
                prefix[torch.arange(length, device=ids.device) >= seen[:, None]] = self.pad_id
                processed = self._at(prefix, scores[:, position].clone(), rows)
                scores[:, position] = torch.where(rows[:, None], processed, scores[:, position])
            tokens[:, position] = choose(scores[:, position], position)
            if position == scores.shape[1] - 1:
                break
            chosen = tokens[:, position]
            active = active & (chosen == proposals[:, position]) & ~ends(chosen, position)
            if not bool(active.any()):
                break
            written = ids.gather(1, lengths[:, None])[:, 0]
            ids.scatter_(1, lengths[:, None], torch.where(active, proposals[:, position], written)[:, None])
        return scores, tokens


__all__ = ["BlockProcessors"]
