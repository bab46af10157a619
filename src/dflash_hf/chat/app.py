"""This module runs the chat as a web server: it refuses wrong requests, limits uploads, and serves the page."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_hf.chat.model import ChatModel
from dflash_hf.chat.page import MINUTES, Page
from dflash_hf.hosts import trusted_hosts

MAX_BODY = 2 * 2**20  # of a request that is not an upload: texts and names of uploaded files
# The two limits of uploads.
MAX_FILES = 512
MAX_BYTES = 2**30
MAX_PAGES = 4096  # the newest pages, whose browsers are remembered
UPLOAD = "/gradio_api/upload"  # the only route that writes its body to files, part by part
HEARTBEAT = "/gradio_api/heartbeat/"  # then a page's name, which other routes have in the query
# A route for programs, which could read here the events of any page. The pages themselves do not need it.
CALL = "/gradio_api/call/"
COOKIE = "dflash-chat"
SPACES = "https://huggingface.co"  # its pages show a Space in a frame
HEADERS = {
    # Gradio's own scripts and styles are inline, and its HTML component compiles templates.
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Uploads:
    """Limits the number of files, and of their bytes, in the folder of uploads.

    Gradio limits and deletes each single file (`max_file_size`, `delete_cache`). But Gradio does not count the files,
    and does not remove uploads that broke off.
    """

    def __init__(
        self, folder: Path, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.folder = folder
        self.max_files = max_files
        self.max_bytes = max_bytes
        self._coming: list[int] = []

    @contextmanager
    def admit(self, num_bytes: int) -> Generator[None]:
        """Counts an upload while it arrives, and raises `HTTPException` if there is no room.

        The part that is already in a file counts twice.
        """
        sizes = [*self._coming, num_bytes]
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # the file was deleted in the meantime
                if not path.is_dir():
                    sizes.append(path.lstat().st_size)
        if len(sizes) > self.max_files or sum(sizes) > self.max_bytes:
            raise HTTPException(
                413,
                f"expected at most {self.max_files} uploaded files on this server, of {self.max_bytes:,} bytes, got "
                f"{len(sizes)} of {sum(sizes):,}; try again in some minutes: uploads are deleted after {MINUTES}",
            )
        self._coming.append(num_bytes)
        try:
            yield
        finally:
            self._coming.remove(num_bytes)
            if not self._coming:
                self._tidy()

    def _tidy(self) -> None:
        """Deletes uploads that broke off, and folders without an upload."""
        for path in self.folder.iterdir():
            with suppress(OSError):  # the folder contains an upload
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()


class Guard:
    """ASGI middleware that refuses requests that are too large or do not come from this chat's own page.

    It recognises browsers by a cookie, and gives the application a name for the browser in `request.state.browser`. It
    also adds headers to responses. `space` is the public name of a Hugging Face Space if the chat runs in one, and
    empty otherwise.
    """

    def __init__(self, app: ASGIApp, uploads: Uploads, space: str = "") -> None:
        self.app = app
        self.uploads = uploads
        # A Space with a custom name has two names, with a comma between them.
        self.space_names = [name.strip() for name in space.lower().split(",") if name.strip()]
        self._browsers: OrderedDict[str, str] = OrderedDict()  # by page
        self._headers = dict(HEADERS)
        # With SameSite=Strict, pages of other sites cannot send the cookie.
        self._cookie = "Path=/; HttpOnly; SameSite=Strict"
        if space:
            # The Hub shows a Space in a frame of its own page. For a browser, the Space is then a page of another
            # site. A partitioned cookie is sent only in that frame.
            policy = HEADERS["content-security-policy"]
            self._headers["content-security-policy"] = policy.replace(
                "frame-ancestors 'self'", f"frame-ancestors 'self' {SPACES}"
            )
            self._cookie = "Path=/; HttpOnly; SameSite=None; Secure; Partitioned"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection. WebSockets are refused, because the page opens none."""
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        known = request.cookies.get(COOKIE)
        browser = known or secrets.token_urlsafe(16)
        request.state.browser = browser

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(self._headers)
                # The cookie is hidden from scripts, and ends with the browser.
                if not known:
                    headers.append("set-cookie", f"{COOKIE}={browser}; {self._cookie}")
            await send(message)

        with ExitStack() as coming:
            try:
                self._admit(request, coming)
            except HTTPException as refusal:
                said = PlainTextResponse(refusal.detail, refusal.status_code)
                head = {
                    "type": "http.response.start",
                    "status": said.status_code,
                    "headers": said.raw_headers,
                }
                await send_with_headers(head)
                # The body is read to its end and dropped. Otherwise, a client that is still sending would see only a
                # broken connection.
                while refusal.status_code == 413 and (await receive()).get("more_body"):
                    pass
                return await send({"type": "http.response.body", "body": said.body})
            await self.app(scope, receive, send_with_headers)

    def _admit(self, request: Request, coming: ExitStack) -> None:
        """Raises `HTTPException` for a request that is not of this chat. An upload counts until `coming` ends."""
        path = str(request.scope["path"])
        headers = request.headers
        length = headers.get("content-length", "")
        if request.method not in ("GET", "HEAD", "OPTIONS"):
            # Browsers send the origin with every request that changes something. Programs do not, and no page of
            # another site can make them send a request.
            origin = headers.get("origin")
            # The proxy of a Space may pass on another name as the host.
            own = [headers.get("host", "").lower(), *self.space_names]
            host = _host_of(origin or "")
            is_own = bool(host) and host in own
            if origin is not None and not is_own:
                sentence = f"expected a request of this chat's own page, got one of {origin}; open the chat itself"
                raise HTTPException(403, sentence)
            if not length.isdecimal():
                raise HTTPException(
                    411, "expected a request that says its length, got none; add Content-Length"
                )
        elif path.startswith(CALL):
            raise HTTPException(
                403, "expected a request of the chat's page, got one of a program; open that page"
            )
        if "://" in path:  # Gradio would fetch such an address for anybody, in the server's name
            raise HTTPException(403, "expected a file of this chat, got an address elsewhere")
        pages = request.query_params.getlist("session_hash")
        if path.startswith(HEARTBEAT):
            pages.append(path.removeprefix(HEARTBEAT))
        for page in pages:
            # The first browser that names a page owns it.
            owner = self._browsers.setdefault(page, request.state.browser)
            self._browsers.move_to_end(page)
            if len(self._browsers) > MAX_PAGES:
                self._browsers.popitem(last=False)
            if not secrets.compare_digest(owner.encode(), request.state.browser.encode()):
                raise HTTPException(
                    403, "expected a page that this browser opened, got another one's; open it anew"
                )
        # The path is compared as it is routed, and as a whole, because other routes read their bodies into memory.
        if (request.method, path) == ("POST", UPLOAD):
            coming.enter_context(self.uploads.admit(int(length)))
        elif int(length or 0) > MAX_BODY:
            raise HTTPException(
                413, f"expected a request of at most {MAX_BODY} bytes, got {length}"
            )


def _host_of(origin: str) -> str:
    """Returns the host of an `Origin` header, with its port; empty if the header is not an address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def guards(host: str, uploads: Uploads, share: bool = False, space: str = "") -> list[Middleware]:
    """Returns the middleware of a server that listens on `host`, the outermost first. Raises `OSError` for no host.

    `space` is the public name of a Hugging Face Space if the server runs in one. With `share`, all host names are
    allowed, because the names of a shared server are not known.
    """
    hosts = ["*"]
    if not share:
        hosts = trusted_hosts(host)
    by_name = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return [by_name, Middleware(Guard, uploads=uploads, space=space)]


@contextmanager
def open_page(model: ChatModel, names: tuple[str, str], note: str = "") -> Generator[Page]:
    """Gives a [`Page`] for the model, names and note. Its uploads are in a folder that is deleted at the end."""
    with TemporaryDirectory(prefix="dflash-chat-", ignore_cleanup_errors=True) as folder:
        # This must come before any component is made, because each component remembers the folder of uploads.
        os.environ.update(GRADIO_TEMP_DIR=folder, GRADIO_ANALYTICS_ENABLED="False")
        yield Page(model, names, Path(folder), note)
