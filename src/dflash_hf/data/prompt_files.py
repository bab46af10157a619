"""This module reads and checks prompts. A prompt is a text, or a conversation in the form of Transformers.

The `content` of a message is a text or a list of parts: `{"type": "text", "text": ...}` and `{"type": "image", ...}`.
The image is under `"path"`, `"url"`, `"image"` or `"base64"`, as `apply_chat_template` of a processor reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_hf.data.row_files import parsed, parsed_object
from dflash_hf.errors import one_line, require, shown

MEDIA = ("image", "video")  # the types of blocks other than text
# The keys of such a block that hold its image or video. Transformers' processors look them up in this order.
SOURCES = ("image", "url", "path", "base64")
VIDEO_SOURCES = ("video", "url", "path")
# No option of a chat template can have these names. They are parameters of the calls that fill the template, and names
# of variables that these calls set.
NO_OPTIONS = (
    "template",
    "conversation",
    "conversations",
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
    "load_audio_from_video",
)
# Options with which a server is started cannot have the last two names either, because each request sets them.
NO_OPTIONS_OF_A_SERVER = (*NO_OPTIONS, "tools", "documents")

MAX_BYTES = 16 * 2**20  # per file. Parsed JSON such as `[],[],...` takes 20 times as much
MAX_PROMPTS = 100_000
FIX = "fix the row"
Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns a prompt as a conversation of new dictionaries. A text becomes one turn of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def with_joined_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages in which a content of only text blocks is one text, as templates of text-only models need it.

    Such templates leave out a list, refuse it, or write it as Python prints it.
    """
    found = [dict(message) for message in messages]
    for message in found:
        if "content" in message:
            message["content"] = joined_texts(message["content"])
    return found


def with_text_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages in which a content that is a text is one text block, as some templates need it.

    Templates that read only blocks, such as SmolVLM's, leave out a text.
    """
    found = [dict(message) for message in messages]
    for message in found:
        if isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return found


def joined_texts(content: Any) -> Any:
    """Returns a turn's blocks as one text with one line per block if all are texts, else the content unchanged."""
    if not isinstance(content, list | tuple):
        return content
    blocks: Sequence[Any] = content
    if any(block["type"] != "text" for block in blocks):
        return blocks
    # vLLM also joins blocks with newlines for a template that accepts texts.
    return "\n".join(block["text"] for block in blocks)


def with_read_calls(turn: Mapping[str, Any], where: str = "a turn") -> dict[str, Any]:
    """Returns a turn in which the arguments of tool calls are objects, as templates need them.

    In many sets, the arguments are a JSON text, as in OpenAI's interface. A template would write this text in quotes.

    Args:
        where (`str`): The name of the turn in messages.

    Raises:
        ValueError: If the text is no JSON object.
    """
    found = dict(turn)
    calls = turn.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        found["tool_calls"] = [_read_call(call, where) for call in calls]
    return found


def _read_call(call: Any, where: str) -> Any:
    """Returns a call whose arguments (in its `function`, or in the call itself) are an object instead of a text."""
    if not isinstance(call, Mapping):
        return call
    found = dict(call)
    if isinstance(call.get("function"), Mapping):
        found["function"] = _read_call(call["function"], where)
    if isinstance(call.get("arguments"), str):
        text = call["arguments"].strip() or "{}"  # a call without arguments
        arguments = parsed(text, f"the arguments of a call in {where}", FIX)
        what = f"an object as the arguments of a call in {where}"
        require(isinstance(arguments, Mapping), what, arguments, FIX)
        found["arguments"] = arguments
    return found


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Refuses a single text, or the messages of a single conversation, instead of a list of prompts."""
    # Otherwise, each letter of the text would be a prompt.
    is_one = isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts)
    require(not is_one, "a list of prompts", prompts, "put the one prompt into a list")


def check_template_options(
    options: Mapping[str, Any], reserved: Sequence[str] = NO_OPTIONS
) -> None:
    """Raises `ValueError` for options of a chat template with a reserved name."""
    for name in reserved:
        require(name not in options, "options of the chat template", name, "leave it out")


def blocks_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns all blocks of messages, in their order. A content that is a text has no blocks."""
    contents = [message.get("content") for message in messages]
    lists = [content for content in contents if isinstance(content, list | tuple)]
    return [block for blocks in lists for block in blocks]


def text_of(prompt: Prompt) -> str:
    """Returns the texts of all messages and of their blocks, one per line."""
    texts: list[str] = []
    for message in as_messages(prompt):
        content = message["content"]
        if isinstance(content, str):
            texts.append(content)
        else:
            texts.append(joined_texts([part for part in content if part["type"] == "text"]))
    return "\n".join(texts)


def image_names(prompt: Prompt) -> list[str]:
    """Returns the names of a prompt's images for messages, in their order: the name of the file, or `"image"`."""
    places = [part.get("path", part.get("url")) for part in image_parts(prompt)]
    return ["image" if place is None else Path(place).name for place in places]


def image_paths(prompt: Prompt) -> list[str]:
    """Returns the paths of a prompt's images, in their order. Images without a path are left out."""
    return [part["path"] for part in image_parts(prompt) if part.get("path")]


