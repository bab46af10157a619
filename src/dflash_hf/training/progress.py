"""This module shows the progress of answering: a bar on a terminal, or a line per minute elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 60.0
RATE_SECONDS = (
    300.0  # the time left is estimated over this time, because answers differ greatly in length
)


class AnswerProgress:
    """Counts answered rows and their tokens, and shows rate and time left on standard error.

    Args:
        is_shown (`bool`): Whether this process shows the progress.
    """

    def __init__(self, is_shown: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not is_shown)
        self.bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=2,
            speed_estimate_period=RATE_SECONDS,
            disable=not (is_shown and self.console.is_terminal),
        )
        self._task = self.bar.add_task("answers", total=0, rate="")
        self.num_expected = 0
        self.num_done = 0
        self.num_new = 0  # rows that this run has done
        self.num_tokens = 0  # tokens of the answers in these rows
        self._began = time.monotonic()
        self._told = self._began

    def __enter__(self) -> Self:
        """Starts the time and the bar."""
        self._began = time.monotonic()
        self._told = self._began
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the bar, which stays visible."""
        self.bar.stop()

    def expect(self, rows: int, done: int = 0) -> None:
        """Adds rows that should be answered. An earlier run has answered `done` of them."""
        self.num_expected += rows
        self.num_done += done
        self._show()

    def add(self, rows: int, tokens: int) -> None:
        """Adds rows that are done now, and the number of tokens of their answers."""
        self.num_done += rows
        self.num_new += rows
        self.num_tokens += tokens
        self._show()

    @property
    def tokens_per_second(self) -> float:
        """The mean number of answer tokens per second so far."""
        return self.num_tokens / max(time.monotonic() - self._began, 1e-9)

    def line(self) -> str:
        """Returns the progress as a line of text."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = self.num_new / seconds
        left = "unknown"
        if rate > 0:
            left = _as_clock((self.num_expected - self.num_done) / rate)
        return (
            f"{self.num_done:,} of {self.num_expected:,} answers, {self.tokens_per_second:,.0f} tokens/s, "
            f"{_as_clock(seconds)} so far, time left {left}"
        )

    def _show(self) -> None:
        rate = f"{self.tokens_per_second:,.0f} tokens/s"
        self.bar.update(self._task, total=self.num_expected, completed=self.num_done, rate=rate)
        is_time = time.monotonic() - self._told >= SECONDS_BETWEEN_LINES
        if self.bar.disable and is_time:
            self._told = time.monotonic()
            self.console.print(self.line(), highlight=False, soft_wrap=True)


def _as_clock(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
