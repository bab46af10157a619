"""What stands before the web server: requests that it must not answer, and what a page may load."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from dflash_hf.chat.uploads import Uploads

MAX_BODY = 2 * 2**20  # of a request that is no upload: texts and names of uploaded files
UPLOAD = "/gradio_api/upload"  # the one route that writes its body to files, part by part
READING = ("GET", "HEAD", "OPTIONS")
# Routes that say or end what a page is told: a page's name is in the query of the one, the path of the other.
EVENTS, HEARTBEAT = "/gradio_api/queue/data", "/gradio_api/heartbeat/"
COOKIE = "dflash-chat"
BROWSER = "x-dflash-browser"  # the header in which what is behind the guard reads a browser's name
MAX_OWNERS = 4096  # pages whose browser is remembered, the newest ones

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


class Owners:
    """Which browser opened which page: what a page is told goes to no other one, whoever knows the page's name."""

    def __init__(self) -> None:
        self._by_page: OrderedDict[str, str] = OrderedDict()

    def may(self, browser: str, page: str) -> bool:
        """Whether a page is this browser's; one that nobody had is from now on."""
        owner = self._by_page.setdefault(page, browser)
        self._by_page.move_to_end(page)
        while len(self._by_page) > MAX_OWNERS:
            self._by_page.popitem(last=False)
        return secrets.compare_digest(owner.encode(), browser.encode())


class Guard:
    """ASGI middleware: refuses other names for this machine, fetching for others, large bodies and too many uploads.

    So too what a page from elsewhere sends to change something here, and pages of another browser, which it tells by a
    cookie. It adds headers to every page. What it refuses, it refuses in a sentence (Starlette's
    `TrustedHostMiddleware` looks at names too, and says "Invalid host header"; for the others it has nothing).

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
        self.owners = Owners()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection; the page opens no web sockets, so there are none."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        browser, new_browser = _browser(headers.get(b"cookie", b"").decode("latin-1"))
        if sentence := self._refusal(scope, headers, browser):
            await _refuse(send, 403, sentence)
            return
        # For the page behind this, at a browser's first request too; nobody else can say it.
        told = [header for header in scope["headers"] if header[0] != BROWSER.encode()]
        scope["headers"] = [*told, (BROWSER.encode(), browser.encode())]
        length = headers.get(b"content-length", b"")
        # The path as it is routed, and the whole of it: other routes read their bodies into memory.
        is_upload = scope["path"] == UPLOAD and scope["method"] == "POST"
        if not is_upload and length.isdigit() and int(length) > MAX_BODY:
            await _refuse(send, 413, f"expected a request of at most {MAX_BODY} bytes, got {int(length)}", receive)
            return
        if is_upload and not length.isdigit():
            await _refuse(send, 411, "expected an upload that says its length, got none; send it with Content-Length")
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = [] if new_browser is None else [(b"set-cookie", new_browser.encode())]
                message["headers"] = [*message["headers"], *HEADERS, *cookie]
            await send(message)

        with ExitStack() as coming:
            if is_upload:
                try:
                    coming.enter_context(self.uploads.admit(int(length)))
                except ValueError as error:
                    await _refuse(send, 413, str(error), receive)
                    return
            await self.app(scope, receive if is_upload else _limited(receive), send_with_headers)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], browser: str) -> str:
        """Why a request is none that this chat answers; nothing if it is one."""
        stated = headers.get(b"host", b"").decode("latin-1")
        host = _host_name(stated)
        if self.hosts is not None and host not in self.hosts:
            sentence = f"expected a request to {' or '.join(sorted(self.hosts))}, got one to {host or 'nobody'}"
            return f"{sentence}; open the address that the chat printed when it started"
        origin = headers.get(b"origin")
        # Browsers say it of every request that changes something; programs do not, and no page from elsewhere can
        # make them send one.
        if origin is not None and scope["method"] not in READING:
            elsewhere = origin.decode("latin-1")
            if urlsplit(elsewhere).netloc.lower() != stated.lower():
                return f"expected a request of this chat's own page, got one of {elsewhere}; open the chat itself"
        path = unquote(str(scope["path"]))
        remote = any(path.startswith(prefix) and "://" in path for prefix in FILES)
        if path.startswith(FETCHING) or remote:
            return "expected a file of this chat, got an address elsewhere"
        pages = [path.removeprefix(HEARTBEAT)] if path.startswith(HEARTBEAT) else []
        if path.rstrip("/") == EVENTS:
            pages = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_hash", [])
        if not all(self.owners.may(browser, page) for page in pages):
            return "expected a page that this browser opened, got another one's; open the chat anew"
        return ""


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


def _browser(cookies: str) -> tuple[str, str | None]:
    """The browser's name from its `Cookie` header, and the `Set-Cookie` header of one that has none."""
    for cookie in cookies.split(";"):
        key, _, value = cookie.strip().partition("=")
        if key == COOKIE and value:
            return value, None
    # Not readable by scripts, and not sent along by pages from elsewhere. It ends with the browser.
    name = secrets.token_urlsafe(16)
    return name, f"{COOKIE}={name}; Path=/; HttpOnly; SameSite=Strict"


def _limited(receive: Receive) -> Receive:
    """A body without a stated length ends where the limit is."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > MAX_BODY else message

    return limited


async def _refuse(send: Send, status: int, sentence: str, receive: Receive | None = None) -> None:
    """Answers with a sentence; with `receive` it then reads the body to its end, and keeps nothing of it.

    Else whoever is still sending hears of a broken connection and not of the reason.
    """
    body = sentence.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": receive is not None})
    if receive is not None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.body", "body": b""})


__all__ = ["BROWSER", "COOKIE", "MAX_BODY", "UPLOAD", "Guard", "Owners", "own_hosts"]
