"""What the chat refuses or drops so that it stays small and private: names, uploads, conversations, their images."""

import asyncio
import html
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from gradio import processing_utils
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.requests import Request

from dflash_hf.chat import conversation as conversation_module
from dflash_hf.chat import page as pages
from dflash_hf.chat.app import COOKIE, MAX_BODY, Uploads, guards
from dflash_hf.chat.conversation import (
    MAX_IMAGE_BYTES,
    MAX_SESSIONS,
    Answer,
    Conversation,
    Run,
    Sessions,
    Turn,
)
from dflash_hf.chat.images import ChatImage
from dflash_hf.chat.model import MAX_CHARACTERS, MAX_IMAGES, ChatModel
from dflash_hf.chat.page import Page
from dflash_hf.data.image_files import KEPT_PIXELS, ImageError, read_image
from helpers.processors import picture

# ---- names of this machine


def call(
    guard: Any, path: str = "/", body: bytes | None = None, kind: str = "http", **headers: str
) -> list[Any]:
    """What is sent back for one request."""
    sent: list[Any] = []
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if body is not None:
        raw.append((b"content-length", str(len(body)).encode()))
    path, _, query = path.partition("?")
    scope = {
        "type": kind,
        "path": path,
        "method": "GET" if body is None else "POST",
        "headers": raw,
    }
    scope["query_string"] = query.encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body or b""}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    return sent


