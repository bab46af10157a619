"""This module defines what a running batch reports of its requests: the new tokens of a step, and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dflash_hf.generation.logprobs import TokenLogprob

Finished = Literal["stop", "length", "error"]


class NewTokens(NamedTuple):
    """The new tokens that one step gave to one request.

    Args:
        id (`int`): The id of the request.
        token_ids (`list[int]`): Its new tokens. The list may be empty if an error has ended the request.
        finished (`str`, *optional*): `"stop"` at an end token, `"length"` at the limit, `"error"` if the request
            cannot continue, and `None` while it continues.
    """

    id: int
    token_ids: list[int]
    finished: Finished | None


@dataclass(slots=True)
class RequestStats:
    """Statistics of one request.

    Args:
        num_prompt_tokens (`int`): Number of tokens of the prompt.
        num_kept_tokens (`int`): Number of tokens of the prompt that were kept from another text. The target did not
            compute them again.
        num_new_tokens (`int`): Number of tokens of the answer, an end token included.
        proposed (`list[int]`): Number of proposals of each verify of this row. In a tree, these are all nodes except
            the anchor.
        accepted (`list[int]`): Number of proposals of each verify that became part of the text.
        logprobs (`list[TokenLogprob]`): Log-probabilities of each new token, if the request asks for them.
        first_token_seconds (`float`): Seconds from `add` to the first token.
        seconds (`float`): Seconds from `add` to the last token.
        error (`str`): The reason if the request ended with `"error"`.
        exception (`Exception`, *optional*): The exception that ended the request. `None` if the request could not
            begin; `generate` may still answer it alone.
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
        """Number of verifies of the row."""
        return len(self.proposed)

    @property
    def num_proposed(self) -> int:
        """Number of proposals that were verified."""
        return sum(self.proposed)

    @property
    def num_accepted(self) -> int:
        """Number of proposals that are part of the text."""
        return sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens committed per verify, the bonus token included; 0 if nothing was verified."""
        if not self.num_verifies:
            return 0.0
        return (self.num_new_tokens - 1) / self.num_verifies
