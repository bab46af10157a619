"""Rows of data: read from JSONL, JSON, Parquet and text files or from the Hub, each with the place it is from.

The one module that imports `datasets`, where a function needs it; rows of text files do without.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from dflash_hf.data.prompt_files import (
    Message,
    check_text,
    image_names,
    prompt_of,
    read_lines,
)
from dflash_hf.data.row_files import parsed
from dflash_hf.errors import listed, one_line, require, shown

FIX = "fix the row, or take the upstream file"
# NVIDIA publishes more than half of SPEED-Bench's rows without their text.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
# Where a row of no form of its own says what is asked.
CONVERSATION = ("turns", "messages", "prompt")
ImageSource = bytes | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a file or of a Hub set."""

    values: Mapping[str, Any]  # its columns
    number: int  # which row it is, from 0
    where: str  # what to call it in a sentence
    folder: Path | None = None  # what paths of images in it are relative to

    def first(self, *names: str) -> Any:
        """Returns the first of some columns that the row has, `None` where it has none of them."""
        return next(
            (self.values[name] for name in names if self.values.get(name) is not None), None
        )

    def value(self, *names: str) -> Any:
        """Returns the same, or raises `ValueError` if it has none of them."""
        if (value := self.first(*names)) is not None:
            return value
        raise ValueError(
            f"expected a column {' or '.join(names)} in {self.where}, got {listed(self.values) or 'no column'}; {FIX}"
        )

    def text(self, *names: str, default: str | None = None) -> str:
        """Returns the first of some columns that the row has, which is a text; a default where nothing is in them."""
        if default is not None and not any(map(self.values.get, names)):
            return default
        return self._checked(self.value(*names), " or ".join(names))

    def texts(self, *names: str) -> tuple[str, ...]:
        """Returns the first of some columns that the row has, a list of texts, which may be empty."""
        value = self.value(*names)
        what = f"a list of texts as {' or '.join(names)} in {self.where}"
        require(
            isinstance(value, Sequence) and not isinstance(value, str | bytes), what, value, FIX
        )
        return tuple(self._checked(text, " and ".join(names)) for text in value)

    def turns(self, *names: str) -> tuple[str, ...]:
        """Returns what the user says, from one of some columns: a text or texts; raises `ValueError` otherwise."""
        value: Any = self.value(*names)
        if isinstance(value, str):
            value = [value]
        require(
            isinstance(value, Sequence) and len(value) > 0, f"turns in {self.where}", value, FIX
        )
        turns = tuple(self._checked(turn, "turn") for turn in value)
        if any(PLACEHOLDER in turn for turn in turns):
            raise ValueError(
                f"expected the text of a question in {self.where}, got {shown(turns[0])}, which NVIDIA publishes in "
                "its place; run SPEED-Bench's own prepare script (examples/specdec_bench of NVIDIA's Model-Optimizer) "
                "and pass what it writes"
            )
        return turns

    def messages(self) -> tuple[list[Message], list[Message]]:
        """Returns a row's conversation in two parts: what stands before, and what the user is to ask, turn by turn.

        Only the last message is asked, unless all are the user's; both parts are empty where the row has texts only.
        Raises `ValueError` if it is malformed, does not end with the user's, or has an image behind its first turn.
        """
        value = self.first(*CONVERSATION)
        if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Mapping):
            return self._checked_messages(self.values.get("history")), []
        found = self._checked_messages(value)
        require(
            found[-1]["role"] == "user",
            f"a last message of the user's in {self.where}",
            found[-1],
            FIX,
        )
        first = 0 if all(message["role"] == "user" for message in found) else len(found) - 1
        later = image_names(found[first + 1 :])
        require(not later, f"images in the first turn alone in {self.where}", later, FIX)
        return found[:first], found[first:]

    def _checked_messages(self, value: Any) -> list[Message]:
        """Messages in Transformers' form, with relative paths of images taken from the row's folder."""
        if not value:
            return []
        require(isinstance(value, list | tuple), f"a list of messages in {self.where}", value, FIX)
        found = prompt_of({"messages": list(value)}, self.where, (self.folder or Path()).resolve())
        return [message for message in found if isinstance(message, Mapping)]

    def name(self, *names: str) -> int | str:
        """Returns an id from one of some columns; the row's number where it has none of them."""
        value = self.number if (value := self.first(*names)) is None else value
        what = f"a number or a text as {' or '.join(names)} in {self.where}"
        require(
            isinstance(value, int | str) and not isinstance(value, bool) and value != "",
            what,
            value,
            FIX,
        )
        return value

    def images(self) -> list[ImageSource]:
        """Returns where the row's images are, those of its messages too: see `image`."""
        value = [] if (value := self.first("images", "image")) is None else value
        values = list(value) if isinstance(value, list | tuple) else [value]
        for message in self.messages()[1][:1]:
            parts = [] if isinstance(message["content"], str) else message["content"]
            values += [part.get("path") for part in parts if part["type"] == "image"]
        return [self.image(source) for source in values]

    def image(self, source: Any) -> ImageSource:
        """Returns an image's bytes or file: of bytes, a path relative to the row's folder, or a mapping with either.

        Raises `ValueError` if it is something else, or the file is not there.
        """
        if isinstance(source, Mapping):  # as `datasets` has it where images are not decoded
            source = source.get("bytes") or source.get("path")
        if isinstance(source, bytes):
            return source
        what = f"the bytes or the path of an image in {self.where}"
        require(isinstance(source, str | PathLike), what, source, FIX)
        path = (self.folder or Path()) / source
        require(path.is_file(), f"an image file in {self.where}", str(source), "fix the path")
        return path.resolve()

    def _checked(self, text: Any, what: str) -> str:
        what = f"{what} in {self.where}"
        require(not isinstance(text, str) or bool(text.strip()), f"a text as {what}", text, FIX)
        return check_text(text, what, action=FIX)