async def fine(scope: Any, receive: Any, send: Any) -> None:
    """An application that is content."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})


def guard(folder: Path, host: str = "127.0.0.1", app: Any = fine, **limits: Any) -> Any:
    """An application behind all that stands before the page."""
    for middleware in reversed(guards(host, Uploads(folder, **limits))):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


@pytest.mark.parametrize(
    ("host", "called", "status"),
    [
        ("127.0.0.1", "127.0.0.1:7860", 200),
        ("127.0.0.1", "localhost:7860", 200),
        ("127.0.0.1", "LOCALHOST", 200),
        ("127.0.0.1", "[::1]:7860", 200),
        ("127.0.0.1", "127.0.0.2:7860", 400),
        ("127.0.0.2", "127.0.0.2:7860", 200),
        ("127.0.0.1", "evil.example:7860", 400),
        ("127.0.0.1", "localhost.evil.example", 400),
        ("127.0.0.1", "[::2]:7860", 400),
        ("127.0.0.1", "", 400),
        ("localhost", "evil.example", 400),
        ("0.0.0.0", "chat.example:7860", 200),
    ],
)
def test_on_loopback_only_its_own_names_are_answered(
    host: str, called: str, status: int, tmp_path: Path
) -> None:
    sent = call(guard(tmp_path, host), host=called)
    assert sent[0]["status"] == status
    if status == 400:
        assert sent[1]["body"] == b"Invalid host header"
        assert (b"content-type", b"text/plain; charset=utf-8") in sent[0]["headers"]


def test_no_name_and_no_web_socket_is_answered(tmp_path: Path) -> None:
    assert call(guard(tmp_path))[0]["status"] == 400
    assert call(guard(tmp_path), kind="websocket", host="localhost") == [
        {"type": "websocket.close", "code": 1008}
    ]


@pytest.mark.parametrize("share", [False, True])
def test_a_public_link_is_made_only_when_it_is_asked_for(
    share: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADIO_SHARE", "True")
    launched: dict[str, Any] = {}
    page: Any = object.__new__(Page)
    page.blocks = SimpleNamespace(
        queue=lambda **_: None, launch=lambda **options: launched.update(options)
    )
    page.launch("127.0.0.1", 7860, guards("127.0.0.1", Uploads(tmp_path), share), share)
    assert launched["share"] is share
    app: Any = fine
    for middleware in reversed(launched["app_kwargs"]["middleware"]):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    # A public address has a name that nobody knows before.
    assert call(app, host="1234.gradio.live")[0]["status"] == (200 if share else 400)
    assert call(app, "/", b"x", host="1234.gradio.live", origin="http://evil.example")[0][
        "status"
    ] in (400, 403)


# ---- a Space of the Hub

SPACE = "owner-chat.hf.space"


def in_space(folder: Path) -> Any:
    """An application as it stands in a Space."""
    app: Any = fine
    names = f"chat.example,{SPACE}"
    for middleware in reversed(guards("0.0.0.0", Uploads(folder), space=names)):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


def test_a_space_may_be_shown_in_a_frame_of_the_hub(tmp_path: Path) -> None:
    headers = dict(call(in_space(tmp_path), host=SPACE)[0]["headers"])
    assert b"frame-ancestors 'self' https://huggingface.co" in headers[b"content-security-policy"]
    assert headers[b"set-cookie"].endswith(b"HttpOnly; SameSite=None; Secure; Partitioned")
    elsewhere = dict(call(guard(tmp_path), host="localhost")[0]["headers"])
    assert elsewhere[b"content-security-policy"].endswith(b"frame-ancestors 'self'")
    assert elsewhere[b"set-cookie"].endswith(b"HttpOnly; SameSite=Strict")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (f"https://{SPACE}", 200),
        ("https://chat.example", 200),
        ("https://inner:7860", 200),
        ("https://huggingface.co", 403),
        ("https://evil.example", 403),
    ],
)
def test_a_space_answers_its_own_page_alone(origin: str, status: int, tmp_path: Path) -> None:
    # The container may be called by another name than the browser knows.
    sent = call(
        in_space(tmp_path), "/gradio_api/queue/join", b"x", host="inner:7860", origin=origin
    )
    assert sent[0]["status"] == status


# ---- other pages, other browsers


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://localhost:7860", "localhost:7860", 200),
        ("http://LOCALHOST:7860", "localhost:7860", 200),
        ("http://evil.example", "localhost:7860", 403),
        ("http://localhost:7861", "localhost:7860", 403),
        ("http://127.0.0.1:7860", "localhost:7860", 403),
        ("null", "localhost:7860", 403),
        ("", "localhost:7860", 403),
    ],
)
@pytest.mark.parametrize("path", ["/gradio_api/upload", "/gradio_api/queue/join", "/"])
def test_pages_from_elsewhere_change_nothing(
    path: str, origin: str, host: str, status: int, tmp_path: Path
) -> None:
    sent = call(guard(tmp_path), path, b"x", host=host, origin=origin)
    assert sent[0]["status"] == status
    if status == 403:
        assert (
            sent[1]["body"]
            .decode()
            .startswith("expected a request of this chat's own page, got one of ")
        )
    assert call(guard(tmp_path), path, host=host, origin=origin)[0]["status"] == 200, (
        "what reads changes nothing"
    )


def cookie_of(sent: list[Any]) -> str:
    """The cookie that an answer sets, or nothing."""
    values = [value.decode() for name, value in sent[0].get("headers", []) if name == b"set-cookie"]
    return values[0].partition(";")[0] if values else ""


@pytest.mark.parametrize(
    "path", ["/gradio_api/queue/data?session_hash=s", "/gradio_api/heartbeat/s"]
)
def test_what_a_page_is_told_goes_to_its_own_browser(path: str, tmp_path: Path) -> None:
    chat = guard(tmp_path)
    first = call(chat, host="localhost")
    cookie = cookie_of(first)
    [header] = [value for name, value in first[0]["headers"] if name == b"set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert header.endswith(b"; Path=/; HttpOnly; SameSite=Strict")
    assert cookie_of(call(chat, host="localhost", cookie=f"a=b; {cookie}")) == ""
    assert call(chat, path, host="localhost", cookie=cookie)[0]["status"] == 200
    for stranger in (
        {},
        {"cookie": cookie_of(call(chat, host="localhost"))},
        {"cookie": f"{COOKIE}=guessed"},
    ):
        sent = call(chat, path, host="localhost", **stranger)
        assert sent[0]["status"] == 403
        assert (
            sent[1]["body"]
            .decode()
            .startswith("expected a page that this browser opened, got another one's")
        )
    assert call(chat, path, host="localhost", cookie=cookie)[0]["status"] == 200


@pytest.mark.parametrize("path", ["/gradio_api/call/any/s", "/gradio_api/call/v2/any/s"])
def test_routes_for_programs_tell_nobody_what_a_page_is_told(path: str, tmp_path: Path) -> None:
    """Gradio's take a page's name in the place of an event's."""
    chat = guard(tmp_path)
    cookie = cookie_of(call(chat, host="localhost"))
    for browser in ({}, {"cookie": cookie}):
        sent = call(chat, path, host="localhost", **browser)
        assert sent[0]["status"] == 403
        assert (
            sent[1]["body"]
            .decode()
            .startswith("expected a request of the chat's page, got one of a program")
        )


