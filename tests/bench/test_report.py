"""`report.html` from a run's files alone: what it says, whatever a run lacks; nothing that was written is markup."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.bench import report as report_module
from dflash_hf.bench.answers import Answer
from dflash_hf.bench.report import write_report
from dflash_hf.bench.summary import summarize
from helpers.bench_run import answers_of, questions, simple_score, write_margins, write_run

HOSTILE = (
    '<script>alert("x")</script><img src=http://evil.example/a onerror=f()>{{ 7 * 7 }} $x^2$ & "\' '
    + "long" * 40
)
VOID = {"meta", "br"}
MAY_STAY_OPEN = {"tr", "td", "th", "dt", "dd"}


class Page(HTMLParser):
    """What a browser would find on a page: its elements, their attributes and ids, and the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(self.html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href")
        ]
        if tag not in VOID | MAY_STAY_OPEN:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID | MAY_STAY_OPEN:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in MAY_STAY_OPEN:
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.text += data


def report(folder: Path) -> Page:
    summarize(folder, simple_score)
    page = Page(write_report(folder))
    assert not page.open
    twice = [name for name, count in Counter(page.ids).items() if count > 1]
    assert not twice
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links), (
        "a page of one file"
    )
    assert "script" not in page.tags
    assert not [name for name in page.attributes if name.startswith("on")]
    return page


