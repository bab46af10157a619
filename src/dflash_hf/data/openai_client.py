"""This module is a client of servers with an OpenAI-style `/v1/chat/completions`: vLLM, SGLang, `dflash-hf serve`, ...

The client sends HTTP requests with httpx, which huggingface_hub needs anyway. OpenAI's own client would add nothing. A
request that fails raises an error and is not repeated.
"""

from __future__ import annotations

import asyncio
import base64
import json
import mimetypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from anyio.from_thread import start_blocking_portal

from dflash_hf.data.prompt_files import MEDIA
from dflash_hf.data.row_files import parsed_object
from dflash_hf.errors import is_a, one_line, require, shown

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # the longest time between two pieces of an answer
# An answer in one piece arrives only when it is complete, so its time limit grows with the maximum number of tokens.
READ_SECONDS_PER_TOKEN = 0.1
# By default, httpx has 100 connections. More requests may be in flight, and none should wait for a connection.
LIMITS = httpx.Limits(max_connections=None)
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
CHECK_SERVER = "check its URL, and see its log"

Body = Mapping[str, Any]
Result = TypeVar("Result")


class NoTextError(ValueError):
    """Raised for an answer without a text: tool calls, a refusal, or nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """An answer of a server.

    Args:
        text (`str`): The answer, without the thoughts that the server separates from it.
        thoughts (`str`): These thoughts. Empty if the server has no parser for them.
        token_ids (`list[int]`): All tokens of the answer and its thoughts. Empty if the server does not return them.
        prompt_ids (`list[int]`): The tokens of the prompt. Empty if the server does not return them.
        is_cut (`bool`): Whether the answer ended at the limit of tokens, and not by itself.
        prompt_tokens, new_tokens (`int`): The numbers of tokens of prompt and answer, as the server counts them.
        seconds (`float`): The time from the request to the end of the answer.
        ttft (`float`, *optional*): The time from the request to the first piece of thoughts or text, if the answer was
            streamed.
    """

    text: str
    thoughts: str
    token_ids: list[int]
    prompt_ids: list[int]
    is_cut: bool
    prompt_tokens: int
    new_tokens: int
    seconds: float
    ttft: float | None = None


class OpenAIClient:
    """A client of a server. Its methods must be called inside of `async with client:`.

    The client does not limit the number of requests in flight.

    Args:
        url (`str`): The URL of the server, with or without `/v1`.
        model (`str`, *optional*): The server's name of the model. The default is the first model that the server
            lists.

    Raises:
        ValueError: If `url` is not a URL.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            got = f"{shown(url)} ({one_line(error)})"
            action = "give one as http://localhost:8000"
            raise ValueError(f"expected the URL of a server, got {got}; {action}") from error
        self._model = model
        # Connections belong to the event loop in which they were made, so each `async with` makes its own.
        self._connections: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        """Creates the HTTP client. Connections are opened when they are needed."""
        timeout = httpx.Timeout(CONNECT_SECONDS, read=READ_SECONDS, pool=None)
        http = httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=LIMITS)
        self._connections.append(await http.__aenter__())
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Closes the connections."""
        await self._connections.pop().__aexit__(*error)

    @property
    def http(self) -> httpx.AsyncClient:
        """The HTTP client. It exists only inside of `async with client:`."""
        return self._connections[-1]

    async def model(self) -> str:
        """Returns the server's name of the model.

        Raises:
            httpx.HTTPError: If the server cannot be reached.
            ValueError: If the server lists no model, or its reply has another form.
        """
        if self._model is None:
            models = await self.models()
            hint = "start the server with one, and check its URL"
            name = _first_object(models).get("id")
            require(
                isinstance(name, str), f"a model with an id at {self.url}{MODELS}", models, hint
            )
            self._model = str(name)
        return self._model

    async def models(self) -> Any:
        """Returns the server's list of models. It also shows that the server works. Raises as [`model`] does."""
        response = await self.http.get(MODELS)
        _check_status(response)
        return _reply(response, f"{self.url}{MODELS}").get("data")

    async def ask(self, body: Body) -> ServerAnswer:
        """Requests an answer in one piece, with its token ids if the server returns them (vLLM does).

        Args:
            body (mapping): The body for `/v1/chat/completions` without the model. Messages with images must have the
                form of [`sent_messages`].

        Raises:
            httpx.HTTPError: If the server cannot be reached, or refuses the request.
            NoTextError: If the answer has no text.
            ValueError: If the reply has another form.
        """
        request = {"model": await self.model(), **body, "return_token_ids": True}
        read = max(READ_SECONDS, READ_SECONDS_PER_TOKEN * body.get("max_tokens", 0))
        timeout = httpx.Timeout(CONNECT_SECONDS, read=read, pool=None)
        started = time.perf_counter()
        response = await self.http.post(CHAT, json=request, timeout=timeout)
        _check_status(response)
        reply = _reply(response, f"the answer of {self.url}")
        seconds = time.perf_counter() - started
        choice = _first_object(reply.get("choices"))
        require(bool(choice), f"a choice in the answer of {self.url}", reply, CHECK_SERVER)
        message = choice.get("message") or {}
        is_message = isinstance(message, dict)
        require(is_message, f"a message in the answer of {self.url}", message, CHECK_SERVER)
        parts = _Parts()
        parts.add_prompt(reply)
        parts.add(choice, message)
        return self._answer(parts, reply.get("usage"), seconds)

    async def complete(self, body: Body) -> dict[str, Any]:
        """Requests a completion of token ids or a text, and returns the reply unchanged.

        Args:
            body (mapping): The body for `/v1/completions` without the model.

        Raises:
            httpx.HTTPError: If the server cannot be reached, or refuses the request.
            ValueError: If the reply is no JSON object.
        """
        request = {"model": await self.model(), **body}
        response = await self.http.post(COMPLETIONS, json=request)
        _check_status(response)
        return _reply(response, f"the answer of {self.url}")

    async def stream(self, body: Body) -> ServerAnswer:
        """Requests a streamed answer, to measure the time to its first piece. See [`ask`] for the rest."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        request = {"model": await self.model(), **body, **options}
        parts = _Parts()
        usage: Any = None
        ttft = None
        started = time.perf_counter()
        # No connection is used again, because llama.cpp's server sometimes closes it after a stream without notice.
        headers = {"Connection": "close"}
        async with self.http.stream("POST", CHAT, json=request, headers=headers) as response:
            if response.is_error:
                await response.aread()
            _check_status(response)
            async for event in _events(response):
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
            prompt_ids=parts.prompt_ids,
            is_cut=parts.finish_reason == "length",
            prompt_tokens=usage["prompt_tokens"],
            new_tokens=usage["completion_tokens"],
            seconds=seconds,
            ttft=ttft,
        )


@dataclass(slots=True)
class _Parts:
    """The parts of an answer that have arrived: one message, or many pieces of it."""

    text: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    prompt_ids: list[int] = field(default_factory=list[int])
    finish_reason: str = ""
    calls_tools: bool = False
    is_refusal: bool = False

    @property
    def has_words(self) -> bool:
        """True if any text or thought has arrived."""
        return any(self.text) or any(self.thoughts)

    def add_prompt(self, reply: Mapping[str, Any]) -> None:
        """Adds the tokens of the prompt, if a reply has them."""
        prompt_ids = reply.get("prompt_token_ids")
        if isinstance(prompt_ids, list):
            self.prompt_ids += prompt_ids

    def add(self, choice: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        """Adds a choice and its message, or a piece of both."""
        self.text.append(_first_text(message, "content"))
        # vLLM and SGLang have used both names. Some releases write both, with the same content.
        self.thoughts.append(_first_text(message, "reasoning", "reasoning_content"))
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list):
            self.token_ids += token_ids
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.calls_tools |= bool(message.get("tool_calls") or message.get("function_call"))
        self.is_refusal |= bool(message.get("refusal"))

    def why_no_text(self) -> str:
        """Returns what came instead of a text, or `""` if a text came or the limit of tokens was reached before it."""
        if self.calls_tools:
            return "calls of tools"
        if self.is_refusal:
            return "a refusal"
        is_told = self.has_words or bool(self.token_ids) or self.finish_reason == "length"
        return "" if is_told else "nothing"


def _first_text(message: Mapping[str, Any], *names: str) -> str:
    """Returns the first of some fields that is a text, or `""`."""
    for name in names:
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _check_status(response: httpx.Response) -> None:
    """Raises an error with the server's own words if the server has refused the request."""
    if response.is_error:
        sentence = f"{response.status_code} {one_line(response.text)}"
        raise httpx.HTTPStatusError(sentence, request=response.request, response=response)


