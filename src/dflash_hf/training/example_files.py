"""This module reads files of prepared or answered rows as examples, which are built when they are read.

Beside each file is a file `.meta.json`, which says from which data and settings the file was made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_hf.data.row_files import RowFile, read_object
from dflash_hf.errors import listed, one_line, require
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.chat_template import Processing
from dflash_hf.training.conversations import resolved
from dflash_hf.training.example import Example

logger = logging.getLogger(__name__)

WHOLE_ROW = -1  # the number of a sequence that is its whole row
UNKNOWN = 0  # the length of a sequence that does not state its number of tokens


class _Sequences(Sequence[dict[str, Any]]):
    """The rows of a file. A row occurs once for each of its sequences that is trained on."""

    def __init__(self, rows: RowFile, chosen: Sequence[tuple[int, int]]) -> None:
        self.file = rows
        self.chosen = chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        row, number = self.chosen[index]
        found = resolved(self.file[row], self.file.path.parent)
        if number == WHOLE_ROW:
            return found
        return {**found, "trained_turns": found["sequences"][number]["turns"]}

    def where(self, index: int) -> str:
        """Returns the name of a row for a message."""
        return self.file.where(self.chosen[index][0])

    def lines_of(self, indices: Sequence[int]) -> str:
        """Returns the name of several rows for a message."""
        numbers = [self.file.line_number(self.chosen[index][0]) for index in indices]
        return f"lines {listed(numbers)} of {self.file.path}"


def read_examples(
    path: str | Path, processing_class: Processing, max_length: int | None = None
) -> Sequence[Example]:
    """Returns the examples of a prepared or answered file.

    Each example is built when it is read, but its length is known before.

    Args:
        path (`Path`): A file that `prepare` or `regenerate` wrote, or any file of `messages` with or without
            `answer_ids`.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): The target's tokenizer or processor.
        max_length (`int`, *optional*): Longer sequences are cut to this number of tokens. A longer sequence is left
            out if no token of an answer would be left, or if it has images. The log says how many were left out.

    Raises:
        ValueError: If there is no such file, a row is malformed (the message names it), or no example is left.
    """
    file = RowFile(Path(path))
    chosen: list[tuple[int, int]] = []
    lengths: Sequence[int] = []
    num_prompts = 0
    for at, row in enumerate(file):
        found = _lengths_in(row, file.where(at))
        num_prompts += not found
        for number, length in found:
            chosen.append((at, number))
            lengths.append(length)
    if num_prompts and chosen:
        logger.warning(
            "%d of %d rows of %s have no answer to train on, and are left out",
            num_prompts,
            len(file),
            path,
        )
    rows = _Sequences(file, chosen)
    if UNKNOWN in lengths:  # another program wrote the file, so the tokens are counted here
        lengths = ChatDataset(rows, processing_class).lengths
    if max_length is not None and any(length > max_length for length in lengths):
        whole = ChatDataset(rows, processing_class)
        kept = [
            at
            for at, length in enumerate(lengths)
            if length <= max_length or _can_be_cut(whole, at, max_length)
        ]
        if len(kept) < len(lengths):
            logger.warning(
                "%d of %d sequences of %s are left out: at %d tokens no answer would be left of them, or an image cut",
                len(lengths) - len(kept),
                len(lengths),
                path,
                max_length,
            )
        rows = _Sequences(file, [chosen[at] for at in kept])
        lengths = [min(lengths[at], max_length) for at in kept]
    got = "none"
    action = "take other data, or a greater length"
    if num_prompts:
        got = f"{num_prompts} prompts without one"
        action = "let the target answer them (`regenerate`)"
    require(len(rows) > 0, f"answers to train on in {path}", got, action)
    return ChatDataset(rows, processing_class, lengths=lengths, max_length=max_length)


def _can_be_cut(examples: ChatDataset, at: int, max_length: int) -> bool:
    """Says whether an example, cut to a length, still has a token of an answer, and does not cut an image."""
    example = examples[at]
    return len(example.input_ids) <= max_length or (
        not example.has_images and 1 in example.loss_mask[:max_length]
    )


def _lengths_in(row: Mapping[str, Any], where: str) -> list[tuple[int, int]]:
    """Returns `(number, length)` for each sequence of a row. The number may be `WHOLE_ROW`, the length `UNKNOWN`."""
    messages = row.get("messages")
    require(isinstance(messages, list), f"messages in {where}", listed(row), "run `prepare`")
    if "answer_ids" in row:
        ids: Any = row["answer_ids"]
        is_good = isinstance(ids, list) and bool(ids) and all(_is_token(token) for token in ids)
        require(is_good, f"answer_ids, a list of token ids, in {where}", ids, "leave the row out")
        return [(WHOLE_ROW, _num_tokens(row, where))]
    if "sequences" not in row:
        if any(message.get("role") == "assistant" for message in row["messages"]):
            return [(WHOLE_ROW, UNKNOWN)]
        return []
    entries = row["sequences"]
    is_good = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    require(is_good, f"sequences as `prepare` writes them in {where}", entries, "run it again")
    known = range(len(row["messages"]))
    found: list[tuple[int, int]] = []
    for number, entry in enumerate(entries):
        turns = entry.get("turns")
        is_good = isinstance(turns, list) and bool(turns) and all(turn in known for turn in turns)
        require(is_good, f"turns of the row's in {where}", turns, "run `prepare` again")
        found.append((number, _num_tokens(entry, where)))
    return found


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _num_tokens(row: Mapping[str, Any], where: str) -> int:
    """Returns the number of tokens that a row or a sequence states, or `UNKNOWN`."""
    value = row.get("num_tokens")
    if value is None:
        return UNKNOWN
    is_good = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(is_good, f"a number of tokens as num_tokens in {where}", value, "leave it out")
    return value


def meta_path(path: Path) -> Path:
    """Returns the path of the file that says from which data and settings a stage's file was made."""
    return path.with_suffix(".meta.json")


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the content of the `.meta.json` file beside a stage's file.

    Raises:
        ValueError: If the file does not exist or cannot be read.
    """
    meta = meta_path(path)
    what = f"{meta} beside {path}, which says what that was made of"
    require(meta.is_file(), what, "no such file", f"remove {path}, or name another file")
    action = f"remove it and {path}, or name another file"
    try:
        return read_object(meta, action)
    except OSError as error:
        raise ValueError(f"expected {what}, got {one_line(error)}; {action}") from error
