"""The page itself: what it loads, what it serves, where it listens, and that it can be read on every screen."""

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from helpers.browser import PATIENCE, Chat, Server, stop
from helpers.half import half
from helpers.processors import picture

# Relative luminance contrast of an element's text with what is behind it (WCAG 2), colours composited.
CONTRAST = """element => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
  canvas.fillStyle = "white";
  canvas.fillRect(0, 0, 1, 1);
  const read = () => [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  for (const colour of layers) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
  const back = read();
  canvas.fillStyle = getComputedStyle(element).color;
  canvas.fillRect(0, 0, 1, 1);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = rgb => { const [r, g, b] = rgb.map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const [high, low] = [light(read()), light(back)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}"""
# Something that cannot be seen without scrolling sideways, inside a column too.
SPILLS = (
    "[...document.querySelectorAll("
    "'#df-main, #df-chat, #df-talk, #df-side, #df-settings, #df-more, .df-headline, .df-header')]"
    ".some(e => e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth)"
)
READ = [
    ".df-user p",
    ".df-run span",
    ".df-meta",
    ".df-figure strong",
    ".df-figure small",
    ".df-legend li",
    ".df-verdict",
    ".df-chart figcaption",
    ".df-axis li",
    ".df-under span",
    ".df-header p",
    ".df-headline p",
    "h1 strong",
    "#df-settings .label-text",
    "#df-new",
]


# Two texts of the figures, the race or the headline that lie on each other.
COLLIDES = """() => {
  const found = [];
  for (const root of document.querySelectorAll("#df-side, .df-headline, .df-header")) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      if (!walker.currentNode.data.trim() || walker.currentNode.parentElement.closest(".df-lane-text")) continue;
      const range = document.createRange();
      range.selectNodeContents(walker.currentNode);
      for (const box of range.getClientRects()) found.push([walker.currentNode.data.trim(), box]);
    }
  }
  return found.flatMap(([text, a], i) => found.slice(i + 1).filter(([other, b]) =>
    other !== text && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4
  ).map(([other]) => `${text} | ${other}`));
}"""
# Where everything stands that must not move.
PLACES = """() => Object.fromEntries([...document.querySelectorAll(
  "#df-main, #df-side, #df-race, #df-statistics, .df-chart, .df-plot, .df-lane, .df-figure, #df-box, #df-settings"
)].map((e, i) => [e.id || `${e.className} ${i}`, [e.offsetLeft, e.offsetTop, e.offsetWidth, e.offsetHeight]]))"""


# Gradio's chatbot names the box of a message, which has no role that could have a name.
GRADIOS = ("aria-prohibited-attr", [".latest"])


def serious(page: Page) -> list[str]:
    """What axe finds that keeps people from using the page, with where it is."""
    findings = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{found['id']}: {node['target']} {node['failureSummary']}"
        for found in findings
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
        if (found["id"], node["target"]) != GRADIOS
    ]


