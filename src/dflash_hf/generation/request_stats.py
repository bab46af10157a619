"""What a running batch tells of its requests: new tokens with each step, and how each one went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dflash_hf.generation.logprobs import TokenLogprob

Finished = Literal["stop", "length", "error"]


class NewTokens(NamedTuple):
    """What a step has brought one request."""

    id: int
    token_ids: list[int]  # may be empty where an error has ended it
    # "stop" at an end token, "length" at the limit, "error" where it cannot go on, None while it goes on
    finished: Finished | None


@dataclass(slots=True)
class RequestStats:
    """How one request went."""

    num_prompt_tokens: int = 0
    num_kept_tokens: int = 0  # of the prompt, which did not go through the target again
    num_new_tokens: int = 0
    # Of each verify, which is a step that the row was part of:
    proposed: list[int] = field(default_factory=list[int])  # proposals, nodes of trees included
    accepted: list[int] = field(default_factory=list[int])  # proposals that are part of the text
    # Of each new token, where the request asks for them
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    first_token_seconds: float = 0.0  # from `add` to the first token
    seconds: float = 0.0  # from `add` to the last one
    error: str = ""  # why it ended with "error"
    # With it; none where the request could not begin, and `generate` may still answer it alone
    exception: Exception | None = None

    @property
    def num_verifies(self) -> int:
        """Verifies of the row."""
        return len(self.proposed)

    @property
    def num_proposed(self) -> int:
        """Proposals that were verified."""
        return sum(self.proposed)

    @property
    def num_accepted(self) -> int:
        """Proposals that are part of the text."""
        return sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per verify, the bonus included; 0 if nothing was verified."""
        if not self.num_verifies:
            return 0.0
        return (self.num_new_tokens - 1) / self.num_verifies
