"""Whatever is sent to it, the chat says a sentence and goes on."""

import itertools
import json
import re
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from helpers.browser import PATIENCE, Chat, Server
from helpers.processors import picture

SENTENCE_WORDS = ("Traceback", "Error:", 'File "')


def bomb(path: Path, width: int, height: int) -> None:
    """Writes a small PNG whose header promises a large image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def write_bad(name: str, folder: Path) -> tuple[Path, str]:
    """Writes an image that is to be refused; returns it and a part of the sentence."""
    path = folder / f"{name}.png"
    if name == "broken":
        path.write_bytes(b"this is no picture")
        return path, "none or is damaged"
    if name == "cut":
        picture(64, 64).save(path)
        path.write_bytes(path.read_bytes()[:-600])
        return path, "damaged"
    if name == "empty":
        path.write_bytes(b"")
        return path, "none or is damaged"
    if name == "bomb":
        bomb(path, 60_000, 60_000)
        return path, "megapixels"
    if name == "large":
        bomb(path, 9_000, 9_000)
        return path, "9000 × 9000"
    assert name == "thin"
    Image.new("RGB", (2000, 2)).save(path)
    return path, "aspect ratio"


def test_bad_image_is_refused_in_a_sentence(
    endless: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    chat = open_chat(endless)
    chat.set_length(16)
    for name in ("broken", "cut", "empty", "bomb", "large", "thin"):
        path, part = write_bad(name, tmp_path)
        chat.send("what is this", path)
        assert part in chat.notice(part), name
        assert not any(word in chat.page.content() for word in SENTENCE_WORDS)
        # The text is still there, the image is not, and sending it again works.
        chat.page.wait_for_function(
            "document.querySelector('#df-box textarea').value === 'what is this'"
        )
        chat.page.wait_for_function(
            "document.querySelectorAll('#df-box .thumbnail-item').length === 0"
        )
        chat.page.click("#df-box .submit-button")
        assert len(chat.wait("done")) == 16
        assert chat.page.locator(".df-notice").count() == 0


def test_what_was_not_refused_stays_in_the_box(
    endless: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    picture(32, 32).save(tmp_path / "good.png")
    bad, _ = write_bad("broken", tmp_path)
    chat = open_chat(endless)
    chat.set_length(16)
    chat.send("x" * 5000, tmp_path / "good.png", bad)
    assert "broken.png" in chat.notice()
    chat.page.wait_for_function("document.querySelectorAll('#df-box .thumbnail-item').length === 1")
    chat.page.click("#df-box .submit-button")
    assert "at most 4,080 tokens" in chat.notice("tokens")
    chat.page.fill("#df-box textarea", "what is this")
    chat.page.click("#df-box .submit-button")
    assert len(chat.wait("done")) == 16
    assert chat.page.locator(".df-images img").count() == 1


def write_odd(name: str, folder: Path) -> Path:
    """Writes an image that is odd, and fine."""
    image = picture(48, 32)
    if name == "animated":
        path = folder / "animated.gif"
        image.save(
            path,
            save_all=True,
            append_images=[picture(48, 32, seed) for seed in (1, 2, 3)],
            duration=50,
        )
    elif name == "cmyk":
        path = folder / "cmyk.jpg"
        image.convert("CMYK").save(path)
    elif name == "pixel":
        path = folder / "pixel.png"
        Image.new("RGB", (1, 1), "red").save(path)
    elif name == "deep":
        path = folder / "deep.png"
        Image.new("I;16", (40, 40), 40_000).save(path)
    elif name == "turned":
        path = folder / "turned.jpg"
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path, exif=exif)
    else:
        path = folder / "seen-through.png"
        image.convert("LA").save(path)
    return path


def test_odd_image_is_answered(
    endless: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    chat = open_chat(endless)
    chat.set_length(16)
    for name in ("cmyk", "pixel", "deep", "turned", "transparent", "animated"):
        assert len(chat.ask("what is this", write_odd(name, tmp_path))) == 16, name
    assert chat.page.locator(".df-images figcaption").all_text_contents() == ["first of 4 frames"]


def test_file_that_is_too_large_is_refused_before_it_is_kept(
    endless: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    path = tmp_path / "heavy.png"
    path.write_bytes(b"\x89PNG" + bytes(21 * 2**20))
    chat = open_chat(endless)
    chat.page.set_input_files("#df-box input[type=file]", [str(path)])
    assert "size" in chat.toast()
    kept = [
        file
        for file in endless.log.parent.glob("dflash-chat-*/**/*")
        if file.is_file() and file.stat().st_size > 2**20
    ]
    assert not kept, f"the server kept {kept}"


def test_empty_message_is_refused(endless: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(endless)
    chat.send("   ")
    assert "Expected a question, got an empty message" in chat.notice()
    chat.page.click("#df-race-start")
    assert "Expected a question to race on" in chat.notice("race")
    assert chat.page.locator(".df-user").count() == 0


def test_long_prompt_is_refused_with_numbers_before_any_work(
    endless: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(endless)
    chat.set_length(96)
    chat.send("x" * 5000)
    sentence = chat.notice()
    assert "at most 4,000 tokens" in sentence
    assert "got 5,0" in sentence
    assert chat.page.locator(".df-user").count() == 0
    chat.page.fill("#df-box textarea", "x" * 200_001)
    chat.page.click("#df-box .submit-button")
    chat.notice("200,001")


def test_text_is_shown_as_it_was_written(endless: Server, open_chat: Callable[..., Chat]) -> None:
    text = "<img src=x onerror=\"document.title='broken'\"> ${1 + 1} {{value}} `x` <b>b</b> & \\( x \\)"
    chat = open_chat(endless)
    chat.set_length(16)
    chat.ask(text)
    assert chat.page.text_content(".df-user p") == text
    chat.ask("again")
    assert chat.page.locator(".df-user p").first.text_content() == text
    assert chat.page.title() == "DFlash chat"


def test_text_of_a_model_never_runs(endless: Server, open_chat: Callable[..., Chat]) -> None:
    """What a model wrote is shown as Markdown: HTML in it is left out or made harmless."""
    chat = open_chat(endless)
    chat.set_length(16)
    answer = chat.ask("hello")
    payload = (
        "<img src='data:,' onerror=\"document.title='broken'\"><script>document.title='broken'</script> "
        "[here](javascript:document.title='broken') <iframe srcdoc='x'></iframe><b onclick='x'>**bold**</b>"
    )

    def tamper(route: Any) -> None:
        # What a click brings comes here too, and has no answer in it.
        reply = route.fetch()
        body = reply.text().replace(f'"{answer}"', json.dumps(payload))
        route.fulfill(response=reply, body=body)

    chat.page.route(re.compile(r"/queue/data"), tamper)
    chat.page.click("#df-new")
    chat.page.wait_for_selector(".df-welcome")
    chat.answers = 0
    chat.page.uncheck("#df-colours input")
    chat.ask("hello")
    shown = chat.page.locator("#df-talk .message-content").last
    assert "bold" in shown.inner_text()
    assert shown.locator("script, iframe, [onerror], [onclick], a[href^=javascript]").count() == 0
    assert chat.page.title() == "DFlash chat"


def post(server: Server, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Sends a request as a program does; returns the status and what is said."""
    request = urllib.request.Request(
        server.url + path, body, {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_large_bodies_and_pages_from_elsewhere_are_refused(endless: Server) -> None:
    large = b"[" + b"[]," * 2**20 + b"[]]"
    for path in ("/gradio_api/run/upload", "/gradio_api/call/upload", "/gradio_api/queue/join"):
        status, sentence = post(endless, path, large)
        assert status == 413, path
        assert sentence.startswith("expected a request of at most ")
    elsewhere = itertools.product(
        ("/gradio_api/upload", "/gradio_api/queue/join"),
        ("http://evil.example", "null", "http://["),
    )
    for path, origin in elsewhere:
        status, sentence = post(endless, path, b"{}", Origin=origin)
        assert (status, sentence.partition(",")[0]) == (
            403,
            "expected a request of this chat's own page",
        )


def test_a_page_name_shows_another_browser_nothing(
    endless: Server, open_chat: Callable[..., Chat]
) -> None:
    chat, other = open_chat(endless), open_chat(endless)
    names: list[str] = []
    chat.page.on(
        "request", lambda request: names.extend(re.findall(r"session_hash=(\w+)", request.url))
    )
    chat.set_length(16)
    chat.ask("what is this")
    assert names
    # Beside the page, with its browser's cookies: a refusal inside of it would be a complaint in its console.
    reply = other.page.request.get(f"{endless.url}/gradio_api/queue/data?session_hash={names[-1]}")
    assert reply.status == 403
    assert "that this browser opened" in reply.text()
    chat.ask("and this")