def get(url: str) -> tuple[int, bytes]:
    """Fetches an address as it stands, dots included."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize(("width", "scheme"), half({"1280": 1280, "390": 390}, ["light", "dark"]))
def test_page_can_be_read(
    width: int, scheme: str, bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(bundled, width=width, height=844, color_scheme=scheme)
    assert chat.page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    sideways = "document.documentElement.scrollWidth > innerWidth || " + SPILLS
    assert not chat.page.evaluate(sideways), "the empty page scrolls sideways"
    places = [chat.page.evaluate(PLACES)]
    chat.ask(bundled.question())
    places.append(chat.page.evaluate(PLACES))
    chat.page.click("#df-race-start")
    chat.page.wait_for_selector('.df-race[data-state="done"] em')
    places.append(chat.page.evaluate(PLACES))
    moved = {
        name: [part.get(name) for part in places]
        for name in places[2]
        if places[1][name] != places[2][name]
    }
    assert not moved
    if width == 1280:  # elsewhere the examples make room
        moved = {
            name: [part.get(name) for part in places]
            for name in places[1]
            if places[0][name] != places[1][name]
        }
        assert not moved
    assert not chat.page.evaluate(COLLIDES)
    assert not serious(chat.page)
    for selector in READ:
        contrast = chat.page.locator(selector).first.evaluate(CONTRAST)
        assert contrast >= 4.5, f"{selector} has a contrast of {contrast:.2f} ({scheme})"
    assert not chat.page.evaluate(sideways), "the page scrolls sideways"
    for selector in (
        "#df-box textarea",
        "#df-box .submit-button",
        "#df-draft input",
        "#df-new",
        "#df-more .label-wrap",
    ):
        box: Any = chat.page.locator(selector).first.bounding_box()
        assert box is not None, selector
        assert box["x"] >= 0, selector
        assert box["x"] + box["width"] <= width, selector
    side: Any = chat.page.locator("#df-side").bounding_box()
    talk: Any = chat.page.locator("#df-chat").bounding_box()
    beside = side["x"] >= talk["x"] + talk["width"]
    assert beside == (width == 1280), (
        "the statistics stand beside the chat where there is room, else below it"
    )


@pytest.mark.parametrize("is_mobile", [False, True])
def test_a_phone_shows_the_headline_first(
    is_mobile: bool, bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    page = open_chat(bundled, width=390, height=844, is_mobile=is_mobile).page
    page.wait_for_timeout(1500)  # Gradio scrolls as far as it will by then
    assert page.evaluate("scrollY") == 0
    assert page.evaluate("document.querySelector('h1').getBoundingClientRect().bottom") < 844


def test_theme_can_be_switched(bundled: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(bundled)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("[data-df-theme]")
    page.wait_for_function(
        "before => getComputedStyle(document.body).backgroundColor !== before", arg=before
    )


def test_example_is_asked_with_a_click(bundled: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(bundled)
    example = chat.page.locator("[data-df-example]").first
    text, images = example.get_attribute("data-df-example"), example.locator("img").count()
    example.click()
    assert chat.wait("done")
    assert chat.page.text_content(".df-user p") == text
    assert chat.page.locator(".df-images img").count() == images


def test_example_is_asked_once_by_a_double_click(
    bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(bundled)
    example = chat.page.locator("[data-df-example]").first
    images = example.locator("img").count()
    example.dblclick()
    chat.wait("done")
    assert chat.page.locator(".df-images img").count() == images
    assert chat.page.locator("#df-box .thumbnail-item, .df-notice").count() == 0


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=../../../../../../etc/passwd",
        "/gradio_api/file=%2Fetc%2Fpasswd",
        "/gradio_api/file/etc/passwd",
        "/file=/etc/passwd",
        "/static/../../../../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/theme.css/../../../etc/passwd",
        "/gradio_api/file=http://127.0.0.1:1/secret",
        "/gradio_api/file=https%3A%2F%2Fexample.com%2Fsecret",
        "/gradio_api/proxy=http://127.0.0.1:1/secret",
    ],
)
def test_no_other_file_and_no_other_address_is_served(path: str, endless: Server) -> None:
    status, body = get(endless.url + path)
    assert status in (400, 403, 404), (status, body[:200])
    assert b"root:" not in body


def test_files_of_the_clone_and_the_target_are_not_served(endless: Server) -> None:
    for file in (
        Path(__file__),
        endless.pair / "target" / "config.json",
        endless.log,
        Path.cwd() / "pyproject.toml",
    ):
        assert file.is_file()
        assert get(f"{endless.url}/gradio_api/file={file}")[0] == 403


@pytest.mark.parametrize("kind", ["path", "url"])
def test_call_with_a_path_of_the_server_as_upload_is_refused(
    kind: str, endless: Server, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    """The same request that the page makes, with another file in it."""
    secret = tmp_path / "secret.png"
    picture(32, 32).save(secret)
    page = open_page(endless)
    place = str(secret) if kind == "path" else "http://127.0.0.1:1/secret.png"

    def tamper(route: Any) -> None:
        body = json.loads(route.request.post_data)
        for value in body["data"]:
            if isinstance(value, dict) and "files" in value:
                value["files"] = [
                    {"path": place, "meta": {"_type": "gradio.FileData"}, "orig_name": "secret.png"}
                ]
        route.continue_(post_data=json.dumps(body))

    page.route(re.compile(r"/queue/join"), tamper)
    page.fill("#df-box textarea", "what is this")
    page.click("#df-box .submit-button")
    page.wait_for_selector(".df-notice, .toast-body")
    assert page.locator(".df-images img").count() == 0
    assert "Traceback" not in page.content()
    assert "upload" in page.locator(".df-notice, .toast-body").first.inner_text()


def test_uploads_are_deleted_and_only_so_many_are_kept(
    forgetful: Server, open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    picture(32, 32).save(tmp_path / "short-lived.png")
    chat = open_chat(forgetful)
    chat.attach(tmp_path / "short-lived.png")
    [folder] = forgetful.log.parent.glob("dflash-chat-*")
    [upload] = folder.rglob("short-lived.png")
    # Deleted while the page loads it, it would be an error of the page's.
    chat.page.wait_for_function(
        "[...document.querySelectorAll('#df-box .thumbnail-item img')].some(image => image.naturalWidth > 0)"
    )
    (forgetful.log.parent / "later").touch()  # sixteen minutes
    deadline = time.monotonic() + PATIENCE
    while upload.exists():
        assert time.monotonic() < deadline, "the upload was kept"
        chat.page.wait_for_timeout(200)
    (forgetful.log.parent / "later").unlink()
    chat.page.fill("#df-box textarea", "what is this")
    chat.page.click("#df-box .submit-button")
    assert "uploads are deleted after 15 minutes; add it again" in chat.notice()
    chat.page.wait_for_function("document.querySelectorAll('#df-box .thumbnail-item').length === 0")
    for index in range(3):
        picture(16, 16, index).save(tmp_path / f"{index}.png")
        chat.attach(tmp_path / f"{index}.png", before=index)
    picture(24, 24).save(tmp_path / "fourth.png")
    chat.page.set_input_files("#df-box input[type=file]", [str(tmp_path / "fourth.png")])
    assert "at most 3 uploaded files on this server" in chat.toast("uploaded files")
    chat.page.context.close()
    stop(forgetful)
    assert not folder.exists()


def test_other_names_for_this_machine_are_refused(endless: Server) -> None:
    """A page from elsewhere whose name was made to point here may not read what is here."""
    connection = http.client.HTTPConnection(endless.url.removeprefix("http://"), timeout=PATIENCE)
    for host, status in (("evil.example", 400), ("localhost", 200)):
        connection.request("GET", "/", headers={"Host": host})
        reply = connection.getresponse()
        body = reply.read()
        assert reply.status == status
        assert (body == b"Invalid host header") == (status == 400)
    connection.close()


def test_it_listens_on_loopback_only(endless: Server) -> None:
    listening = [
        c.laddr
        for c in psutil.Process(endless.process.pid).net_connections()
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_large_requests_are_refused(endless: Server) -> None:
    connection = http.client.HTTPConnection(endless.url.removeprefix("http://"), timeout=PATIENCE)
    connection.putrequest("POST", "/gradio_api/queue/join")
    connection.putheader("Content-Length", str(3 * 2**20))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
