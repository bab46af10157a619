"""Writes docs/images: `make screenshots`. No test by its name, so that the suite does not write into the tree."""

from collections.abc import Callable

import pytest

from helpers.browser import Chat, Server
from helpers.source_tree import ROOT

STILL = (
    "document.getAnimations()"
    ".every(a => a.playState !== 'running' || a.effect.getTiming().iterations === Infinity)"
)


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme", "example"),
    [
        ("chat-light", 1280, 860, "light", None),  # as it opens
        ("chat-dark", 1280, 860, "dark", 2),
        ("chat-narrow", 390, 844, "light", None),
        ("chat-narrow-dark", 390, 844, "dark", 2),
    ],
)
def test_screenshots(
    name: str,
    width: int,
    height: int,
    scheme: str,
    example: int | None,
    bundled: Server,
    open_chat: Callable[..., Chat],
) -> None:
    chat = open_chat(bundled, width=width, height=height, color_scheme=scheme)
    if example is not None:
        chat.page.locator("[data-df-example]").nth(example).click()
        chat.wait("done")
        chat.page.click("#df-race-start")
        chat.page.wait_for_selector('.df-race[data-state="done"] em')
    chat.page.wait_for_function(STILL)
    chat.page.screenshot(path=ROOT / "docs" / "images" / f"{name}.png", full_page=width < 900)
