"""This module writes replies in OpenAI's form: whole answers, chunks of a stream, usage and log-probabilities."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_hf.generation.logprobs import TokenLogprob
from dflash_hf.serve.answers import Answer
from dflash_hf.serve.engine import Counts
from dflash_hf.serve.markup import BROKEN, Piece

DONE = "data: [DONE]\n\n"
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}


@dataclass(kw_only=True)
class Choice:
    """One of the answers to a request, with its pieces so far and the reason of its end.

    Args:
        index (`int`): Number of the answer.
        answer (`Answer`): Reads the tokens of the answer.
    """

    index: int
    answer: Answer
    pieces: list[Piece] = field(default_factory=list[Piece])
    finish_reason: str = ""
    counts: Counts = field(default_factory=Counts)
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    num_calls: int = 0

    def end(self, is_cut: bool) -> list[Piece]:
        """Ends the answer and returns its last pieces.

        If the limit has cut a call, the call is text, and the `finish_reason` is `length`.
        """
        pieces = self.answer.end()
        self.finish_reason = "stop"
        if is_cut and not self.answer.is_stopped:
            self.finish_reason = "length"
        elif self.answer.has_calls:
            self.finish_reason = "tool_calls"
        return pieces

    def text_of(self, kind: str) -> str:
        """Returns the text of all pieces of a kind."""
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)


class Reply:
    """Writes the answers to one request.

    Args:
        name (`str`): Id of the request.
        model (`str`): The name of the model for clients.
        is_chat (`bool`): Whether the request is a chat. Otherwise, it is a plain completion.
        tokenizer: The tokenizer that decodes single tokens.
        num_top (`int`): How many of the most likely tokens are reported at each place, with their log-probabilities;
            -1 for no log-probabilities.
    """

    def __init__(
        self,
        name: str,
        model: str,
        is_chat: bool,
        tokenizer: PreTrainedTokenizerBase,
        num_top: int,
    ) -> None:
        self.is_chat = is_chat
        self.tokenizer = tokenizer
        self.num_top = num_top
        self.head: dict[str, Any] = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
        """Returns all answers as one object."""
        kind = "text_completion"
        told = [self._text(choice) for choice in choices]
        if self.is_chat:
            kind = "chat.completion"
            told = [self._message(choice) for choice in choices]
        return {
            **self.head,
            "object": kind,
            "choices": told,
            "usage": usage(choices, num_prompt_tokens),
        }

    def _message(self, choice: Choice) -> dict[str, Any]:
        content: str | None = choice.text_of("content")
        calls = [piece for piece in choice.pieces if piece.kind == "call"]
        if calls and not content:
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        reasoning = choice.text_of("reasoning")
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {"index": choice.index, "message": message, **self._end(choice)}

    def _text(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": choice.text_of("content"), **self._end(choice)}

    def _end(self, choice: Choice) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "acceptance_length": choice.counts.acceptance_length,
        }

    # ---- chunks of a stream

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """Returns the chunk that begins an answer; None for a plain completion."""
        if not self.is_chat:
            return None
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Returns the chunk of one piece."""
        delta: dict[str, Any] = {piece.kind: piece.text}
        if piece.kind == "call":
            delta = {"tool_calls": [{"index": choice.num_calls, **_call(piece)}]}
            choice.num_calls += 1
        return self._chunk(choice, delta)

    def last(self, choice: Choice) -> dict[str, Any]:
        """Returns the chunk that ends an answer, with all its log-probabilities."""
        chunk = self._chunk(choice, {})
        chunk["choices"][0] |= self._end(choice)
        return chunk

    def usage_chunk(self, choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
        """Returns the chunk with the usage, which follows after all answers."""
        return {**self._chunk_head(), "choices": [], "usage": usage(choices, num_prompt_tokens)}

    def _chunk(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = {"index": choice.index, "logprobs": None, "finish_reason": None}
        if self.is_chat:
            told["delta"] = delta
        else:
            told["text"] = delta.get("content", "")
        return {**self._chunk_head(), "choices": [told]}

    def _chunk_head(self) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk"
        return {**self.head, "object": kind}

    # ---- log-probabilities

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self.num_top < 0:
            return None
        answer = choice.answer
        kept: list[tuple[int, int, TokenLogprob]] = []
        for token_id, offset, logprob in zip(
            answer.ids, answer.offsets, choice.logprobs, strict=False
        ):
            is_cut_off = answer.is_stopped and offset >= answer.num_kept
            has_text = token_id not in answer.text.hidden and self._is_token(token_id)
            if has_text and not is_cut_off:
                kept.append((token_id, offset, logprob))
        if self.is_chat:
            return {"content": [self._token(*entry) for entry in kept], "refusal": None}
        return {
            "tokens": [self._said(token_id) for token_id, _, _ in kept],
            "token_logprobs": [logprob.logprob for _, _, logprob in kept],
            "top_logprobs": [
                {self._said(token_id): value for token_id, value in self._top(logprob)}
                for _, _, logprob in kept
            ],
            "text_offset": [offset for _, offset, _ in kept],
        }

    def _token(self, token_id: int, offset: int, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(other, value) for other, value in self._top(logprob)]
        return {**self._entry(token_id, logprob.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._said(token_id),
            "logprob": logprob,
            "bytes": token_bytes(self.tokenizer, token_id),
        }

    def _top(self, logprob: TokenLogprob) -> list[tuple[int, float]]:
        """Returns the most likely tokens at a place with their log-probabilities."""
        return [(token_id, value) for token_id, value in logprob.top if self._is_token(token_id)]

    def _is_token(self, token_id: int) -> bool:
        """Returns False for an id that the tokenizer does not have. A head may have more rows, as in Qwen3."""
        token: Any = self.tokenizer.convert_ids_to_tokens(token_id)
        return token is not None

    def _said(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


def _call(piece: Piece) -> dict[str, Any]:
    function = {"name": piece.name, "arguments": piece.text}
    return {"id": piece.call_id, "type": "function", "function": function}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> list[int] | None:
    """Returns the bytes of a token; None if it is a part of a character and the tokenizer does not give its bytes."""
    text = str(tokenizer.decode([token_id], skip_special_tokens=False))
    # Some tokenizers decode a part of a character to an empty text.
    is_whole = bool(text) and BROKEN not in text
    if is_whole:
        return list(text.encode())
    token: Any = tokenizer.convert_ids_to_tokens(token_id)
    if len(token) == 6 and token.startswith("<0x"):
        return [int(token[3:5], 16)]
    if all(letter in BYTES for letter in token):
        return [BYTES[letter] for letter in token]
    return None


def usage(choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
    """Returns the token counts of a request, with the kept tokens of the prompt and the used proposals."""
    num_tokens = sum(len(choice.answer.ids) for choice in choices)
    # Later choices reuse the prompt of the first choice, so the smallest count is the one before the request.
    num_kept = min(choice.counts.num_kept_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_kept},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(choice.counts.num_used for choice in choices),
            "rejected_prediction_tokens": sum(choice.counts.num_rejected for choice in choices),
        },
    }


def event(content: dict[str, Any]) -> str:
    """Returns an event of a stream, in ASCII: some clients would end a line at U+2028, which a text may contain."""
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
