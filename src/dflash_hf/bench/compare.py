"""Two runs side by side: what changed beyond the noise of the choice of questions, and what differs between them.

Only questions that both asked, and methods that both ran. Intervals are over questions: they know nothing of another
machine or a busier one, which moves tokens/s of all methods. The speed-up, whose baseline ran in turns with the
method, is moved less by that, acceptance, accuracy and texts not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from dflash_hf.bench.answers import Answer
from dflash_hf.bench.counting import first_difference, per_question, ratios
from dflash_hf.bench.intervals import interval, mcnemar, resample
from dflash_hf.bench.questions import Key
from dflash_hf.bench.run_files import Run, read_run
from dflash_hf.bench.summary import Scores, read_scores
from dflash_hf.errors import listed

CERTAIN = 0.99  # of an interval: a comparison has many rows, and one in twenty of 95 % ones would be a false alarm
ALL = "all sets"
# What is another in any two runs.
_NOT_CONDITIONS = ("provenance.date", "provenance.command")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number in both runs.

    Args:
        dataset (`str`): Name of the set, or `ALL`.
        before, after (`float`): The number in the first and in the second run.
        low, high (`float`, *optional*): 99 % interval of the ratio (of speeds), or of the difference (of the others).
        count (`int`): Questions that it is of; answers, of texts.
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
    """What two runs have in common and where they part."""

    folders: tuple[Path, Path]
    changes: list[Change]  # per set and method, all numbers that both have
    conditions: list[tuple[str, str, str]]  # settings and provenance that differ: name, first run's, second's
    left_out: list[str]  # methods that only one of them has answers of

    @property
    def beyond_noise(self) -> list[Change]:
        """Those that changed."""
        return [change for change in self.changes if change.is_beyond_noise]


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Compares the runs of two folders on the questions that both asked; accuracy where both have `scores.jsonl`.

    Raises:
        ValueError: If one is no run's folder, or they have no question or no method in common.
    """
    runs = read_run(first), read_run(second)
    one, two = (run.questions for run in runs)
    shared = [key for key, question in one.items() if key in two and two[key].turns == question.turns]
    if not shared:
        names = " and ".join(listed(run.datasets) for run in runs)
        raise ValueError(f"expected two runs with a question in common, got {names}; compare runs of the same sets")
    found = [
        {name for name, answers in run.answers.items() if any(a.error is None for a in answers.values())}
        for run in runs
    ]
    methods = [cell.model_id for cell in runs[0].cells if cell.model_id in found[0] & found[1]]
    if not methods:
        names = " and ".join(listed(sorted(part)) or "none" for part in found)
        raise ValueError(f"expected two runs with a method in common, got {names}; compare runs of the same methods")
    scores = read_scores(runs[0].folder), read_scores(runs[1].folder)
    datasets = [name for name in runs[0].datasets if any(key[0] == name for key in shared)]
    changes: list[Change] = []
    for dataset in [*datasets, *([ALL] if len(datasets) > 1 else [])]:
        keys = {key for key in shared if dataset in (ALL, key[0])}
        for name in methods:
            changes += _Pairing(runs, scores, name, keys, dataset).changes()
    return Comparison(
        folders=(runs[0].folder, runs[1].folder),
        changes=changes,
        conditions=_conditions(*runs),
        left_out=sorted(found[0] ^ found[1]),
    )


