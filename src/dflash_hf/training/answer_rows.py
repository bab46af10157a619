"""This module defines the settings and counts of a regeneration of answers, and the rows that it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_hf.data.row_files import RowFile
from dflash_hf.data.sampling import ALLOWED, check_sampling
from dflash_hf.errors import require
from dflash_hf.training.chat_template import ChatTemplate, Processing
from dflash_hf.training.conversations import resolved
from dflash_hf.training.progress import AnswerProgress

# (number of the row in the prompts, the prompt). The prompt becomes a row of the answers.
Question = tuple[int, dict[str, Any]]

# Settings that an answer depends on, besides prompt and target.
OF_THE_ANSWERS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "turns")
TOO_LONG = "prompts longer than the greatest length"
NEW_FILE = "remove it and what stands beside it, or name another"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a prompt.

    Args:
        ids (`list[int]`): The tokens of the answer, including the end token.
        is_finished (`bool`): Whether the answer ended by itself. Otherwise the limit cut it.
        is_exact (`bool`): Whether the tokens are the generated tokens, or at least decode to the same text.
    """

    ids: list[int]
    is_finished: bool
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateSettings:
    """The prompts to answer, and the settings of the answers.

    Args:
        prompts (`Path`): A file that [`prepare`] wrote.
        output (`Path`): The file to write, or to continue.
        max_new_tokens (`int`): The maximum number of tokens of an answer.
        max_length (`int`, *optional*): Prompts of this number of tokens or more are left out, because no token of
            their answers would be trained on.
        batch_size (`int`): Prompts that are answered at once. If servers answer, each of them gets this number.
        temperature (`float`): 0 is greedy.
        top_p (`float`), top_k (`int`), min_p (`float`): For sampled answers. 1, 0 and 0 mean the whole vocabulary.
        seed (`int`): For sampled answers. A server gets this seed plus the number of the row, so the answers do not
            depend on the order of the requests.
        turns (`str`): `"last"`: the user's last turn is answered, after the conversation as it is in the data.
            `"all"`: each turn of the user is answered, after the target's own answers to the earlier turns. The next
            turn is answered only if the answer before it was not cut, and not after results of tools.
    """

    prompts: Path
    output: Path
    max_new_tokens: int = 1024
    max_length: int | None = None
    batch_size: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    turns: Literal["last", "all"] = "last"

    def check(self) -> None:
        """Refuses settings that are out of range or contradict each other.

        Raises:
            ValueError: If a setting is refused. The message names the first such setting.
        """
        for name in ("max_new_tokens", "batch_size"):
            require(
                getattr(self, name) > 0,
                f"at least 1 as {name}",
                getattr(self, name),
                "give a larger one",
            )
        check_sampling({name: getattr(self, name) for name in ALLOWED})
        require(self.seed >= 0, "0 or more as seed", self.seed, "give a larger one")
        require(
            self.turns in ("last", "all"), "last or all as turns", self.turns, "choose one of them"
        )
        same = self.prompts.resolve() != self.output.resolve()
        require(
            same, "another file for the answers than the prompts'", str(self.output), "name another"
        )

    def sampling(self) -> dict[str, Any]:
        """Returns the settings that answers depend on, besides prompt and target."""
        return {name: getattr(self, name) for name in OF_THE_ANSWERS}

    def of_server(self, row: int) -> dict[str, Any]:
        """Returns all settings of a request to a server, because servers have defaults of their own."""
        whole_vocabulary = -1  # the value of vLLM and SGLang
        return {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or whole_vocabulary,
            "min_p": self.min_p,
            "seed": self.seed + row,
        }

    @property
    def errors(self) -> Path:
        """The file of the prompts without an answer. It is in the folder of the answers."""
        return self.output.with_suffix(".errors.jsonl")

    def parts(self) -> list[Path]:
        """Returns the files of processes that are not merged yet. The last run may have had another number of them."""
        return sorted(self.output.parent.glob(f"{self.output.stem}.rank*.jsonl"))

    def files(self) -> list[Path]:
        """Returns all files with answers."""
        return [self.output, *self.parts()]


@dataclass(slots=True)
class Regenerated:
    """Counts of the prompts and their answers.

    Args:
        num_prompts (`int`): Number of prompts.
        num_answers (`int`): Number of prompts with an answer.
        num_new (`int`): Number of prompts that this call answered.
        num_unfinished (`int`): Number of answers that the limit cut.
        num_errors (`int`): Number of prompts in the file of errors. They are not asked again.
        num_inexact (`int`): Answers of this call whose text, tokenized again, does not decode to the same text.
        num_tokens (`int`): Tokens of all answers.
        tokens_per_second (`float`): Rate of the answers of this call.
        seconds (`float`): Duration of this call.
        left_out (`Counter[str]`): Number of prompts that were left out, by reason.
    """

    num_prompts: int = 0
    num_answers: int = 0
    num_new: int = 0
    num_unfinished: int = 0
    num_errors: int = 0
    num_inexact: int = 0
    num_tokens: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """The objects that each kind of answering needs.

    Args:
        settings ([`RegenerateSettings`]): The settings of the answers, and the file to write.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`): The target's tokenizer or processor.
        template ([`ChatTemplate`]): The target's chat template.
        prompts (`RowFile`): The file of the prompts.
        report ([`Regenerated`]): The counts, which are updated.
        progress ([`AnswerProgress`]): The progress, which is updated for each prompt.
    """

    settings: RegenerateSettings
    processing_class: Processing
    template: ChatTemplate
    prompts: RowFile
    report: Regenerated
    progress: AnswerProgress


def answer_row(
    settings: RegenerateSettings, question: Mapping[str, Any], answer: Answer, prompt_length: int
) -> dict[str, Any]:
    """Returns a row of the answers. The paths of its images are relative to the folder of the answers.

    Args:
        question (mapping): The prompt. The paths of its images are relative to the folder of the prompts.
        prompt_length (`int`): The number of tokens of the prompt.
    """
    row = resolved(question, settings.prompts.parent, settings.output.parent)
    return {
        **row,
        "answer_ids": answer.ids,
        "finished": answer.is_finished,
        "num_tokens": prompt_length + len(answer.ids),
    }


def answers_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the answers in a file. If the file does not exist, there are none.

    Raises:
        ValueError: If a row is no answer. The message names its line.
    """
    if not path.is_file():
        return
    rows = RowFile(path)
    for at, row in enumerate(rows):
        good = (
            isinstance(row.get("id"), str)
            and isinstance(row.get("answer_ids"), list)
            and "finished" in row
        )
        require(good, f"an answer in {rows.where(at)}", row, NEW_FILE)
        yield row
