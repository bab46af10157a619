"""A real server process on a free port, and a real browser that may talk to nothing else."""

import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from helpers.browser import PATIENCE, Chat, Server, free_port, start, stop
from helpers.source_tree import ROOT

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test here may take as long as all that it waits for."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(6 * PATIENCE))


@pytest.fixture(scope="session", autouse=True)
def forks_have_the_chat() -> None:
    """Has the fork server load what a chat needs, Gradio among it, and no trainer: it starts at the first fork."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["dflash_hf.chat.app", "transformers.models.qwen3.modeling_qwen3"]
    )


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The chat as `make chat` starts it, on the bundled pair."""
    port = free_port()
    folder = tmp_path_factory.mktemp("bundled")
    command = [str(ROOT / "demos" / "app.py"), "--pair", "vision", "--port", str(port)]
    pair = ROOT / "demos" / "toy" / "vision"
    server = start(command, folder / "log", pair, port, is_fork=False)
    yield server
    stop(server)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The chat on a random pair that sees images and never ends an answer by itself; it can be held."""
    from helpers.browser_pair import write_pair

    port = free_port()
    folder = tmp_path_factory.mktemp("endless")
    pair = write_pair(folder / "pair")
    options = [
        "--target",
        str(pair / "target"),
        "--draft",
        str(pair / "draft"),
        "--port",
        str(port),
        "--threads",
        "1",
    ]
    script = [str(ROOT / "tests" / "helpers" / "held_chat.py"), str(folder / "allowed")]
    server = start([*script, *options], folder / "log", pair, port)
    yield server
    stop(server)


@pytest.fixture
def held(endless: Server) -> Iterator[Server]:
    """The chat of `endless`, for a test that holds it; let go afterwards, whatever happened."""
    yield endless
    endless.hold(None)


@pytest.fixture
def forgetful(endless: Server, tmp_path: Path) -> Iterator[Server]:
    """The chat on the pair of `endless`, with a clock of its own for uploads, and room for three."""
    port = free_port()
    options = [
        "--target",
        str(endless.pair / "target"),
        "--draft",
        str(endless.pair / "draft"),
        "--port",
        str(port),
    ]
    script = [str(ROOT / "tests" / "helpers" / "forgetful_chat.py"), str(tmp_path / "later")]
    server = start([*script, *options], tmp_path / "log", endless.pair, port)
    yield server
    stop(server)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A browser for all tests; every test opens contexts of its own."""
    names = (
        os.environ.get("CHROMIUM", ""),
        "chromium-headless-shell",
        "chromium",
        "chromium-browser",
        "google-chrome",
    )
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(
            "expected Chromium for the browser tests, got none; `make chromium`, or set CHROMIUM to its path"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the chat in a browser session of its own; at the end, nothing may have left this machine."""
    contexts: list[BrowserContext] = []
    seen: list[str] = []
    complaints: list[str] = []

    def console(message: Any) -> None:
        if message.type == "error" or "Content Security Policy" in message.text:
            complaints.append(f"{message.text} {message.location['url']}")

    def open_one(server: Server, width: int = 1280, height: int = 860, **options: Any) -> Page:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE * 1000)
        context.on("request", lambda request: seen.append(request.url))
        page = context.new_page()
        page.on("console", console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        page.wait_for_selector("#df-box textarea")
        return page

    yield open_one
    for context in contexts:
        context.close()
    outside = [
        url
        for url in seen
        if urlsplit(url).scheme not in ("data", "blob") and "127.0.0.1" not in url[:20]
    ]
    assert seen, "the browser asked for nothing: this check looks elsewhere"
    assert not outside, f"the page asked for {outside}"
    # A refused upload is a failed request, and the small image of one that was deleted; the page says the rest.
    expected = r"status of 4(00|13)|status of 403 .*/gradio_api/file=.*/dflash-chat-"
    complaints = [text for text in complaints if not re.search(expected, text)]
    assert not complaints, complaints


@pytest.fixture
def open_chat(open_page: Callable[..., Page]) -> Callable[..., Chat]:
    """Opens the chat and returns the person at it."""
    return lambda server, **options: Chat(open_page(server, **options))
