"""This module holds the answers of one way of decoding, in Spec-Bench's form.

`answers-METHOD.jsonl` has a line per question and repeat. Spec-Bench's `speed.py` and `equal.py` read these files.
Each choice has further fields, which these scripts do not know.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from dflash_hf.bench.questions import Key, fields_in

FinishReason = Literal["stop", "length"]
# The marks before and after a model's thought.
THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"
# Identifies one of a cell's answers: its question, and how often the question had been asked before.
Which = tuple[Key, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The answer of a method to one turn of a question, and how it was decoded.

    Args:
        text (`str`): The answer without special tokens.
        token_ids (`list[int]`): Its tokens, including the end token. Empty if a server does not report them.
        new_tokens (`int`): Number of tokens, including the end token.
        prompt_tokens (`int`): Number of tokens that were read before it.
        wall_time (`float`): Seconds of the call divided by the number of rows that it answered. So tokens divided by
            the sum of these seconds is what a batch makes per second.
        latency (`float`): Seconds of the call, which its caller had to wait.
        ttft (`float`, *optional*): Seconds from the start of the call until its first token.
        finish_reason (`str`): `"stop"` at an end token, `"length"` at the limit.
        begins_in_thought (`bool`): Whether the prompt ended with `<think>`, as some chat templates write it. For a
            server this is not known.
        committed (`list[int]`, *optional*): Tokens committed at each verify, including the bonus token but not the
            prefill's token. `None` for a method that does not draft, or does not report this.
        accepted (`list[int]`, *optional*): Proposals that matched at each verify, before any cut at the end.
        proposed (`list[int]`, *optional*): Proposals checked at each verify.
        checked (`list[int]`, *optional*): Positions of the block that each verify checked, if proposals were a tree or
            may have been one: the accepted positions, and the next one unless the accepted path ended in a leaf.
            `None` means the same numbers as `proposed`.
        counters (`dict[str, float]`, *optional*): How far a server's own counters of speculation have moved during the
            call, by vLLM's names. Only the first row of a call has them. `acceptance_length` is SGLang's mean after
            the call.
    """

    text: str
    token_ids: list[int]
    new_tokens: int
    prompt_tokens: int
    wall_time: float
    latency: float
    ttft: float | None = None
    finish_reason: FinishReason = "stop"
    begins_in_thought: bool = False
    committed: list[int] | None = None
    accepted: list[int] | None = None
    proposed: list[int] | None = None
    checked: list[int] | None = None
    counters: dict[str, float] | None = None

    @property
    def ends_in_thought(self) -> bool:
        """Whether the text ended, or was cut, before the end of its thought. Then it contains no answer."""
        begins = self.begins_in_thought or self.text.lstrip().startswith(THOUGHT)
        return begins and END_OF_THOUGHT not in self.text

    @property
    def said(self) -> str:
        """The text after the thought."""
        if self.ends_in_thought:
            return ""
        return self.text.rpartition(END_OF_THOUGHT)[2]

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens of each step, as Spec-Bench counts them. Without a draft, every token is a step."""
        if self.committed is None:
            return [1] * self.new_tokens
        return self.committed


# The fields of a turn that Spec-Bench's form has as one value per turn. The text is in its own list, `turns`.
_PER_TURN = tuple(field.name for field in fields(Turn) if field.name != "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a method to one question, or the reason why there is none.

    Args:
        repeat (`int`): How often the question had been asked before, from 0.
        model_id (`str`): Name of the method in this run, with the values that the run compares.
        turns (`tuple[Turn, ...]`): One per turn of the question; empty if the method failed.
        error (`str`, *optional*): Why there is no answer.
        tstamp (`float`): Time of the answer, in seconds since 1970.
    """

    dataset: str
    question_id: int | str
    category: str
    model_id: str
    tstamp: float
    subcategory: str = ""
    repeat: int = 0
    turns: tuple[Turn, ...] = ()
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether there is an error instead of turns."""
        return self.error is not None

    @property
    def key(self) -> Key:
        """Set and id of the question."""
        return self.dataset, self.question_id

    @property
    def which(self) -> Which:
        """Question and repeat, which identify the answer among those of its method."""
        return self.key, self.repeat

    def to_dict(self) -> dict[str, Any]:
        """Returns the line of the answers file. `choices` is empty if there is an error instead."""
        row: dict[str, Any] = {
            "question_id": self.question_id,
            "category": self.category,
            "answer_id": uuid.uuid5(
                uuid.NAMESPACE_URL, repr((self.key, self.model_id, self.repeat))
            ).hex,
            "model_id": self.model_id,
            "choices": [] if self.has_failed else [self._choice()],
            "tstamp": self.tstamp,
            "dataset": self.dataset,
            "repeat": self.repeat,
        }
        if self.subcategory:
            row["subcategory"] = self.subcategory
        if self.has_failed:
            row["error"] = self.error
        return row

    def _choice(self) -> dict[str, Any]:
        turns = [asdict(turn) for turn in self.turns]
        return {
            "index": 0,
            "turns": [turn.text for turn in self.turns],
            "decoding_steps": [len(turn.accept_lengths) for turn in self.turns],
            "accept_lengths": [length for turn in self.turns for length in turn.accept_lengths],
            **{name: [turn[name] for turn in turns] for name in _PER_TURN},
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Answer:
        """Reads a line of an answers file that `to_dict` wrote."""
        turns: list[Turn] = []
        for choice in row["choices"]:
            for number, text in enumerate(choice["turns"]):
                said = {name: choice[name][number] for name in _PER_TURN if name in choice}
                turn = Turn(**fields_in({**said, "text": text}, Turn))
                # Each of these lists has a number per verify.
                of_verifies = [turn.accepted, turn.proposed, turn.checked]
                if len({len(numbers) for numbers in of_verifies if numbers is not None}) > 1:
                    raise TypeError("lists of verifies that are not as long as each other")
                turns.append(turn)
        return cls(**fields_in(row, cls, turns=tuple(turns)))
