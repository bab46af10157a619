"""What stands before the web server: requests that it must not answer, and what a page may load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

MAX_BODY = 2 * 2**20  # of a request that is no upload: texts and names of uploaded files

# Gradio's own scripts and styles are inline, and its HTML component compiles templates.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
# Gradio fetches addresses that it is given there, in the server's name.
FETCHING = ("/gradio_api/proxy=", "/proxy=")
FILES = ("/gradio_api/file=", "/gradio_api/file/", "/file=", "/file/")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """ASGI middleware: refuses fetching for others and large bodies, and adds headers to every page.

    Args:
        app: The ASGI application behind it.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = unquote(str(scope["path"]))
        remote = any(path.startswith(prefix) and "://" in path for prefix in FILES)
        if path.startswith(FETCHING) or remote:
            await _refuse(send, 403, "expected a file of this chat, got an address elsewhere")
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        is_upload = path.endswith("/upload")
        if not is_upload and length.isdigit() and int(length) > MAX_BODY:
            await _refuse(send, 413, f"expected a request of at most {MAX_BODY} bytes, got {int(length)}")
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        await self.app(scope, receive if is_upload else _limited(receive), send_with_headers)


def _limited(receive: Receive) -> Receive:
    """A body without a stated length ends where the limit is."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > MAX_BODY else message

    return limited


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = sentence.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


__all__ = ["MAX_BODY", "Guard"]