def test_it_says_what_the_summary_says(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    write_margins(folder, summarize(folder, simple_score))
    page = report(folder)
    summary = json.loads((folder / "summary.json").read_text())
    methods = {method["model_id"]: method for method in summary["methods"]}
    speed = methods["dflash"]["all"]["speedup"]
    headline = (
        f"dflash makes {speed['ratio']:.2f} times the tokens per second of plain "
        f"(95 % interval {speed['low']:.2f}"
    )
    assert headline in page.text
    assert (
        f"A verify commits {methods['dflash']['all']['acceptance']['acceptance_length']:.2f} tokens."
        in page.text
    )
    own = methods["dflash"]["all"]["own_speedup"]
    assert own["ratio"] < speed["ratio"]
    beside = (
        f"That is {own['ratio']:.2f} times the tokens per second of this package without the draft."
    )
    assert beside in page.text
    assert methods["stock"]["all"]["own_speedup"] is None
    for name in summary["datasets"]:
        assert f"{methods['stock']['sets'][name]['speedup']['ratio']:.2f}×" in page.text
    assert "zlab" in page.text
    assert methods["zlab"]["failed"] in page.text
    assert "expected text, got an image; leave the method out (24 times)" in page.text
    assert f"{summary['provenance']['command']}" in page.text
    assert "1.41 % of 640 s" in page.text
    for name in ("speedup", "positions", "along", "text", "latency", "accuracy", "margins"):
        assert f"fig-{name}" in page.ids
    for element in re.findall(r"<svg.*?</svg>", page.html, flags=re.DOTALL):
        ET.fromstring(element)
        assert "var(--ink," in element
        assert not re.search(r"#000[12]\d\d", element), "a colour that stands for another was left"
    assert page.tags["svg"] == 7
    assert all(definition in page.text for definition in summary["definitions"].values())


def test_nothing_that_was_written_is_markup(tmp_path: Path) -> None:
    asked = questions(2)
    tame = report(write_run(tmp_path / "tame", asked, answers_of(asked)))
    asked = [
        replace(
            q,
            category=HOSTILE + q.category,
            turns=tuple(HOSTILE for _ in q.turns),
            reference=HOSTILE,
        )
        for q in asked
    ]
    answers = {
        name: [
            replace(
                answer,
                category=HOSTILE + answer.category,
                error=answer.error and HOSTILE,
                turns=tuple(replace(turn, text=HOSTILE) for turn in answer.turns),
            )
            for answer in given
        ]
        for name, given in answers_of(asked).items()
    }
    answers[HOSTILE] = [replace(answer, model_id=HOSTILE) for answer in answers.pop("stock")]

    def spoil(record: dict[str, Any]) -> None:
        record["settings"] |= {"target": HOSTILE, "draft": HOSTILE, HOSTILE: HOSTILE}
        record["provenance"] |= {
            "command": HOSTILE,
            "versions": {"torch": HOSTILE, "transformers": HOSTILE},
        }
        next(m for m in record["methods"] if m["model_id"] == "zlab")["failed"] = HOSTILE

    page = report(write_run(tmp_path / "hostile", asked, answers, spoil))
    assert set(page.tags) <= set(tame.tags) | {"b"}
    assert "img" not in page.tags
    assert page.attributes <= tame.attributes
    assert page.text.count('<script>alert("x")</script>') > 20
    assert "49" not in re.findall(r"onerror=f\(\)>(\S+)", page.text)


ANSWERS = answers_of(questions(2))


def only(*names: str) -> dict[str, list[Answer]]:
    return {name: given for name, given in ANSWERS.items() if name in names}


def failed(name: str) -> list[Answer]:
    return [replace(answer, turns=(), error="RuntimeError: no room") for answer in only(name)[name]]


@pytest.mark.parametrize(
    ("answers", "said", "missing"),
    [
        (
            only("plain"),
            "there is no baseline to compare it with",
            ["acceptance", "texts", "failures", "fig-speedup"],
        ),
        (only("dflash"), "dflash makes", ["texts", "failures", "fig-speedup"]),
        (
            only("plain", "plain-static"),
            "plain-static makes 1.",
            ["acceptance", "fig-positions", "fig-text"],
        ),
        (only("zlab"), "No method gave an answer", ["speed", "acceptance", "examples"]),
        (
            {"plain": failed("plain"), "dflash": failed("dflash")},
            "RuntimeError: no room (16 times)",
            ["speed"],
        ),
        ({"plain": [], "dflash": []}, "not asked yet", ["speed", "times", "accuracy"]),
        (
            {"plain": failed("plain"), **only("dflash")},
            "no baseline to compare it with",
            ["texts", "fig-speedup"],
        ),
    ],
)
def test_it_works_without_what_a_run_may_not_have(
    answers: dict[str, list[Answer]], said: str, missing: list[str], tmp_path: Path
) -> None:
    page = report(write_run(tmp_path, questions(2), answers))
    assert said in page.text
    assert not set(missing) & set(page.ids)
    assert {"definitions", "provenance"} <= set(page.ids)


def test_the_headline_counts_the_settings_with_a_speed_up(tmp_path: Path) -> None:
    """The method's settings are ordered by speed-up over their own baselines; one of them has failed."""

    def name_alike(record: dict[str, Any]) -> None:
        for row in record["methods"]:
            if row["model_id"] in ("stock", "zlab"):
                row["method"] = "dflash"

    answers = only("plain", "dflash", "stock", "zlab")
    page = report(write_run(tmp_path, questions(2), answers, name_alike))
    assert "dflash, with the largest speed-up of 2 settings, makes " in page.text


def test_an_answer_that_ended_early_is_said_to_be_no_tie(tmp_path: Path) -> None:
    """There is no margin where one answer ends and the other goes on."""
    answers = only("plain", "dflash")
    answers["dflash"] = [replace(answer, model_id="dflash") for answer in answers["plain"]]
    longer = answers["dflash"][0]
    shorter = replace(longer.turns[0], token_ids=longer.turns[0].token_ids[:-1])
    answers["dflash"][0] = replace(longer, turns=(shorter, *longer.turns[1:]))
    folder = write_run(tmp_path, questions(2), answers)
    row = summarize(folder, simple_score)["methods"][1]["differing"][0]
    told = {**row, "model_id": "dflash", "margin": None, "is_tie": False}
    (folder / "margins.jsonl").write_text(json.dumps(told) + "\n")
    page = report(folder)
    assert "1 differs, 1 of them at no tie of rounding" in page.text
    assert "the margins were not computed" not in page.text
    assert '<td class="bad">1' in page.html


def test_it_works_with_next_to_nothing_recorded(tmp_path: Path) -> None:
    """One question of one set, without scores, TTFT, tokens, provenance or settings."""
    asked = [question for question in questions(1) if question.dataset == "mt-bench"]
    answers = {
        name: [
            replace(
                a,
                turns=tuple(
                    replace(t, ttft=None, token_ids=[], accepted=None, proposed=None)
                    for t in a.turns
                ),
            )
            for a in given[:1]
        ]
        for name, given in answers_of(asked).items()
        if name in ("plain", "dflash")
    }

    def forget(record: dict[str, Any]) -> None:
        record |= {"provenance": {}, "settings": {"target": None}, "sessions": []}

    page = report(write_run(tmp_path, asked, answers, forget))
    assert "over 1 question of 1 set." in page.text
    assert not {"accuracy", "fig-latency", "fig-positions"} & set(page.ids)


def test_without_matplotlib_there_are_no_figures_and_without_jinja_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path, questions(2), answers_of(questions(2)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = report(folder)
    assert "There are no figures: expected matplotlib" in page.text
    assert "svg" not in page.tags
    (folder / "report.html").unlink()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    # The page above has loaded it.
    report_module._environment.cache_clear()
    with pytest.raises(ImportError, match=r"expected jinja2.*pip install 'dflash-hf\[bench\]'"):
        write_report(folder)
    assert not (folder / "report.html").exists()
