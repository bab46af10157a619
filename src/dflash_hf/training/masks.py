"""This module finds the assistant's answers in the text of a conversation if the chat template does not mark them.

An answer is the text that the template writes after the prompt of the answer, up to the token that ends the turn. The
prompt consists of the turns before and the generation prompt. Some templates write a turn differently if other turns
follow (Qwen3's template drops the thoughts). So an answer counts in a longer conversation only if this conversation
begins with the same prompt and the same answer, letter by letter.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_hf.errors import shown

Messages = Sequence[Mapping[str, Any]]
# (conversation, whether a generation prompt is added) -> text
Render = Callable[[Messages, bool], str]
Span = tuple[int, int]  # first character, and the character after the last one
NOWHERE = -1
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the pattern that Transformers searches for
REGENERATE = "let the target answer itself (`regenerate`), or add the markers"


def assistant_turns(messages: Messages) -> list[int]:
    """Returns the indices of the assistant's messages."""
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


def turns_to_train(messages: Messages) -> list[int]:
    """Returns the indices of the assistant's messages, except those with `weight` 0, as in OpenAI's format."""
    return [at for at in assistant_turns(messages) if messages[at].get("weight") != 0]


def answer_spans(
    render: Render, messages: Messages, turns: Sequence[int], ends: Sequence[str]
) -> list[Span]:
    """Returns the places of answers in the text of a conversation. The text ends with the last of these answers.

    Args:
        turns (sequence of `int`): The indices of the answers' messages, in order. Each is a message of the assistant.
        ends (sequence of `str`): The texts of the tokens that can end a turn.

    Returns:
        `list[tuple[int, int]]`: The first character of each answer, and the character after its end token.

    Raises:
        ValueError: If the template writes a turn differently when other turns follow, or does not write an answer
            after its prompt.
    """
    whole = render(messages[: turns[-1] + 1], False)
    spans: list[Span] = []
    for turn in turns:
        text = whole
        if turn != turns[-1]:
            text = render(messages[: turn + 1], False)
        start, end = _answer_span(render, messages, turn, text, ends)
        if whole[:end] != text[:end]:
            raise ValueError(
                f"expected a chat template that leaves turns as they were written, got one that changes turn {turn} "
                "once others follow it; train on the last turn alone, or let `prepare` give the turn its own sequence"
            )
        spans.append((start, end))
    return spans


def _answer_span(
    render: Render, messages: Messages, turn: int, text: str, ends: Sequence[str]
) -> Span:
    """Returns the place of a turn's answer in `text`, the text of the conversation up to this turn."""
    prompt = render(messages[:turn], True)
    if not text.startswith(prompt):
        raise ValueError(
            "expected a chat template with {% generation %} around assistant turns, or one that writes an answer "
            f"behind its own generation prompt, got one that does neither for turn {turn}; {REGENERATE}"
        )
    answer = text[len(prompt) :]
    written = squeezed(answer)
    pieces = said(messages[turn])
    # A template without a generation prompt does not show how an assistant's turn begins. So the answer has to begin
    # with the first text of the message.
    has_prompt = prompt != render(messages[:turn], False)
    begins_so = has_prompt or written.startswith("".join(pieces[:1]))
    if _end_of(pieces, written, 0) == NOWHERE or not begins_so:
        raise ValueError(
            "expected a chat template with {% generation %} around assistant turns, or one that writes what they "
            f"say behind a generation prompt, got {shown(answer)} for turn {turn}; {REGENERATE}"
        )
    stop = len(answer.rstrip())
    if ends:
        end = "|".join(map(re.escape, ends))
        # The answer ends with the first of the end tokens after its last letter.
        found = re.search(f"(?:{end})(?=(?:\\s|{end})*$)", answer)
        if found:
            stop = found.end()
    return len(prompt), len(prompt) + stop


def groups_in_place(
    render: Render, messages: Messages, turns: Sequence[int], ends: Sequence[str]
) -> list[list[int]]:
    """Divides turns into groups. Each group can be trained on in one sequence, which ends with the group's last turn.

    There is one group if the template never changes earlier turns. Qwen3's template gives one group per turn.

    Raises:
        ValueError: If the template does not write an answer after its prompt.
    """
    texts = {turn: render(messages[: turn + 1], False) for turn in turns}
    spans = {turn: _answer_span(render, messages, turn, texts[turn], ends) for turn in turns}
    left = list(turns)
    groups = list[list[int]]()
    while left:
        whole = texts[left[-1]]
        group = [turn for turn in left if whole.startswith(texts[turn][: spans[turn][1]])]
        left = [turn for turn in left if turn not in group]
        groups.insert(0, group)
    return groups


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Returns 1 for each token that lies within a span, else 0. A token that also holds letters of a prompt gets 0.

    Args:
        offsets (sequence of `tuple[int, int]`): The characters of each token, as fast tokenizers return them.
        spans (sequence of `tuple[int, int]`): The places of the answers, as [`answer_spans`] returns them.
    """
    mask = [0] * len(offsets)
    starts = [start for start, _ in offsets]
    for first, stop in spans:
        at = bisect_left(starts, first)
        # Offsets may leave out a token's leading space. If this space belongs to the prompt, the token does too.
        if 0 < at < len(offsets) and offsets[at - 1][1] < first:
            at += 1
        while at < len(offsets) and offsets[at][1] <= stop:
            mask[at] = 1
            at += 1
    return mask


def check_turns(text: str, messages: Messages) -> None:
    """Checks that the text of a conversation has every turn.

    Raises:
        ValueError: If the template leaves out or changes a turn. The message names the turn.
    """
    whole = squeezed(text)
    place = 0
    for at, message in enumerate(messages):
        # Some templates write the system's turn into a later turn of the user.
        is_system = message["role"] == "system"
        begin = 0 if is_system else place
        end = _end_of(said(message), whole, begin)
        if end == NOWHERE and message["role"] == "tool":
            end = _end_of(_said_in_json(message), whole, begin)
        if end == NOWHERE:
            raise ValueError(
                f"expected a chat template that writes every turn, got one that leaves out or changes turn {at} "
                f"(role {message['role']}); merge it into another turn, or leave the row out"
            )
        if not is_system:
            place = end


def said(message: Mapping[str, Any]) -> list[str]:
    """Returns a turn's texts without white space (templates trim it) and without thoughts (templates drop them)."""
    texts = _texts(message)
    if message["role"] == "assistant":
        texts = [text.rpartition("</think>")[2] for text in texts]
    return [squeezed(text) for text in texts]


def _said_in_json(message: Mapping[str, Any]) -> list[str]:
    """Returns a turn's texts as JSON strings without quotes: Llama's templates write tool results with `tojson`."""
    return [squeezed(json.dumps(text, ensure_ascii=False)[1:-1]) for text in _texts(message)]


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Returns a turn's texts unchanged."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [block["text"] for block in content if block["type"] == "text"]


def _end_of(pieces: Sequence[str], text: str, start: int) -> int:
    """Finds pieces in a text, one after the other, and returns where the last one ends, or `NOWHERE`."""
    for piece in pieces:
        found = text.find(piece, start)
        if found < 0:
            return NOWHERE
        start = found + len(piece)
    return start


def squeezed(text: str) -> str:
    """Returns a text without its white space."""
    return "".join(text.split())
