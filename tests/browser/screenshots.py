"""Writes docs/images: `make screenshots`. No test by its name, so that the suite does not write into the tree."""

from collections.abc import Callable

import pytest

from helpers.browser import Chat, Server
from helpers.source_tree import ROOT

STILL = (
    "document.getAnimations().every(a => a.playState !== 'running' || a.effect.getTiming().iterations === Infinity)"
)


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    [
        ("chat-light", 1280, 860, "light"),
        ("chat-dark", 1280, 860, "dark"),
        ("chat-narrow", 390, 844, "light"),
    ],
)
def test_screenshots(
    name: str, width: int, height: int, scheme: str, bundled: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(bundled, width=width, height=height, color_scheme=scheme)
    chat.page.locator("[data-df-example]").first.click()
    chat.wait("done")
    if width > 900:
        chat.page.click("#df-race-start")
        chat.page.wait_for_selector('.df-race[data-state="done"]')
        chat.page.wait_for_function(STILL)
    chat.page.screenshot(path=ROOT / "docs" / "images" / f"{name}.png")