def _reply(response: httpx.Response, where: str) -> dict[str, Any]:
    """Returns the reply of a server, which must be a JSON object."""
    return parsed_object(response.content, where, CHECK_SERVER)


def _first_object(values: Any) -> dict[str, Any]:
    """Returns the first object of a list of objects, or an empty object for any other value."""
    is_filled = isinstance(values, list) and bool(values)
    first: Any = values[0] if is_filled else {}
    return first if isinstance(first, dict) else {}


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yields the lines of a stream, split only at line feeds. `aiter_lines` also splits at U+2028 and others."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
    yield rest


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream, up to its end."""
    async for line in _lines(response):
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = parsed_object(data, f"the answer of {response.url}", CHECK_SERVER)
        if "error" in event:
            reason = one_line(event["error"])
            raise ValueError(
                f"expected an answer from the server, got {reason}; read the server's log"
            )
        yield event


async def at_once(
    ask: Callable[[Body], Awaitable[ServerAnswer]], bodies: Sequence[Body]
) -> list[ServerAnswer]:
    """Calls a function with all bodies at the same time, and returns its results in the order of the bodies.

    The first error is raised only when all calls have ended.
    """
    results = await asyncio.gather(*map(ask, bodies), return_exceptions=True)
    answers: list[ServerAnswer] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        answers.append(result)
    return answers


def run_async(work: Callable[[], Awaitable[Result]]) -> Result:
    """Runs a coroutine function in an event loop in another thread, and returns its result.

    The caller's thread may already run an event loop, as in a notebook.
    """
    with start_blocking_portal("asyncio") as portal:
        return portal.call(work)


def sent_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as a server accepts them: images and videos as URLs or data URLs, arguments of calls as texts.

    The place of an image is in the key `path`, `url` or `image` of its block, and that of a video in `path`, `url` or
    `video`.
    """
    return [_sent_message(message) for message in messages]


def _sent_message(message: Mapping[str, Any]) -> dict[str, Any]:
    sent = {**message, "content": _sent_content(message["content"])}
    if message.get("tool_calls"):
        sent["tool_calls"] = [_sent_call(call) for call in message["tool_calls"]]
    return sent


def _sent_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call in the form of OpenAI's interface, in which the arguments are a JSON text."""
    # The arguments are in the `function` of the call, or beside its name.
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_sent_arguments(call["function"])}
    return _with_sent_arguments(call)


def _with_sent_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function of a call with its arguments as a JSON text."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _sent_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_sent_media(part) if part["type"] in MEDIA else part for part in content]


def _sent_media(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    place = str(part.get("path") or part.get("url") or part[kind])
    if not place.startswith(("http://", "https://", "data:")):
        path = Path(place)
        mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        place = f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"
    # vLLM and SGLang accept videos in the form in which OpenAI's interface accepts images.
    return {"type": f"{kind}_url", f"{kind}_url": {"url": place}}
