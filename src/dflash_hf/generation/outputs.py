"""What `generate` returns with a draft, and collecting `output_scores`, `output_logits` and `output_hidden_states`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dflash_hf.generation.stats import SpeculativeStats


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True` and a DFlash draft.

    `scores`, `logits` and `hidden_states` have plain `generate`'s shapes, one entry per new token. Plain `generate`
    goes on feeding padding to a finished row; here it is not run any more, and its entries beyond its end are zeros.

    Args:
        speculative (`SpeculativeStats`): How the run went.
    """

    speculative: SpeculativeStats | None = None


class Recorder:
    """Collects what a call asks to be returned, row by row: only what belongs to committed tokens is kept.

    Args:
        generation_config (`GenerationConfig`): Says what is asked for.
        rows (`int`): Rows of the batch.
    """

    def __init__(self, generation_config: GenerationConfig, rows: int) -> None:
        wanted = bool(generation_config.return_dict_in_generate)
        self.has_scores = wanted and bool(generation_config.output_scores)
        self.has_logits = wanted and bool(generation_config.output_logits)
        self.has_hidden_states = wanted and bool(generation_config.output_hidden_states)
        self._first_hidden_states: tuple[Tensor, ...] | None = None
        # Per name and row: pieces [tokens, ...] in order.
        self._pieces: dict[str, list[list[Tensor]]] = {}
        self._rows = rows

    @property
    def is_on(self) -> bool:
        """Returns True if anything is collected at all."""
        return self.has_scores or self.has_logits or self.has_hidden_states

    def add_prefill(self, outputs: Any) -> None:
        """Keeps the prefill's hidden states, which are the first token's entry as they are: `[B, S, D]` per layer."""
        self._first_hidden_states = outputs.hidden_states if self.has_hidden_states else None

    def add(self, scores: Tensor, outputs_logits: Tensor, hidden_states: Any, num_committed: list[int]) -> None:
        """Keeps the committed part of one decision.

        Args:
            scores (`torch.Tensor` of shape `[B, C, V]`): Processed scores.
            outputs_logits (`torch.Tensor` of shape `[B, C, V]`): The target's logits.
            hidden_states (`tuple[torch.Tensor, ...]`, *optional*): `[B, C, D]` per layer; none for the first token.
            num_committed (`list[int]`): Columns each row has committed.
        """
        if self.has_scores:
            # Transformers makes scores float32; a processor of the user's may make them float64.
            wide = torch.promote_types(scores.dtype, torch.float32)
            self._keep("scores", scores.to(wide), num_committed)
        if self.has_logits:
            self._keep("logits", outputs_logits.to(torch.float32), num_committed)
        if self.has_hidden_states and hidden_states is not None:
            for index, states in enumerate(hidden_states):
                self._keep(f"hidden_states.{index}", states, num_committed)

    def collected(self) -> dict[str, Any]:
        """Returns the keyword arguments of the output: tuples with one entry per new token."""
        found: dict[str, Any] = {}
        if self.has_scores:
            found["scores"] = self._joined("scores")
        if self.has_logits:
            found["logits"] = self._joined("logits")
        if self.has_hidden_states:
            num_layers = sum(name.startswith("hidden_states.") for name in self._pieces)
            layers = [self._joined(f"hidden_states.{index}") for index in range(num_layers)]
            later = [tuple(states[:, None] for states in token) for token in zip(*layers, strict=True)]
            found["hidden_states"] = (cast(tuple[Tensor, ...], self._first_hidden_states), *later)
        return found

    def _keep(self, name: str, values: Tensor, num_committed: list[int]) -> None:
        rows = self._pieces.setdefault(name, [[] for _ in range(self._rows)])
        for row, num in enumerate(num_committed):
            if num:
                rows[row].append(values[row, :num].clone())

    def _joined(self, name: str) -> tuple[Tensor, ...]:
        """One tensor `[B, ...]` per new token."""
        rows = [torch.cat(pieces) for pieces in self._pieces[name] if pieces]
        longest = max(row.shape[0] for row in rows)
        padded = rows[0].new_zeros(self._rows, longest, *rows[0].shape[1:])
        for index, pieces in enumerate(self._pieces[name]):
            if pieces:
                row = torch.cat(pieces)
                padded[index, : row.shape[0]] = row
        return padded.unbind(1)


__all__ = ["DFlashGenerateOutput", "Recorder"]
