"""This module defines a row of data, whose methods read columns and refuse missing or malformed ones with a sentence.

[`dflash_hf.data.sources`] reads rows from files and from the Hub.
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
# The columns that may hold the question of a row without a special form.
CONVERSATION = ("turns", "messages", "prompt")
ImageSource = bytes | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a file or of a Hub set."""

    values: Mapping[str, Any]  # column -> value
    number: int  # the number of the row, from 0
    where: str  # the name of the row in messages
    folder: Path = field(default_factory=Path)  # paths of images are relative to this folder

    def first(self, *names: str, default: Any = None) -> Any:
        """Returns the value of the first of some columns that the row has, or `default` if it has none of them."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        return default

    def value(self, *names: str) -> Any:
        """Returns the value of the first of some columns that the row has. Raises `ValueError` if it has none."""
        value = self.first(*names)
        if value is None:
            raise ValueError(
                f"expected a column {' or '.join(names)} in {self.where}, got {listed(self.values) or 'no column'}; "
                f"{FIX}"
            )
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """Returns the text in the first of some columns that the row has, or `default` if all of them are empty."""
        is_empty = not any(self.values.get(name) for name in names)
        if is_empty and default is not None:
            return default
        return self._checked(self.value(*names), " or ".join(names))

    def texts(self, *names: str) -> tuple[str, ...]:
        """Returns the list of texts in the first of some columns that the row has. The list may be empty."""
        value = self.value(*names)
        what = f"a list of texts as {' or '.join(names)} in {self.where}"
        require(
            isinstance(value, Sequence) and not isinstance(value, str | bytes), what, value, FIX
        )
        return tuple(self._checked(text, " and ".join(names)) for text in value)

    def turns(self, *names: str) -> tuple[str, ...]:
        """Returns the user's turns from the first of some columns that the row has, which is a text or several texts.

        Raises `ValueError` if the column is missing, empty, malformed, or a placeholder of SPEED-Bench.
        """
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
        """Returns a row's conversation in two parts: the history, and the turns that the user asks one by one.

        Only the last message is asked, unless all messages are from the user. If the row has only texts, the first
        part is its column `history`, and the second part is empty. Raises `ValueError` if the conversation is
        malformed, does not end with a user message, or has an image after the first asked turn.
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
        """Returns messages in the form of Transformers. Relative paths of images begin at the row's folder."""
        if not value:
            return []
        require(isinstance(value, list | tuple), f"a list of messages in {self.where}", value, FIX)
        found = prompt_of({"messages": list(value)}, self.where, self.folder.resolve())
        messages = [message for message in found if isinstance(message, Mapping)]
        for path in image_paths(messages):
            self.image(path)
        return messages

    def name(self, *names: str) -> int | str:
        """Returns an id from the first of some columns that the row has, or the row's number if it has none."""
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
        """Returns the row's images, including those of the first asked turn, as bytes or files (see `image`).

        Raises `ValueError` if an image is no file, or if an image of the asked turn is not given by `path`, because a
        question names the images of its turns only by paths.
        """
        sources = self.own_images()
        for part in image_parts(self.messages()[1][:1]):
            what = f"images of the asked turn under path in {self.where}"
            action = "write the image to a file, and name it there"
            require(bool(part.get("path")), what, part, action)
            sources.append(part["path"])
        return [self.image(source) for source in sources]

    def own_images(self) -> list[Any]:
        """Returns the content of the row's column of images, as a list."""
        return self._listed("images", "image")

    def own_videos(self) -> list[Any]:
        """Returns the content of the row's column of videos, as a list."""
        return self._listed("videos", "video")

    def _listed(self, *names: str) -> list[Any]:
        """Returns the content of the first of some columns that the row has, as a list."""
        value = self.first(*names, default=[])
        if isinstance(value, list | tuple):
            return list(value)
        return [value]

    def image(self, source: Any) -> ImageSource:
        """Returns the bytes or the file of an image.

        The source is bytes, a path relative to the row's folder, or a mapping with `bytes` or `path`. Raises
        `ValueError` if it is something else, or the file does not exist.
        """
        if isinstance(source, Mapping):  # the form of an undecoded image in `datasets`
            source = source.get("bytes") or source.get("path")
        if isinstance(source, bytes):
            return source
        what = f"the bytes or the path of an image in {self.where}"
        require(isinstance(source, str | PathLike), what, source, FIX)
        path = self.folder / source
        # `Path.is_file` of Python 3.11 raises an error for a text that is too long for a path.
        require(os.path.isfile(path), f"an image file in {self.where}", str(source), "fix the path")
        return whole_path(path)

    def video(self, source: Any) -> Path:
        """Returns the file of a video.

        The source is a path relative to the row's folder, or a mapping with `path`. Raises `ValueError` if it is
        something else, or the file does not exist.
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
    """Returns a value of a table without the fields of structs that hold `None`.

    In a table, the structs of all rows have the same fields. So a call of one tool would have the arguments of all
    other tools too.
    """
    if isinstance(value, Mapping):
        return {name: without_filling(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_filling(part) for part in value]
    return value


def whole_path(path: Path) -> Path:
    """Returns a file's path in a form that is valid in every working folder.

    A link is not followed, because in the Hub's cache it points to a file in another folder whose name has no suffix.
    """
    return path.parent.resolve() / path.name


def filled(template: str, row: Row) -> str:
    """Returns a template in which names of columns in braces are replaced by the row's values. `{{` is a brace.

    Raises `ValueError` if the template names no column, or one that the row does not have, or if it has more than a
    name between braces.
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
