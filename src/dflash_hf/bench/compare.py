"""This module compares two runs: what changed beyond the noise of the choice of questions, and what else differs.

Only questions that both runs asked and methods that both ran are compared. Intervals are over questions. They do not
include the effect of another machine or a busier one, which changes the tokens/s of all methods. The speed-up changes
less in that case, because its baseline ran in turns with the method. Acceptance, accuracy and texts do not change at
all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.counting import first_difference, mean_scores, per_question, ratios
from dflash_hf.bench.intervals import interval, mcnemar, resample
from dflash_hf.bench.questions import Key
from dflash_hf.bench.run_files import Run, read_run
from dflash_hf.bench.summary import Scores, read_scores
from dflash_hf.errors import listed
from dflash_hf.tables import make_table

# The level of the intervals. A comparison has many rows, and one in twenty 95 % intervals would be a false alarm.
CERTAIN = 0.99
ALL = "all sets"
# These differ between any two runs.
_NOT_CONDITIONS = ("provenance.date", "provenance.command")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number in both runs.

    Args:
        dataset (`str`): Name of the set, or `ALL`.
        before, after (`float`): The number in the first and in the second run.
        low, high (`float`, *optional*): 99 % interval of the ratio (for speeds) or of the difference (for the others).
        count (`int`): Number of questions; for texts, number of answers.
    """

    dataset: str
    model_id: str
    quantity: str
    before: float
    after: float
    low: float | None = None
    high: float | None = None
    count: int
    is_beyond_noise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two runs."""

    folders: tuple[Path, Path]
    changes: list[Change]  # all numbers that both runs have, per set and method
    # Settings and provenance that differ: name, value of the first run, value of the second run.
    conditions: list[tuple[str, str, str]]
    left_out: list[str]  # methods that only one of the runs has answers of

    @property
    def beyond_noise(self) -> list[Change]:
        """The changes that chance does not explain, in the order of `changes`."""
        return [change for change in self.changes if change.is_beyond_noise]


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Compares the runs of two folders on the questions that both asked. Accuracy needs `scores.jsonl` in both.

    Raises:
        ValueError: If one is not the folder of a run, or they have no question or no method in common.
    """
    runs = read_run(first), read_run(second)
    one, two = (run.questions for run in runs)
    shared = [
        key for key, question in one.items() if key in two and two[key].turns == question.turns
    ]
    if not shared:
        names = " and ".join(listed(run.datasets) for run in runs)
        raise ValueError(
            f"expected two runs with a question in common, got {names}; compare runs of the same sets"
        )
    found = [
        {
            name
            for name, answers in run.answers.items()
            if not all(answer.has_failed for answer in answers.values())
        }
        for run in runs
    ]
    methods = [cell.model_id for cell in runs[0].cells if cell.model_id in found[0] & found[1]]
    if not methods:
        names = " and ".join(listed(sorted(part)) or "none" for part in found)
        raise ValueError(
            f"expected two runs with a method in common, got {names}; compare runs of the same methods"
        )
    scores = read_scores(runs[0].folder), read_scores(runs[1].folder)
    datasets = [name for name in runs[0].datasets if any(key[0] == name for key in shared)]
    changes: list[Change] = []
    parts = list(datasets)
    if len(datasets) > 1:
        parts.append(ALL)
    for dataset in parts:
        keys = {key for key in shared if dataset in (ALL, key[0])}
        for name in methods:
            changes += _changes(runs, scores, name, keys, dataset)
    return Comparison(
        folders=(runs[0].folder, runs[1].folder),
        changes=changes,
        conditions=_conditions(*runs),
        left_out=sorted(found[0] ^ found[1]),
    )