def test_nobody_says_which_browser_it_is(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        seen.append(Request(scope).state.browser)
        await fine(scope, receive, send)

    chat = guard(tmp_path, app=note)
    call(chat, host="localhost", cookie=f"{COOKIE}=mine", browser="theirs")
    call(chat, "/?browser=theirs", host="localhost", cookie=f"{COOKIE}=mine")
    assert seen == ["mine", "mine"]


def test_conversation_needs_both_names(page: Page) -> None:
    for browser, turns in (("b", 0), ("c", 0), ("b", 1)):
        request = SimpleNamespace(session_hash="a", state=SimpleNamespace(browser=browser))
        with page.sessions.use(pages._name_of(request)) as conversation:
            assert len(conversation.turns) == turns
            if browser == "b" and not turns:
                filled(conversation)


# ---- uploads


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/run/upload",
        "/gradio_api/call/upload",
        "/upload",
        "/gradio_api/%75pload",
        "/gradio_api/upload/",
    ],
)
def test_only_the_route_of_uploads_takes_a_large_body(path: str, tmp_path: Path) -> None:
    body = bytes(MAX_BODY + 1)
    sent = call(guard(tmp_path), path, body, host="localhost")
    assert sent[0]["status"] == 413
    assert sent[1]["body"].decode().startswith(f"expected a request of at most {MAX_BODY} bytes")
    assert call(guard(tmp_path), "/gradio_api/upload", body, host="localhost")[0]["status"] == 200


def test_uploads_are_limited_in_number_and_bytes_together(tmp_path: Path) -> None:
    small = guard(tmp_path, max_files=2, max_bytes=100)

    def upload(size: int) -> tuple[int, str]:
        sent = call(small, "/gradio_api/upload", bytes(size), host="localhost")
        return sent[0]["status"], sent[1]["body"].decode() if len(sent) > 1 else ""

    assert upload(100) == (200, "")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.png").write_bytes(bytes(60))
    assert upload(40) == (200, "")
    status, sentence = upload(41)
    assert status == 413
    assert sentence.startswith(
        "expected at most 2 uploaded files on this server, of 100 bytes, got 2 of 101; "
    )
    assert sentence.endswith("; try again in some minutes: uploads are deleted after 15")
    (tmp_path / "two.png").write_bytes(b"")
    status, sentence = upload(1)
    assert status == 413
    assert sentence.startswith(
        "expected at most 2 uploaded files on this server, of 100 bytes, got 3 of 61; try again"
    )
    assert call(small, "/gradio_api/queue/join", bytes(1), host="localhost")[0]["status"] == 200


def test_uploads_that_are_coming_in_count_until_they_end(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, max_files=2, max_bytes=100)
    with uploads.admit(60):
        with pytest.raises(HTTPException, match="of 100 bytes, got 2 of 101"), uploads.admit(41):
            pass
        with (
            uploads.admit(40),
            pytest.raises(HTTPException, match="at most 2 uploaded files"),
            uploads.admit(0),
        ):
            pass
    with uploads.admit(100):
        pass
    with pytest.raises(RuntimeError, match="broke off"), uploads.admit(100):
        raise RuntimeError("broke off")
    with uploads.admit(100):
        pass


@pytest.mark.parametrize("path", ["/gradio_api/upload", "/gradio_api/queue/join"])
def test_request_that_does_not_say_its_length_is_refused(path: str, tmp_path: Path) -> None:
    scope = {"type": "http", "path": path, "method": "POST", "headers": [(b"host", b"localhost")]}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(tmp_path)(scope, lambda: pytest.fail("it was read"), send))
    assert sent[0]["status"] == 411


