"""What a running batch tells of its requests: new tokens with each step, and how each one went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dflash_hf.generation.logprobs import TokenLogprob

Finished = Literal["stop", "length", "error"]


class NewTokens(NamedTuple):
    """What a step has brought one request.

    Args:
        id (`int`): The request.
        token_ids (`list[int]`): Its new tokens; may be empty where an error has ended it.
        finished (`str`, *optional*): `"stop"` at an end token, `"length"` at the limit, `"error"` where it cannot go
            on, `None` while it goes on.
    """

    id: int
    token_ids: list[int]
    finished: Finished | None


@dataclass(slots=True)
class RequestStats:
    """How one request went.

    Args:
        num_prompt_tokens (`int`): Tokens of the prompt.
        num_kept_tokens (`int`): Of them, those that were kept from another text and did not go through the target
            again.
        num_new_tokens (`int`): Tokens of the answer, an end token included.
        proposed (`list[int]`): Proposals of each verify, which is a step that the row was part of; all nodes of a tree
            but the anchor.
        accepted (`list[int]`): Of them, those that are part of the text.
        logprobs (`list[TokenLogprob]`): Of each new token, where the request asks for them.
        first_token_seconds (`float`): From `add` to the first token.
        seconds (`float`): From `add` to the last token.
        error (`str`): Why it ended with `"error"`.
        exception (`Exception`, *optional*): What was raised then; `None` where the request could not begin, and
            `generate` may still answer it alone.
    """

    num_prompt_tokens: int = 0
    num_kept_tokens: int = 0
    num_new_tokens: int = 0
    proposed: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    error: str = ""
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
