"""Answers of one way of decoding, in Spec-Bench's form: a line of `answers-METHOD.jsonl` per question and repeat.

Spec-Bench's `speed.py` and `equal.py` read these files; what they do not know of stands beside it in each choice.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from dflash_hf.bench.questions import Key, fields_in

FinishReason = Literal["stop", "length"]
# The marks around what a model thinks before it answers
THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"
# An answer among a cell's: its question, and how often that had been asked before
Which = tuple[Key, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a method answered to one turn of a question, and how.

    Args:
        text (`str`): The answer, special tokens left out.
        token_ids (`list[int]`): Its tokens, the end token included; empty of a server that does not tell them.
        new_tokens (`int`): Number of tokens, the end token included.
        prompt_tokens (`int`): Tokens that were read before it.
        wall_time (`float`): Seconds of the call divided by the rows it answered, so that tokens over the sum of these
            is what a batch makes per second.
        latency (`float`): Seconds of the call, as the one who asks waits for it.
        ttft (`float`, *optional*): Seconds of the call until its first token.
        finish_reason (`str`): `"stop"` at an end token, `"length"` at the limit.
        begins_in_thought (`bool`): Whether the prompt ended in `<think>`, as some chat templates write it; not known
            of a server.
        committed (`list[int]`, *optional*): Tokens committed at each verify, the bonus included and the prefill's
            token left out; `None` of a method that does not draft, or does not tell.
        accepted (`list[int]`, *optional*): Proposals that matched at each verify, before any cut at the end.
        proposed (`list[int]`, *optional*): Proposals checked at each verify.
        checked (`list[int]`, *optional*): Positions of the block that each verify checked, where proposals were a tree
            or may have been: the accepted ones, and the next one unless the accepted path ended in a leaf. `None` says
            as many as `proposed`.
        counters (`dict[str, float]`, *optional*): What a server's own counters of speculation have moved by during the
            call, by vLLM's names; on the first row of a call only. `acceptance_length` is SGLang's mean afterwards.
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
        """Whether the text ended, or was cut, before its thought did: then it says nothing."""
        begins = self.begins_in_thought or self.text.lstrip().startswith(THOUGHT)
        return begins and END_OF_THOUGHT not in self.text

    @property
    def said(self) -> str:
        """What the turn says once it has thought."""
        if self.ends_in_thought:
            return ""
        return self.text.rpartition(END_OF_THOUGHT)[2]

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens of each step, as Spec-Bench counts them: without a draft every token is a step of its own."""
        if self.committed is None:
            return [1] * self.new_tokens
        return self.committed


# Fields of a turn that Spec-Bench's form has under the same name, one value per turn, except the text, its `turns`.
_PER_TURN = tuple(field.name for field in fields(Turn) if field.name != "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a method answered to one question, or why it did not.

    Args:
        repeat (`int`): How often it had been asked before, from 0.
        model_id (`str`): Name of the method in this run, with the values that the run compares.
        turns (`tuple[Turn, ...]`): One per turn of the question; none where it failed.
        error (`str`, *optional*): Why there is no answer.
        tstamp (`float`): When it was there, in seconds since 1970.
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
        """Whether there is an error in place of turns."""
        return self.error is not None

    @property
    def key(self) -> Key:
        """Set and id of the question that it answers."""
        return self.dataset, self.question_id

    @property
    def which(self) -> Which:
        """What it is found by among those of its method."""
        return self.key, self.repeat

    def to_dict(self) -> dict[str, Any]:
        """Returns the line of the answers file; `choices` is empty where there is an error instead."""
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
                # A number of each verify.
                of_verifies = [turn.accepted, turn.proposed, turn.checked]
                if len({len(numbers) for numbers in of_verifies if numbers is not None}) > 1:
                    raise TypeError("lists of verifies that are not as long as each other")
                turns.append(turn)
        return cls(**fields_in(row, cls, turns=tuple(turns)))