def test_broken_uploads_are_deleted_and_whole_ones_stay(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.png").write_bytes(b"x")
    with uploads.admit(1):
        with uploads.admit(1):
            (tmp_path / "tmp-of-an-upload-that-broke-off").write_bytes(b"x")
        assert len(list(tmp_path.iterdir())) == 3, (
            "another one is still coming: it could be its own"
        )
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "kept",
        "kept/a.png",
    ]


# ---- conversations


def filled(conversation: Conversation, *images: ChatImage) -> None:
    conversation.turns.append(
        Turn(
            text="see",
            images=list(images),
            answer=Answer(drafted=False, block_size=4, state="done"),
        )
    )


def blank(num_bytes: int) -> ChatImage:
    """An image of so many bytes that is not there."""
    image = SimpleNamespace(width=num_bytes // 3, height=1)
    return ChatImage(name="x.png", image=image, thumbnail="")


def test_images_of_all_chats_are_limited_and_losers_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation_module, "MAX_IMAGE_BYTES", 90)
    sessions = Sessions()
    for page in ("first", "text", "second"):
        with sessions.use(page) as conversation:
            filled(conversation, *([blank(30)] * (page != "text")))
    with sessions.use("first") as first:  # no longer the least recently used
        pass
    with sessions.use("third") as conversation:
        filled(conversation, blank(60))
    refusal = r"^expected a conversation that is still held here, got one .* images of .* MB; send the message again"
    with pytest.raises(ValueError, match=refusal), sessions.use("second"):
        pass
    with sessions.use("second") as again:
        assert again.turns == [], "said once, then it is a new conversation"
    for page, kept in (("first", first), ("text", None), ("third", conversation)):
        with sessions.use(page) as found:
            assert len(found.turns) == 1
            assert kept is None or found is kept


def test_conversation_that_is_being_answered_is_never_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation_module, "MAX_IMAGE_BYTES", 90)
    sessions = Sessions()
    with sessions.use("answered") as answered:
        filled(answered, blank(60))
        with sessions.use("other") as other:
            filled(other, blank(60))
        filled(answered, blank(0))
    with sessions.use("answered") as again:
        assert again is answered
    with pytest.raises(ValueError, match="still held"), sessions.use("other"):
        pass


def test_surplus_conversations_are_told_unless_closed_or_empty() -> None:
    sessions = Sessions()
    for page in ("asked", "closed", "empty"):
        with sessions.use(page) as conversation:
            if page != "empty":
                filled(conversation)
    for index in range(MAX_SESSIONS):
        with sessions.use(str(index)):
            pass
    sessions.forget("closed")
    refusal = f"at most {MAX_SESSIONS} are held at once, .*; send the message again"
    with pytest.raises(ValueError, match=refusal), sessions.use("asked"):
        pass
    for page in ("closed", "empty"):
        with sessions.use(page):
            pass


def test_one_conversation_always_has_room() -> None:
    assert 2 * MAX_IMAGES * 3 * KEPT_PIXELS < MAX_IMAGE_BYTES


def test_forgetting_says_whether_a_run_ends_by_it() -> None:
    sessions = Sessions()
    assert not sessions.forget("a")
    with sessions.use("a") as conversation:
        assert sessions.forget("a")
        assert conversation.left
        assert conversation.stop.is_set()
    with sessions.use("a") as conversation:
        pass
    assert not sessions.forget("a")
    assert not conversation.left


# ---- the page


def bitmap(path: Path, width: int, height: int) -> Path:
    """Writes a bitmap whose header says this size, which may be nothing."""
    Image.new("RGB", (2, 2)).save(path, "BMP")
    data = bytearray(path.read_bytes())
    data[18:26] = width.to_bytes(4, "little") + height.to_bytes(4, "little")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("width", "height"), [(0, 2), (2, 0), (0, 0)])
