"""The benchmark's report as a browser shows it: from a file, asking for nothing, no wider than the screen."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from dflash_hf.bench.report import write_report
from dflash_hf.bench.summary import summarize
from helpers.bench_run import answers_of, questions, simple_score, write_margins, write_run

WIDER = """() => [...document.querySelectorAll("main *")].filter(
  (e) => !e.closest(".scroll") && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1
).map((e) => e.outerHTML.slice(0, 80))"""
# Text of the figures and of the page, as it is painted.
COLOURS = """() => [document.body, ...document.querySelectorAll("svg text")].map(
  (e) => getComputedStyle(e)[e === document.body ? "backgroundColor" : "fill"])"""


@pytest.fixture(scope="module")
def page_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = questions(4)
    folder = write_run(tmp_path_factory.mktemp("run"), asked, answers_of(asked))
    write_margins(folder, summarize(folder, simple_score))
    summarize(folder, simple_score)
    return write_report(folder)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_is_readable(
    width: int, scheme: str, page_of_a_run: Path, chromium: Browser
) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    complaints: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(page_of_a_run.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.evaluate(WIDER)
    # A figure's text is not smaller than 9 pixels on any screen.
    sizes = page.eval_on_selector_all(
        "svg text", "all => all.map(e => e.getBoundingClientRect().height)"
    )
    assert len(sizes) > 50
    assert min(sizes) >= 9
    background, *inks = (
        sum(map(int, colour[4:-1].split(","))) for colour in page.evaluate(COLOURS)
    )
    assert all(abs(ink - background) > 250 for ink in inks), "text that is hardly there"
    assert (background > 600) == (scheme == "light")
    assert asked == [page_of_a_run.as_uri()]
    assert not complaints
    context.close()
