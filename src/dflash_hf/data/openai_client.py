"""A client of servers with an OpenAI-style `/v1/chat/completions`: vLLM, SGLang, `dflash-hf serve` and others.

It speaks HTTP through httpx, which huggingface_hub needs anyway: of OpenAI's own client nothing else would be used.
Nothing is asked twice: a request that fails raises.
"""

from __future__ import annotations

import base64
import mimetypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from dflash_hf.data.row_files import parsed_object
from dflash_hf.errors import is_a, one_line, require, shown

# Seconds; `read` is between two pieces of an answer. As many are asked at once as there are rows, more than httpx's
# 100 connections: none waits for another one's.
TIMEOUT = httpx.Timeout(10.0, read=600.0, pool=None)
LIMITS = httpx.Limits(max_connections=None)
CHAT = "/v1/chat/completions"
CHECK_SERVER = "check its URL, and see its log"

Body = Mapping[str, Any]
Answer = TypeVar("Answer")


class NoTextError(ValueError):
    """Raised for an answer that is no text: calls of tools, a refusal, or nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """An answer of a server.

    Args:
        text (`str`): The answer, without the thoughts that the server takes out of it.
        thoughts (`str`): Those thoughts; empty of a server that has no parser for them.
        token_ids (`list[int]`): All its tokens, thoughts included; empty of a server that does not tell them.
        is_cut (`bool`): Whether it ends at the limit of tokens, not by itself.
        prompt_tokens, new_tokens (`int`): As the server counts them.
        seconds (`float`): From the request to the end of the answer.
        ttft (`float`, *optional*): From the request to the first piece of thoughts or text, where it comes in pieces.
    """

    text: str
    thoughts: str
    token_ids: list[int]
    is_cut: bool
    prompt_tokens: int
    new_tokens: int
    seconds: float
    ttft: float | None = None


class OpenAIClient:
    """A server, asked over HTTP.

    Args:
        url (`str`): Where it is; `/v1` may be left out.
        model (`str`, *optional*): What it calls the model; default the first one that it names.

    Raises:
        ValueError: If the URL is none.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT, limits=LIMITS)
        except httpx.InvalidURL as error:
            got = f"{shown(url)} ({one_line(error)})"
            action = "give one as http://localhost:8000"
            raise ValueError(f"expected the URL of a server, got {got}; {action}") from error
        self._model = model

    @property
    def model(self) -> str:
        """What the server calls the model.

        Raises:
            httpx.HTTPError: If the server cannot be reached.
            ValueError: If it names none, or replies something else.
        """
        if self._model is None:
            response = self.http.get("/v1/models")
            response.raise_for_status()
            where = f"{self.url}/v1/models"
            models = _reply(response, where).get("data")
            hint = "start the server with one, and check its URL"
            name = _first_object(models).get("id")
            require(isinstance(name, str), f"a model with an id at {where}", models, hint)
            self._model = str(name)
        return self._model

    def ask(self, body: Body) -> ServerAnswer:
        """Asks for an answer in one piece, with its token ids where the server can tell them (vLLM).

        Args:
            body (mapping): What `/v1/chat/completions` takes, but the model; images as [`sent_messages`] makes them.

        Raises:
            httpx.HTTPError: If the server cannot be reached, or refuses.
            NoTextError: If the answer is no text.
            ValueError: If it has another form.
        """
        request = {"model": self.model, **body, "return_token_ids": True}
        started = time.perf_counter()
        response = self.http.post(CHAT, json=request)
        _check_status(response)
        reply = _reply(response, f"the answer of {self.url}")
        seconds = time.perf_counter() - started
        choice = _first_object(reply.get("choices"))
        require(bool(choice), f"a choice in the answer of {self.url}", reply, CHECK_SERVER)
        message = choice.get("message") or {}
        is_message = isinstance(message, dict)
        require(is_message, f"a message in the answer of {self.url}", message, CHECK_SERVER)
        parts = _Parts()
        parts.add(choice, message)
        return self._answer(parts, reply.get("usage"), seconds)

    def stream(self, body: Body) -> ServerAnswer:
        """Asks for an answer in pieces, for the time to the first one; see [`ask`] for the rest."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        request = {"model": self.model, **body, **options}
        parts = _Parts()
        usage: Any = None
        ttft = None
        started = time.perf_counter()
        with self.http.stream("POST", CHAT, json=request) as response:
            if response.is_error:
                response.read()
            _check_status(response)
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    parts.add(choice, choice.get("delta") or {})
                if ttft is None and parts.has_words:
                    ttft = time.perf_counter() - started
        seconds = time.perf_counter() - started
        return self._answer(parts, usage, seconds, ttft)

    def _answer(
        self, parts: _Parts, usage: Any, seconds: float, ttft: float | None = None
    ) -> ServerAnswer:
        names = ("prompt_tokens", "completion_tokens")
        is_counted = isinstance(usage, dict) and all(is_a(usage.get(name), int) for name in names)
        hint = "it has to count tokens, of streams too (stream_options)"
        require(is_counted, f"usage in the answer of {self.url}", usage, hint)
        reason = parts.why_no_text()
        if reason:
            raise NoTextError(
                f"expected a text as the answer of {self.url}, got {reason}; "
                "ask for text alone, and start the server without a parser of tool calls"
            )
        return ServerAnswer(
            text="".join(parts.text),
            thoughts="".join(parts.thoughts),
            token_ids=parts.token_ids,
            is_cut=parts.finish_reason == "length",
            prompt_tokens=usage["prompt_tokens"],
            new_tokens=usage["completion_tokens"],
            seconds=seconds,
            ttft=ttft,
        )


@dataclass(slots=True)
class _Parts:
    """What has come of an answer: one message, or many pieces of it."""

    text: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str = ""
    calls_tools: bool = False
    is_refusal: bool = False

    @property
    def has_words(self) -> bool:
        """Whether any text or thought has come."""
        return any(self.text) or any(self.thoughts)

    def add(self, choice: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        """Adds a choice and its message, or a piece of both."""
        self.text.append(_first_text(message, "content"))
        # vLLM and SGLang have called it either; some releases write both, with the same in them.
        self.thoughts.append(_first_text(message, "reasoning", "reasoning_content"))
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list):
            self.token_ids += token_ids
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.calls_tools |= bool(message.get("tool_calls") or message.get("function_call"))
        self.is_refusal |= bool(message.get("refusal"))

    def why_no_text(self) -> str:
        """Returns what came in place of a text; nothing where a text came, or a limit was reached before one."""
        if self.calls_tools:
            return "calls of tools"
        if self.is_refusal:
            return "a refusal"
        is_told = self.has_words or bool(self.token_ids) or self.finish_reason == "length"
        return "" if is_told else "nothing"


def _first_text(message: Mapping[str, Any], *names: str) -> str:
    """The first of some fields that is a text."""
    for name in names:
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _check_status(response: httpx.Response) -> None:
    """Raises what a server refuses with, its own words in it."""
    if response.is_error:
        sentence = f"{response.status_code} {one_line(response.text)}"
        raise httpx.HTTPStatusError(sentence, request=response.request, response=response)


def _reply(response: httpx.Response, where: str) -> dict[str, Any]:
    """What a server replies, which must be a JSON object."""
    return parsed_object(response.content, where, CHECK_SERVER)


def _first_object(values: Any) -> dict[str, Any]:
    """The first of a list of objects; an empty one of anything else."""
    is_filled = isinstance(values, list) and bool(values)
    first: Any = values[0] if is_filled else {}
    return first if isinstance(first, dict) else {}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its end."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = parsed_object(data, f"the answer of {response.url}", CHECK_SERVER)
        if "error" in event:
            reason = one_line(event["error"])
            raise ValueError(f"expected an answer of the server, got {reason}; see its log")
        yield event


def at_once(ask: Callable[[Body], Answer], bodies: Sequence[Body]) -> list[Answer]:
    """Calls a function with each body at the same time; returns what it returned, in their order."""
    with ThreadPoolExecutor(max_workers=len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def sent_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as a server takes them: images (`path`, `url` or `image` of a block) as URLs or data URLs."""
    return [{**message, "content": _sent_content(message["content"])} for message in messages]


def _sent_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_sent_image(part) if part["type"] == "image" else part for part in content]


def _sent_image(part: Mapping[str, Any]) -> dict[str, Any]:
    place = str(part.get("path") or part.get("url") or part["image"])
    if not place.startswith(("http://", "https://", "data:")):
        path = Path(place)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        place = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": "image_url", "image_url": {"url": place}}
