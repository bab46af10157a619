"""Rows of any form that data sets have, as one: `messages` as chat templates take them, `images`, an `id`.

Known are ShareGPT's (`conversations` of `from` and `value`), `messages`, `prompt` with or without `completion` (texts
or messages), `turns` of the user's, and any other columns through a template of names in braces.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_hf.data.image_files import image_size, store_image
from dflash_hf.data.prompt_files import SOURCES, check_text
from dflash_hf.data.rows import FIX, Row, filled
from dflash_hf.errors import listed, require, shown

# What sets call who speaks -> what chat templates do.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
MAX_PATH = 4096  # longer texts are images themselves
FORMS = ("messages", "conversations", "conversation", "turns", "prompt")


class ConversationReader:
    """Makes conversations of rows.

    Args:
        template (`str`, *optional*): What the user says, of rows of other columns: a text with their names in braces.
        images (`Path`, *optional*): Folder for images that a row holds as bytes; without one they are refused. Their
            paths are relative to the folder above it, see [`resolved`].
        chat_template_kwargs (mapping, *optional*): What each row's chat template is to read; a row's own come first.
    """

    def __init__(
        self,
        template: str | None = None,
        images: Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = template
        self.folder = images
        self.options = dict(chat_template_kwargs or {})

    def __call__(self, row: Row) -> dict[str, Any]:
        """Returns `{"id", "messages", "images"?, "chat_template_kwargs"?}`, with everything in it fit for JSON.

        What the assistant says before the user's first turn is left out.

        Raises:
            ValueError: If the row has no known form, or is malformed; naming it.
        """
        turns = self._turns(row)
        messages = [self._message(turn, at, row) for at, turn in enumerate(turns)]
        first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
        require(
            first is not None,
            f"a turn of the user's in {row.where}",
            [m["role"] for m in messages],
            FIX,
        )
        messages = [
            m for at, m in enumerate(messages) if at >= (first or 0) or m["role"] == "system"
        ]
        found: dict[str, Any] = {"messages": messages}
        images = [] if (images := row.first("images", "image")) is None else images
        # A set of questions may have a text there that is no image's place.
        if images := images if isinstance(images, list | tuple) else [images]:
            found["images"] = [self._image(image, row) for image in images]
        tools = {"tools": row.values["tools"]} if row.values.get("tools") else {}
        if options := {**self.options, **tools, **(row.values.get("chat_template_kwargs") or {})}:
            found["chat_template_kwargs"] = options
        return {"id": content_id(found), **found}

    def _turns(self, row: Row) -> list[Any]:
        if self.template is not None:
            return [{"role": "user", "content": filled(self.template, row)}]
        name = next((name for name in FORMS if row.values.get(name) is not None), None)
        if name is None:
            raise ValueError(
                f"expected {', '.join(FORMS[:-1])} or prompt in {row.where}, got {listed(row.values) or 'no column'}; "
                "say what the user asks with a template of names in braces: '{COLUMN}'"
            )
        value: Any = row.values[name]
        if name == "turns":
            return [{"role": "user", "content": turn} for turn in row.turns("turns")]
        if name == "prompt":
            completion = row.values.get("completion")
            return [
                *_side(value, "user"),
                *([] if completion is None else _side(completion, "assistant")),
            ]
        is_list = isinstance(value, list | tuple) and len(value) > 0
        require(is_list, f"{name}, a list of turns, in {row.where}", value, FIX)
        return list(value)

    def _message(self, turn: Any, at: int, row: Row) -> dict[str, Any]:
        """A turn as chat templates take it."""
        where = f"turn {at} of {row.where}"
        require(isinstance(turn, Mapping), f"a role and a content in {where}", turn, FIX)
        # Tables fill up with None.
        turn = {key: value for key, value in turn.items() if value is not None}
        if "role" not in turn and "from" in turn:
            turn = {"role": turn["from"], "content": turn.get("value")}
        role = turn.get("role")
        known = ROLES.get(role) if isinstance(role, str) else None
        if known is None:
            raise ValueError(
                f"expected a role in {where}, got {shown(role)} (known are {listed(ROLES)}); {FIX}"
            )
        content: Any = turn.get("content")
        if content is None and turn.get("tool_calls"):
            content = ""
        kept = {
            key: value for key, value in turn.items() if key not in ("role", "content", "weight")
        }
        return {"role": known, "content": self._content(content, where, row), **kept}

    def _content(self, content: Any, where: str, row: Row) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return check_text(content, f"content in {where}", may_be_empty=True, action=FIX)
        require(
            isinstance(content, list | tuple),
            f"a text or a list of blocks as content in {where}",
            content,
            FIX,
        )
        blocks = [self._block(block, where, row) for block in content]
        if all(block["type"] == "text" for block in blocks):
            return "".join(block["text"] for block in blocks)
        return blocks

    def _block(self, block: Any, where: str, row: Row) -> dict[str, Any]:
        require(isinstance(block, Mapping), f"blocks with a type in {where}", block, FIX)
        block = {key: value for key, value in block.items() if value is not None}
        if block.get("type") == "text":
            text = check_text(
                block.get("text"), f"each block of text in {where}", may_be_empty=True, action=FIX
            )
            return {"type": "text", "text": text}
        if block.get("type") == "image_url":  # as OpenAI's interface has it
            address = block.get("image_url")
            block = {
                "type": "image",
                "url": address.get("url") if isinstance(address, Mapping) else address,
            }
        require(
            block.get("type") == "image",
            f"blocks of type text or image in {where}",
            block,
            "leave the row out",
        )
        source = next((block[key] for key in SOURCES if key in block), None)
        return (
            {"type": "image"}
            if source is None
            else {"type": "image", "image": self._image(source, row)}
        )

    def _image(self, image: Any, row: Row) -> str:
        """An image as a processor finds it again: an address, or a file."""
        place = (
            image.get("path") if isinstance(image, Mapping) and not image.get("bytes") else image
        )
        if isinstance(place, str) and place.startswith(("http://", "https://", "data:")):
            return place
        source = row.image(image)
        if isinstance(source, bytes):
            what = f"the path of an image in {row.where}"
            require(self.folder is not None, what, "its bytes", "name a folder for images")
            stored = store_image(source, self.folder or Path())
            # Beside the file that names it: both can be moved
            return f"{stored.parent.name}/{stored.name}"
        what = f"an image that can be read in {row.where}"
        require(
            image_size(str(source)) is not None,
            what,
            str(place),
            "leave the row out, or install pillow",
        )
        return str(source)


def resolved(row: Mapping[str, Any], folder: Path, seen_from: Path | None = None) -> dict[str, Any]:
    """Returns a row whose images of relative paths are those of a folder.

    Args:
        row (mapping): With `messages` and maybe `images`.
        folder (`Path`): What they are relative to.
        seen_from (`Path`, *optional*): What they are to be relative to; without it their paths are whole.
    """

    def place(image: Any) -> Any:
        is_relative = isinstance(image, str) and len(image) < MAX_PATH and not os.path.isabs(image)
        if not is_relative or not (folder / image).is_file():
            return image
        return (
            str(folder / image) if seen_from is None else os.path.relpath(folder / image, seen_from)
        )

    def block(part: Any) -> Any:
        return (
            {**part, "image": place(part["image"])}
            if isinstance(part, Mapping) and "image" in part
            else part
        )

    def turn(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        return (
            {**message, "content": [block(part) for part in content]}
            if isinstance(content, list)
            else message
        )

    found = dict(row)
    for name, change in (("images", place), ("messages", turn)):
        if isinstance(row.get(name), list):
            found[name] = [change(value) for value in row[name]]
    return found


def content_id(row: Mapping[str, Any]) -> str:
    """Returns a name that says what is in a row: the same for the same conversation, wherever it comes from."""
    parts = [row["messages"], row.get("images"), row.get("chat_template_kwargs")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _side(value: Any, role: str) -> Sequence[Any]:
    """A prompt or a completion as turns."""
    return [{"role": role, "content": value}] if not isinstance(value, list | tuple) else value
