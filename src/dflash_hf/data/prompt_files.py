"""Prompts: a text, or a conversation in Transformers' form whose messages may have images in them.

A message's `content` is a text or a list of parts, `{"type": "text", "text": ...}` and `{"type": "image", ...}` with
the image under `"path"`, `"url"`, `"image"` or `"base64"`, as `apply_chat_template` of a processor reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_hf.data.row_files import parsed, parsed_object
from dflash_hf.errors import one_line, require, shown

MEDIA = ("image", "video")  # kinds of blocks beside texts
# Keys of such a block that say where its image or its video is, as Transformers' processors look them up.
SOURCES = ("image", "url", "path", "base64")
VIDEO_SOURCES = ("video", "url", "path")
# Names that no option of a chat template can have: of the calls that fill it, and of what they fill it with
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
# Those that a server is started with have none of the last two either: each request says them itself.
NO_OPTIONS_OF_A_SERVER = (*NO_OPTIONS, "tools", "documents")

MAX_BYTES = 16 * 2**20  # of a file: as `[],[],...` it takes 20 times as much when parsed
MAX_PROMPTS = 100_000
FIX = "fix the row"
Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns a conversation as new dictionaries; a text is one turn of the user's."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def with_joined_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages as templates of models for text alone take them: a content of only blocks of text is one text.

    Such templates leave a list out, refuse it, or write it as Python prints it.
    """
    found = [dict(message) for message in messages]
    for message in found:
        if "content" in message:
            message["content"] = joined_texts(message["content"])
    return found


def with_text_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages as templates that read only blocks take them: a content that is a text is one block.

    Such templates, as SmolVLM's, leave a text out.
    """
    found = [dict(message) for message in messages]
    for message in found:
        if isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return found


def joined_texts(content: Any) -> Any:
    """Returns a turn's blocks as one text, a line each, if all are texts, and any other content as it is."""
    if not isinstance(content, list | tuple):
        return content
    blocks: Sequence[Any] = content
    if any(block["type"] != "text" for block in blocks):
        return blocks
    # As vLLM joins them for a template that takes texts
    return "\n".join(block["text"] for block in blocks)


def with_read_calls(turn: Mapping[str, Any], where: str = "a turn") -> dict[str, Any]:
    """Returns a turn whose calls of tools have arguments that are objects, as templates take them.

    Many sets have them as a text of JSON, as OpenAI's interface does. A template would write that between quotes.

    Args:
        where (`str`): What to call the turn in a sentence.

    Raises:
        ValueError: If the text says no object.
    """
    found = dict(turn)
    calls = turn.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        found["tool_calls"] = [_read_call(call, where) for call in calls]
    return found


def _read_call(call: Any, where: str) -> Any:
    """A call, or what is in its place, with arguments that are no text; they stand in its `function`, or beside it."""
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
    """Refuses one text, or the messages of one conversation, in the place of several prompts."""
    # Letters of a text would be prompts too, and are never meant.
    is_one = isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts)
    require(not is_one, "a list of prompts", prompts, "put the one prompt into a list")


def check_template_options(
    options: Mapping[str, Any], reserved: Sequence[str] = NO_OPTIONS
) -> None:
    """Raises `ValueError` for options of a chat template with a reserved name."""
    for name in reserved:
        require(name not in options, "options of the chat template", name, "leave it out")


def blocks_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns all blocks of messages, in their order; a text has none."""
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
    """Returns what to call a prompt's images, in their order: the name of the file, else `"image"`."""
    places = [part.get("path", part.get("url")) for part in image_parts(prompt)]
    return ["image" if place is None else Path(place).name for place in places]


def image_paths(prompt: Prompt) -> list[str]:
    """Returns the paths of those images of a prompt that are named by one, in their order."""
    return [part["path"] for part in image_parts(prompt) if part.get("path")]


def image_parts(prompt: Prompt) -> list[Mapping[str, Any]]:
    """Returns the blocks of a prompt's messages that are images, in their order."""
    return [part for part in blocks_of(as_messages(prompt)) if part["type"] == "image"]


def with_images(text: str, files: Sequence[Path]) -> Prompt:
    """Returns a prompt with image files before its text, or the text alone; `ValueError` if a file is not there."""
    for file in files:
        # `Path.is_file` of Python 3.11 raises for a text that is too long for a path.
        if not os.path.isfile(file):
            raise ValueError(
                f"expected an image file, got {str(file)!r}, which is not there; fix the path"
            )
    if not files:
        return text
    parts: list[dict[str, Any]] = [{"type": "image", "path": str(file)} for file in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Returns the lines that are not empty, with their numbers from 1; `ValueError` for large files, and no UTF-8."""
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
    # Not `splitlines`: a string in JSON may have other ends of lines in it.
    if text.count("\n") > MAX_PROMPTS:
        raise ValueError(
            f"expected at most {MAX_PROMPTS} lines in {path}, got more; use fewer prompts"
        )
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def read_rows(path: Path) -> list[tuple[dict[str, Any], Prompt]]:
    """Returns the objects of a `.jsonl` file, each with what it asks; raises as `read_lines` and `prompt_of` do."""
    found: list[tuple[dict[str, Any], Prompt]] = []
    for number, line in read_lines(path):
        where = f"line {number} of {path}"
        row = parsed_object(line, where, "fix the line")
        found.append((row, prompt_of(row, where, path.parent)))
    return found


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts: the lines of a text file, or `"messages"` or else `"prompt"` of the objects of a `.jsonl` one.

    Paths of images in messages are relative to the file. Raises `ValueError` if a file or line has no prompt.
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
    """Returns what a row asks, relative paths of images taken from `folder`; `ValueError` if nothing, or malformed."""
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
    """A message as this module's docstring has it, with paths of images from a folder; raises unless it is one."""
    require(isinstance(message, dict), f"turns with role and content in {where}", message, FIX)
    check_text(message.get("role"), f"role of each turn in {where}")
    content = message.get("content")
    # As OpenAI's interface has a turn of calls alone
    if content is None and message.get("tool_calls"):
        content = ""
    content = _located(_checked_content(content, where), folder)
    return with_read_calls({**message, "content": content}, where)


def _checked_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A message's content; raises unless it is a text or a list of parts."""
    if not isinstance(content, list):
        # Turns of calls, and system prompts of many sets, say nothing
        what = f"content of each turn (or a list of parts) in {where}"
        return check_text(content, what, may_be_empty=True)
    require(bool(content), f"content in each turn in {where}", content, "add a part")
    parts: list[Any] = content
    for part in parts:
        _check_part(part, where)
    return parts


def _located(content: str | list[dict[str, Any]], folder: Path) -> str | list[dict[str, Any]]:
    """A message's content with relative paths of images taken from a folder, that of the file it was read from."""
    if isinstance(content, str):
        return content
    return [
        {**part, "path": str(folder / part["path"])} if part.get("path") else part
        for part in content
    ]


def _check_part(part: Any, where: str) -> None:
    """Raises unless it is a text or an image."""
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
    """Returns a text that a tokenizer can read; raises `ValueError` if it is something else."""
    is_text = isinstance(text, str) and (bool(text) or may_be_empty)
    require(is_text, f"a text as {what}", text, action)
    require(_is_whole(text), f"a text of whole characters as {what}", text, action)
    return text


def _is_whole(text: str) -> bool:
    """Whether no character is half of one (a surrogate), which UTF-8 has no bytes for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
