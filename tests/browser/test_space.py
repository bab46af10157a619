"""The Hugging Face Space's own file starts the page, and the page answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.browser import Chat, Server, free_port, start, stop
from helpers.source_tree import ROOT


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Server]:
    """The Space's `app.py`, with the bundled pair in place of the one from the Hub.

    It loads no more than `demos/app.py` does, which `bundled` starts as a user would: a fork has all loaded.
    """
    port = free_port()
    pair = ROOT / "demos" / "toy"
    folders = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    script = str(ROOT / "demos" / "space" / "app.py")
    words = [script, *folders, "--port", str(port)]
    server = start(words, tmp_path / "log", pair, port)
    yield server
    stop(server)


def test_space_starts_and_answers(space: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(space)
    assert chat.ask("Compute 41 + 80 - 99 + 14.")
    assert "http://0.0.0.0:" in space.logged()
