"""This module converts rows of various forms into one form: `messages` as chat templates accept them, and `images`.

A video stays in its message, with its file or address.

The known forms are ShareGPT's (`conversations` of `from` and `value`), `messages`, `prompt` with or without
`completion` (texts or messages), and `turns` of the user. Rows with other columns need a template, which is a text
with names of columns in braces.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_hf.data.image_files import image_size, shrunk_image, store_image
from dflash_hf.data.prompt_files import (
    MEDIA,
    SOURCES,
    VIDEO_SOURCES,
    blocks_of,
    check_text,
    joined_texts,
    with_read_calls,
)
from dflash_hf.data.row_files import parsed
from dflash_hf.data.rows import FIX, Row, filled
from dflash_hf.errors import listed, require, shown

# The name of a role in data sets -> its name in chat templates.
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
# The keys of a turn that chat templates read, besides its role and content. Other keys are notes of the data set. If
# they were kept, copies of one conversation with different notes would count as different conversations.
READ_OF_A_TURN = (
    "name",
    "tool",
    "tools",
    "tool_calls",
    "tool_call_id",
    "tool_plan",
    "tool_responses",
    "function_calls",
    "functions",
    "reasoning",
    "reasoning_content",
    "thinking",
    "prefix",
)
MAX_PATH = 4096  # a longer text is not a path but an image
FORMS = ("messages", "conversations", "conversation", "turns", "prompt")
NO_OPTIONS: Mapping[str, Any] = {}
NO_LIMIT = sys.maxsize  # no limit of pixels


@dataclass(frozen=True, kw_only=True)
class Images:
    """The settings for the images of rows.

    Args:
        folder (`Path`, *optional*): The folder into which images are written that a row holds as bytes, or that are
            shrunk.
        max_pixels (`int`): Images with a larger product of width and height are shrunk.
    """

    folder: Path | None
    max_pixels: int

    @property
    def has_limit(self) -> bool:
        """True if large images are shrunk."""
        return self.max_pixels < NO_LIMIT


def conversation_of(
    row: Row,
    template: str | None = None,
    images: Path | None = None,
    chat_template_kwargs: Mapping[str, Any] = NO_OPTIONS,
    max_pixels: int = NO_LIMIT,
) -> dict[str, Any]:
    """Returns a row as `{"messages", "images"?, "chat_template_kwargs"?}`, with values that can be written as JSON.

    Turns of the assistant before the user's first turn are left out. Keys of a turn that chat templates do not read
    (see `READ_OF_A_TURN`) are left out too.

    Args:
        row ([`Row`]): A row of any known form.
        template (`str`, *optional*): For rows with other columns, the text of the user's turn, with names of columns
            in braces.
        images (`Path`, *optional*): The folder for images that a row holds as bytes, or that are shrunk. Without a
            folder, such images are refused. Their paths are relative to the parent of this folder (see [`resolved`]).
        chat_template_kwargs (mapping): Options of the chat template for each row. A row's own options override them.
        max_pixels (`int`): Images with a larger product of width and height are shrunk.

    Raises:
        ValueError: If the row has no known form, or is malformed. The message names it.
    """
    turns = _turns(row, template)
    kept = Images(folder=images, max_pixels=max_pixels)
    messages = [_message(turn, at, row, kept) for at, turn in enumerate(turns)]
    _place_videos(messages, row)
    messages = _from_first_user(messages, row)
    found: dict[str, Any] = {"messages": messages}
    # In a set of questions, the column may hold a text that is not the path of an image.
    sources = row.own_images()
    if sources:
        found["images"] = [_image(source, row, kept) for source in sources]
    options = dict(chat_template_kwargs)
    tools = _tools(row)
    if tools:
        options["tools"] = tools
    options |= row.values.get("chat_template_kwargs") or {}
    if options:
        found["chat_template_kwargs"] = options
    return found


def _tools(row: Row) -> Sequence[Any]:
    """Returns the tools of a row for its chat template. Some sets have them as a JSON text."""
    tools = row.first("tools", default=())
    if isinstance(tools, str) and tools:
        tools = parsed(tools, f"tools in {row.where}", FIX)
    is_list = isinstance(tools, list | tuple) or tools == ""
    require(is_list, f"a list of tools in {row.where}", tools, FIX)
    return tools


def _place_videos(messages: list[dict[str, Any]], row: Row) -> None:
    """Puts the videos of a row's column into blocks without a video, or before the text of the first user turn."""
    videos = [_video(source, row) for source in row.own_videos()]
    places = [block for block in blocks_of(messages) if block == {"type": "video"}]
    from_users = [message for message in messages if message["role"] == "user"]
    if videos and not places and from_users:
        first = from_users[0]
        content = first["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        places = [{"type": "video"} for _ in videos]
        first["content"] = [*places, *content]
    what = f"as many videos as their blocks without one of their own ({len(places)}) in {row.where}"
    require(len(videos) == len(places), what, len(videos), "give every video its place")
    for block, video in zip(places, videos, strict=True):
        block["video"] = video


def _from_first_user(messages: list[dict[str, Any]], row: Row) -> list[dict[str, Any]]:
    """Returns the messages from the first user message on, preceded by the earlier system messages."""
    roles = [message["role"] for message in messages]
    require("user" in roles, f"a turn of the user's in {row.where}", roles, FIX)
    first = roles.index("user")
    system = [message for message in messages[:first] if message["role"] == "system"]
    return system + messages[first:]


def weigh_as_prepared(messages: list[dict[str, Any]], row: Row) -> None:
    """Sets weight 0 on the answers that a row from an earlier `prepare` does not train on."""
    sequences = row.values.get("sequences")
    if not isinstance(sequences, list):
        return
    trained: list[int] = []
    for sequence in sequences:
        turns = sequence.get("turns") if isinstance(sequence, Mapping) else None
        # A data set from elsewhere may have a column of this name with another meaning.
        if not isinstance(turns, list):
            return
        trained += turns
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at not in trained:
            message["weight"] = 0


def _turns(row: Row, template: str | None) -> list[Any]:
    """Returns the turns of a row in the form that the row has them."""
    if template is not None:
        return [{"role": "user", "content": filled(template, row)}]
    present = [name for name in FORMS if row.values.get(name) is not None]
    if not present:
        raise ValueError(
            f"expected {', '.join(FORMS[:-1])} or prompt in {row.where}, got {listed(row.values) or 'no column'}; "
            f"say what the user asks with --template '{{{next(iter(row.values), 'COLUMN')}}}', a text with names of "
            "columns in braces"
        )
    name = present[0]
    value: Any = row.values[name]
    if name == "turns":
        return [{"role": "user", "content": turn} for turn in row.turns("turns")]
    if name == "prompt":
        turns = _side(value, "user")
        completion = row.values.get("completion")
        if completion is not None:
            turns += _side(completion, "assistant")
        return turns
    is_list = isinstance(value, list | tuple) and len(value) > 0
    require(is_list, f"{name}, a list of turns, in {row.where}", value, FIX)
    return list(value)


def _side(value: Any, role: str) -> list[Any]:
    """Returns a prompt or a completion as a list of turns."""
    if isinstance(value, list | tuple):
        return list(value)
    return [{"role": role, "content": value}]


def _message(turn: Any, at: int, row: Row, images: Images) -> dict[str, Any]:
    """Returns a turn in the form that chat templates accept."""
    where = f"turn {at} of {row.where}"
    require(isinstance(turn, Mapping), f"a role and a content in {where}", turn, FIX)
    turn = _without_none(turn)
    if "role" not in turn and "from" in turn:
        turn = {"role": turn["from"], "content": turn.get("value"), "weight": turn.get("weight")}
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(
            f"expected a role in {where}, got {shown(role)} (known are {listed(ROLES)}); {FIX}"
        )
    content: Any = turn.get("content")
    if content is None and turn.get("tool_calls"):
        content = ""
    message = {"role": ROLES[role], "content": _content(content, where, row, images)}
    others = {name: turn[name] for name in READ_OF_A_TURN if name in turn}
    # A weight of 0 on an answer means that the answer does not count. Other weights are ignored.
    if message["role"] == "assistant" and turn.get("weight") == 0:
        others["weight"] = 0
    return with_read_calls(message | others, where)


def _content(content: Any, where: str, row: Row, images: Images) -> str | list[dict[str, Any]]:
    """Returns the content of a turn: one text, or a list of blocks."""
    if isinstance(content, str):
        return check_text(content, f"content in {where}", may_be_empty=True, action=FIX)
    what = f"a text or a list of blocks as content in {where}"
    require(isinstance(content, list | tuple), what, content, FIX)
    blocks = [_block(block, where, row, images) for block in content]
    # Several blocks stay blocks, because the template of a processor decides how it joins them.
    if len(blocks) > 1:
        return blocks
    return joined_texts(blocks)


def _block(block: Any, where: str, row: Row, images: Images) -> dict[str, Any]:
    """Returns a block of a turn: a text, or an image or video block, with or without its own image or video."""
    require(isinstance(block, Mapping), f"blocks with a type in {where}", block, FIX)
    block = _without_none(block)
    kind = block.get("type")
    if kind == "text":
        what = f"each block of text in {where}"
        text = check_text(block.get("text"), what, may_be_empty=True, action=FIX)
        return {"type": "text", "text": text}
    if kind in ("image_url", "video_url"):  # as OpenAI's interface and vLLM's have it
        address = block.get(kind)
        if isinstance(address, Mapping):
            address = address.get("url")
        kind = kind.removesuffix("_url")
        block = {"type": kind, "url": address}
    what = f"blocks of type text, image or video in {where}"
    require(kind in MEDIA, what, block, "leave the row out")
    names = VIDEO_SOURCES if kind == "video" else SOURCES
    given = [name for name in names if name in block]
    if not given:
        return {"type": kind}
    source = block[given[0]]
    if kind == "video":
        return {"type": "video", "video": _video(source, row)}
    if given[0] == "base64":
        source = {"bytes": _decoded(source, row)}
    return {"type": "image", "image": _image(source, row, images)}


def _video(video: Any, row: Row) -> str:
    """Returns the address or the path of a video, from which a processor can read it later."""
    if isinstance(video, str) and video.startswith(("http://", "https://")):
        return video
    return str(row.video(video))


def _image(image: Any, row: Row, images: Images) -> str:
    """Returns the address or the path of an image, from which a processor can read it later."""
    place = image
    if isinstance(image, Mapping) and not image.get("bytes"):
        place = image.get("path")
    source: Path | bytes
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        what = f"images in files or rows, which can be shrunk, in {row.where}"
        action = "download the image, or leave the limit out"
        require(not images.has_limit, what, place, action)
        return place
    if isinstance(place, str) and place.startswith("data:"):
        if not images.has_limit:
            return place
        source = _decoded(place, row)
    else:
        source = row.image(image)
    if isinstance(source, bytes):
        if _is_too_large(io.BytesIO(source), images):
            source = shrunk_image(Path(row.where), source, images.max_pixels)
        return _stored(source, row, images)
    is_readable = image_size(str(source)) is not None
    what = f"an image that can be read in {row.where}"
    require(is_readable, what, str(place), "leave the row out, or install pillow")
    if _is_too_large(str(source), images):
        return _stored(shrunk_image(source, None, images.max_pixels), row, images)
    return str(source)


def _is_too_large(source: Any, images: Images) -> bool:
    """Says whether an image must be shrunk. An image whose header does not give its size is not shrunk."""
    if not images.has_limit:
        return False
    height, width = image_size(source) or (0, 0)
    return height * width > images.max_pixels


def _decoded(code: Any, row: Row) -> bytes:
    """Returns the bytes of an image from base64, alone or in a `data:` address."""
    what = f"base64 of an image in {row.where}"
    require(isinstance(code, str), what, code, FIX)
    letters = "".join(code.rpartition("base64,")[2].split())  # some encoders break lines
    try:
        return base64.b64decode(letters, validate=True)
    except ValueError as error:
        raise ValueError(f"expected {what}, got {shown(code[:80])}; {FIX}") from error


def _stored(image: bytes, row: Row, images: Images) -> str:
    """Writes an image into the folder, and returns its path relative to the parent of the folder."""
    if images.folder is None:
        raise ValueError(
            f"expected the path of an image in {row.where}, got the bytes of the image; "
            "name a folder into which images are written"
        )
    stored = store_image(image, images.folder)
    # The path is relative to the folder of the rows' file, so both can be moved together.
    return f"{stored.parent.name}/{stored.name}"


def _without_none(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that are not `None`, with which tables are filled."""
    return {name: value for name, value in columns.items() if value is not None}


def resolved(row: Mapping[str, Any], folder: Path, seen_from: Path | None = None) -> dict[str, Any]:
    """Returns a row in which relative paths of images and videos are replaced.

    Args:
        row (mapping): A row with `messages`, and optionally `images`.
        folder (`Path`): The folder to which the paths in the row are relative.
        seen_from (`Path`, *optional*): The folder to which the new paths are relative. By default, the new paths begin
            with `folder`.
    """

    def place(image: Any) -> Any:
        is_relative = isinstance(image, str) and len(image) < MAX_PATH and not os.path.isabs(image)
        # `Path.is_file` of Python 3.11 raises an error for a text that is too long for a path.
        if not is_relative or not os.path.isfile(folder / image):
            return image
        if seen_from is None:
            return str(folder / image)
        return os.path.relpath(folder / image, seen_from)

    def block(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        return {**part, **{kind: place(part[kind]) for kind in MEDIA if kind in part}}

    def turn(message: Any) -> Any:
        if isinstance(message, Mapping) and isinstance(message.get("content"), list):
            return {**message, "content": [block(part) for part in message["content"]]}
        return message

    found = dict(row)
    if isinstance(row.get("images"), list):
        found["images"] = [place(image) for image in row["images"]]
    if isinstance(row.get("messages"), list):
        found["messages"] = [turn(message) for message in row["messages"]]
    return found


def content_id(row: Mapping[str, Any]) -> str:
    """Returns an id that depends only on the content of a row, so equal conversations from different sets share it."""
    parts = [row["messages"], row.get("images"), row.get("chat_template_kwargs")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
