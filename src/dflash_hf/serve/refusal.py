"""This module says how a request is refused: by a sentence in OpenAI's error object."""

from __future__ import annotations

import json
from typing import Any

from dflash_hf.errors import require

FIX = "correct the request"
INVALID = "invalid_value"


class Refusal(ValueError):
    """Raised for a request that is not answered.

    Args:
        sentence (`str`): Says what was expected, what came, and what to do.
        status (`int`): HTTP status of the response.
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
    """Raises a [`Refusal`] with status 400 unless `good` is true. The sentence is that of `require`."""
    try:
        require(good, what, got, action)
    except ValueError as error:
        raise Refusal(str(error), 400, code, param) from None


def has_whole_characters(value: Any) -> bool:
    """Returns whether a value from JSON has only whole characters, and is not too deeply nested to be written again.

    No tokenizer reads half a character, such as a single `\\ud83d`.
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
