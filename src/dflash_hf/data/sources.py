"""Where rows come from: JSONL, JSON, Parquet and text files, folders and sets of the Hub, read by `datasets`.

This is the one module that imports `datasets`, where a function needs it; `file_rows` of text files does without.
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
# Rows of a part: what a killed run does again at most.
PART_ROWS = 50_000
# To start a process takes as long as that many rows of a chat take.
ROWS_PER_PROCESS = 1_000

# What `datasets` sets for processes of its own, and leaves in the environment.
PARALLELISM = "TOKENIZERS_PARALLELISM"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Kind = Literal["line of JSON", "line of text", "row of JSON", "row"]
Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a set's rows are and what to call them: all that a function over them needs beside their columns."""

    called: str  # the set, in a sentence
    kind: Kind  # what is in the columns: a text of one of these forms in `text`, or the row itself
    folder: Path  # what paths of images are relative to

    def has_row(self, values: Columns) -> bool:
        """Whether there is a row: empty lines of a file are none."""
        return self.kind == "row" or bool(values["text"].strip())

    def row(self, values: Columns, number: int) -> Row:
        """Returns a row of its columns as `datasets` gives them, and its number from 0.

        Raises:
            ValueError: For a line that is no JSON object, naming it.
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
    """The columns of a table's row, without what their structs have for other rows alone."""
    return {name: without_filling(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """What is made of rows, and where it is kept, part by part: a run that was killed goes on behind the last part.

    Args:
        function (callable): Of a row's columns, its number from 0, the number of the process that it is in (`None`:
            this one) and `options` by name; it returns other columns.
        options (mapping): What else the function takes.
        columns (mapping): Name of each column that it returns -> its type, as `datasets.Value` has it.
        folder (`Path`): Where the parts are kept.
        key (`str`): Says what the function makes: parts of another key are not taken.
    """

    function: Callable[..., dict[str, Any]]
    options: Mapping[str, Any]
    columns: Mapping[str, str]
    folder: Path
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A set of rows that is open: `table` is a `datasets.Dataset`, an `IterableDataset` where it is streamed."""

    origin: Origin
    table: Any
    action: str = FIX_FILE  # what to do where it cannot be read

    @property
    def is_streamed(self) -> bool:
        """Whether rows are fetched one by one, and none are kept."""
        return not hasattr(self.table, "select")

    def rows(self) -> Iterator[Row]:
        """Yields the rows as they are."""
        for number, values in self._numbered():
            yield self.origin.row(values, number)

    def mapped(self, row_map: RowMap, num_rows: int | None = None) -> Iterator[Columns]:
        """Yields what is made of each row, in their order, by as many processes as there are cores.

        Rows of a set that is streamed are made one by one, and none are kept.

        Args:
            row_map ([`RowMap`]): What to make, and where it is kept.
            num_rows (`int`, *optional*): Most rows that are made.

        Raises:
            ValueError: If the set cannot be read, or the disk is full; and whatever the function raises.
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
        """What is made of some rows one behind the other, read from the folder if it is there."""
        datasets = _datasets(self.origin.called)
        part = self.table.select(range(start, stop))
        name = self._name_of(part, f"{row_map.key} {self.origin} {start}")
        features = {column: datasets.Value(kind) for column, kind in row_map.columns.items()}
        num_processes = min(num_cores(), (stop - start) // ROWS_PER_PROCESS)
        if num_processes < 2:
            num_processes = None  # this one
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
        except RuntimeError as error:  # a process is gone
            what = f"{num_processes} processes that read {self.origin.called} to its end"
            action = "free memory and run it again: it goes on"
            raise ValueError(f"expected {what}, got {one_line(error)}; {action}") from error

    def _name_of(self, part: Any, of: str) -> str:
        """A name that says what is in a part, and what else it is of.

        Texts are known by what they say, so that a file in which a line was put right is read anew in one part alone.
        """
        digest = hashlib.sha256(of.encode())
        if self.origin.kind == "row":
            digest.update(part._fingerprint.encode())
        else:
            for values in part:
                digest.update(f"{values['text']}\n".encode())
        return digest.hexdigest()[:32]

    def _lines_with(self, num_rows: int) -> int:
        """How many lines from the first one on hold that many rows."""
        stop = 0
        for number, _ in islice(self._numbered(), num_rows):
            stop = number + 1
        return stop

    def _numbered(self) -> Iterator[tuple[int, Columns]]:
        """The columns of each row with its number from 0; empty lines count and are left out."""
        try:
            for number, values in enumerate(self.table):
                if self.origin.has_row(values):
                    yield number, values
        except (OSError, ValueError) as error:  # Arrow's own are kinds of both
            raise _unread(self.origin.called, error, self.action) from error

    def _bad_text(self, start: int, error: UnicodeDecodeError) -> ValueError:
        """The sentence for a row whose text is no UTF-8, the first one from a row on: tables are read unchecked."""
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
    """What a function makes of a row of a part that begins with the row `start`."""
    return function(values, start + number, rank, **options)


@contextmanager
def _same_environment() -> Generator[None]:
    """Has the environment be the same object, and say the same, afterwards.

    For processes of its own `datasets` puts a copy in the place of `os.environ`. What holds the first object (Rich
    does) would never see a later change.
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
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def full_name(name: str) -> str:
    """Returns the name of a set of rows that is right in every working folder: of a file or folder its whole path."""
    if name.endswith(FILES):
        return str(whole_path(Path(name)))
    path, colon, config_and_split = name.partition(":")
    # `Path.is_dir` of Python 3.11 raises for a text that is too long for a path.
    if os.path.isdir(path):
        return f"{Path(path).resolve()}{colon}{config_and_split}"
    return name


def open_source(name: str, *, streaming: bool = False) -> Source:
    """Opens a set of rows: a file of one of `FILES`, a folder, or `ORG/NAME:CONFIG:SPLIT` (split `train` by default).

    Args:
        name (`str`): Which.
        streaming (`bool`): Fetch rows as they are asked for, and keep none; by default `datasets` keeps a copy of
            them in its cache (`HF_DATASETS_CACHE`) and no row in memory. Of a set with images inside of messages or
            lists it keeps two copies: the second one says that images are not decoded.

    Raises:
        ValueError: If there is no `datasets`, no such set, it cannot be read, or the disk is full.
    """
    if name.endswith(FILES):
        return _open_file(Path(name), streaming)
    path, config, split = set_parts(name, FILES)
    return _open_set(path, config, split or "train", streaming)


def set_parts(name: str, files: Sequence[str]) -> tuple[str, str | None, str | None]:
    """Returns the path, the configuration and the split of `ORG/NAME:CONFIG:SPLIT`, `None` where one is not named.

    Args:
        name (`str`): Of a set of the Hub, or a folder.
        files (sequence of `str`): Endings of the files that could be named in its place.

    Raises:
        ValueError: If it is no such name, or that of a file.
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
    """A set of the Hub, or a folder; see [`hub_rows`]."""
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
    """A file's rows; of a JSON list alone all of them are in memory for a while."""
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
        # As lines, not as tables: rows may be of several forms, and what is wrong with one is told with its line.
        options: dict[str, Any] = {
            "split": "train",
            "data_files": _only(path),
            "encoding": "utf-8-sig",
        }
        table = _loaded(called, (), "text", streaming, **options)
    return Source(origin=Origin(called=called, kind=kind, folder=path.parent), table=table)


def _has_lines(path: Path) -> bool:
    """Whether a text file has a line that is not empty; bytes that are no UTF-8 are refused later, by their line."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as stream:
            return any(line.strip() for line in stream)
    except OSError as error:
        raise _unread(str(path), error) from error


def _only(path: Path) -> list[str]:
    """The `data_files` of one file: `datasets` reads them as patterns, and `d[1].jsonl` would match `d1.jsonl`."""
    return [glob.escape(str(path))]


def _generated(path: Path, streaming: bool) -> Any:
    """The rows of a JSON list as texts."""
    datasets = _datasets(str(path))
    kind = datasets.IterableDataset if streaming else datasets.Dataset
    # Another time of change is another set
    options = {"path": str(path), "changed": path.stat().st_mtime_ns}
    features = datasets.Features({"text": datasets.Value("large_string")})
    try:
        return kind.from_generator(_json_rows, features=features, gen_kwargs=options)
    except datasets.exceptions.DatasetGenerationError as error:
        raise _unread(str(path), error) from error


def _json_rows(path: str, changed: int) -> Iterator[dict[str, str]]:
    """Each row of a JSON list as a text."""
    rows = parsed(Path(path).read_bytes(), path, FIX)
    require(isinstance(rows, list), f"a list of rows in {path}", rows, FIX)
    require(bool(rows), f"rows in {path}", "no rows", FIX_FILE)
    for row in rows:
        # Whatever JSON was read becomes the same JSON again, `NaN` and half characters too: they may be in a column
        # that nobody reads.
        yield {"text": json.dumps(row)}


def file_rows(paths: Sequence[Path], columns: Sequence[str] = ()) -> Iterator[Row]:
    """Yields the rows of `.jsonl`, `.json` (one list), `.parquet` or `.txt` (a prompt a line) files in turn.

    Of Parquet files some `columns`, all where empty. Made for questions, which are few.
    """
    number = 0
    for path in paths:
        require(os.path.isfile(path), "a file of questions", str(path), "fix the path")
        for where, value in _placed(path, columns):
            require(isinstance(value, Mapping), f"a JSON object in {where}", value, FIX)
            yield Row(values=value, number=number, where=where, folder=path.parent)
            number += 1


def _placed(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Each row of a file with what to call it; of `.jsonl` only one line is in memory."""
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
    """Yields the rows of a set that `datasets` can load: its name on the Hub, or a folder.

    Args:
        split (`str`, *optional*): Without one `"test"` where there is one, or else the only one.
        columns (sequence of `str`): What is read of it; all of it where empty.
        files (sequence of `str`): Addresses of its JSONL files, where they are not found by the name.
        action (`str`): What to do where the Hub's set cannot be read.

    Raises `ValueError` if there is no `datasets`, or the set cannot be read.
    """
    source = _open_set(path, config, split, False, columns, files, action)
    yield from source.rows()


def _called(path: str, config: str | None, split: str | None) -> str:
    """What to call a set of the Hub in a sentence."""
    parts = [part for part in (config, split) if part]
    if not parts:
        return path
    return f"{path} ({', '.join(parts)})"


def _datasets(called: str) -> Any:
    """The library, or a sentence where it is not installed."""
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
    """The table that `load_dataset` returns, images as bytes."""
    datasets = _datasets(called)
    if streaming:
        options["streaming"] = True
    try:
        table: Any = datasets.load_dataset(path, **options)
    except Exception as error:
        # The libraries below it, for the network, for addresses and for Parquet, each raise kinds of their own.
        raise _unread(called, error, action) from error
    if options["split"] is None:
        table = _only_split(table, called)
    # Of a set that is streamed they may not be known before its rows are.
    known = table.column_names or ()
    kept = [column for column in columns if column in known]
    if kept:
        table = table.select_columns(kept)
    try:
        for column, feature in (table.features or {}).items():
            kept_feature = _undecoded(feature, datasets.Image)
            if kept_feature != feature:
                table = table.cast_column(column, kept_feature)
    except (OSError, ValueError) as error:  # Arrow's own are kinds of both
        raise _unread(called, error, action) from error
    return table


def _undecoded(feature: Any, image: Any) -> Any:
    """The feature of a column whose images, however deep in it, stay bytes.

    Args:
        feature: Of `datasets`.
        image: The class of images there.
    """
    if isinstance(feature, image):
        return image(decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(part, image) for name, part in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(part, image) for part in feature]
    if hasattr(feature, "feature"):  # a list, or one of its other kinds
        return replace(feature, feature=_undecoded(feature.feature, image))
    return feature


def _only_split(splits: Any, called: str) -> Any:
    """The split that is meant where none is named."""
    split = "test" if "test" in splits else next(iter(splits))
    is_clear = split == "test" or len(splits) == 1
    what = f"one split in {called}, or test"
    require(is_clear, what, list(splits), "name one: ORG/NAME:CONFIG:SPLIT")
    return splits[split]


def _unread(called: str, error: BaseException, action: str = FIX_FILE) -> ValueError:
    """What is wrong with a set that cannot be read, by the errors that led to the last one."""
    for cause in _causes(error):
        if isinstance(cause, UnicodeDecodeError) and called.endswith(TEXT_FILES):
            return ValueError(_no_text(Path(called), cause))
        if is_ours(cause):
            return cause
        if isinstance(cause, OSError) and is_no_room(cause):
            return _no_room(cause, Path(_datasets(called).config.HF_DATASETS_CACHE))
    reason = error
    if isinstance(error, _datasets(called).exceptions.DatasetGenerationError):
        reason = error.__cause__ or error  # it says itself only that there was one
    got = f"{type(reason).__name__} ({one_line(reason)})"
    return ValueError(f"expected to read {called} with datasets, got {got}; {action}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _no_text(path: Path, error: UnicodeDecodeError) -> str:
    """Which line of a file is no UTF-8."""
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
    """Whether an error says that a disk is full."""
    return isinstance(error, OSError) and error.errno in NO_ROOM


def _no_room(error: OSError, folder: Path) -> ValueError:
    """The sentence for a disk that is full."""
    got = one_line(error.strerror or error)
    return ValueError(
        f"expected to write to {folder}, got {got}; make room and run it again: it goes on"
    )
