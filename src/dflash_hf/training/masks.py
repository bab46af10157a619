"""Where the assistant's answers stand in a conversation whose chat template does not mark them.

An answer is what the template writes behind its own prompt (the turns before, and the generation prompt), up to the
token that ends the turn. Some templates write a turn differently once others follow (Qwen3's drops its thoughts): in a
longer conversation an answer only counts where that begins with the same prompt and answer, letter by letter.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_hf.errors import shown

Messages = Sequence[Mapping[str, Any]]
# A conversation, and whether a generation prompt follows -> text
Render = Callable[[Messages, bool], str]
Span = tuple[int, int]  # of characters
NOWHERE = -1
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as Transformers looks for them
REGENERATE = "let the target answer itself (`regenerate`), or add the markers"


def assistant_turns(messages: Messages) -> list[int]:
    """Returns which messages are the assistant's."""
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


def turns_to_train(messages: Messages) -> list[int]:
    """Returns which messages are the assistant's and count: those of weight 0 do not, as in OpenAI's format."""
    return [at for at in assistant_turns(messages) if messages[at].get("weight") != 0]


def answer_spans(
    render: Render, messages: Messages, turns: Sequence[int], ends: Sequence[str]
) -> list[Span]:
    """Returns where answers stand in the text of a conversation up to the last of them.

    Args:
        turns (sequence of `int`): Which messages, in order; each of them the assistant's.
        ends (sequence of `str`): Texts of tokens that can end a turn.

    Returns:
        `list[tuple[int, int]]`: First character of each answer, and the one behind its end token.

    Raises:
        ValueError: If the template writes a turn differently once others follow, or no answer behind its prompt.
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
    """Where a turn stands in the text that ends with it."""
    prompt = render(messages[:turn], True)
    if not text.startswith(prompt):
        raise ValueError(
            "expected a chat template with {% generation %} around assistant turns, or one that writes an answer "
            f"behind its own generation prompt, got one that does neither for turn {turn}; {REGENERATE}"
        )
    answer = text[len(prompt) :]
    written = squeezed(answer)
    pieces = said(messages[turn])
    # Without a generation prompt what begins the assistant's turns is nowhere to be seen: there has to be nothing.
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
        # The first of the end tokens behind the last letter
        found = re.search(f"(?:{end})(?=(?:\\s|{end})*$)", answer)
        if found:
            stop = found.end()
    return len(prompt), len(prompt) + stop


def groups_in_place(
    render: Render, messages: Messages, turns: Sequence[int], ends: Sequence[str]
) -> list[list[int]]:
    """Returns turns in groups that can be trained on in one sequence, that of the group's last turn.

    One group where the template leaves turns as they were written; with Qwen3's, one of each turn.

    Raises:
        ValueError: As [`answer_spans`].
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
    """Returns 1 for each token that lies within a span, else 0; one that also has letters of the prompt gets 0.

    Args:
        offsets (sequence of `tuple[int, int]`): Each token's characters, as fast tokenizers give them.
        spans (sequence of `tuple[int, int]`): Where answers stand.
    """
    mask = [0] * len(offsets)
    starts = [start for start, _ in offsets]
    for first, stop in spans:
        at = bisect_left(starts, first)
        # Offsets may leave out a token's leading space: the one before the answer is the prompt's.
        if 0 < at < len(offsets) and offsets[at - 1][1] < first:
            at += 1
        while at < len(offsets) and offsets[at][1] <= stop:
            mask[at] = 1
            at += 1
    return mask


def check_turns(text: str, messages: Messages) -> None:
    """Refuses a template that leaves out a turn.

    Raises:
        ValueError: Naming the turn.
    """
    whole = squeezed(text)
    place = 0
    for at, message in enumerate(messages):
        # Some templates put the system's turn into a later one of the user's.
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
    """Returns a turn's texts without white space, which templates trim, and without thoughts, which they drop."""
    texts = _texts(message)
    if message["role"] == "assistant":
        texts = [text.rpartition("</think>")[2] for text in texts]
    return [squeezed(text) for text in texts]


def _said_in_json(message: Mapping[str, Any]) -> list[str]:
    """The same as texts of JSON without their quotes: templates of Llama's write results of tools by `tojson`."""
    return [squeezed(json.dumps(text, ensure_ascii=False)[1:-1]) for text in _texts(message)]


def _texts(message: Mapping[str, Any]) -> list[str]:
    """A turn's texts, as they are."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [block["text"] for block in content if block["type"] == "text"]


def _end_of(pieces: Sequence[str], text: str, start: int) -> int:
    """Where the last of some pieces ends that stand in a text one behind the other; `NOWHERE` where they do not."""
    for piece in pieces:
        found = text.find(piece, start)
        if found < 0:
            return NOWHERE
        start = found + len(piece)
    return start


def squeezed(text: str) -> str:
    """Returns a text without its white space."""
    return "".join(text.split())
