"""This module shows the progress of a run: a line per cell, with its acceptance length and tokens per second so far.

The thread that asks questions also draws the bars, between two calls. Drawing in another thread would take time from
the methods.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from dflash_hf.bench.answers import Answer

SECONDS_BETWEEN = 0.5


class Bars:
    """One bar per cell. Nothing is shown if standard error is not a terminal.

    Args:
        totals (mapping): Number of answers of each cell, by its `model_id`.
        is_shown (`bool`): Whether this process shows the bars.
    """

    def __init__(self, totals: Mapping[str, int], is_shown: bool = True) -> None:
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
            disable=not (is_shown and console.is_terminal),
        )
        self._tasks: dict[str, TaskID] = {
            name: self.progress.add_task(name, total=total, numbers="")
            for name, total in totals.items()
        }
        # For each cell: tokens, seconds, tokens committed by verifies, number of verifies.
        self._sums: dict[str, list[float]] = {name: [0.0] * 4 for name in totals}
        self._drawn = 0.0

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.refresh()
        self.progress.stop()

    def add(self, name: str, answers: Iterable[Answer]) -> None:
        """Adds answers of a cell. Draws the bars again if the last drawing is `SECONDS_BETWEEN` ago."""
        if self.progress.disable:
            return
        sums = self._sums[name]
        found = list(answers)
        for turn in (turn for answer in found for turn in answer.turns):
            committed = turn.committed or []
            for index, value in enumerate(
                (turn.new_tokens, turn.wall_time, sum(committed), len(committed))
            ):
                sums[index] += value
        tokens, seconds, committed, verifies = sums
        numbers: list[str] = []
        if seconds:
            numbers.append(f"{tokens / seconds:.1f} tokens/s")
        if verifies:
            numbers.append(f"acceptance {committed / verifies:.2f}")
        self.progress.update(self._tasks[name], advance=len(found), numbers=", ".join(numbers))
        if time.perf_counter() - self._drawn >= SECONDS_BETWEEN:
            self.progress.refresh()
            self._drawn = time.perf_counter()

    def give_up(self, name: str) -> None:
        """Marks a cell as given up."""
        self.progress.update(self._tasks[name], numbers="[red]given up")
