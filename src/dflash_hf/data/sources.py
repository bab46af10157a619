"""This module reads rows from JSONL, JSON, Parquet and text files, folders and sets of the Hub, with `datasets`.

No other module imports `datasets`. It is imported only by functions that need it: `file_rows` needs it only for
Parquet files.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dflash_hf.data.prompt_files import read_lines
from dflash_hf.data.row_files import parsed
from dflash_hf.data.rows import FIX, Row, whole_path, without_filling
from dflash_hf.errors import is_ours, one_line, require

FILES = (".jsonl", ".json", ".parquet", ".txt")
TEXT_FILES = (".jsonl", ".json", ".txt")
FIX_FILE = "fix the file, or name another one"
FIX_FOLDER = "fix the folder, or name another one"
CONNECT = "fix the name, or connect"
# The number of rows in a part. A run that was killed repeats at most one part.
PART_ROWS = 50_000
# The start of a process takes as long as this number of chat rows.
ROWS_PER_PROCESS = 1_000

# `datasets` sets this variable for its processes, and leaves it in the environment.
PARALLELISM = "TOKENIZERS_PARALLELISM"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Kind = Literal["line of JSON", "line of text", "row of JSON", "row"]
Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The form and the names of a set's rows. A function over rows needs this besides their columns."""

    called: str  # the name of the set in messages
    kind: Kind  # what the columns hold: a text of one of these forms in the column `text`, or the row itself
    folder: Path  # paths of images are relative to this folder

    def has_row(self, values: Columns) -> bool:
        """Says whether the columns are a row. An empty line of a file is no row."""
        return self.kind == "row" or bool(values["text"].strip())

    def row(self, values: Columns, number: int) -> Row:
        """Returns the row with some columns, as `datasets` returns them, and a number from 0.

        Raises:
            ValueError: If a line is no JSON object. The message names it.
        """
        if self.kind in ("line of JSON", "line of text"):
            where = f"line {number + 1} of {self.called}"
        else:
            where = f"row {number + 1} of {self.called}"
        found: Any
        if self.kind == "row":
            found = _columns_of(values)
        elif self.kind == "line of text":
            found = {"prompt": values["text"]}
        else:
            found = parsed(values["text"], where, FIX)
            require(isinstance(found, Mapping), f"a JSON object in {where}", found, FIX)
        return Row(values=found, number=number, where=where, folder=self.folder)