def _changes(
    runs: tuple[Run, Run], scores: tuple[Scores, Scores], name: str, asked: set[Key], dataset: str
) -> Iterator[Change]:
    """Yields all numbers of a method that both runs have, on the questions of a set that both answered."""
    of: dict[str, Any] = {"dataset": dataset, "model_id": name}
    mine = [_answers(run, name, asked) for run in runs]
    keys = [key for key in mine[0] if key in mine[1]]
    if not keys:
        return
    yield _change(of, "tokens/s", keys, [_rates(answers, keys) for answers in mine], is_ratio=True)
    cells = [next(cell for cell in run.cells if cell.model_id == name) for run in runs]
    baselines = [cell.baseline for cell in cells]
    if None not in baselines and name not in baselines:
        theirs = [
            _answers(run, str(baseline), asked)
            for run, baseline in zip(runs, baselines, strict=True)
        ]
        both = [key for key in keys if key in theirs[0] and key in theirs[1]]
        if both:
            parts = [
                np.hstack([_rates(answers, both) for answers in each])
                for each in zip(mine, theirs, strict=True)
            ]
            yield _change(of, "speed-up", both, parts, is_ratio=True)
    verifies = [
        np.array([_verifies(answers[key]) for key in keys], dtype=np.float64) for answers in mine
    ]
    if all(part[:, 1].any() for part in verifies):
        yield _change(of, "acceptance length", keys, verifies)
    # Failed answers have a score too, because they count as wrong.
    means = [
        mean_scores(
            (key, score)
            for (model_id, (key, _)), score in found.items()
            if model_id == name and key in asked
        )
        for found in scores
    ]
    scored = [key for key in means[0] if key in means[1]]
    if scored:
        change = _change(
            of,
            "accuracy",
            scored,
            [np.array([(mean[key], 1.0) for key in scored]) for mean in means],
        )
        lost, won = (
            sum(sign * (means[1][key] - means[0][key]) > 0 for key in scored) for sign in (-1, 1)
        )
        yield replace(change, is_beyond_noise=mcnemar(lost, won) < 1 - CERTAIN)
    # Sampled texts may differ, so they are not compared.
    others = {(key, answer.repeat): answer for key in keys for answer in mine[1][key]}
    pairs = [(answer, others.get((key, answer.repeat))) for key in keys for answer in mine[0][key]]
    same = [first_difference(one, other) is None for one, other in pairs if other is not None]
    if same and not any(cell.is_sampled for cell in cells):
        share = sum(same) / len(same)
        yield Change(
            **of,
            quantity="same text",
            before=1.0,
            after=share,
            count=len(same),
            is_beyond_noise=not all(same),
        )


def _answers(run: Run, name: str, keys: set[Key]) -> dict[Key, list[Answer]]:
    """Returns a method's answers by question, with all repeats but without failed answers."""
    found: dict[Key, list[Answer]] = {}
    for (key, _), answer in run.answers.get(name, {}).items():
        if key in keys and not answer.has_failed:
            found.setdefault(key, []).append(answer)
    return found


def _change(
    of: Mapping[str, Any],
    quantity: str,
    keys: Sequence[Key],
    parts: Sequence[Any],
    is_ratio: bool = False,
) -> Change:
    """Returns a change with its interval.

    `parts` holds, per run, the columns that are summed over the questions. The number of a run is a ratio of these
    sums.
    """
    values = np.hstack(parts)
    before, after = (float(number) for number in _numbers(values.sum(axis=0)))
    drawn_before, drawn_after = _numbers(resample(values, [dataset for dataset, _ in keys]))
    no_change = 1.0 if is_ratio else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = drawn_after / drawn_before if is_ratio else drawn_after - drawn_before
    low, high = interval(moved, CERTAIN)
    is_beyond = low is not None and high is not None and not low <= no_change <= high
    ends: dict[str, Any] = {"before": before, "after": after, "low": low, "high": high}
    return Change(**of, quantity=quantity, **ends, count=len(values), is_beyond_noise=is_beyond)


