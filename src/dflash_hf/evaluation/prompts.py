"""Prompts: a text, or a conversation in Transformers' form whose messages may have pictures in them.

A message's `content` is a text or a list of parts, `{"type": "text", "text": ...}` and `{"type": "image", ...}` with
the picture under `"path"`, `"url"`, `"image"` or `"base64"`, as `apply_chat_template` of a processor reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns a conversation as new dictionaries; a text is one turn of the user's."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def text_of(prompt: Prompt) -> str:
    """Returns the texts of all messages, one per line."""
    texts: list[str] = []
    for message in as_messages(prompt):
        content = message["content"]
        if isinstance(content, str):
            texts.append(content)
        else:
            texts.append(" ".join(part["text"] for part in content if part["type"] == "text"))
    return "\n".join(texts)


def picture_names(prompt: Prompt) -> list[str]:
    """Returns what to call a prompt's pictures, in their order: the name of the file, else `"picture"`."""
    contents = [message["content"] for message in as_messages(prompt)]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    places = [part.get("path", part.get("url")) for part in parts if part["type"] == "image"]
    return ["picture" if place is None else Path(place).name for place in places]


def with_pictures(text: str, files: Sequence[Path]) -> Prompt:
    """Returns a prompt with picture files before its text; the text alone where there is none.

    Raises:
        ValueError: If a file is not there.
    """
    for file in files:
        if not file.is_file():
            raise ValueError(f"expected a picture's file, got {str(file)!r}, which is not there; mend the path")
    if not files:
        return text
    parts: list[dict[str, Any]] = [{"type": "image", "path": str(file)} for file in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def find_pictures(prompt: Prompt, folder: Path) -> Prompt:
    """Returns the prompt with relative paths of pictures taken from a folder, that of the file it was read from."""
    if isinstance(prompt, str):
        return prompt
    messages = as_messages(prompt)
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [
                {**part, "path": str(folder / part["path"])} if "path" in part else dict(part)
                for part in message["content"]
            ]
    return messages


__all__ = ["Message", "Prompt", "as_messages", "find_pictures", "picture_names", "text_of", "with_pictures"]
