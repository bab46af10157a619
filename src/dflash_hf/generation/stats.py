"""How a run went: tokens committed at every verify, per row, and what follows from them.

Definitions. A *verify* is one forward of the target over a block, counted for every row that was still running. It
*accepts* the longest prefix of the proposals that equals what the target says, and *commits* that plus one token of
the target's own (the bonus), cut at an end-of-sequence token and at the length limit. `acceptance_length` is the mean
number committed per verify, the bonus included, pooled over rows. The first token of an answer comes from the prefill
and belongs to no verify.

z-lab reports the mean over responses of per-response means; vLLM `1 + accepted / drafts` (before the cut at the end);
SGLang `completion_tokens / verify_ct` (the prefill's token included).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class SpeculativeStats:
    """Statistics of one `generate` call.

    Args:
        num_committed (`list[list[int]]`): Per row, tokens committed at each verify (the bonus included).
        num_accepted (`list[list[int]]`): Per row, proposals that matched at each verify, before any cut.
        num_proposed (`int`): Proposals checked per verify (`verify_width - 1`).
        num_target_forwards (`int`): Forwards of the target, the prefill's included.
        num_draft_forwards (`int`): Block forwards of the draft.
        prefill_seconds, draft_seconds, verify_seconds (`float`): Wall time of the prefill (first token included), of
            drafting, and of verify with acceptance and writing the next context. On an accelerator work is queued, not
            waited for, so only their sum over a whole run is exact.
        engine (`str`): Engine that ran.
        proposal (`str`): Proposal rule that ran; `"greedy"` without sampling.
        cache_bytes (`int`): Size of the target's and the draft's K/V buffers, in bytes.
    """

    num_committed: list[list[int]] = field(default_factory=list)
    num_accepted: list[list[int]] = field(default_factory=list)
    num_proposed: int = 0
    num_target_forwards: int = 0
    num_draft_forwards: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    engine: str = "eager"
    proposal: str = "greedy"
    cache_bytes: int = 0

    @property
    def num_verifies(self) -> int:
        """Number of verifies, summed over rows."""
        return sum(len(row) for row in self.num_committed)

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated, summed over rows, the prefill's first token of each row included."""
        return len(self.num_committed) + sum(sum(row) for row in self.num_committed)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per verify, the bonus included, pooled over rows; 0 if nothing was verified."""
        verifies = self.num_verifies
        return sum(sum(row) for row in self.num_committed) / verifies if verifies else 0.0

    @property
    def acceptance_length_per_row(self) -> list[float]:
        """The same for each row on its own."""
        return [sum(row) / len(row) if row else 0.0 for row in self.num_committed]

    def acceptance_per_position(self, conditional: bool = False) -> list[float]:
        """Share of verifies in which the proposal at each position was accepted, first proposal first.

        Args:
            conditional (`bool`): Divide by the verifies that accepted everything before it instead of by all of them.

        Returns:
            `list[float]`: `num_proposed` values; a conditional one with nothing to divide by is 0.
        """
        counts = [accepted for row in self.num_accepted for accepted in row]
        reached = [sum(count > position for count in counts) for position in range(self.num_proposed)]
        tried = [len(counts), *reached] if conditional else [len(counts)] * self.num_proposed
        return [hit / base if base else 0.0 for hit, base in zip(reached, tried, strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as plain numbers, for JSON."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_per_position": self.acceptance_per_position(),
            "num_verifies": self.num_verifies,
            "num_new_tokens": self.num_new_tokens,
            "num_target_forwards": self.num_target_forwards,
            "num_draft_forwards": self.num_draft_forwards,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "engine": self.engine,
            "proposal": self.proposal,
            "cache_bytes": self.cache_bytes,
        }


__all__ = ["SpeculativeStats"]
