"""This module writes `report.html`, the results of a run as one page that needs no network, from the run's files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.counting import ratio
from dflash_hf.bench.plots import Figure, figures
from dflash_hf.bench.run_files import RUN, Run, read_run
from dflash_hf.bench.summary import read_scores, summarize
from dflash_hf.data.row_files import read_object, write_whole
from dflash_hf.errors import one_line, require

MAX_DIFFERING = 50  # rows in the table of differing answers
MAX_TEXT = 4000  # characters of an answer that is shown
MIN_VERIFIES = 8  # in the text that is shown verify by verify

logger = logging.getLogger(__name__)


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Writes `report.html` into a run's folder, whole or not at all. Also writes `summary.json` if there is none.

    Without matplotlib, the page has no figures and says so.

    Raises:
        ValueError: If the folder contains no run, or a summary that cannot be read.
    """
    environment = _environment()
    from jinja2 import UndefinedError

    run = read_run(folder)
    path = run.folder / "summary.json"
    again = "remove it to have it written again"
    if path.exists():
        require(path.is_file(), f"a file as {path}", "a folder", again)
        summary = read_object(path, again)
    else:
        summary = summarize(folder)
    try:
        page = _page(run, summary, environment)
    # Nearly all of a summary, and of the run's own description, is drawn or written. So it is not checked field by
    # field.
    except (ValueError, LookupError, TypeError, AttributeError, UndefinedError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(
            f"expected {RUN} and {path.name} as a run writes them in {run.folder}, got something else ({what}); "
            f"remove {path.name} to have it written again, or run the bench again"
        ) from error
    return write_whole(run.folder / "report.html", page)


@cache
def _environment() -> Any:
    """Returns the environment of the page's template, made once for all reports. Raises as [`write_report`] does."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        sentence = "expected jinja2 for the report, got no module of that name; pip install 'dflash-hf[bench]'"
        raise ImportError(sentence) from error
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "percent": _percent,
        "ms": _milliseconds,
        "rate": _rate,
        "words": _words,
    }
    return environment


def _page(run: Run, summary: dict[str, Any], environment: Any) -> str:
    """Returns the page of a run and its summary."""
    main = _main(summary)
    notes = list(summary["notes"])
    drawn: dict[str, Figure] = {}
    try:
        drawn = figures(summary, _one_text(run, main))
    except ImportError as error:
        logger.warning("The report has no figures: %s", error)
        notes.append(f"There are no figures: {error}")
    answering = [method for method in summary["methods"] if method["all"]["texts"]]
    alike: list[Any] = []
    if main is not None:
        alike = [m for m in answering if m["method"] == main["method"] and m["all"]["speedup"]]
    return environment.get_template("report.html.jinja").render(
        summary=summary,
        main=main,
        base=next(
            (m for m in summary["methods"] if main and m["model_id"] == main["baseline"]), None
        ),
        num_alike=len(alike),
        answering=answering,
        times=_tables(
            answering, list(summary["datasets"]), lambda block: block if block["texts"] else None
        ),
        acceptance=_tables(answering, list(summary["datasets"]), lambda block: block["acceptance"]),
        failing=[
            m
            for m in summary["methods"]
            if m["failed"] or m["all"]["failures"] or not m["all"]["texts"]
        ],
        figures=drawn,
        notes=notes,
        examples=_examples(run, main),
        max_differing=MAX_DIFFERING,
        harness=ratio(
            *(
                sum(s.get(name, 0.0) for s in summary["sessions"])
                for name in ("harness_seconds", "seconds")
            )
        ),
    )


def _main(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the method that the report is about: one with our draft, else one with any draft, else any method.

    If there are several, it is the one with the largest speed-up over its own baseline. If none has a baseline, it is
    the one with the most tokens/s.
    """
    answering = [method for method in summary["methods"] if method["all"]["texts"]]

    def order(method: Mapping[str, Any]) -> tuple[bool, bool, float, float]:
        block = method["all"]
        speed = (block["speedup"] or {}).get("ratio") or 0.0
        return (
            method["method"] == "dflash",
            bool(block["acceptance"]),
            speed,
            block["tokens_per_second"] or 0.0,
        )

    return max(answering, key=order, default=None)


def _tables(
    methods: Sequence[Mapping[str, Any]], sets: Sequence[str], pick: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the rows of tables, over all sets and for each set. A row is a name and what `pick` takes of a block.

    The entry of a set has its name, a row per method, and a row per category and method. Empty rows are left out.
    """
    found: list[Any] = []
    for name in sets:
        here = [
            (method["model_id"], method["sets"][name])
            for method in methods
            if name in method["sets"]
        ]
        rows = [(method, pick(block)) for method, block in here]
        parts = [
            (part, method, pick(one))
            for method, block in here
            for part, one in block["categories"].items()
        ]
        parts.sort(key=lambda row: row[0].lower())
        named = _filled((f"{part} · {method}", picked) for part, method, picked in parts)
        rows = _filled(rows)
        if named or (rows and len(sets) > 1):
            found.append((name, rows, named))
    over_all = _filled((method["model_id"], pick(method["all"])) for method in methods)
    return over_all, found


def _filled(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the rows that have something to show."""
    return [row for row in rows if row[1]]


def _one_text(run: Run, main: Mapping[str, Any] | None) -> tuple[str, list[int]] | None:
    """Returns a text whose verifies commit about as much as the average, and the tokens of each verify."""
    acceptance = main["all"]["acceptance"] if main else None
    if not main or not acceptance or not acceptance["acceptance_length"]:
        return None
    texts = [
        (answer, turn.committed)
        for answer in run.answers[main["model_id"]].values()
        for turn in answer.turns
        if turn.committed
    ]
    long = [text for text in texts if len(text[1]) >= MIN_VERIFIES]

    def order(text: tuple[Answer, list[int]]) -> tuple[float, int]:
        """Returns how far the mean of a text is off. For equal means, the longest text comes first."""
        committed = text[1]
        mean = sum(committed) / len(committed)
        return abs(mean - acceptance["acceptance_length"]), -len(committed)

    answer, committed = min(long or texts, key=order)
    return f"{answer.dataset} {answer.question_id}, {answer.model_id}", committed


def _examples(run: Run, main: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the first question of each set with the method's answer and its score."""
    if main is None:
        return []
    scores = read_scores(run.folder)
    found: dict[str, dict[str, Any]] = {}
    for which, answer in run.answers[main["model_id"]].items():
        if not answer.has_failed and answer.dataset not in found:
            said = [_cut(turn.text) for turn in answer.turns]
            found[answer.dataset] = {
                "question": run.questions[answer.key],
                "turns": list(zip(run.questions[answer.key].turns, said, strict=True)),
                "score": scores.get((main["model_id"], which)),
            }
    return list(found.values())


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} …"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def _rate(value: float | None) -> str:
    is_small = value is not None and value < 1000
    return _number(value, int(is_small))


def _words(value: object) -> str:
    """Returns a value of a record as one line: names and values of nested records, without unknown values."""
    if isinstance(value, Mapping):
        items: Any = value.items()
        return ", ".join(
            f"{name}: {_words(one)}" for name, one in items if one not in (None, [], {}, "")
        )
    if isinstance(value, list | tuple):
        rows: Any = value
        return ", ".join(map(_words, rows))
    return str(value)
