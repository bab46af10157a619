"""What a step has tried is seen by pointing at it, by tapping it, and with the keyboard alone."""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from dflash_hf import DFlashGenerationConfig
from dflash_hf.cli.pair import BUNDLED
from helpers.browser import Chat, Server, free_port, start, stop
from helpers.half import half
from helpers.source_tree import ROOT

OPEN = "#df-tried:popover-open"
# Steps of the answer, in order: what they have tried, and the text that they wrote.
STEPS = "all => all.map(e => [e.dataset.dfTried, e.querySelector('span')?.textContent ?? '', e.textContent])"
# Far from every step.
ELSEWHERE = ".df-header b"


@pytest.fixture(scope="module")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The chat on the bundled pair that reads text, which verifies a tree at every step.

    Left alone it finds that chains pay more, or on a busy machine that plain steps do.
    """
    port, pair = free_port(), tmp_path_factory.mktemp("text") / "pair"
    shutil.copytree(BUNDLED / "draft", pair / "draft")
    (pair / "held_out.jsonl").symlink_to(BUNDLED / "held_out.jsonl")
    options = DFlashGenerationConfig.from_pretrained(pair / "draft")
    options.num_tree_nodes = 16
    options.save_pretrained(pair / "draft")
    models = ["--target", str(BUNDLED / "target"), "--draft", str(pair / "draft")]
    script = str(ROOT / "tests" / "helpers" / "whole_blocks.py")
    command = [script, *models, "--port", str(port)]
    server = start(command, pair.with_name("log"), pair, port)
    yield server
    stop(server)


def answered(chat: Chat, server: Server) -> list[tuple[str, str, str]]:
    """Asks something with many ways to go on, and returns the steps of the answer that have verified a tree."""
    chat.ask(next(row for row in questions(server) if "JSON" in row))
    steps: Any = chat.page.eval_on_selector_all("#df-talk [data-df-tried]", STEPS)
    assert any("\t" in tried for tried, _, _ in steps), "no step has tried anything else"
    assert chat.page.locator("#df-talk .df-run[title]").count() < len(steps), (
        "they are explained twice"
    )
    return steps


def questions(server: Server) -> list[str]:
    """The examples that the page offers."""
    rows = map(
        json.loads, (server.pair / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return [row["messages"][0]["content"] for row in rows if len(row["messages"]) == 1]


def rows_of(tried: str) -> list[list[str]]:
    """What the page says of each branch: where it leaves, its text, and where it came from."""
    rows: list[list[str]] = []
    for line in tried.split("\n")[1:]:
        after, from_text, text = line.split("\t")
        where = (
            "from the start"
            if after == "0"
            else f"after {after} token{'s' if after != '1' else ''}"
        )
        rows.append([where, text, *(["from the text before"] if from_text == "1" else [])])
    return rows


def seen(page: Page) -> tuple[list[list[str]], list[list[str]]]:
    """What is shown: the rows of what was written, and of what was tried beside it."""
    page.wait_for_selector(OPEN)
    script = "all => all.map(list => [...list.querySelectorAll('dt')].map(e => [e.textContent, "
    script += "...[...e.nextElementSibling.children].map(part => part.textContent)]))"
    lists: Any = page.eval_on_selector_all(f"{OPEN} dl", script)
    return lists[0], lists[1] if lists[1:] else []


def assert_shows(page: Page, step: tuple[str, str, str]) -> None:
    """The step's guesses, the target's own token, and every branch are there, and on the screen."""
    tried, guessed, whole = step
    written, beside = seen(page)
    expected = [["guessed right", guessed]] if guessed else []
    expected += [["the big model’s own", whole.removeprefix(guessed)]] if whole != guessed else []
    assert written == [[name, text.replace("\n", "↵")] for name, text in expected]
    assert beside == rows_of(tried)
    text, more = page.locator(OPEN).inner_text(), tried.split("\n")[0]
    assert (f"and {more} less likely" in text) == (more != "0")
    assert ("Nothing else was tried." in text) == (not beside)
    box: Any = page.locator(OPEN).bounding_box()
    size: Any = page.viewport_size
    assert box["x"] >= 0
    assert box["y"] >= 0
    assert box["x"] + box["width"] <= size["width"]
    assert box["y"] + box["height"] <= size["height"]


@pytest.mark.parametrize(("width", "scheme"), half({"1280": 1280, "390": 390}, ["light", "dark"]))
def test_branches_are_seen_by_pointing_at_a_step(
    width: int, scheme: str, text_pair: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(text_pair, width=width, height=860, color_scheme=scheme)
    page, steps = chat.page, answered(chat, text_pair)
    assert page.locator(OPEN).count() == 0
    assert page.locator(".df-legend-tried").is_visible()
    assert "guesses taken: " in chat.meta()
    places = page.locator("#df-talk [data-df-tried]")
    index = next(i for i, (tried, _, _) in enumerate(steps) if "\t" in tried)
    for number in (index, len(steps) - 1):
        places.nth(number).hover()
        page.wait_for_selector(
            f"#df-talk [data-df-tried] >> nth={number} >> css=:scope[aria-describedby=df-tried]"
        )
        assert_shows(page, steps[number])
    findings = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    wrong = [
        node["target"]
        for found in findings
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]
    assert wrong in ([], [[".latest"]]), "Gradio's own is the only one"
    for parts in page.locator(f"{OPEN} p, {OPEN} dt, {OPEN} dd > span").all():
        colours = parts.evaluate(
            "e => [getComputedStyle(e).color, getComputedStyle(e.closest('#df-tried')).backgroundColor]"
        )
        ink, paper = (sum(map(int, colour[4:-1].split(","))) for colour in colours)
        assert abs(ink - paper) > 250, "text that is hardly there"
    page.hover(ELSEWHERE)
    page.wait_for_selector("#df-tried", state="hidden")
    assert page.locator("[aria-describedby=df-tried]").count() == 0


def test_branches_are_seen_by_keyboard(text_pair: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(text_pair)
    page, steps = chat.page, answered(chat, text_pair)
    inside = "document.activeElement.matches('#df-talk [data-df-tried]')"
    page.locator("[data-df-theme]").focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate(inside):
            break
    assert page.evaluate(inside), "Tab does not come to the answer"
    for number, step in enumerate(steps):
        if number:
            page.keyboard.press("ArrowRight")
        assert_shows(page, step)
    page.keyboard.press("ArrowRight")  # there is none
    assert_shows(page, steps[-1])
    page.keyboard.press("ArrowLeft")
    assert_shows(page, steps[-2])
    page.keyboard.press("Escape")
    page.wait_for_selector("#df-tried", state="hidden")
    page.keyboard.press("ArrowLeft")
    assert_shows(page, steps[-3])
    page.keyboard.press("Tab")
    page.wait_for_selector("#df-tried", state="hidden")
    assert not page.evaluate(inside), "every step is a stop of its own"


def test_branches_are_seen_by_tapping_a_step_and_are_text(
    text_pair: Server, open_chat: Callable[..., Chat]
) -> None:
    chat = open_chat(text_pair, width=390, height=844, has_touch=True)
    page, steps = chat.page, answered(chat, text_pair)
    place = page.locator("#df-talk [data-df-tried]").nth(2)
    place.tap()
    assert_shows(page, steps[2])
    page.locator(ELSEWHERE).tap()
    page.wait_for_selector("#df-tried", state="hidden")
    hostile = "<img src=x onerror=document.title='ran'> ${1} {{value}}"
    place.evaluate("(e, tried) => { e.dataset.dfTried = tried }", f"0\n1\t1\t{hostile}")
    place.tap()
    assert seen(page)[1] == [["after 1 token", hostile, "from the text before"]]
    assert page.locator(f"{OPEN} img").count() == 0
    assert page.title() == "DFlash chat"
