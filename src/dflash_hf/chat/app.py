"""The chat as a web server: which requests it refuses, how much may be uploaded, and that it serves the page."""

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

MAX_BODY = 2 * 2**20  # of a request that is no upload: texts and names of uploaded files
# of uploads
MAX_FILES = 512
MAX_BYTES = 2**30
MAX_PAGES = 4096  # whose browser is remembered, the newest ones
UPLOAD = "/gradio_api/upload"  # the one route that writes its body to files, part by part
HEARTBEAT = "/gradio_api/heartbeat/"  # and a page's name, which other routes have in the query
# For programs, which are told there what any page is told; pages do without
CALL = "/gradio_api/call/"
COOKIE = "dflash-chat"
SPACES = "https://huggingface.co"  # whose pages show a Space in a frame
HEADERS = {
    # Gradio's own scripts and styles are inline, and its HTML component compiles templates.
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Uploads:
    """How many files, and how many bytes of them, the folder of uploads may hold.

    Gradio limits and deletes each one (`max_file_size`, `delete_cache`), but neither counts nor tidies what broke off.
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
        """Counts an upload while it comes in, what is there of it twice; `HTTPException` without room for it."""
        sizes = [*self._coming, num_bytes]
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
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
        """Deletes what broke off, and folders without an upload."""
        for path in self.folder.iterdir():
            with suppress(OSError):  # a folder with an upload in it
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()


class Guard:
    """ASGI middleware: refuses in a sentence what is no request of this chat's own page, or is too large.

    It tells browsers by a cookie: the application finds a name in `request.state.browser`. It adds headers. `space` is
    the public name of a Hugging Face Space that the chat runs in, and empty elsewhere.
    """

    def __init__(self, app: ASGIApp, uploads: Uploads, space: str = "") -> None:
        self.app = app
        self.uploads = uploads
        # A Space with a name of its owner's choice has two, with a comma between.
        self.space_names = [name.strip() for name in space.lower().split(",") if name.strip()]
        self._browsers: OrderedDict[str, str] = OrderedDict()  # by page
        self._headers = dict(HEADERS)
        # Not sent along by pages from elsewhere
        self._cookie = "Path=/; HttpOnly; SameSite=Strict"
        if space:
            # The Hub shows a Space in a frame of its own page, and to a browser that is a page from elsewhere. A
            # partitioned cookie is sent in that frame alone.
            policy = HEADERS["content-security-policy"]
            self._headers["content-security-policy"] = policy.replace(
                "frame-ancestors 'self'", f"frame-ancestors 'self' {SPACES}"
            )
            self._cookie = "Path=/; HttpOnly; SameSite=None; Secure; Partitioned"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection; the page opens no web sockets, so there are none."""
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
                # Not for scripts; it ends with the browser
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
                # Read to the end, and kept nowhere: who is still sending would hear of a broken connection only.
                while refusal.status_code == 413 and (await receive()).get("more_body"):
                    pass
                return await send({"type": "http.response.body", "body": said.body})
            await self.app(scope, receive, send_with_headers)

    def _admit(self, request: Request, coming: ExitStack) -> None:
        """Raises `HTTPException` for what is no request of this chat; an upload counts until `coming` ends."""
        path = str(request.scope["path"])
        headers = request.headers
        length = headers.get("content-length", "")
        if request.method not in ("GET", "HEAD", "OPTIONS"):
            # Browsers say it of every request that changes something; programs do not, and no page from elsewhere can
            # make them send one.
            origin = headers.get("origin")
            # The proxy of a Space may hand on another name as the host.
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
        if "://" in path:  # Gradio fetches such an address for anybody, in the server's name
            raise HTTPException(403, "expected a file of this chat, got an address elsewhere")
        pages = request.query_params.getlist("session_hash")
        if path.startswith(HEARTBEAT):
            pages.append(path.removeprefix(HEARTBEAT))
        for page in pages:
            # Who is the first to name it
            owner = self._browsers.setdefault(page, request.state.browser)
            self._browsers.move_to_end(page)
            if len(self._browsers) > MAX_PAGES:
                self._browsers.popitem(last=False)
            if not secrets.compare_digest(owner.encode(), request.state.browser.encode()):
                raise HTTPException(
                    403, "expected a page that this browser opened, got another one's; open it anew"
                )
        # The path as it is routed, and the whole of it: other routes read their bodies into memory.
        if (request.method, path) == ("POST", UPLOAD):
            coming.enter_context(self.uploads.admit(int(length)))
        elif int(length or 0) > MAX_BODY:
            raise HTTPException(
                413, f"expected a request of at most {MAX_BODY} bytes, got {length}"
            )


def _host_of(origin: str) -> str:
    """Returns the host of an `Origin` header, with its port; none where that is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def guards(host: str, uploads: Uploads, share: bool = False, space: str = "") -> list[Middleware]:
    """What stands before the page of a server that listens on `host`, the outermost first; `OSError` for no host.

    `space` is the public name of a Hugging Face Space that it runs in.

    Where the server is shared, nobody knows its names.
    """
    hosts = ["*"]
    if not share:
        hosts = trusted_hosts(host)
    by_name = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return [by_name, Middleware(Guard, uploads=uploads, space=space)]


@contextmanager
def open_page(model: ChatModel, names: tuple[str, str], note: str = "") -> Generator[Page]:
    """The page, as [`Page`] takes model, names and note; its uploads lie in a folder of their own, which then goes."""
    with TemporaryDirectory(prefix="dflash-chat-", ignore_cleanup_errors=True) as folder:
        # Before any component is made: each notes where uploads go.
        os.environ.update(GRADIO_TEMP_DIR=folder, GRADIO_ANALYTICS_ENABLED="False")
        yield Page(model, names, Path(folder), note)