def test_image_without_pixels_is_refused_in_a_sentence(
    width: int, height: int, tmp_path: Path
) -> None:
    with pytest.raises(
        ImageError, match=r"^expected an image .*, got x\.bmp, which is none or is damaged; choose"
    ):
        read_image(bitmap(tmp_path / "x.bmp", width, height))


def ask(page: Page, text: str, files: list[Path]) -> dict[Any, Any]:
    """What the page changes for a message that is refused."""
    message = {"text": text, "files": [str(path) for path in files]}
    request = SimpleNamespace(session_hash="a", state=SimpleNamespace(browser="b"))
    data = {
        page.box: message,
        **{part: part.value for part in (*page.settings.values(), page.system)},
    }
    return {part: value for change in page._ask(data, request) for part, value in change.items()}


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """A page whose model is never asked."""
    model: Any = object.__new__(ChatModel)
    model.takes_images, model.max_length, model.block_size, model.facts = True, 4096, 8, "small"
    return Page(model, ("target", "draft"), tmp_path)


def test_no_component_has_an_address_fetched(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.blocks, "launch", lambda **_: None)
    # What launching replaces
    monkeypatch.setattr(processing_utils, "async_ssrf_protected_download", None)
    page.launch("127.0.0.1", 7860, [])
    file = {"path": "http://127.0.0.1:1/x.png", "meta": {"_type": "gradio.FileData"}}
    handler = next(fn for fn in page.blocks.fns.values() if page.box in fn.inputs)
    for asked in handler.inputs:
        # As it is, and as Gradio makes it anew after an update.
        for part in (asked, type(asked)(**asked.constructor_args)):
            with pytest.raises(gr.Error, match="got an address: http://127"):
                asyncio.run(
                    processing_utils.async_move_files_to_cache(
                        [file], part, check_in_upload_folder=True
                    )
                )


@pytest.mark.parametrize(
    "text", ["def f():\n    if x:\n\treturn\n", "  a\n    b\n", "a\n    b\n    c", "\n\na\tb\n\n"]
)
def test_a_text_reaches_the_browser_with_its_white_space(page: Page, text: str) -> None:
    run = Run(text=text, bonus="", num_tokens=1, num_accepted=0, seconds=0.1)
    answer = Answer(drafted=True, block_size=4, runs=[run], state="done")
    shown = page.talk.postprocess(page._messages([Turn(text=text, images=[], answer=answer)])).root
    assert [message.role for message in shown] == ["user", "assistant", "assistant"]
    assert shown[-1].content[0].text == text
    for message in shown[:-1]:
        assert text in html.unescape(re.sub("<[^>]*>", "", message.content[0].value))


def test_message_is_refused_before_any_of_its_images_is_read(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "chat_image", lambda path: pytest.fail(f"{path} was read"))
    changed = ask(page, "which", [Path(__file__)] * (MAX_IMAGES + 1))
    assert f"at most {MAX_IMAGES} images" in changed[page.sentence]


def test_images_stay_where_the_text_is_refused(page: Page, tmp_path: Path) -> None:
    picture(8, 8).save(tmp_path / "a.png")
    changed = ask(page, "x" * (MAX_CHARACTERS + 1), [tmp_path / "a.png"])
    assert "200,001" in changed[page.sentence]
    assert page.box not in changed


def test_only_the_refused_image_leaves_the_box(page: Page, tmp_path: Path) -> None:
    picture(8, 8).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"x")
    files = [tmp_path / name for name in ("good.png", "bad.png", "deleted.png")]
    files.append(Path(__file__))  # no upload
    changed = ask(page, "see", files)
    assert "expected deleted.png to be an upload" in changed[page.sentence].lower()
    assert changed[page.box]["value"] == {"text": "see", "files": [str(path) for path in files[:2]]}
    changed = ask(page, "see", files[:2])
    assert "bad.png" in changed[page.sentence]
    assert changed[page.box]["value"] == {"text": "see", "files": [str(tmp_path / "good.png")]}
    page.model.takes_images = False
    assert ask(page, "see", files[:1])[page.box]["value"]["files"] == [], (
        "no image can be sent to this target"
    )