def _columns_of(values: Columns) -> dict[str, Any]:
    """Returns the columns of a table's row, without the fields of structs that only other rows have."""
    return {name: without_filling(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """A function over rows, and the folder of its results.

    The results are stored in parts, and a run that was killed continues after the last part.

    Args:
        function (callable): The function. Its arguments are a row's columns, the row's number from 0, the index of the
            process (`None` for this process), and `options` by name. It returns other columns.
        options (mapping): Further arguments of the function.
        columns (mapping): The name of each returned column -> its type in `datasets.Value`.
        folder (`Path`): The folder of the parts.
        key (`str`): A text that identifies the results. Parts with another key are not used.
    """

    function: Callable[..., dict[str, Any]]
    options: Mapping[str, Any]
    columns: Mapping[str, str]
    folder: Path
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An open set of rows. `table` is a `datasets.Dataset`, or an `IterableDataset` if the set is streamed."""

    origin: Origin
    table: Any
    action: str = FIX_FILE  # the advice if the set cannot be read

    @property
    def is_streamed(self) -> bool:
        """True if rows are fetched one by one and not stored."""
        return not hasattr(self.table, "select")

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the set."""
        for number, values in self._numbered():
            yield self.origin.row(values, number)

    def mapped(self, row_map: RowMap, num_rows: int | None = None) -> Iterator[Columns]:
        """Yields the function's result for each row, in the order of the rows. One process per core computes them.

        For a streamed set, this process computes the results one by one, and they are not stored.

        Args:
            row_map ([`RowMap`]): The function, and the folder of its results.
            num_rows (`int`, *optional*): The maximum number of rows.

        Raises:
            ValueError: If the set cannot be read, or the disk is full. Errors of the function are raised too.
        """
        if self.is_streamed:
            filled_lines = self._numbered()
            for number, values in islice(filled_lines, num_rows):
                try:
                    made = row_map.function(values, number, None, **row_map.options)
                except OSError as error:
                    raise _no_room(error, row_map.folder) from error
                yield made
            return
        stop = len(self.table)
        if num_rows is not None:
            stop = self._lines_with(num_rows)
        for start in range(0, stop, PART_ROWS):
            yield from self._part(row_map, start, min(start + PART_ROWS, stop))

    def _part(self, row_map: RowMap, start: int, stop: int) -> Iterable[Columns]:
        """Returns the results for consecutive rows. They are read from the folder if they exist there."""
        datasets = _datasets(self.origin.called)
        part = self.table.select(range(start, stop))
        name = self._name_of(part, f"{row_map.key} {self.origin} {start}")
        features = {column: datasets.Value(kind) for column, kind in row_map.columns.items()}
        num_processes = min(num_cores(), (stop - start) // ROWS_PER_PROCESS)
        if num_processes < 2:
            num_processes = None  # only this process
        options = {"function": row_map.function, "start": start, "options": dict(row_map.options)}
        try:
            with _same_environment():
                return part.map(
                    _made_at,
                    with_indices=True,
                    with_rank=True,
                    num_proc=num_processes,
                    remove_columns=self.table.column_names,
                    features=datasets.Features(features),
                    fn_kwargs=options,
                    cache_file_name=str(row_map.folder / f"{name}.arrow"),
                    new_fingerprint=name,
                    desc=f"{self.origin.called}, from row {start + 1}",
                )
        except OSError as error:
            raise _no_room(error, row_map.folder) from error
        except UnicodeDecodeError as error:
            raise self._bad_text(start, error) from error
        except RuntimeError as error:  # a process has ended unexpectedly
            what = f"{num_processes} processes that read {self.origin.called} to its end"
            action = "free memory and run it again: it goes on"
            raise ValueError(f"expected {what}, got {one_line(error)}; {action}") from error

    def _name_of(self, part: Any, of: str) -> str:
        """Returns a name for a part that depends on its content and on `of`.

        For texts, the name depends on the texts themselves. So if one line of a file is corrected, only its part is
        computed again.
        """
        digest = hashlib.sha256(of.encode())
        if self.origin.kind == "row":
            digest.update(part._fingerprint.encode())
        else:
            for values in part:
                digest.update(f"{values['text']}\n".encode())
        return digest.hexdigest()[:32]

    def _lines_with(self, num_rows: int) -> int:
        """Returns the number of lines, from the first one, that hold `num_rows` rows."""
        stop = 0
        for number, _ in islice(self._numbered(), num_rows):
            stop = number + 1
        return stop

    def _numbered(self) -> Iterator[tuple[int, Columns]]:
        """Yields the number (from 0) and the columns of each row. Empty lines are counted but not yielded."""
        try:
            for number, values in enumerate(self.table):
                if self.origin.has_row(values):
                    yield number, values
        except (OSError, ValueError) as error:  # Arrow's errors are subclasses of these
            raise _unread(self.origin.called, error, self.action) from error

    def _bad_text(self, start: int, error: UnicodeDecodeError) -> ValueError:
        """Returns the error for the first row, from `start` on, whose text is not UTF-8. Tables are read unchecked."""
        number = start
        try:
            while number < len(self.table):
                _ = self.table[number]
                number += 1
        except UnicodeDecodeError:
            pass
        where = f"row {number + 1} of {self.origin.called}"
        return ValueError(
            f"expected UTF-8 in {where}, got other bytes ({one_line(error)}); {FIX_FILE}"
        )


def _made_at(
    values: Columns,
    number: int,
    rank: int | None,
    *,
    function: Callable[..., dict[str, Any]],
    start: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the function's result for a row of a part. The first row of the part has the number `start`."""
    return function(values, start + number, rank, **options)


@contextmanager
def _same_environment() -> Generator[None]:
    """Restores the object `os.environ` and the variable `PARALLELISM` at the end.

    When `datasets` starts processes, it replaces `os.environ` by a copy. Code that holds the first object (Rich does)
    would never see a later change.
    """
    environment = os.environ
    before = environment.get(PARALLELISM)
    try:
        yield
    finally:
        os.environ = environment  # noqa: B003  (the object that was there before)
        if before is None:
            environment.pop(PARALLELISM, None)
        else:
            environment[PARALLELISM] = before


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def full_name(name: str) -> str:
    """Returns the name of a set of rows in a form for every working folder: a file or folder by its absolute path."""
    if name.endswith(FILES):
        return str(whole_path(Path(name)))
    path, colon, config_and_split = name.partition(":")
    # `Path.is_dir` of Python 3.11 raises an error for a text that is too long for a path.
    if os.path.isdir(path):
        return f"{Path(path).resolve()}{colon}{config_and_split}"
    return name


def open_source(name: str, *, streaming: bool = False) -> Source:
    """Opens a set of rows: a file of one of `FILES`, a folder, or `ORG/NAME:CONFIG:SPLIT` (split `train` by default).

    Args:
        name (`str`): The name of the set.
        streaming (`bool`): Whether rows are fetched when they are needed, and not stored. By default, `datasets` keeps
            a copy of the rows in its cache (`HF_DATASETS_CACHE`) and no row in memory. If a set has images inside of
            messages or lists, there are two copies. In the second copy, images are marked as not decoded.

    Raises:
        ValueError: If `datasets` is not installed, there is no such set, it cannot be read, or the disk is full.
    """
    if name.endswith(FILES):
        return _open_file(Path(name), streaming)
    path, config, split = set_parts(name, FILES)
    return _open_set(path, config, split or "train", streaming)


def set_parts(name: str, files: Sequence[str]) -> tuple[str, str | None, str | None]:
    """Returns the path, the configuration and the split of `ORG/NAME:CONFIG:SPLIT`. A missing part is `None`.

    Args:
        name (`str`): The name of a set of the Hub, or of a folder.
        files (sequence of `str`): The suffixes of files that could be named instead. The error message lists them.

    Raises:
        ValueError: If `name` has another form, or is the name of a file.
    """
    path, *parts = name.split(":")
    is_place = "/" in path or os.path.isdir(path)
    is_known = is_place and len(parts) <= 2 and not os.path.isfile(path)
    what = f"a file ({', '.join(files)}) or a set as ORG/NAME:CONFIG:SPLIT"
    require(is_known, what, name, "fix the name")
    config, split = [part or None for part in (*parts, "", "")[:2]]
    return path, config, split


def _open_set(
    path: str,
    config: str | None,
    split: str | None,
    streaming: bool,
    columns: Sequence[str] = (),
    files: Sequence[str] = (),
    action: str = CONNECT,
) -> Source:
    """Opens a set of the Hub, or a folder. See [`hub_rows`]."""
    called = _called(path, config, split)
    folder = Path()
    if os.path.isdir(path):
        folder = Path(path)
        action = FIX_FOLDER
    options: dict[str, Any] = {"name": config, "split": split}
    if files:
        path = "json"
        options = {"data_files": list(files), "split": "train"}
    table = _loaded(called, columns, path, streaming, action, **options)
    origin = Origin(called=called, kind="row", folder=folder)
    return Source(origin=origin, table=table, action=action)


def _open_file(path: Path, streaming: bool) -> Source:
    """Opens a file of rows. Only for a JSON list, all rows are in memory for a while."""
    require(os.path.isfile(path), "a file of rows", str(path), "fix the path")
    called = str(path)
    kind: Kind = "row"
    if path.suffix == ".parquet":
        table = _loaded(called, (), "parquet", streaming, split="train", data_files=_only(path))
    elif path.suffix == ".json":
        kind = "row of JSON"
        table = _generated(path, streaming)
    else:
        kind = "line of text" if path.suffix == ".txt" else "line of JSON"
        require(_has_lines(path), f"rows in {path}", "no rows", FIX_FILE)
        # Lines are read as texts, not as a table: rows may have several forms, and an error names the line.
        options: dict[str, Any] = {
            "split": "train",
            "data_files": _only(path),
            "encoding": "utf-8-sig",
        }
        table = _loaded(called, (), "text", streaming, **options)
    return Source(origin=Origin(called=called, kind=kind, folder=path.parent), table=table)


def _has_lines(path: Path) -> bool:
    """Says whether a text file has a line that is not empty. Bytes that are not UTF-8 are refused later, by line."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as stream:
            return any(line.strip() for line in stream)
    except OSError as error:
        raise _unread(str(path), error) from error


def _only(path: Path) -> list[str]:
    """Returns the `data_files` of one file, escaped, because `datasets` would match `d1.jsonl` with `d[1].jsonl`."""
    return [glob.escape(str(path))]


def _generated(path: Path, streaming: bool) -> Any:
    """Returns a table with the rows of a JSON list as texts."""
    datasets = _datasets(str(path))
    kind = datasets.IterableDataset if streaming else datasets.Dataset
    # The time of the last change is an argument, so that `datasets` does not use its cache for a changed file.
    options = {"path": str(path), "changed": path.stat().st_mtime_ns}
    features = datasets.Features({"text": datasets.Value("large_string")})
    try:
        return kind.from_generator(_json_rows, features=features, gen_kwargs=options)
    except datasets.exceptions.DatasetGenerationError as error:
        raise _unread(str(path), error) from error


def _json_rows(path: str, changed: int) -> Iterator[dict[str, str]]:
    """Yields each row of a JSON list as a text."""
    rows = parsed(Path(path).read_bytes(), path, FIX)
    require(isinstance(rows, list), f"a list of rows in {path}", rows, FIX)
    require(bool(rows), f"rows in {path}", "no rows", FIX_FILE)
    for row in rows:
        # Values such as `NaN` and lone surrogates are written as they were read, because they may be in a column that
        # is never used.
        yield {"text": json.dumps(row)}


def file_rows(paths: Sequence[Path], columns: Sequence[str] = ()) -> Iterator[Row]:
    """Yields the rows of `.jsonl`, `.json` (one list), `.parquet` or `.txt` (one prompt per line) files in turn.

    From Parquet files, only the `columns` are read, or all columns if there are none. The function is meant for
    questions, whose number is small.
    """
    number = 0
    for path in paths:
        require(os.path.isfile(path), "a file of questions", str(path), "fix the path")
        for where, value in _placed(path, columns):
            require(isinstance(value, Mapping), f"a JSON object in {where}", value, FIX)
            yield Row(values=value, number=number, where=where, folder=path.parent)
            number += 1


def _placed(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the name (for messages) and the value of each row of a file. For `.jsonl`, only one line is in memory."""
    if path.suffix in (".json", ".parquet"):
        if path.suffix == ".json":
            rows = parsed(path.read_bytes(), str(path), FIX)
            require(isinstance(rows, list), f"a list of rows in {path}", rows, FIX)
        else:
            options: dict[str, Any] = {"split": "train", "data_files": _only(path)}
            table = _loaded(str(path), columns, "parquet", False, **options)
            rows = map(_columns_of, table)
        for number, row in enumerate(rows, 1):
            yield f"row {number} of {path}", row
    elif path.suffix == ".txt":
        for number, line in read_lines(path):
            yield f"line {number} of {path}", {"prompt": line}
    else:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    where = f"line {number} of {path}"
                    yield where, parsed(line, where, FIX)


def hub_rows(
    path: str,
    config: str | None,
    split: str | None,
    *,
    columns: Sequence[str] = (),
    files: Sequence[str] = (),
    action: str = CONNECT,
) -> Iterator[Row]:
    """Yields the rows of a set of the Hub, or of a folder, that `datasets` can load.

    Args:
        path (`str`): The name of the set on the Hub, or the folder.
        config (`str`, *optional*): The configuration of the set.
        split (`str`, *optional*): The split. The default is `"test"` if there is such a split, or else the only split.
        columns (sequence of `str`): The columns to read. If there are none, all columns are read.
        files (sequence of `str`): The addresses of the set's JSONL files, if they are not found by its name.
        action (`str`): The advice if the Hub's set cannot be read.

    Raises:
        ValueError: If `datasets` is not installed, or the set cannot be read.
    """
    source = _open_set(path, config, split, False, columns, files, action)
    yield from source.rows()


def _called(path: str, config: str | None, split: str | None) -> str:
    """Returns the name of a set of the Hub for messages."""
    parts = [part for part in (config, split) if part]
    if not parts:
        return path
    return f"{path} ({', '.join(parts)})"


def _datasets(called: str) -> Any:
    """Returns the library `datasets`. Raises `ValueError` if it is not installed."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        sentence = f"expected the package datasets to read {called}, got none; pip install datasets"
        raise ValueError(sentence) from error
    return datasets


def _loaded(
    called: str,
    columns: Sequence[str],
    path: str,
    streaming: bool,
    action: str = FIX_FILE,
    **options: Any,
) -> Any:
    """Returns the table of `load_dataset`, with images as bytes."""
    datasets = _datasets(called)
    if streaming:
        options["streaming"] = True
    try:
        table: Any = datasets.load_dataset(path, **options)
    except Exception as error:
        # `datasets` uses libraries for the network, for addresses and for Parquet, which raise errors of their own.
        raise _unread(called, error, action) from error
    if options["split"] is None:
        table = _only_split(table, called)
    # The columns of a streamed set may not be known before its rows are read.
    known = table.column_names or ()
    kept = [column for column in columns if column in known]
    if kept:
        table = table.select_columns(kept)
    try:
        for column, feature in (table.features or {}).items():
            kept_feature = _undecoded(feature, datasets.Image)
            if kept_feature != feature:
                table = table.cast_column(column, kept_feature)
    except (OSError, ValueError) as error:  # Arrow's errors are subclasses of these
        raise _unread(called, error, action) from error
    return table


def _undecoded(feature: Any, image: Any) -> Any:
    """Returns the feature of a column with decoding switched off for images at any depth, so that they stay bytes.

    Args:
        feature: A feature of `datasets`.
        image: The class of image features in `datasets`.
    """
    if isinstance(feature, image):
        return image(decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(part, image) for name, part in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(part, image) for part in feature]
    if hasattr(feature, "feature"):  # a list feature of any kind
        return replace(feature, feature=_undecoded(feature.feature, image))
    return feature


def _only_split(splits: Any, called: str) -> Any:
    """Returns the default split: `test`, or the only split. Raises `ValueError` if there are only other splits."""
    split = "test" if "test" in splits else next(iter(splits))
    is_clear = split == "test" or len(splits) == 1
    what = f"one split in {called}, or test"
    require(is_clear, what, list(splits), "name one: ORG/NAME:CONFIG:SPLIT")
    return splits[split]


def _unread(called: str, error: BaseException, action: str = FIX_FILE) -> ValueError:
    """Returns the error for a set that cannot be read. It is chosen by the causes of `error`."""
    for cause in _causes(error):
        if isinstance(cause, UnicodeDecodeError) and called.endswith(TEXT_FILES):
            return ValueError(_no_text(Path(called), cause))
        if is_ours(cause):
            return cause
        if isinstance(cause, OSError) and is_no_room(cause):
            return _no_room(cause, Path(_datasets(called).config.HF_DATASETS_CACHE))
    reason = error
    if isinstance(error, _datasets(called).exceptions.DatasetGenerationError):
        reason = error.__cause__ or error  # the error itself does not say what was wrong
    got = f"{type(reason).__name__} ({one_line(reason)})"
    return ValueError(f"expected to read {called} with datasets, got {got}; {action}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and the errors that have caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _no_text(path: Path, error: UnicodeDecodeError) -> str:
    """Returns a message that names the first line of a file that is not UTF-8."""
    where = str(path)
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as found:
                where = f"line {number} of {path}"
                error = found
                break
    return f"expected UTF-8 in {where}, got other bytes ({one_line(error)}); save it as UTF-8"


def is_no_room(error: BaseException) -> bool:
    """Says whether an error means that a disk is full."""
    return isinstance(error, OSError) and error.errno in NO_ROOM


def _no_room(error: OSError, folder: Path) -> ValueError:
    """Returns the error for a full disk."""
    got = one_line(error.strerror or error)
    return ValueError(
        f"expected to write to {folder}, got {got}; make room and run it again: it goes on"
    )
