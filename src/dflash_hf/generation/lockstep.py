"""Deciding a block column by column with all rows in step: exactly the calls that plain `generate` makes.

Logits processors and stopping criteria of the user's own may keep state or compare rows, and a streamer gets one token
of every row at a time. They are called once per column, with every row as long as the others and finished rows padded,
in the order processors, criteria, streamer. A block is committed up to the first column at which a running row does
not continue with its proposal, so with several rows fewer tokens are committed per verify than each row alone would.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from dflash_hf.generation.accept import accept_matching
from dflash_hf.generation.acceptance import accept_rejection, choose, ends_row
from dflash_hf.generation.processors import BlockProcessors
from dflash_hf.generation.state import DecodeState

# Transformers' own processors look at nothing but each row's prefix and scores; SynthID keeps state.
TOKEN_LOCAL_PROCESSORS = "transformers.generation.logits_process"


@dataclass(slots=True, kw_only=True)
class Lockstep:
    """What is called at every column, and which rows go on.

    Args:
        processors (`BlockProcessors`): The run's processors.
        criteria (`list[StoppingCriteria]`): Stopping criteria besides length and end of sequence.
        streamer (`BaseStreamer`, *optional*): Gets each column `[B]` on the CPU.
        pad_id (`int`, *optional*): What finished rows go on with; `None` without an end-of-sequence id, where they go
            on with tokens of their own until all rows have finished.
        unfinished (`torch.Tensor` of shape `[B]`, bool): Rows that nothing has stopped yet.
        scores (`list[torch.Tensor]`, *optional*): Processed scores of every column, for criteria, if the call asks
            for `output_scores`.
    """

    processors: BlockProcessors
    criteria: list[StoppingCriteria]
    streamer: BaseStreamer | None
    pad_id: int | None
    unfinished: Tensor
    scores: list[Tensor] | None = None
    num_columns: int = field(default=0, init=False)

    @classmethod
    def if_needed(
        cls,
        processors: BlockProcessors,
        criteria: list[StoppingCriteria],
        streamer: BaseStreamer | None,
        state: DecodeState,
        scores: list[Tensor] | None,
    ) -> Lockstep | None:
        """Returns one if the rows of a run have to advance together, else `None`.

        Args:
            processors, criteria, streamer, scores: See the class.
            state (`DecodeState`): The run's. One row is in step with itself: nothing is lost by it. Without an
                end-of-sequence id plain `generate` lets stopped rows run on until all have stopped.
        """
        stateful = any(
            type(p).__module__ != TOKEN_LOCAL_PROCESSORS or isinstance(p, SynthIDTextWatermarkLogitsProcessor)
            for p in processors.processors
        )
        has_eos = state.eos_ids is not None
        foreign = any(type(c) not in (MaxTimeCriteria, StopStringCriteria) for c in criteria)
        if state.ids.shape[0] == 1:
            needed = stateful or bool(criteria)
        else:
            needed = stateful or foreign or streamer is not None or (bool(criteria) and not has_eos)
        if not needed:
            return None
        return cls(
            processors=processors,
            criteria=criteria,
            streamer=streamer,
            pad_id=processors.pad_id if has_eos else None,
            unfinished=~state.done,
            scores=scores,
        )

    def decide(self, state: DecodeState, logits_BCV: Tensor) -> tuple[Tensor, Tensor]:
        """Decides as many columns as all running rows agree to go on with; reads on the host.

        Args:
            state (`DecodeState`): `tokens` and columns of `ids` that are not committed yet are written, and
                `remaining` is lowered where something stops a row.
            logits_BCV (`torch.Tensor` of shape `[B, C, V]`): The target's, `C` being the state's width.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Processed scores `[B, C, V]`, float32 or what a processor makes of it,
            raw beyond the last column; and the number of proposals that each row keeps `[B]`.
        """
        is_stateless, last, positions = self.processors.is_stateless, state.width - 1, state.decided_positions
        scores = self.processors.warp(logits_BCV) if is_stateless else logits_BCV.to(torch.float32, copy=True)
        chosen, agreed = self._at_once(state, scores, positions) if is_stateless else (None, None)
        committed, was_running = torch.zeros_like(state.remaining), self._running()
        for column in range(last + 1):
            prefix = state.ids[:, : state.columns + self.num_columns]
            if not is_stateless:
                # A copy, because processors may write into what they get while the raw logits may be asked for.
                processed = self.processors(prefix, scores[:, column].to(torch.float32, copy=True))
                scores = scores.to(torch.promote_types(scores.dtype, processed.dtype))
                scores[:, column] = processed
            if chosen is not None:
                tokens = chosen[:, column]
            else:
                tokens = choose(scores[:, column, None], state.key, positions[:, column, None])[:, 0]
            state.tokens[:, column] = tokens
            running = self._take_column(state, tokens, scores[:, column])
            committed += running
            if not bool(self.unfinished.any()) or column == last:
                break
            going_on = tokens == state.proposals[:, column] if agreed is None else agreed > column
            if not bool((going_on | ~self._running()).all()):
                break
        goes_on = self._running() & self.unfinished.any()
        state.remaining.copy_(torch.where(was_running & ~goes_on, committed, state.remaining))
        return scores, (committed - 1).clamp_min(0)

    def _running(self) -> Tensor:
        """Rows whose tokens count `[B]`."""
        return self.unfinished if self.pad_id is not None else torch.ones_like(self.unfinished)

    def _at_once(self, state: DecodeState, scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens of all columns `[B, C]` where none depends on the prefix, and how many proposals each row keeps."""
        if state.draft_probs is not None and state.key is not None and scores.shape[1] > 1:
            agreed, chosen = accept_rejection(state.proposals, scores, state.draft_probs, state.key, positions)
            return chosen, agreed
        chosen = choose(scores, state.key, positions)
        return chosen, accept_matching(state.proposals, chosen) if scores.shape[1] > 1 else None

    def _take_column(self, state: DecodeState, tokens: Tensor, scores: Tensor) -> Tensor:
        """Appends one column to every row and asks what has finished; returns the rows whose token counts `[B]`."""
        running = self._running()
        if self.pad_id is not None:
            tokens = torch.where(running, tokens, self.pad_id)
        state.ids[:, state.columns + self.num_columns] = tokens
        self.num_columns += 1
        if self.scores is not None:
            self.scores.append(scores.clone())
        stopped = torch.zeros_like(self.unfinished)
        if state.eos_ids is not None:
            stopped |= ends_row(tokens, state.eos_ids)
        if self.num_columns >= state.limit:
            stopped |= True
        ids = state.ids[:, : state.columns + self.num_columns]
        given = None if self.scores is None else tuple(self.scores)
        for criterion in self.criteria:
            stopped |= torch.as_tensor(criterion(ids, given), device=stopped.device)  # pyright: ignore[reportArgumentType]
        self.unfinished = self.unfinished & ~stopped
        if self.streamer is not None:
            # A copy: a streamer may keep what it gets.
            self.streamer.put(tokens.to("cpu", copy=True))
        return running


__all__ = ["Lockstep"]
