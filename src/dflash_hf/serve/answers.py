"""This module turns the tokens of an answer into pieces of text. A stream and a whole answer have the same pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash_hf.serve.markup import BROKEN, MarkupReader, Piece, marks_of


def hidden_tokens(tokenizer: PreTrainedTokenizerBase, markup: dict[str, Any]) -> frozenset[int]:
    """Returns the tokens that have no text: all special tokens, except the marks of a response template."""
    marks = marks_of(markup)
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    # A tokenizer may not name all of its special tokens: Llama 3 ends some answers with a token without such a name.
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[token_id] = token.content
    return frozenset(token_id for token_id, token in special.items() if token not in marks)


class TextReader:
    """Decodes tokens one by one, and returns their text in whole characters.

    A token is decoded together with the tokens of the piece before it, because these tokens decide whether a space
    comes before it.

    Args:
        tokenizer: The tokenizer that decodes the tokens.
        hidden (`frozenset[int]`): Tokens that have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.hidden = hidden
        # Tokens of the last piece that is more than spaces, and the tokens that were returned after it.
        self.told: list[int] = []
        self.new: list[int] = []  # later tokens, whose text has not been returned yet

    def add(self, token_id: int) -> str:
        """Returns the text that one more token completes."""
        if token_id in self.hidden:
            return ""
        self.new.append(token_id)
        text = self._new_text()
        is_whole = bool(text) and not text.endswith(BROKEN)
        if not is_whole:
            return ""
        # A tokenizer that drops a leading space decodes a piece of spaces to nothing, so such a piece is no beginning.
        if self._decoded(self.new):
            self.told = []
        self.told += self.new
        self.new = []
        return text

    def end(self) -> str:
        """Returns the rest of the text: an incomplete character, as `decode` writes it."""
        return self._new_text()

    def _new_text(self) -> str:
        told = self._decoded(self.told)
        text = self._decoded(self.told + self.new)
        if text.startswith(told):
            return text[len(told) :]
        # Some tokenizers write a mark for every byte of a run of bytes that is no text, also for its whole characters.
        # The text that was returned before cannot change any more.
        return self._decoded(self.new)

    def _decoded(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


@dataclass
class StopReader:
    """Cuts a text off before the first stop text in it.

    Args:
        stops (sequence of `str`): The stop texts.
    """

    stops: Sequence[str]
    held: str = ""
    is_stopped: bool = False

    def add(self, text: str) -> str:
        """Returns the text that cannot be part of a stop text any more. A possible beginning of one is held back."""
        if self.is_stopped or not self.stops:
            return "" if self.is_stopped else text
        text = self.held + text
        places = [text.find(stop) for stop in self.stops]
        found = [place for place in places if place >= 0]
        if found:
            self.is_stopped = True
            self.held = ""
            return text[: min(found)]
        num_held = max(_overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """Returns the text that was held back."""
        rest = self.held
        self.held = ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Returns how many letters at the end of a text may be the beginning of a stop text."""
    for number in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-number:]):
            return number
    return 0


class StopSearch:
    """Looks for stop texts in an answer, as its client sees the answer.

    Args:
        tokenizer: The tokenizer that decodes the answer.
        hidden (`frozenset[int]`): Tokens that have no text.
        stops (sequence of `str`): The stop texts.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, hidden: frozenset[int], stops: Sequence[str]
    ) -> None:
        self.text = TextReader(tokenizer, hidden)
        self.stops = StopReader(stops)

    @property
    def is_stopped(self) -> bool:
        """Whether one of the stop texts is in the answer."""
        return self.stops.is_stopped

    def add(self, token_id: int) -> None:
        """Reads the text of one more token. After that, [`is_stopped`] says whether a stop text is complete."""
        if self.stops.stops:
            self.stops.add(self.text.add(token_id))


@dataclass
class Answer:
    """One answer while it is generated.

    Args:
        text (`TextReader`): Decodes the tokens of the answer.
        stops (`StopReader`): Cuts the text off at a stop text.
        markup (`MarkupReader`): Splits the text into pieces.
        has_parallel_calls (`bool`): Whether the answer may contain more than one call. Otherwise, calls after the
            first one are dropped.
    """

    text: TextReader
    stops: StopReader
    markup: MarkupReader
    has_parallel_calls: bool
    ids: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])  # letters before each token
    num_letters: int = 0  # of the text of all tokens so far
    num_kept: int = 0  # of the text before a stop text
    has_calls: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has ended the answer."""
        return self.stops.is_stopped

    def add(self, ids: Sequence[int]) -> list[Piece]:
        """Returns the pieces that some more tokens complete. Tokens after a stop text are ignored."""
        pieces: list[Piece] = []
        for token_id in ids:
            if self.is_stopped:
                break
            self.ids.append(token_id)
            self.offsets.append(self.num_letters)
            self._tell(pieces, self.text.add(token_id))
        return self._noted(pieces)

    def end(self) -> list[Piece]:
        """Returns the pieces of the text that was held back, because a stop text or a call could have begun there."""
        pieces: list[Piece] = []
        if not self.is_stopped:
            self._tell(pieces, self.text.end())
        self._keep(pieces, self.stops.end())
        pieces += self.markup.end()
        return self._noted(pieces)

    def _tell(self, pieces: list[Piece], text: str) -> None:
        self.num_letters += len(text)
        self._keep(pieces, self.stops.add(text))

    def _keep(self, pieces: list[Piece], text: str) -> None:
        self.num_kept += len(text)
        pieces += self.markup.add(text)

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        noted: list[Piece] = []
        for piece in pieces:
            is_call = piece.kind == "call"
            is_one_too_many = is_call and self.has_calls and not self.has_parallel_calls
            if not is_one_too_many:
                noted.append(piece)
            self.has_calls |= is_call
        return _joined(noted)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Joins neighbouring pieces of the same kind. Every call stays a piece of its own."""
    joined: list[Piece] = []
    for piece in pieces:
        is_same = bool(joined) and joined[-1].kind == piece.kind != "call"
        if is_same:
            piece = replace(piece, text=joined.pop().text + piece.text)
        joined.append(piece)
    return joined
