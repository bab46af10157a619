"""What the steps of a running batch bring to its requests, on its way to callbacks and to the caller of a step."""

from __future__ import annotations

import time

from dflash_hf.errors import one_line
from dflash_hf.generation.request_stats import Finished, NewTokens, RequestStats
from dflash_hf.generation.row_requests import Row


class Answers:
    """New tokens and ends of requests, each told once and returned once."""

    def __init__(self) -> None:
        # Statistics of the requests whose ends the next return has, by id.
        self.ended: dict[int, RequestStats] = {}
        self._found: list[tuple[Row, NewTokens]] = []  # not returned yet
        self._num_told = 0  # of those, with which requests have been called back

    def begin(self) -> None:
        """Begins a step; what one before it has left behind an error is returned with what this one finds."""
        self.ended = {row.id: row.stats for row, new in self._found if new.finished is not None}

    def take(self) -> list[NewTokens]:
        """Returns what was found, in the order in which it came."""
        found = [new for _, new in self._found]
        self._found = []
        self._num_told = 0
        return found

    def drop(self, id: int) -> None:
        """Forgets what was found of a request and was not returned, between two steps."""
        self._found = [(row, new) for row, new in self._found if row.id != id]
        # All of it was told when the step ended.
        self._num_told = len(self._found)

    def add(self, row: Row, token_ids: list[int], is_last: bool) -> None:
        """Adds the new tokens of a row."""
        row.stats.num_new_tokens += len(token_ids)
        if not is_last:
            self._found.append((row, NewTokens(row.id, token_ids, None)))
            return
        finished: Finished = "length"
        # Also where the last token that was allowed is an end token.
        if token_ids[-1] in row.end_ids:
            finished = "stop"
        self._end(row, NewTokens(row.id, token_ids, finished))

    def fail(self, row: Row, error: ValueError) -> None:
        """Ends a request that could not be prefilled."""
        row.stats.error = one_line(error)
        self._end(row, NewTokens(row.id, [], "error"))

    def break_off(self, row: Row, error: Exception) -> None:
        """Ends a request by an error of its own."""
        row.stats.error = one_line(error)
        # A sentence says all; the message of another error says little without its kind.
        if not isinstance(error, ValueError):
            row.stats.error = f"{type(error).__name__}: {row.stats.error}"
        row.stats.exception = error
        self._end(row, NewTokens(row.id, [], "error"))

    def _end(self, row: Row, new: NewTokens) -> None:
        """Adds the end of a request."""
        row.stats.seconds = time.perf_counter() - row.added
        self.ended[row.id] = row.stats
        self._found.append((row, new))

    def call_back(self) -> None:
        """Hands each request what is new to it; raises the first error of a callback once all have been called."""
        errors: list[Exception] = []
        while self._num_told < len(self._found):
            row, new = self._found[self._num_told]
            # Counted before the call: what an interrupt cuts short is not told twice.
            self._num_told += 1
            if row.on_tokens is None:
                continue
            try:
                row.on_tokens(new)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
