"""JSONL files that are written whole or not at all, or line by line, so that a run killed at any time goes on.

A line that a kill or a full disk has cut is the last one and has no end: whoever goes on leaves it out.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, Self

from dflash_hf.errors import one_line, require

logger = logging.getLogger(__name__)

SYNC_SECONDS = 5.0  # between two waits for the disk, of rows that come one by one


class RowFile:
    """The rows of a JSONL file, read when they are asked for; in memory are only their places.

    Raises:
        ValueError: If there is no such file; for a line that is no JSON object, when it is asked for.
    """

    def __init__(self, path: Path) -> None:
        # `Path.is_file` of Python 3.11 raises for a text that is too long for a path.
        require(os.path.isfile(path), "a JSONL file", str(path), "fix the path")
        self.path = path
        self._starts = array("Q")
        self._numbers = array("Q")
        with path.open("rb") as stream:
            start = 0
            for number, line in enumerate(stream, 1):
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = range(len(self))[index]
        with self.path.open("rb") as stream:
            stream.seek(self._starts[at])
            return self._parsed(stream.readline(), at)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as stream:
            lines = (line for line in stream if line.strip())
            # What has been appended since the file was opened has no place here.
            for at, line in enumerate(islice(lines, len(self))):
                yield self._parsed(line, at)

    def where(self, index: int) -> str:
        """Returns what to call a row in a sentence."""
        return f"line {self._numbers[index]} of {self.path}"

    def line_number(self, index: int) -> int:
        """Returns the line that a row is in; the first one is 1."""
        return self._numbers[index]

    def _parsed(self, line: bytes, at: int) -> dict[str, Any]:
        return parsed_object(
            line, self.where(at), "fix the line, or go on with the run that wrote it"
        )


def parsed(text: str | bytes, where: str, action: str) -> Any:
    """Returns what a text of JSON says; raises `ValueError` if it is none, with `where` it is and `action` to take."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"expected JSON in {where}, got something else ({one_line(error)}); {action}"
        ) from error


def parsed_object(text: str | bytes, where: str, action: str) -> dict[str, Any]:
    """Returns what a text of JSON says, like [`parsed`], which must be an object."""
    row: Any = parsed(text, where, action)
    require(isinstance(row, dict), f"a JSON object in {where}", row, action)
    return row


def read_object(path: Path, action: str) -> dict[str, Any]:
    """Returns the JSON object in a file of UTF-8.

    Raises:
        ValueError: If the file holds something else; with the `action` to take.
        OSError: If the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected a JSON object in {path}, got a file that cannot be read ({one_line(error)}); {action}"
        ) from error
    return parsed_object(text, str(path), action)


def line_of(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSONL."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows behind those of a file, and waits until the disk has them; `ValueError` where it is full.

    Only one row is in memory at a time.
    """
    try:
        with path.open("ab") as file:
            for row in rows:
                file.write(line_of(row).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritten(path, error) from error


class RowAppender:
    """Appends rows to a file one by one; there is no file before the first.

    A kill of the process loses none of them, a crash of the machine those of the last seconds. It is used inside of
    `with`, and raises `ValueError` where the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[FileIO] = []  # the file, once it is open
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        """Opens nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until the disk has all, and closes the file."""
        if not self._files:
            return
        file = self._files.pop()
        try:
            self._sync(file)
        finally:
            file.close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row as one line of JSON; raises the error of [`unwritten`] if the disk does not take all of it."""
        line = line_of(row).encode()
        try:
            if not self._files:
                self._files.append(self.path.open("ab", buffering=0))
            file = self._files[0]
            written = file.write(line)
        except OSError as error:
            raise unwritten(self.path, error) from error
        if written < len(
            line
        ):  # of a disk that has just become full; whoever goes on leaves the part out
            raise unwritten(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync(file)

    def _sync(self, file: FileIO) -> None:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise unwritten(self.path, error) from error
        self._synced = time.monotonic()


def unwritten(path: Path, error: OSError) -> ValueError:
    """Returns the sentence for rows that a disk has no room for."""
    return ValueError(
        f"expected to write to {path}, got {one_line(error.strerror)}; make room and run it again: it goes on"
    )


def repair(path: Path) -> None:
    """Takes away what stands behind the last end of a line of a file, if there is such a file."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 2**16)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            logger.warning(
                "the last line of %s was not written to its end: it is written again", path
            )
            file.truncate(end)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes rows to a file, as [`write_whole`] does, and returns its path."""
    return write_whole(path, map(line_of, rows))


def write_whole(path: Path, text: str | Iterable[str]) -> Path:
    """Writes a text, or its parts as they come, to a file and returns its path; `ValueError` if the disk is full.

    Whole or not at all, also where the process is killed or getting the next part fails.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", newline="") as file:
            file.writelines((text,) if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        return part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        sentence = f"expected to write {path}, got {one_line(error.strerror or error)}; make room and run it again"
        raise ValueError(sentence) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