def _numbers(sums: Any) -> list[Any]:
    """Returns both runs' numbers: the ratio of two sums each for `(..., 4)`, and their [`ratios`] for `(..., 8)`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        halves = np.split(sums, 2, axis=-1)
        if sums.shape[-1] == 8:
            return [ratios(half) for half in halves]
        return [half[..., 0] / half[..., 1] for half in halves]


def _rates(answers: Mapping[Key, Sequence[Answer]], keys: Sequence[Key]) -> Any:
    """Returns the tokens and seconds of each question, a float array of shape `(questions, 2)`."""
    pairs = [(answer, answer) for key in keys for answer in answers[key]]
    return per_question(pairs)[:, :2]


def _verifies(answers: Sequence[Answer]) -> tuple[int, int]:
    """Returns the number of tokens committed, and the number of verifies."""
    counts = [
        count for answer in answers for turn in answer.turns for count in turn.committed or ()
    ]
    return sum(counts), len(counts)


def _conditions(first: Run, second: Run) -> list[tuple[str, str, str]]:
    one, two = (
        _flat({"settings": run.settings, "provenance": run.provenance}) for run in (first, second)
    )
    names = [name for name in {**one, **two} if name not in _NOT_CONDITIONS]
    return [
        (name, one.get(name, "–"), two.get(name, "–"))
        for name in names
        if one.get(name) != two.get(name)
    ]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            inner: Any = value
            found |= _flat(inner, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Returns the tables of a comparison for people: the conditions that differ (if any), and the changes."""
    tables: list[Table] = []
    names = Text(
        "\n".join(
            f"{letter}: {folder}" for letter, folder in zip("AB", comparison.folders, strict=True)
        )
    )
    if comparison.conditions:
        table = make_table("what else differs", ["", "A", "B"], [])
        for row in comparison.conditions:
            table.add_row(*map(Text, row))
        tables.append(table)
    changed = len(comparison.beyond_noise) or "none"
    of = len(comparison.changes)
    caption = f"{changed} of {of} numbers changed beyond noise (of the choice of questions)"
    if comparison.left_out:
        caption += f"; only one of the runs has {listed(comparison.left_out)}"
    numbers = ["A", "B", "change", "99 % interval", "n"]
    table = make_table(names, ["set", "method", ""], numbers)
    table.add_column("")
    table.caption = Text(caption)
    table.caption_justify = "left"
    previous = None
    for change in comparison.changes:
        here = (change.dataset, change.model_id)
        if previous not in (None, here):
            table.add_section()
        is_same_row = previous == here
        names_here = ("", "") if is_same_row else here
        table.add_row(*map(Text, (*names_here, *_cells(change))), _verdict(change))
        previous = here
    return [*tables, table]


def _cells(change: Change) -> tuple[str, ...]:
    """Returns the cells of a row as text: quantity, both numbers, change, interval and count."""
    if change.quantity == "same text":
        return change.quantity, "", f"{100 * change.after:.1f} %", "", "", str(change.count)
    ends = [end for end in (change.low, change.high) if end is not None]
    if change.quantity in ("tokens/s", "speed-up"):
        # The change is in per cent of the first number, because the interval is one of the ratio.
        before = f"{change.before:.2f}"
        after = f"{change.after:.2f}"
        ratio = change.after / change.before if change.before else 1.0
        moved = f"{100 * (ratio - 1):+.1f} %"
        shown = [f"{100 * (end - 1):+.1f}" for end in ends]
    elif change.quantity == "accuracy":
        before = f"{100 * change.before:.1f} %"
        after = f"{100 * change.after:.1f} %"
        moved = f"{100 * (change.after - change.before):+.1f} %"
        shown = [f"{100 * end:+.1f}" for end in ends]
    else:
        before = f"{change.before:.2f}"
        after = f"{change.after:.2f}"
        moved = f"{change.after - change.before:+.2f}"
        shown = [f"{end:+.2f}" for end in ends]
    return change.quantity, before, after, moved, " … ".join(shown), str(change.count)


def _verdict(change: Change) -> Text:
    is_text = change.quantity == "same text"
    if is_text and change.is_beyond_noise:
        return Text("differs", style="bold yellow")
    if is_text:
        return Text("the same", style="dim")
    if not change.is_beyond_noise:
        return Text("noise", style="dim")
    if change.after > change.before:
        return Text("better", style="bold green")
    return Text("worse", style="bold red")