def image_parts(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Returns the blocks of a prompt's messages that are images, in their order."""
    return [part for part in blocks_of(as_messages(prompt)) if part["type"] == "image"]


def with_images(text: str, files: Sequence[Path]) -> Prompt:
    """Returns a prompt with image files before its text, or the text alone. Raises `ValueError` for a missing file."""
    for file in files:
        # `Path.is_file` of Python 3.11 raises an error for a text that is too long for a path.
        if not os.path.isfile(file):
            raise ValueError(
                f"expected an image file, got {str(file)!r}, which is not there; fix the path"
            )
    if not files:
        return text
    parts: list[dict[str, Any]] = [{"type": "image", "path": str(file)} for file in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Returns the lines that are not empty, with their numbers from 1.

    Raises `ValueError` if the file is too large, has too many lines, or is not UTF-8.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(
            f"expected a file of prompts of at most {MAX_BYTES / 2**20:.0f} MB, got {path} with {size / 2**20:.0f}; "
            "use fewer prompts, and give images as files"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected UTF-8 in {path}, got other bytes ({one_line(error)}); save it as UTF-8"
        ) from error
    # `splitlines` would also split at other line ends, which a string in JSON may contain.
    if text.count("\n") > MAX_PROMPTS:
        raise ValueError(
            f"expected at most {MAX_PROMPTS} lines in {path}, got more; use fewer prompts"
        )
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def read_rows(path: Path) -> list[tuple[dict[str, Any], Prompt]]:
    """Returns the objects of a `.jsonl` file, each with its prompt. Raises as `read_lines` and `prompt_of` do."""
    found: list[tuple[dict[str, Any], Prompt]] = []
    for number, line in read_lines(path):
        where = f"line {number} of {path}"
        row = parsed_object(line, where, "fix the line")
        found.append((row, prompt_of(row, where, path.parent)))
    return found


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a file: its lines, or `"messages"` or else `"prompt"` of the objects in a `.jsonl` file.

    Paths of images in messages are relative to the folder of the file. Raises `ValueError` if the file does not exist
    or has no prompt, or if an object has none.
    """
    if not os.path.isfile(path):
        raise ValueError(
            f"expected a file of prompts as --prompts, got {str(path)!r}, which is none; fix the path"
        )
    prompts: list[Prompt] = []
    if path.suffix == ".jsonl":
        prompts += [prompt for _, prompt in read_rows(path)]
    else:
        prompts += [line for _, line in read_lines(path)]
    if not prompts:
        raise ValueError(f"expected prompts in {path}, got none; write one per line")
    return prompts


def prompt_of(row: Mapping[str, Any], where: str, folder: Path) -> Prompt:
    """Returns the prompt of a row. Relative paths of images begin at `folder`.

    Raises `ValueError` if the row has no prompt or is malformed.
    """
    messages = row.get("messages")
    prompt = row.get("prompt")
    if messages:
        require(isinstance(messages, list), f"messages, a list of turns, in {where}", messages, FIX)
        return [_read_message(message, where, folder) for message in messages]
    if not prompt:
        raise ValueError(
            f"expected messages or prompt in {where}, got the keys {shown(list(row))}; add one of them"
        )
    return check_text(prompt, f"prompt in {where}")


def _read_message(message: Any, where: str, folder: Path) -> dict[str, Any]:
    """Returns a message in the form of this module's docstring, with paths of images in `folder`, or raises."""
    require(isinstance(message, dict), f"turns with role and content in {where}", message, FIX)
    check_text(message.get("role"), f"role of each turn in {where}")
    content = message.get("content")
    # In OpenAI's interface, a turn with only tool calls has no content.
    if content is None and message.get("tool_calls"):
        content = ""
    content = _located(_checked_content(content, where), folder)
    return with_read_calls({**message, "content": content}, where)


def _checked_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Returns a message's content. Raises `ValueError` unless it is a text or a list of parts."""
    if not isinstance(content, list):
        # The text may be empty, as in turns of tool calls and in the system prompts of many sets.
        what = f"content of each turn (or a list of parts) in {where}"
        return check_text(content, what, may_be_empty=True)
    require(bool(content), f"content in each turn in {where}", content, "add a part")
    parts: list[Any] = content
    for part in parts:
        _check_part(part, where)
    return parts


def _located(content: str | list[dict[str, Any]], folder: Path) -> str | list[dict[str, Any]]:
    """Returns a message's content in which relative paths of images begin at `folder`, the folder of its file."""
    if isinstance(content, str):
        return content
    return [
        {**part, "path": str(folder / part["path"])} if part.get("path") else part
        for part in content
    ]


def _check_part(part: Any, where: str) -> None:
    """Raises `ValueError` unless a part is a text or an image."""
    is_known = isinstance(part, dict) and part.get("type") in ("text", "image")
    require(is_known, f"parts of type text or image in {where}", part, FIX)
    if part["type"] == "text":
        check_text(
            part.get("text"), f"text of each part of type text in {where}", may_be_empty=True
        )
        return
    sources = {name: part[name] for name in SOURCES if part.get(name) is not None}
    what = f"each part of type image in {where} to have one of {SOURCES}"
    require(bool(sources), what, part, "say where the image is")
    for name, source in sources.items():
        check_text(source, f"{name} of each image in {where}")


def check_text(text: Any, what: str, may_be_empty: bool = False, action: str = FIX) -> str:
    """Returns a text that a tokenizer can read. Raises `ValueError` for any other value."""
    is_text = isinstance(text, str) and (bool(text) or may_be_empty)
    require(is_text, f"a text as {what}", text, action)
    require(_is_whole(text), f"a text of whole characters as {what}", text, action)
    return text


def _is_whole(text: str) -> bool:
    """Says whether a text has no lone surrogate (half of a character), which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
