"""A server process of the chat, and a person at its page."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from helpers import forked_python
from helpers.held_chat import write_allowed
from helpers.source_tree import ROOT

PATIENCE = 300  # seconds: a loaded or slow machine is no failure


@dataclass
class Server:
    """A running chat."""

    url: str
    process: subprocess.Popen[bytes] | forked_python.Process
    log: Path
    pair: Path

    @property
    def allowed(self) -> Path:
        """Where a chat that can be held looks for how far it may go; see `helpers.held_chat`."""
        return self.log.with_name("allowed")

    def hold(self, runs: int | None) -> None:
        """Lets so many runs of each answer through, from now on; `None`: all of them."""
        write_allowed(self.allowed, runs)

    def question(self) -> str:
        """A held-out question of one turn without pictures that the pair has an answer to."""
        rows = map(
            json.loads, (self.pair / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
        )
        found = (row["messages"][0]["content"] for row in rows if len(row["messages"]) == 1)
        return next(text for text in found if isinstance(text, str))

    def logged(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")


def free_port() -> int:
    """A port that nobody has, below those that a system gives to connections: it has to stay free for a while."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start(command: list[str], log: Path, pair: Path, port: int, is_fork: bool = True) -> Server:
    """Starts a server process and waits until its page can be had; a fork has all loaded."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(log.parent),
    }
    process: subprocess.Popen[bytes] | forked_python.Process
    if is_fork:
        process = forked_python.start(command, environment, log, log)
    else:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=output, stderr=output, env=environment
            )
    server = Server(f"http://127.0.0.1:{port}", process, log, pair)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(server.url, timeout=PATIENCE) as reply:
            assert b"gradio" in reply.read(), "somebody else listens there"
            return server
        time.sleep(0.2)  # the one wait that nothing reports the end of
    process.kill()
    pytest.fail(f"the chat did not start:\n{server.logged()}")


def stop(server: Server) -> None:
    """Ends a server and looks at what it wrote: no stack traces but of paths that Gradio refused.

    By SIGTERM: what a shell starts in the background ignores SIGINT, and so do its children.
    """
    server.process.terminate()
    server.process.wait(PATIENCE)
    traces = [
        trace
        for trace in server.logged().split("Traceback")[1:]
        if "was not uploaded by a user" not in trace
    ]
    assert not traces, server.logged()


class Chat:
    """A person at a page.

    Args:
        page: The page.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.answers = 0

    def attach(self, *pictures: Path, before: int = 0) -> None:
        """Adds pictures to the message, which has so many before, and waits until they are uploaded."""
        self.page.set_input_files("#df-box input[type=file]", [str(path) for path in pictures])
        self.page.wait_for_function(
            "n => document.querySelectorAll('#df-box .thumbnail-item').length >= n",
            arg=before + len(pictures),
        )

    def send(self, text: str, *pictures: Path) -> None:
        """Attaches pictures, writes a message and sends it."""
        if pictures:
            self.attach(*pictures)
        self.page.fill("#df-box textarea", text)
        self.page.click("#df-box .submit-button")

    def ask(self, text: str, *pictures: Path) -> str:
        """Sends a message and returns the answer, once it is there."""
        self.send(text, *pictures)
        return self.wait("done")

    def wait(self, state: str) -> str:
        """Waits until there is one answer more than before and it is in a state, and returns its text."""
        self.answers += 1
        self.page.wait_for_function(
            "([n, state]) => { const all = document.querySelectorAll('.df-answer');"
            "return all.length === n && all[n - 1].dataset.state === state }",
            arg=[self.answers, state],
        )
        self.page.wait_for_selector("#df-box .submit-button")
        return str(self.page.locator(".df-answer .df-text").last.text_content())

    def wait_for_letters(self, number: int) -> str:
        """Waits until an answer that is being written has that many letters or more, and returns them."""
        script = (
            "n => { const answer = document.querySelector('.df-answer[data-state=running] .df-text');"
            "return answer && answer.textContent.length >= n ? answer.textContent : '' }"
        )
        return str(self.page.wait_for_function(script, arg=number).json_value())

    def wait_for_steps(self, number: int) -> str:
        """Waits until an answer that is being written has come in that many steps, and returns its text."""
        script = (
            "n => { const answer = document.querySelector('.df-answer[data-state=running]');"
            "return answer && [...answer.querySelectorAll('.df-meta span')].some(e => e.textContent === `${n} steps`)"
            " ? answer.querySelector('.df-text').textContent : '' }"
        )
        return str(self.page.wait_for_function(script, arg=number).json_value())

    def notice(self, part: str = "") -> str:
        """Waits for a sentence about what could not be done, with these words in it, and returns it."""
        return self._text(".df-notice", part)

    def toast(self, part: str = "") -> str:
        """Waits for a sentence of Gradio's own, with these words in it, and returns it."""
        return self._text(".toast-body", part)

    def _text(self, selector: str, part: str) -> str:
        """In one step: a toast is gone after some seconds."""
        script = (
            "([selector, part]) => [...document.querySelectorAll(selector)].map(e => e.innerText)"
            ".find(text => text.includes(part))"
        )
        return str(self.page.wait_for_function(script, arg=[selector, part]).json_value())

    def set_length(self, tokens: int) -> None:
        """Sets the longest answer."""
        self.set("length", tokens)

    def set(self, name: str, value: float) -> None:
        """Sets a number among the settings, which are folded up at first."""
        box = self.page.locator(f"#df-{name} input[type=number]")
        if not box.is_visible():
            self.page.click("#df-more .label-wrap")
            box.wait_for()
            self.page.wait_for_function(
                "document.querySelector('#df-more').getAnimations({subtree: true}).length === 0"
            )
        box.fill(str(value))
        box.press("Tab")
        slider = "([name, value]) => Number(document.querySelector(`#df-${name} input[type=range]`).value) === value"
        self.page.wait_for_function(slider, arg=[name, value])

    def meta(self) -> str:
        """The line under the newest answer."""
        return str(self.page.locator(".df-meta").last.text_content())

    def numbers(self, selector: str, name: str) -> list[float]:
        """The values of a custom property of all elements that match."""
        script = "(all, name) => all.map(e => parseFloat(e.style.getPropertyValue(name)))"
        found: Any = self.page.eval_on_selector_all(selector, script, name)
        return [float(value) for value in found]
