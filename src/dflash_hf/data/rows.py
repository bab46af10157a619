"""A row of data: its columns, read with a sentence about each that is missing or malformed, and the place it is from.

[`dflash_hf.data.sources`] reads them from files and from the Hub.
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from dflash_hf.data.prompt_files import (
    Message,
    check_text,
    image_names,
    image_parts,
    image_paths,
    prompt_of,
)
from dflash_hf.errors import listed, require, shown

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
    folder: Path = field(default_factory=Path)  # what paths of images in it are relative to

    def first(self, *names: str, default: Any = None) -> Any:
        """Returns the first of some columns that the row has, a default where it has none of them."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        return default

    def value(self, *names: str) -> Any:
        """Returns the same, or raises `ValueError` if it has none of them."""
        value = self.first(*names)
        if value is None:
            raise ValueError(
                f"expected a column {' or '.join(names)} in {self.where}, got {listed(self.values) or 'no column'}; "
                f"{FIX}"
            )
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """Returns the first of some columns that the row has, which is a text; a default where nothing is in them."""
        is_empty = not any(self.values.get(name) for name in names)
        if is_empty and default is not None:
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
        all_asked = all(message["role"] == "user" for message in found)
        first = 0 if all_asked else len(found) - 1
        later = image_names(found[first + 1 :])
        require(not later, f"images in the first turn alone in {self.where}", later, FIX)
        return found[:first], found[first:]

    def _checked_messages(self, value: Any) -> list[Message]:
        """Messages in Transformers' form, with relative paths of images taken from the row's folder."""
        if not value:
            return []
        require(isinstance(value, list | tuple), f"a list of messages in {self.where}", value, FIX)
        found = prompt_of({"messages": list(value)}, self.where, self.folder.resolve())
        messages = [message for message in found if isinstance(message, Mapping)]
        for path in image_paths(messages):
            self.image(path)
        return messages

    def name(self, *names: str) -> int | str:
        """Returns an id from one of some columns; the row's number where it has none of them."""
        value = self.first(*names, default=self.number)
        what = f"a number or a text as {' or '.join(names)} in {self.where}"
        require(
            isinstance(value, int | str) and not isinstance(value, bool) and value != "",
            what,
            value,
            FIX,
        )
        return value

    def images(self) -> list[ImageSource]:
        """Returns where the row's images are, those of its messages too: see `image`.

        Raises `ValueError` if one is no file, as one of another name than `path` in the turn that is asked: a
        question names the images of its turns by paths alone.
        """
        sources = self.own_images()
        for part in image_parts(self.messages()[1][:1]):
            what = f"images of the asked turn under path in {self.where}"
            action = "write the image to a file, and name it there"
            require(bool(part.get("path")), what, part, action)
            sources.append(part["path"])
        return [self.image(source) for source in sources]

    def own_images(self) -> list[Any]:
        """Returns what stands in the row's column of images, in a list."""
        return self._listed("images", "image")

    def own_videos(self) -> list[Any]:
        """Returns what stands in the row's column of videos, in a list."""
        return self._listed("videos", "video")

    def _listed(self, *names: str) -> list[Any]:
        """What stands in the first of some columns that the row has, in a list."""
        value = self.first(*names, default=[])
        if isinstance(value, list | tuple):
            return list(value)
        return [value]

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
        path = self.folder / source
        # `Path.is_file` of Python 3.11 raises for a text that is too long for a path.
        require(os.path.isfile(path), f"an image file in {self.where}", str(source), "fix the path")
        return whole_path(path)

    def video(self, source: Any) -> Path:
        """Returns a video's file, of a path relative to the row's folder, or of a mapping with one.

        Raises `ValueError` if it is something else, or the file is not there.
        """
        if isinstance(source, Mapping):
            source = source.get("path")
        what = f"the path of a video in {self.where}"
        action = "write the video to a file, and name the file"
        require(isinstance(source, str | PathLike), what, source, action)
        path = self.folder / source
        require(os.path.isfile(path), f"a video file in {self.where}", str(source), "fix the path")
        return whole_path(path)

    def _checked(self, text: Any, what: str) -> str:
        what = f"{what} in {self.where}"
        require(not isinstance(text, str) or bool(text.strip()), f"a text as {what}", text, FIX)
        return check_text(text, what, action=FIX)


def without_filling(value: Any) -> Any:
    """Returns a value of a table without the names of structs that hold `None`.

    All rows of a column have the same names: a call of one tool would have the arguments of every other one.
    """
    if isinstance(value, Mapping):
        return {name: without_filling(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_filling(part) for part in value]
    return value


def whole_path(path: Path) -> Path:
    """Returns a file's path that is right in every working folder.

    A link keeps its name: in the Hub's cache the file behind it has a name without a suffix, in another folder.
    """
    return path.parent.resolve() / path.name


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
