"""What stands before the web server: requests that it must not answer, and what a page may load."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import unquote

from dflash_hf.chat.uploads import Uploads

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
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FILES = ("/gradio_api/file=", "/gradio_api/file/", "/file=", "/file/")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """ASGI middleware: refuses other names for this machine, fetching for others, large bodies and too many uploads.

    It adds headers to every page. What it refuses, it refuses in a sentence (Starlette's `TrustedHostMiddleware` looks
    at names too, and says "Invalid host header").

    Args:
        app: The ASGI application behind it.
        uploads (`Uploads`): Where uploads go.
        hosts (collection of `str`, *optional*): Names that a request may call this machine; see `own_hosts`.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        uploads: Uploads,
        hosts: Collection[str] | None = None,
    ) -> None:
        self.app = app
        self.uploads = uploads
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection; the page opens no web sockets, so there are none."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if self.hosts is not None and host not in self.hosts:
            sentence = f"expected a request to {' or '.join(sorted(self.hosts))}, got one to {host or 'nobody'}"
            await _refuse(send, 403, f"{sentence}; open the address that the chat printed when it started")
            return
        path = unquote(str(scope["path"]))
        remote = any(path.startswith(prefix) and "://" in path for prefix in FILES)
        if path.startswith(FETCHING) or remote:
            await _refuse(send, 403, "expected a file of this chat, got an address elsewhere")
            return
        length = headers.get(b"content-length", b"")
        is_upload = path.endswith("/upload") and scope["method"] == "POST"
        if not is_upload and length.isdigit() and int(length) > MAX_BODY:
            await _refuse(send, 413, f"expected a request of at most {MAX_BODY} bytes, got {int(length)}")
            return
        if is_upload and not length.isdigit():
            await _refuse(send, 411, "expected an upload that says its length, got none; send it with Content-Length")
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        with ExitStack() as coming:
            if is_upload:
                try:
                    coming.enter_context(self.uploads.admit(int(length)))
                except ValueError as error:
                    # Read to its end, or the browser hears of a broken connection and not of the reason.
                    while (await receive()).get("more_body"):
                        pass
                    await _refuse(send, 413, str(error))
                    return
            await self.app(scope, receive if is_upload else _limited(receive), send_with_headers)


def own_hosts(host: str) -> frozenset[str] | None:
    """What requests may call this machine where it listens on `host`; `None`: anything.

    Where it listens on loopback, all requests come from here, also those of a page from elsewhere whose name was made
    to point here (DNS rebinding): those call it by that name. Where it listens to others too, it has names that nobody
    knows here.

    Raises:
        OSError: If there is no such host.
    """
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return None
    return frozenset({*LOOPBACK, host.strip("[]").lower()})


def _host_name(host: str) -> str:
    """The name or address in a `Host` header, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


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


__all__ = ["MAX_BODY", "Guard", "own_hosts"]