def file_rows(
    paths: Sequence[Path], columns: Sequence[str] = (), *, streaming: bool = False
) -> Iterator[Row]:
    """Yields the rows of `.jsonl`, `.json` (one list), `.parquet` or `.txt` (a prompt a line) files in turn.

    Of Parquet files some `columns` (all where empty); `streaming` makes no copy in the cache of `datasets`.
    """
    number = 0
    for path in paths:
        require(path.is_file(), "a file of questions", str(path), "fix the path")
        for where, value in _placed(path, columns, streaming):
            require(isinstance(value, Mapping), f"a JSON object in {where}", value, FIX)
            yield Row(values=value, number=number, where=where, folder=path.parent)
            number += 1


def _placed(path: Path, columns: Sequence[str], streaming: bool) -> Iterator[tuple[str, Any]]:
    """Each row of a file with what to call it; of `.jsonl` only one line is in memory."""
    if path.suffix in (".json", ".parquet"):
        if path.suffix == ".json":
            rows = parsed(path.read_bytes(), str(path), FIX)
            require(isinstance(rows, list), f"a list of rows in {path}", rows, FIX)
        else:
            rows = _loaded(
                str(path), columns, "parquet", streaming, split="train", data_files=[str(path)]
            )
        for number, row in enumerate(rows, 1):
            yield f"row {number} of {path}", row
    elif path.suffix == ".txt":
        for number, line in read_lines(path):
            yield f"line {number} of {path}", {"prompt": line}
    else:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield (where := f"line {number} of {path}"), parsed(line, where, FIX)


def hub_rows(
    path: str,
    config: str | None,
    split: str | None,
    *,
    columns: Sequence[str] = (),
    files: Sequence[str] = (),
    streaming: bool = False,
) -> Iterator[Row]:
    """Yields the rows of a set that `datasets` can load: its name on the Hub, or a folder.

    Args:
        split (`str`, *optional*): Without one `"test"` where there is one, or else the only one.
        columns (sequence of `str`): What is read of it; all of it where empty.
        files (sequence of `str`): Addresses of its JSONL files, where they are not found by the name.
        streaming (`bool`): Fetch rows as they are asked for, and keep none.

    Raises `ValueError` if there is no `datasets`, or the set cannot be read.
    """
    called = (
        f"{path} ({', '.join(part for part in (config, split) if part)})"
        if config or split
        else path
    )
    if files:
        values = _loaded(called, columns, "json", streaming, split="train", data_files=list(files))
    else:
        values = _loaded(called, columns, path, streaming, name=config, split=split)
    for number, value in enumerate(values):
        yield Row(values=value, number=number, where=f"row {number + 1} of {called}")


def _loaded(
    called: str, columns: Sequence[str], path: str, streaming: bool = False, **options: Any
) -> Iterator[Mapping[str, Any]]:
    """The rows that `load_dataset` returns, images as bytes."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        sentence = f"expected the package datasets to read {called}, got none; pip install datasets"
        raise ValueError(sentence) from error
    try:
        more: dict[str, Any] = {"streaming": True} if streaming else {}
        loaded: Any = datasets.load_dataset(path, **options, **more)
    except Exception as error:
        # The libraries below it, for the network, for addresses and for Parquet, each raise kinds of their own.
        raise ValueError(
            f"expected to read {called} with datasets, got {type(error).__name__} ({one_line(error)}); fix the name, "
            "connect, or run `dflash-hf bench prepare` where there is a network and pass --data-dir"
        ) from error
    if options["split"] is None:
        split = "test" if "test" in loaded else next(iter(loaded))
        is_clear = split == "test" or len(loaded) == 1
        require(
            is_clear,
            f"one split in {called}, or test",
            list(loaded),
            "name one: ORG/NAME:CONFIG:SPLIT",
        )
        loaded = loaded[split]
    # Of a set that is streamed they may not be known before its rows are.
    if kept := [column for column in columns if column in (loaded.column_names or ())]:
        loaded = loaded.select_columns(kept)
    for column, feature in (loaded.features or {}).items():
        if isinstance(feature, datasets.Image):
            loaded = loaded.cast_column(column, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            loaded = loaded.cast_column(column, type(feature)(datasets.Image(decode=False)))
    yield from loaded


def filled(template: str, row: Row) -> str:
    """Returns a template with the row's columns in the places of their names in braces; `{{` is a brace.

    Raises `ValueError` if it names no column or one that the row has not, or has more between its braces than a name.
    """
    action = "fix --template"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"expected a template such as 'Q: {{question}}', got {shown(template)}; {action}"
        ) from error
    what = "a template with names of columns in braces"
    require(any(name is not None for _, name, _, _ in parts), what, template, action)
    texts: list[str] = []
    for literal, name, form, conversion in parts:
        texts.append(literal)
        if name is None:
            continue
        require(bool(name) and not form and not conversion, what, template, action)
        if name not in row.values:
            raise ValueError(
                f"expected the columns of --template in {row.where}, got no {shown(name)} (there are "
                f"{listed(row.values)}); {action}"
            )
        value = row.values[name]
        require(
            isinstance(value, str | int | float),
            f"a text or a number as {name} in {row.where}",
            value,
            action,
        )
        texts.append(str(value))
    return "".join(texts)
