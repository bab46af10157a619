"""This module reads and writes JSONL files so that a run that was killed at any time can be continued.

A file is written completely or not at all, or line by line. A line that was cut by a kill or a full disk is the last
line and has no line end. A continued run leaves it out.
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

SYNC_SECONDS = 5.0  # the time between two syncs to the disk, for rows that come one by one


class RowFile:
    """The rows of a JSONL file. Each row is read when it is needed. Only the places of the rows are in memory.

    Raises:
        ValueError: If there is no such file. A line that is no JSON object raises when it is read.
    """

    def __init__(self, path: Path) -> None:
        # `Path.is_file` of Python 3.11 raises an error for a text that is too long for a path.
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
            # Rows that were appended after the file was opened are not yielded.
            for at, line in enumerate(islice(lines, len(self))):
                yield self._parsed(line, at)

    def where(self, index: int) -> str:
        """Returns the name of a row for a message."""
        return f"line {self._numbers[index]} of {self.path}"

    def line_number(self, index: int) -> int:
        """Returns the number of a row's line. The first line has the number 1."""
        return self._numbers[index]

    def _parsed(self, line: bytes, at: int) -> dict[str, Any]:
        return parsed_object(
            line, self.where(at), "fix the line, or go on with the run that wrote it"
        )


def parsed(text: str | bytes, where: str, action: str) -> Any:
    """Returns the value of a JSON text. Raises `ValueError` if it is no JSON. The message has `where` and `action`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"expected JSON in {where}, got something else ({one_line(error)}); {action}"
        ) from error


def parsed_object(text: str | bytes, where: str, action: str) -> dict[str, Any]:
    """Returns the value of a JSON text, like [`parsed`]. Raises `ValueError` if the value is no object."""
    row: Any = parsed(text, where, action)
    require(isinstance(row, dict), f"a JSON object in {where}", row, action)
    return row


def read_object(path: Path, action: str) -> dict[str, Any]:
    """Returns the JSON object in a UTF-8 file.

    Raises:
        ValueError: If the file holds something else. The message has the `action` to take.
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
    """Appends rows to a file, and waits until the disk has them. Raises `ValueError` if they cannot be written.

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
    """Appends rows to a file one by one. The file is created with the first row.

    If the process is killed, no row is lost. If the machine crashes, the rows of the last seconds are lost. The object
    is used in a `with` statement, and raises `ValueError` if a row cannot be written, for example to a full disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[FileIO] = []  # the file, or empty before it is open
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        """Returns this object. The file is not opened yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until the disk has all rows, and closes the file."""
        if not self._files:
            return
        file = self._files.pop()
        try:
            self._sync(file)
        finally:
            file.close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row as one line of JSON. Raises the error of [`unwritten`] if the disk does not take all of it."""
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
        ):  # the disk has just become full. A continued run leaves this part of a line out
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
    """Returns the error for rows that cannot be written to a disk."""
    return ValueError(
        f"expected to write to {path}, got {one_line(error.strerror)}; make room and run it again: it goes on"
    )


def repair(path: Path) -> None:
    """Removes an incomplete last line from a file, if the file exists."""
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
    """Writes a text, or its parts as they come, to a file, and returns the path of the file.

    The file is written completely or not at all, also if the process is killed or the next part raises an error.
    Raises `ValueError` if the file cannot be written, for example because the disk is full.
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
