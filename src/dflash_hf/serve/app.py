"""This module contains the pages of the server: OpenAI's two endpoints for answers, over one pair, and a few more.

[`dflash_hf.serve.requests`] checks a request. [`dflash_hf.serve.exchange`] submits its jobs to the engine
([`dflash_hf.serve.engine`]), and makes an answer or a stream of pieces from their tokens. For an error, the response
is OpenAI's error object with one sentence.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dflash_hf.errors import one_line, shown
from dflash_hf.hosts import trusted_hosts
from dflash_hf.serve.engine import Ended
from dflash_hf.serve.exchange import Exchange
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.refusal import Refusal, error_object
from dflash_hf.serve.replies import event
from dflash_hf.serve.requests import MAX_BODY, read_object, read_request

PAGES = (
    "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/NAME, "
    "GET /metrics, GET /health, POST /load_model"
)
LENGTH_HEADER = "x-acceptance-length"
UNREAD = (408, 413, 415)  # with these, a part of the body is unread, so the connection is closed
PATIENCE = 1.0  # seconds to wait for the next bytes of a body that is not complete


class Endpoint:
    """An ASGI application that answers one kind of request."""

    def __init__(self, pair: Pair, is_chat: bool) -> None:
        self.pair = pair
        self.is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. If the client disconnects, its run ends, both for a whole answer and for a stream."""
        kind = "cmpl"
        if self.is_chat:
            kind = "chatcmpl"
        name = f"{kind}-{uuid.uuid4().hex[:24]}"
        exchange = None
        try:
            try:
                body = await read_body(Request(scope, receive))
                asked = await asyncio.to_thread(read_request, body, self.is_chat, self.pair)
                exchange = Exchange(self.pair, asked, name)
                exchange.submit()
                if asked.is_streamed:
                    stream = self.stream(exchange, name)
                    response: Response = StreamingResponse(stream, media_type="text/event-stream")
                else:
                    response = whole(await or_gone(receive, exchange, exchange.whole()))
            except ClientDisconnect:
                return
            except Exception as error:
                status, content = self.failed(error, name)
                response = refused(status, content)
            await response(scope, receive, send)
        finally:
            if exchange is not None:
                exchange.end()

    async def stream(self, exchange: Exchange, name: str) -> AsyncGenerator[str]:
        """Yields the events of a stream. An error becomes one event, which is the last one."""
        try:
            async for text in exchange.stream():
                yield text
        except Exception as error:
            _, content = self.failed(error, name)
            yield event(content)

    def failed(self, error: Exception, name: str) -> tuple[int, dict[str, Any]]:
        """Returns the status and the content of the response to a failed request.

        Also writes a line about the failure, except for [`Ended`]: the engine has already written that line.
        """
        if isinstance(error, Ended):
            return 503, error_object(str(error), 503)
        status = 500
        code = None
        param = None
        sentence = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, Refusal):
            status = error.status
            code = error.code
            param = error.param
            sentence = str(error)
        # `generate` has refused the request.
        elif isinstance(error, ValueError):
            status = 400
            sentence = one_line(error)
        self.pair.note(f"{name}: {status}, {sentence}")
        return status, error_object(sentence, status, code, param)


def refused(status: int, content: dict[str, Any]) -> Response:
    """Returns the response to a request that failed."""
    headers: dict[str, str] = {}
    if status in UNREAD:
        headers["connection"] = "close"
    return JSONResponse(content, status, headers)


