"""Gradio's `load_chat`, a web chat for any OpenAI-like server, at `dflash-hf serve`: a person in a real browser."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.pair import named_pair
from dflash_hf.pair.answers import encode_prompt, tokenizer_of
from dflash_hf.pair.loading import load_pair
from helpers.browser import PATIENCE, Server, free_port, start, stop
from helpers.served import Served
from helpers.source_tree import ROOT

VISION = ROOT / "demos" / "toy" / "vision"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"), "--pair", "vision")
    yield server
    server.ended_by(signal.SIGTERM)


@pytest.fixture(scope="module")
def web_chat(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    script = str(ROOT / "tests" / "helpers" / "web_chat.py")
    folder = tmp_path_factory.mktemp("web_chat")
    server = start([script, served.url, "vision", str(port)], folder / "log", VISION, port)
    yield server
    stop(server)


@pytest.fixture
def page(chromium: Browser, web_chat: Server) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": 900, "height": 700})
    context.set_default_timeout(PATIENCE * 1000)
    found = context.new_page()
    # The page's fonts are elsewhere, and nothing may leave this machine.
    found.route(
        "**/*", lambda route: route.continue_() if is_here(route.request.url) else route.abort()
    )
    found.goto(web_chat.url)
    found.wait_for_selector("textarea")
    yield found
    context.close()


def is_here(url: str) -> bool:
    return urlsplit(url).scheme in ("data", "blob") or urlsplit(url).hostname == "127.0.0.1"


def generated(messages: list[dict[str, Any]]) -> str:
    """What plain `generate` answers, without the draft."""
    target, _, processor = load_pair(*named_pair("vision"))
    inputs = encode_prompt(processor, messages, torch.device("cpu"))
    ids = target.generate(**inputs, max_new_tokens=600, do_sample=False)
    new = ids[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer_of(processor).decode(new, skip_special_tokens=True))


def ask(page: Page, text: str, num_before: int, expected: str) -> None:
    """Types a message and waits for its answer, behind so many before it."""
    page.fill("textarea", text)
    page.press("textarea", "Enter")
    answer = page.locator(".bot.message").nth(num_before)
    expect(answer).to_have_text(expected, use_inner_text=True, timeout=PATIENCE * 100)


def test_a_person_asks_about_a_picture_and_goes_on(page: Page, tmp_path: Path) -> None:
    rows = read_prompts(VISION / "held_out.jsonl", 1)
    row = next(row for row in rows if row["kind"] == "describe")
    content = row["messages"][0]["content"]
    picture = next(part["path"] for part in content if "path" in part)
    question = next(part["text"] for part in content if part["type"] == "text")
    page.set_input_files("input[type=file]", str(picture))
    page.wait_for_selector(".thumbnail-item")
    # The page sends a picture and its question as two turns.
    asked = [{"role": "user", "content": [part]} for part in content]
    first = generated(asked)
    ask(page, question, 0, first)
    turns = [*asked, {"role": "assistant", "content": first}]
    counts = "How many objects are there?"
    second = generated([*turns, {"role": "user", "content": counts}])
    ask(page, counts, 1, second)
    page.screenshot(path=tmp_path / "web-chat.png")
