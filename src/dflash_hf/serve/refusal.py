"""How a request is refused: a sentence, and what OpenAI's error object has beside it."""

from __future__ import annotations

import json
from typing import Any

from dflash_hf.errors import require

FIX = "correct the request"
INVALID = "invalid_value"


class Refusal(ValueError):
    """A request that is not answered.

    Args:
        sentence (`str`): What was expected, what came, and what to do.
        status (`int`): Status of the response.
        code (`str`, *optional*): OpenAI's word for the reason.
        param (`str`, *optional*): The field that is wrong.
    """

    def __init__(
        self,
        sentence: str,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.param = param


def need(
    good: bool, param: str, what: str, got: object, action: str = FIX, code: str = INVALID
) -> None:
    """Raises a [`Refusal`] with status 400 unless a field is good; the sentence is that of `require`."""
    try:
        require(good, what, got, action)
    except ValueError as error:
        raise Refusal(str(error), 400, code, param) from None


def has_whole_characters(value: Any) -> bool:
    """Returns whether a value of JSON has whole characters alone, and is not too deep to be written again.

    No tokenizer reads half a character, as `\\ud83d` alone is.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def error_object(
    sentence: str, status: int, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Returns an error in OpenAI's form."""
    kind = "server_error"
    if status < 500:
        kind = "invalid_request_error"
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code}}