async def read_body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises:
        Refusal: If the body is too long, stops arriving, or has another content type than JSON. Pages of other sites
            can send other content types.
        ClientDisconnect: If the client disconnects before the body is complete.
    """
    kind = request.headers.get("content-type", "none").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            f"expected application/json as content-type, got {kind}; correct the request", 415
        )
    parts: list[bytes] = []
    length = 0
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(PATIENCE):
                part = await anext(stream)
        except StopAsyncIteration:
            return b"".join(parts)
        except TimeoutError:
            what = (
                f"expected the rest of the body within {PATIENCE:.0f} s, got {length} bytes of it"
            )
            raise Refusal(f"{what}; send all of it", 408, "request_timeout") from None
        parts.append(part)
        length += len(part)
        if length > MAX_BODY:
            raise Refusal(
                f"expected a body of at most {MAX_BODY // 2**20} MB, got more; shorten it", 413
            )


async def or_gone(receive: Receive, exchange: Exchange, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of `work`. Ends the exchange if the client disconnects before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.end()

    watch = asyncio.ensure_future(gone())
    try:
        return await work
    finally:
        watch.cancel()


def whole(content: dict[str, Any]) -> Response:
    """Returns the response with a whole answer. A header repeats the acceptance length of the first choice."""
    response = JSONResponse(content)
    length = content["choices"][0]["acceptance_length"]
    if length is not None:
        response.headers[LENGTH_HEADER] = f"{length:.4f}"
    return response


def guards(host: str, cors_origins: Sequence[str]) -> list[Middleware]:
    """Returns the middleware of a server that listens on `host`, the outermost first.

    Args:
        host (`str`): The host that the server listens on.
        cors_origins (sequence of `str`): Origins whose pages may send requests from a browser; `*` for all origins.

    Raises:
        OSError: If there is no such host.
    """
    hosts = trusted_hosts(host)
    found = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)]
    if cors_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[LENGTH_HEADER],
            )
        )
    return found


def build_app(pair: Pair, middleware: Sequence[Middleware] = ()) -> Starlette:
    """Returns the server's pages as an ASGI application, behind the given middleware."""
    model = {
        "id": pair.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dflash-hf",
    }

    def one_model(request: Request) -> Response:
        asked = request.path_params["name"]
        if asked == pair.name:
            return JSONResponse(model)
        sentence = f"expected {pair.name!r} as model, got {shown(asked)}; correct it"
        return JSONResponse(error_object(sentence, 404, "model_not_found", "model"), 404)

    async def load_model(request: Request) -> Response:
        """Answers the request of `transformers chat` to load its model. The model is always loaded already."""
        try:
            asked = read_object(await read_body(request)).get("model")
        except ClientDisconnect:
            return Response()  # nobody reads this response
        except Refusal as error:
            content = error_object(str(error), error.status, error.code, error.param)
            return refused(error.status, content)
        told = {"status": "ready", "model": pair.name, "cached": True}
        if asked != pair.name:
            sentence = f"expected {pair.name!r} as model, got {shown(asked)}; correct it"
            told = {"status": "error", "model": pair.name, "message": sentence}
        return Response(event(told), media_type="text/event-stream")

    def no_page(request: Request, error: Exception) -> Response:
        asked = shown(f"{request.method} {request.url.path}")
        status = getattr(error, "status_code", 500)
        sentence = f"expected one of {PAGES}, got {asked}; correct it"
        return JSONResponse(error_object(sentence, status), status)

    routes = [
        Route("/v1/chat/completions", Endpoint(pair, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Endpoint(pair, is_chat=False), methods=["POST"]),
        Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [model]})),
        Route("/v1/models/{name:path}", one_model),
        Route("/load_model", load_model, methods=["POST"]),
        Route("/metrics", pair.metrics.page),
        Route("/health", lambda _: JSONResponse({"status": "ok"})),
    ]
    return Starlette(
        routes=routes,
        middleware=list(middleware),
        exception_handlers={HTTPException: no_page},
    )


class Server(uvicorn.Server):
    """A server that ends every run when it has to stop, and then gives slow readers 5 seconds."""

    def __init__(self, pair: Pair, middleware: Sequence[Middleware] = ()) -> None:
        quiet: Any = {"lifespan": "off", "log_level": "warning", "access_log": False}
        app = build_app(pair, middleware)
        super().__init__(uvicorn.Config(app, **quiet, timeout_graceful_shutdown=5))
        self.pair = pair

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal comes. Then waits for the running step, because Python must not end during a step."""
        try:
            super().run(sockets)
        finally:
            self.pair.engine.call(int)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Tells the engine to end all runs. Then uvicorn handles the signal."""
        self.pair.engine.stop()
        super().handle_exit(sig, frame)
