"""This module separates thoughts, text and calls of tools in an answer while the answer grows.

Transformers' response templates say how a family marks these parts, and its `parse_response` reads the calls. This
reader decides what that parser leaves open. A call counts only if it is closed and can be read. Everything else is
text. White space next to marks is not text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import regex
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from dflash_hf.errors import is_a

BROKEN = "\ufffd"  # decoding writes this for bytes that are not a whole character
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of the field in response templates
CALLS = "tool_calls"
QUOTES = {"json": '"', "python-call-list": "\"'"}  # around texts, by the format of a call
HALF = regex.compile("[\ud800-\udfff]")  # half of a character, which JSON may contain as an escape


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of an answer.

    Args:
        kind (`str`): The kind of the piece.
        text (`str`): Its text. For a call, this is the arguments as JSON.
        name (`str`): For a call, the name of the function.
        call_id (`str`): For a call, its id.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""
    call_id: str = ""


@dataclass
class Region:
    """A marked part of an answer that is not closed yet."""

    field: Any
    opened: str  # the mark that opened it
    num_searched: int = 0  # letters up to the last closing mark that is inside a quoted text
    quote: str = ""  # the quote that this text begins with


@dataclass
class Trimmed:
    """Text of one kind whose white space at both ends is held back.

    White space at the beginning is dropped. White space at the end is held back until more text comes or the answer
    ends. White space next to a mark is dropped.
    """

    held: str = ""
    has_text: bool = False
    keeps_start: bool = False
    is_beside_mark: bool = False  # whether only white space has come since a mark

    def add(self, text: str) -> str:
        """Returns the text that is certain after some more text."""
        text = self.held + text
        if not self.has_text and not self.keeps_start:
            text = text.lstrip()
        told = text.rstrip()
        self.held = text[len(told) :]
        if told:
            self.has_text = True
            self.is_beside_mark = False
        return told

    def meet_mark(self) -> None:
        """Drops the white space before a mark, and prepares to drop the white space after it."""
        self.held = ""
        self.keeps_start = False
        self.is_beside_mark = True

    def end(self) -> str:
        """Returns the white space at the end of the answer; an empty text next to a mark."""
        if self.is_beside_mark:
            return ""
        return self.held


@dataclass
class MarkupReader:
    """Splits the text of an answer into pieces.

    Args:
        template (`dict`): The response template of the target's family. If it is empty, the whole text is content.
        prefix (`str`): The prompt. Its end may open a region: some chat templates write `<think>` themselves.
        tools (`list`): The tools of the request. Without tools, calls are text.
    """

    template: dict[str, Any]
    prefix: str
    tools: Sequence[Any]
    buffer: str = ""
    region: Region | None = None
    is_marked: bool = False  # whether a mark has been read
    last: str = ""  # the letter before the buffer
    content: Trimmed = field(default_factory=lambda: Trimmed(keeps_start=True))
    reasoning: Trimmed = field(default_factory=Trimmed)

    def __post_init__(self) -> None:
        self.fields: list[Any] = []
        if not self.template:
            return
        read = load_response_template(self.template)
        for name, one in read.fields.items():
            is_wanted = name in REASONING or (name == CALLS and bool(self.tools))
            if is_wanted and one.open_re is not None:
                self.fields.append(one)
        # The part of the answer that the prompt contains changes the state, but is not part of the answer's text.
        begun = read.truncate_past_last_anchor(self.prefix)
        if begun != self.prefix:
            self.add(begun)
            self.content = Trimmed(keeps_start=not self.is_marked)
            self.reasoning = Trimmed()

    def add(self, text: str) -> list[Piece]:
        """Returns the pieces that are complete after some more text."""
        self.buffer += text
        return self._read(is_end=False)

    def end(self) -> list[Piece]:
        """Returns the last pieces. A call that is not closed is text."""
        pieces = self._read(is_end=True)
        thoughts = self.reasoning.end()
        if thoughts:
            pieces.append(Piece(kind="reasoning", text=thoughts))
        text = self.content.end()
        if text:
            pieces.append(Piece(kind="content", text=text))
        return pieces

    def _read(self, is_end: bool) -> list[Piece]:
        pieces: list[Piece] = []
        is_going_on = True
        while is_going_on:
            if self.region is None:
                is_going_on = self._read_content(pieces, is_end)
            elif self.region.field.name == CALLS:
                is_going_on = self._read_call(pieces, self.region, is_end)
            else:
                is_going_on = self._read_reasoning(pieces, self.region, is_end)
        return pieces

    def _read_content(self, pieces: list[Piece], is_end: bool) -> bool:
        """Reads up to the next mark. Returns whether there was a mark."""
        hold = len(self.buffer)
        best: tuple[int, Any, Any] | None = None
        for one in self.fields:
            is_late = one.name != CALLS and (self.content.has_text or self.is_marked)
            if is_late:
                continue
            match = one.open_re.search(self.buffer, partial=not is_end)
            if match is None:
                continue
            is_at_edge = match.end() == len(self.buffer) and one.open_literals is None
            can_grow = is_at_edge and not is_end
            if match.partial or can_grow:
                hold = min(hold, match.start())
            elif best is None or match.start() < best[0]:
                best = (match.start(), one, match)
        if best is None or best[0] > hold:
            self._tell(pieces, self.buffer[:hold])
            self._drop(hold)
            return False
        start, one, match = best
        before = self.buffer[:start]
        quotes = match.group().lstrip().startswith("<") and (before or self.last).endswith("`")
        if quotes:
            self._tell(pieces, self.buffer[: match.end()])
            self._drop(match.end())
            return True
        self._tell(pieces, before)
        self.region = Region(field=one, opened=match.group())
        self._drop(match.end())
        return True

    def _read_reasoning(self, pieces: list[Piece], region: Region, is_end: bool) -> bool:
        """Reads up to the end of the thoughts. Returns whether the end was there."""
        self.is_marked = True
        self.content.meet_mark()
        match = region.field.close_re.search(self.buffer, partial=not is_end)
        end = len(self.buffer)
        is_closed = match is not None and not match.partial
        if match is not None:
            end = match.start()
        text = self.reasoning.add(self.buffer[:end])
        if text:
            pieces.append(Piece(kind="reasoning", text=text))
        if not is_closed:
            self._drop(end)
            return False
        assert match is not None
        self._drop(match.end())
        self.region = None
        self.reasoning.meet_mark()
        return True

    def _read_call(self, pieces: list[Piece], region: Region, is_end: bool) -> bool:
        """Reads a call if it is closed. Returns whether the state has changed."""
        match = region.field.close_re.search(self.buffer, region.num_searched)
        body = self.buffer
        if match is not None:
            body = self.buffer[: match.start()]
            before = region.quote + body[region.num_searched :]
            region.quote = _open_quote(region.field, before)
            # A pattern may match an empty text. After an empty match the search would not advance.
            is_text = bool(region.quote and match.group())
            if is_text:
                region.num_searched = match.end()
                return True
        can_be_json = not body.strip() or body.lstrip().startswith(("{", "["))
        is_hopeless = region.field.content == "json" and not can_be_json
        if match is None and not is_end and not is_hopeless:
            return False
        calls: list[Piece] = []
        if match is not None:
            calls = self._calls(region, body, match.group())
        if not calls:
            # Only the mark becomes text, because a call may follow after it.
            self.region = None
            self._tell(pieces, region.opened)
            return True
        assert match is not None
        pieces.extend(calls)
        self.content.meet_mark()
        self.is_marked = True
        self.region = None
        self._drop(match.end())
        return True

    def _calls(self, region: Region, body: str, closed: str) -> list[Piece]:
        """Returns the calls of a closed region; an empty list if the region cannot be read."""
        pattern = region.field.content_args.get("tag_pattern")
        if pattern and regex.sub(pattern, "", body, flags=regex.DOTALL).strip():
            return []
        try:
            raw = region.opened + _with_arguments(body) + closed
            template = _closed_at_the_end(self.template, region.field)
            message = parse_response(raw, template, prefix="", tools=list(self.tools))
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        pieces: list[Piece] = []
        for call in message.get(CALLS) or []:
            piece = _call_of(call)
            if piece is None:
                return []
            pieces.append(piece)
        return pieces

    def _tell(self, pieces: list[Piece], text: str) -> None:
        """Adds a piece of content."""
        told = self.content.add(text)
        if told:
            pieces.append(Piece(kind="content", text=told))

    def _drop(self, end: int) -> None:
        """Removes the beginning of the buffer."""
        self.last = self.buffer[max(end - 1, 0) : end] or self.last
        self.buffer = self.buffer[end:]


def _open_quote(one: Any, body: str) -> str:
    """Returns the opening quote of a text that is still open at the end of `body`; empty if no text is open there."""
    delims = one.content_args.get("string_delims", [])
    texts = [
        rf"(?P<quote>{regex.escape(opened)}).*?(?:{regex.escape(closed)}|(?P<cut>\Z))"
        for opened, closed in delims
    ]
    texts += [
        rf"(?P<quote>{quote})(?:\\.|[^{quote}\\\n\r])*+(?:{quote}|(?P<cut>\Z))"
        for quote in QUOTES.get(one.content, "")
    ]
    if not texts:
        return ""
    for match in regex.finditer("|".join(texts), body, flags=regex.DOTALL):
        if match["cut"] is not None:
            return str(match["quote"])
    return ""


def _closed_at_the_end(template: dict[str, Any], one: Any) -> dict[str, Any]:
    """Returns a response template for a single call whose own texts may contain the closing mark."""
    calls = {**template["fields"][CALLS], "close_pattern": rf"(?:{one.close_re.pattern})\Z"}
    calls.pop("close", None)
    return {**template, "fields": {**template["fields"], CALLS: calls}}


def _with_arguments(body: str) -> str:
    """Returns the body of a call in JSON, with empty arguments if it has none."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if isinstance(call, dict) and call.get("arguments") is None:
        return json.dumps({**call, "arguments": {}}, ensure_ascii=False)
    return body


def _call_of(call: Any) -> Piece | None:
    """Returns a call as a piece; None if it has no name, or if its arguments are not an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    name = function.get("name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not is_a(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        # Python reads a number like 1e999 as infinity, and JSON has no infinity.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return Piece(
        kind="call",
        text=HALF.sub(BROKEN, text),
        name=HALF.sub(BROKEN, name),
        call_id=f"call_{uuid.uuid4().hex[:24]}",
    )


def open_thoughts(template: dict[str, Any], prompt: str) -> str:
    """Returns the mark that ends the thoughts that a prompt has begun; empty if it has begun none."""
    region = MarkupReader(template, prompt, ()).region
    if region is None:
        return ""
    literals: list[str] = region.field.close_literals or [""]
    return literals[0]


def marks_of(template: dict[str, Any]) -> str:
    """Returns all marks of a response template in one text, so that tokens can be looked up in it."""
    marks: list[str] = []
    for name, one in template.get("fields", {}).items():
        if name != "content":
            values = [
                one.get(key, "") for key in ("open", "close", "open_pattern", "close_pattern")
            ]
            marks.extend(str(value).replace("\\", "") for value in values)
            marks.append(str(one.get("content_args", "")))
    return "\n".join(marks)