class _Pairing:
    """One method in two runs, on the questions of a set that both answered."""

    def __init__(
        self, runs: tuple[Run, Run], scores: tuple[Scores, Scores], name: str, keys: set[Key], dataset: str
    ) -> None:
        self.runs, self.scores, self.name, self.dataset, self.asked = runs, scores, name, dataset, keys
        self.answers = [self._of(run, name, keys) for run in runs]
        self.keys = [key for key in self.answers[0] if key in self.answers[1]]

    @staticmethod
    def _of(run: Run, name: str, keys: set[Key]) -> dict[Key, list[Answer]]:
        """Answers of a method by question, all repeats."""
        found: dict[Key, list[Answer]] = {}
        for (key, _), answer in run.answers.get(name, {}).items():
            if key in keys and answer.error is None:
                found.setdefault(key, []).append(answer)
        return found

    def changes(self) -> list[Change]:
        """All numbers that both runs have."""
        if not self.keys:
            return []
        rates = np.stack([_rates(self.answers[run], self.keys) for run in (0, 1)], axis=1)
        found = [self._change("tokens/s", self.keys, rates.reshape(len(self.keys), 4), _speed, is_ratio=True)]
        found += self._speedup()
        verifies = [[_verifies(self.answers[run][key]) for run in (0, 1)] for key in self.keys]
        sums = np.array(verifies, dtype=np.float64).reshape(len(self.keys), 4)
        if sums[:, 1].any() and sums[:, 3].any():
            found.append(self._change("acceptance length", self.keys, sums, _speed, is_ratio=False))
        return [*found, *self._accuracy(), *self._texts()]

    def _change(
        self,
        quantity: str,
        keys: Sequence[Key],
        values: Any,
        numbers: Callable[[Any], tuple[Any, Any]],
        is_ratio: bool,
    ) -> Change:
        """A change with its interval, from what is summed of each question."""
        before, after = (float(number) for number in numbers(values.sum(axis=0)))
        sets = [dataset for dataset, _ in keys]
        drawn = numbers(resample(values, sets))
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = interval(drawn[1] / drawn[0] if is_ratio else drawn[1] - drawn[0], CERTAIN)
        same = 1.0 if is_ratio else 0.0
        is_beyond = low is not None and high is not None and not low <= same <= high
        ends = {"low": low, "high": high}
        return self._named(quantity, before, after, count=len(values), is_beyond_noise=is_beyond, **ends)

    def _named(self, quantity: str, before: float, after: float, **more: Any) -> Change:
        named = {"dataset": self.dataset, "model_id": self.name, "quantity": quantity}
        return Change(**named, before=before, after=after, **more)

    def _speedup(self) -> list[Change]:
        baselines = [next(c.baseline for c in run.cells if c.model_id == self.name) for run in self.runs]
        if None in baselines or self.name in baselines:
            return []
        theirs = [self._of(run, str(name), set(self.keys)) for run, name in zip(self.runs, baselines, strict=True)]
        keys = [key for key in self.keys if key in theirs[0] and key in theirs[1]]
        if not keys:
            return []
        parts = [_rates(answers[run], keys) for run in (0, 1) for answers in (self.answers, theirs)]
        values = np.concatenate(parts, axis=1)
        return [
            self._change("speed-up", keys, values, lambda s: (ratios(s[..., :4]), ratios(s[..., 4:])), is_ratio=True)
        ]

    def _accuracy(self) -> list[Change]:
        """By McNemar's test on questions, whose repeats are averaged."""
        means = [self._means(run) for run in (0, 1)]
        keys = [key for key in means[0] if key in means[1]]
        if not keys:
            return []
        values = np.array([[means[0][key], means[1][key], 1.0] for key in keys])
        change = self._change(
            "accuracy", keys, values, lambda s: (s[..., 0] / s[..., 2], s[..., 1] / s[..., 2]), False
        )
        won = int((values[:, 1] > values[:, 0]).sum())
        lost = int((values[:, 1] < values[:, 0]).sum())
        return [replace(change, is_beyond_noise=mcnemar(lost, won) < 1 - CERTAIN)]

    def _means(self, run: int) -> dict[Key, float]:
        """The mean score of each question, failed answers too: they are not right."""
        found: dict[Key, list[float]] = {}
        for key, repeat in self.runs[run].answers[self.name]:
            score = self.scores[run].get((self.name, (key, repeat)))
            if key in self.asked and score is not None:
                found.setdefault(key, []).append(score)
        return {key: float(np.mean(scores)) for key, scores in found.items()}

    def _texts(self) -> list[Change]:
        """How many answers are the other run's; of drawn ones, which may differ, nothing is said."""
        if any(cell.is_sampled for run in self.runs for cell in run.cells if cell.model_id == self.name):
            return []
        others = {(key, a.repeat): a for key in self.keys for a in self.answers[1][key]}
        pairs = [
            (a, others[key, a.repeat]) for key in self.keys for a in self.answers[0][key] if (key, a.repeat) in others
        ]
        if not pairs:
            return []
        same = sum(first_difference(*pair) is None for pair in pairs) / len(pairs)
        return [self._named("same text", 1.0, same, count=len(pairs), is_beyond_noise=same < 1)]


