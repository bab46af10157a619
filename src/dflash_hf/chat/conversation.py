"""What a chat remembers: turns, the runs that each answer came in, and the cache that the next turn goes on from."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from transformers import Cache

from dflash_hf.chat.pictures import Picture
from dflash_hf.generation.stats import SpeculativeStats

State = Literal["waiting", "running", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to answer.

    Args:
        use_draft (`bool`): With the draft, or by plain `generate`.
        temperature (`float`): 0 is greedy.
        max_new_tokens (`int`): Longest answer, in tokens.

    Raises:
        ValueError: If a number is outside what makes sense.
    """

    use_draft: bool = True
    temperature: float = 0.0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"expected a temperature from 0 (greedy) to 2, got {self.temperature}; change it")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected answers of at least 1 token, got {self.max_new_tokens}; change it")

    def for_generate(self) -> dict[str, Any]:
        """Returns the keywords for `generate`; what the target's own config says about sampling does not count."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        return {"max_new_tokens": self.max_new_tokens, **sampling}


@dataclass(slots=True, kw_only=True)
class Run:
    """Tokens that were committed together: by the prefill, by one verify, or by one plain forward.

    Args:
        text (`str`): Their text, without the bonus token's.
        bonus (`str`): Text of the target's own token, which comes last.
        num_tokens (`int`): How many there are, the bonus included.
        num_accepted (`int`): Proposals of the draft among them.
        seconds (`float`): When they arrived, from the start of the call.
    """

    text: str
    bonus: str
    num_tokens: int
    num_accepted: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer, as far as it has come.

    Args:
        drafted (`bool`): Whether a draft was used.
        block_size (`int`): Most tokens that one forward of the target can commit.
        runs (`list[Run]`): What arrived, in order; the first is the prefill's token.
        state (`str`): `"waiting"` (for another conversation's run), `"running"`, `"done"`, `"stopped"`, `"failed"`.
        seconds (`float`): Time since the call of `generate`, at the end the call's.
        num_prompt_tokens (`int`): Tokens of the conversation before it.
        num_cached_tokens (`int`): Those of them that were in the cache already.
        stats (`SpeculativeStats`, *optional*): The run's own, once it has ended with a draft.
        error (`str`): Why it failed.
    """

    drafted: bool
    block_size: int
    runs: list[Run] = field(default_factory=list[Run])
    state: State = "waiting"
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    stats: SpeculativeStats | None = None
    error: str = ""

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(run.text + run.bonus for run in self.runs)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, an end-of-sequence token included."""
        return sum(run.num_tokens for run in self.runs)

    @property
    def verifies(self) -> list[Run]:
        """The runs that a verify committed: all but the prefill's."""
        return self.runs[1:]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify, the bonus included; 0 before the first."""
        return sum(run.num_tokens for run in self.verifies) / len(self.verifies) if self.verifies else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens by time since the call, prefill included; 0 before the first."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def acceptance_per_position(self) -> list[float]:
        """Share of verifies that accepted the proposal at each position: `block_size - 1` values, joint as vLLM's."""
        counts = [run.num_accepted for run in self.verifies]
        return [sum(n > i for n in counts) / len(counts) if counts else 0.0 for i in range(self.block_size - 1)]

    def histogram(self) -> list[int]:
        """Verifies by the number of tokens that they committed, from 1 to `block_size`."""
        counts = [run.num_tokens for run in self.verifies]
        return [counts.count(length) for length in range(1, self.block_size + 1)]


@dataclass(slots=True, kw_only=True)
class Turn:
    """A message and its answer."""

    text: str
    pictures: list[Picture]
    answer: Answer


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """One person's conversation.

    Args:
        turns (`list[Turn]`): Finished ones; the newest may be running.
        cache (`Cache`, *optional*): Of the target, with the draft's context attached, after the last drafted answer.
        cached_ids (`torch.Tensor` of shape `[1, C]`, *optional*): The tokens of its columns.
        stop (`threading.Event`): Set to end the run in progress; every run has its own.
        left (`bool`): The person began a new one, or went, while a run was in progress.
    """

    turns: list[Turn] = field(default_factory=list[Turn])
    cache: Cache | None = None
    cached_ids: Tensor | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    left: bool = False

    def messages(self, in_parts: bool) -> list[dict[str, Any]]:
        """The conversation for a chat template, from its beginning to the newest question.

        Turns without an answer are left out, the newest excepted.

        Args:
            in_parts (`bool`): Contents as lists of parts, pictures before the text, as a processor's template takes
                them; otherwise as strings, for a tokenizer's.
        """
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            is_last = turn is self.turns[-1]
            if not turn.answer.text and not is_last:
                continue
            pictures = [{"type": "image", "image": picture.image} for picture in turn.pictures]
            messages.append({"role": "user", "content": _content(turn.text, pictures, in_parts)})
            if not is_last:
                messages.append({"role": "assistant", "content": _content(turn.answer.text, [], in_parts)})
        return messages

    @property
    def pictures(self) -> list[Picture]:
        """All pictures that the target sees at the next answer."""
        last = self.turns[-1:]
        return [picture for turn in self.turns if turn.answer.text or turn in last for picture in turn.pictures]

    @property
    def num_bytes(self) -> int:
        """Memory that its pictures take."""
        return sum(picture.num_bytes for turn in self.turns for picture in turn.pictures)

    def forget(self) -> None:
        """Drops the cache; the next turn prefills the whole conversation."""
        self.cache, self.cached_ids = None, None


def _content(text: str, pictures: list[dict[str, Any]], in_parts: bool) -> Any:
    return [*pictures, {"type": "text", "text": text}] if in_parts else text


__all__ = ["Answer", "Conversation", "Run", "Settings", "State", "Turn"]
