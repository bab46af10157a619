"""This module checks the conversation of a request turn by turn, and converts it for the chat template."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from dflash_hf.data.image_files import MAX_FILE_BYTES, MAX_PIXELS, read_image
from dflash_hf.data.prompt_files import joined_texts, with_text_parts
from dflash_hf.errors import one_line, shown
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.refusal import FIX, INVALID, Refusal, has_whole_characters, need

MAX_IMAGES = 16
MAX_PIXELS_OF_ALL = 256_000_000  # of all images of a request; decoded, they take 768 MB
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of a turn that reach the chat template. Other fields are refused.
TURN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
PARAM = "messages"


def read_messages(messages: Any, pair: Pair) -> list[dict[str, Any]]:
    """Returns the turns as the chat template takes them, with the images themselves instead of their addresses.

    Raises:
        Refusal: If a turn does not have OpenAI's form, or asks for something that this server or target does not
            support.
    """
    is_list = isinstance(messages, list) and bool(messages)
    need(is_list, PARAM, "messages, a list of turns", messages)
    turns: list[dict[str, Any]] = []
    num_images = 0
    num_pixels = 0
    for message in messages:
        is_turn = isinstance(message, dict)
        need(is_turn, PARAM, "turns with role and content in messages", message)
        turn = without_nulls(message)
        role = turn.get("role")
        need(role in ROLES, PARAM, f"role of each turn among {', '.join(ROLES)}", role)
        # For OpenAI's older models, the role `system` has the meaning that `developer` has now.
        if role == "developer" and not pair.takes_developer:
            turn["role"] = "system"
        turn = _known(turn)
        calls = _tool_calls(turn.pop("tool_calls", []))
        if calls:
            turn["tool_calls"] = calls
            turn.setdefault("content", "")
        _read_reasoning(turn)
        content = turn.get("content")
        if isinstance(content, list):
            num_images += sum(_is_image(part) for part in content)
            what = f"at most {MAX_IMAGES} images"
            need(num_images <= MAX_IMAGES, PARAM, what, num_images, "send fewer")
            parts: list[dict[str, Any]] = []
            for part in content:
                parts.append(_part(part, pair))
                num_pixels += _num_pixels(parts[-1])
                what = f"images of together at most {MAX_PIXELS_OF_ALL} pixels"
                need(num_pixels <= MAX_PIXELS_OF_ALL, PARAM, what, num_pixels, "shrink them")
            turn["content"] = _joined(parts, pair)
        else:
            what = "content of each turn (or a list of parts)"
            check_text(content, PARAM, what, may_be_empty=True)
        turns.append(turn)
    if not pair.takes_texts:
        turns = with_text_parts(turns)
    return turns


def _known(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns the known fields of a turn. Clients may send unknown fields back to the server if they are empty."""
    for name, value in turn.items():
        is_known = name in TURN or value in ([], "")
        what = f"turns of {', '.join(TURN)}"
        need(is_known, PARAM, what, name, "leave it out", "unknown_parameter")
    for name in ("name", "tool_call_id"):
        if name in turn:
            check_text(turn[name], PARAM, f"{name} of a turn", may_be_empty=True)
    return {name: value for name, value in turn.items() if name in TURN}


def _read_reasoning(turn: dict[str, Any]) -> None:
    """Stores the thoughts of a turn under both names that templates use for them."""
    thoughts = [turn[name] for name in ("reasoning", "reasoning_content") if name in turn]
    for thought in thoughts:
        check_text(thought, PARAM, "reasoning of a turn", may_be_empty=True)
    if thoughts:
        is_one = len(set(thoughts)) == 1
        need(is_one, PARAM, "the same reasoning and reasoning_content", thoughts)
        turn["reasoning"] = thoughts[0]
        turn["reasoning_content"] = thoughts[0]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _num_pixels(part: dict[str, Any]) -> int:
    """Returns how many pixels a part has that was read; 0 for a text."""
    if part["type"] == "text":
        return 0
    width, height = part["image"].size
    return width * height


def without_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns turns as they were sent, without the images among their parts. [`read_messages`] must have read them."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [part for part in content if not _is_image(part)]
        turns.append({**message, "content": content})
    return turns


def _joined(parts: list[dict[str, Any]], pair: Pair) -> Any:
    """Returns the parts. For a template that takes only texts, returns their text, one part per line."""
    if pair.takes_parts:
        return parts
    return joined_texts(parts)


def _part(part: Any, pair: Pair) -> dict[str, Any]:
    """Returns a part of a message, with its image read."""
    is_known = isinstance(part, dict) and part.get("type") in ("text", "image_url")
    need(is_known, PARAM, "parts of type text or image_url", part)
    if part["type"] == "text":
        text = part.get("text")
        check_text(text, PARAM, "text of each part of type text", may_be_empty=True)
        return {"type": "text", "text": text}
    what = "texts, which are all that this target reads"
    need(pair.takes_images, PARAM, what, "an image", "leave it out")
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    kind = ""
    code = ""
    if isinstance(url, str):
        kind, _, code = url.partition(",")
    # Neither files nor addresses are accepted, because clients must not decide which of them the server reads.
    is_data = re.fullmatch(r"data:[\w/+.-]*;base64", kind) is not None
    what = "each image as data:image/...;base64,..."
    need(is_data, PARAM, what, url, "send what is in it")
    limit = MAX_FILE_BYTES // 3 * 4 + 4
    what = f"at most {limit} letters of base64 for each image"
    need(len(code) <= limit, PARAM, what, len(code), "shrink it")
    try:
        data = base64.b64decode(code, validate=True)
    except ValueError as error:
        sentence = f"expected base64 in each image, got {shown(code)}; encode it anew"
        raise Refusal(sentence, 400, INVALID, PARAM) from error
    try:
        image, _ = read_image(Path("an image"), data, MAX_PIXELS)
    except ValueError as error:
        raise Refusal(one_line(error), 400, "invalid_image", PARAM) from error
    return {"type": "image", "image": image}


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Returns the calls of a turn with their arguments as an object, as templates take them."""
    need(isinstance(calls, list), PARAM, "tool_calls as a list", calls)
    read: list[dict[str, Any]] = []
    for call in calls:
        is_named = isinstance(call, dict) and has_name(call.get("function"))
        need(is_named, PARAM, "tool_calls with a function that has a name", call)
        function = call["function"]
        arguments = function.get("arguments")
        if arguments is None:
            arguments = {}
        elif isinstance(arguments, str):
            # For a call without arguments, some clients send an empty text as its arguments.
            arguments = _read_json(arguments.strip() or "{}")
        is_object = isinstance(arguments, dict)
        what = "arguments of each of tool_calls as an object in JSON"
        need(is_object, PARAM, what, function.get("arguments"))
        # The arguments are JSON within JSON, so they may contain halves of characters as escapes.
        what = "arguments of each of tool_calls of whole characters"
        need(has_whole_characters(arguments), PARAM, what, function.get("arguments"))
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _read_json(text: str) -> Any:
    """Returns the value that a text in JSON has; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def check_text(text: Any, param: str, what: str, may_be_empty: bool = False) -> None:
    """Raises a `Refusal` unless `text` is a text."""
    is_text = isinstance(text, str) and (bool(text) or may_be_empty)
    need(is_text, param, f"a text as {what}", text, FIX)


def has_name(function: Any) -> bool:
    """Returns whether a function has a name."""
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields without those that are null."""
    return {name: value for name, value in fields.items() if value is not None}