def _rates(answers: Mapping[Key, Sequence[Answer]], keys: Sequence[Key]) -> Any:
    """Tokens and seconds of each question, a float array of `(questions, 2)`."""
    pairs = [(answer, answer) for key in keys for answer in answers[key]]
    return per_question(pairs)[:, :2]


def _speed(sums: Any) -> tuple[Any, Any]:
    """Both runs' ratios, of `(..., 4)` sums."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]


def _verifies(answers: Sequence[Answer]) -> tuple[int, int]:
    """Tokens committed, and by how many verifies."""
    counts = [count for answer in answers for turn in answer.turns for count in turn.committed or ()]
    return sum(counts), len(counts)


def _conditions(first: Run, second: Run) -> list[tuple[str, str, str]]:
    one, two = (_flat({"settings": run.settings, "provenance": run.provenance}) for run in (first, second))
    names = [name for name in {**one, **two} if name not in _NOT_CONDITIONS]
    return [(name, one.get(name, "–"), two.get(name, "–")) for name in names if one.get(name) != two.get(name)]


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
    """Returns what a person reads of a comparison: the conditions that differ, if any do, and the changes."""
    tables: list[Table] = []
    names = Text("\n".join(f"{letter}: {folder}" for letter, folder in zip("AB", comparison.folders, strict=True)))
    if comparison.conditions:
        table = Table(title="what else differs", title_justify="left")
        for heading in ("", "A", "B"):
            table.add_column(heading, overflow="fold")
        for row in comparison.conditions:
            table.add_row(*map(Text, row))
        tables.append(table)
    changed, of = len(comparison.beyond_noise) or "none", len(comparison.changes)
    caption = f"{changed} of {of} numbers changed beyond noise (of the choice of questions)"
    if comparison.left_out:
        caption += f"; only one of the runs has {listed(comparison.left_out)}"
    table = Table(title=names, title_justify="left", caption=Text(caption), caption_justify="left")
    for heading in ("set", "method"):
        table.add_column(heading, overflow="fold")
    table.add_column("")
    for heading in ("A", "B", "change", "99 % interval", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    previous = None
    for change in comparison.changes:
        here = (change.dataset, change.model_id)
        if previous not in (None, here):
            table.add_section()
        names_here = ("", "") if previous == here else here
        table.add_row(*map(Text, (*names_here, *_cells(change))), _verdict(change))
        previous = here
    return [*tables, table]


def _cells(change: Change) -> tuple[str, ...]:
    """What it is, both numbers, the change, its interval and what it is of, as text."""
    if change.quantity == "same text":
        return change.quantity, "", f"{100 * change.after:.1f} %", "", "", str(change.count)
    is_speed = change.quantity in ("tokens/s", "speed-up")
    scale, digits, unit = (100, 1, " %") if change.quantity == "accuracy" else (1, 2, "")
    before, after = (f"{scale * value:.{digits}f}{unit}" for value in (change.before, change.after))
    if is_speed:  # in per cent of what it was, as the interval of its ratio
        scale, digits = 100, 1
    offset = 1.0 if is_speed else 0.0
    moved = (change.after / change.before if is_speed and change.before else change.after - change.before) - offset
    ends = [f"{scale * (end - offset):+.{digits}f}" for end in (change.low, change.high) if end is not None]
    percent = " %" if is_speed else unit
    return change.quantity, before, after, f"{scale * moved:+.{digits}f}{percent}", " … ".join(ends), str(change.count)


def _verdict(change: Change) -> Text:
    if not change.is_beyond_noise:
        return Text("the same" if change.quantity == "same text" else "noise", style="dim")
    if change.quantity == "same text":
        return Text("differs", style="bold yellow")
    return Text("better", style="bold green") if change.after > change.before else Text("worse", style="bold red")


__all__ = ["Change", "Comparison", "compare", "comparison_tables"]
