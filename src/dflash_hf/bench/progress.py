"""The progress bar of a run: a line per cell, with its acceptance length and its tokens per second so far.

It is drawn between two calls and by the thread that asks: one that draws by itself would take time from the methods.
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
    """One bar per cell; nothing is shown where standard error is no terminal.

    Args:
        totals (mapping): Answers of each cell, by its `model_id`.
        is_shown (`bool`): Whether this process shows them.
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
        # Per cell: tokens, seconds, tokens committed by verifies, verifies.
        self._sums: dict[str, list[float]] = {name: [0.0] * 4 for name in totals}
        self._drawn = 0.0

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.refresh()
        self.progress.stop()

    def add(self, name: str, answers: Iterable[Answer]) -> None:
        """Adds answers of a cell, and draws if it has been a while."""
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
        """Says of a cell that it is not asked any more."""
        self.progress.update(self._tasks[name], numbers="[red]given up")
