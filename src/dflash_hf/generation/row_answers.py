"""This module passes new tokens and ends of requests from the steps of a running batch to callbacks and the caller."""

from __future__ import annotations

import time

from dflash_hf.errors import one_line
from dflash_hf.generation.request_stats import Finished, NewTokens, RequestStats
from dflash_hf.generation.row_requests import Row


class Answers:
    """New tokens and ends of requests. Each is passed to a callback once, and returned once."""

    def __init__(self) -> None:
        # Statistics, by id, of the requests whose ends the next return contains.
        self.ended: dict[int, RequestStats] = {}
        self._found: list[tuple[Row, NewTokens]] = []  # not returned yet
        self._num_told = 0  # how many of them were passed to callbacks

    def begin(self) -> None:
        """Begins a step. Entries that an error has left from the step before are returned with the new ones."""
        self.ended = {row.id: row.stats for row, new in self._found if new.finished is not None}

    def take(self) -> list[NewTokens]:
        """Returns the entries in the order in which they were added, and removes them."""
        found = [new for _, new in self._found]
        self._found = []
        self._num_told = 0
        return found

    def drop(self, id: int) -> None:
        """Removes the entries of a request that were not returned; to be called between two steps."""
        self._found = [(row, new) for row, new in self._found if row.id != id]
        # When the step ended, all entries had been passed to callbacks.
        self._num_told = len(self._found)

    def add(self, row: Row, token_ids: list[int], is_last: bool) -> None:
        """Adds the new tokens of a row."""
        row.stats.num_new_tokens += len(token_ids)
        if not is_last:
            self._found.append((row, NewTokens(row.id, token_ids, None)))
            return
        finished: Finished = "length"
        # This also applies if the last token within the limit is an end token.
        if token_ids[-1] in row.end_ids:
            finished = "stop"
        self._end(row, NewTokens(row.id, token_ids, finished))

    def fail(self, row: Row, error: ValueError) -> None:
        """Ends a request that could not be prefilled."""
        row.stats.error = one_line(error)
        self._end(row, NewTokens(row.id, [], "error"))

    def break_off(self, row: Row, error: Exception) -> None:
        """Ends a request because of an error that concerns only this request."""
        row.stats.error = one_line(error)
        # The message of a `ValueError` is a full sentence. Other messages say little without the class of the error.
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
        """Passes new entries to the callbacks; after all calls, raises the first error of a callback."""
        errors: list[Exception] = []
        while self._num_told < len(self._found):
            row, new = self._found[self._num_told]
            # Counted before the call, so that an interrupted entry is not passed twice.
            self._num_told += 1
            if row.on_tokens is None:
                continue
            try:
                row.on_tokens(new)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
