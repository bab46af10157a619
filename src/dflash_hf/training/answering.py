"""The second stage of training: the target's own answers to prepared conversations, written batch by batch.

A row of the file is a prompt with its answer: `id` (of the prompt), `messages`, `images` and `chat_template_kwargs`
where there are any, `answer_ids` (its end token included), `finished` (whether it came to that), `num_tokens` (of
both). Beside it stands which target wrote it, and how. A batch is on the disk before the next one is asked; a batch of
which one is missing is asked again, with the same random numbers, so that a run that was killed ends as one that was
not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from dflash_hf.data.openai_client import OpenAIClient
from dflash_hf.data.row_files import RowFile, append_rows, repair, write_rows
from dflash_hf.errors import require
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.collators import POOL_BATCHES, collate, sorted_batches
from dflash_hf.training.conversations import content_id, resolved
from dflash_hf.training.examples import meta_path, read_meta
from dflash_hf.training.identity import target_identity, text_identity
from dflash_hf.training.messages import ChatTemplate, Processing
from dflash_hf.training.regenerate import end_tokens, generated, padding_of
from dflash_hf.training.server import Answer, served_answers, served_model

logger = logging.getLogger(__name__)

NEW_FILE = "remove it and what stands beside it, or name another"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateSettings:
    """What to answer, and how.

    Args:
        prompts (`Path`): What [`prepare`] wrote.
        output (`Path`): The file to write, or to go on with.
        max_new_tokens (`int`): Longest answer in tokens.
        max_length (`int`, *optional*): Prompts of as many tokens are left out: no answer would be trained on.
        batch_size (`int`): Prompts that are answered at once.
        temperature (`float`): 0 is greedy.
        top_p (`float`), top_k (`int`): Of sampled answers; 1 and 0 are the whole vocabulary.
        seed (`int`): Of sampled answers.
        turns (`str`): `"last"`: what the user said last is answered, behind the conversation as the data have it.
            `"all"`: each of the user's turns is, behind the target's own answers to the earlier ones; as far as those
            came to their end, and not behind results of tools.
    """

    prompts: Path
    output: Path
    max_new_tokens: int = 1024
    max_length: int | None = None
    batch_size: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    turns: Literal["last", "all"] = "last"

    def check(self) -> None:
        """Refuses settings that cannot be run.

        Raises:
            ValueError: Naming the first of them.
        """
        for name in ("max_new_tokens", "batch_size"):
            require(
                getattr(self, name) > 0,
                f"at least 1 as {name}",
                getattr(self, name),
                "give a larger one",
            )
        require(
            0 <= self.temperature < float("inf"),
            "0 or more as temperature",
            self.temperature,
            "0 is greedy",
        )
        require(
            0 < self.top_p <= 1,
            "above 0 and at most 1 as top_p",
            self.top_p,
            "1 is the whole vocabulary",
        )
        require(self.top_k >= 0, "0 or more as top_k", self.top_k, "0 is the whole vocabulary")
        require(
            self.turns in ("last", "all"), "last or all as turns", self.turns, "choose one of them"
        )
        same = self.prompts.resolve() != self.output.resolve()
        require(
            same, "another file for the answers than the prompts'", str(self.output), "name another"
        )

    def sampling(self) -> dict[str, Any]:
        """Returns what answers depend on beside prompt and target."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "turns")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class Regenerated:
    """What became of the prompts.

    Args:
        num_prompts (`int`): How many there are.
        num_answers (`int`): How many of them have an answer.
        num_new (`int`): How many were answered now.
        num_unfinished (`int`): Answers among all that the limit cut.
        num_tokens (`int`): Tokens of all answers.
        seconds (`float`): That this took.
        left_out (`Counter[str]`): Reason -> how many prompts.
    """

    num_prompts: int = 0
    num_answers: int = 0
    num_new: int = 0
    num_unfinished: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter[str])


def regenerate(
    settings: RegenerateSettings,
    target: PreTrainedModel | OpenAIClient,
    processing_class: Processing,
    draft: PreTrainedModel | None = None,
) -> Regenerated:
    """Lets the target answer prepared conversations; goes on with a file that is there.

    Args:
        draft (`PreTrainedModel`, *optional*): A draft of the target's to be faster: greedy answers are the same.

    Raises:
        ValueError: If the prompts cannot be read (naming the line), the file was begun by another target or with other
            settings, the disk is full, or a server does not answer. What has been answered is kept.
    """
    settings.check()
    run = _Run(settings, target, processing_class, draft)
    report = run.report
    run.begin()
    began = time.monotonic()
    asked = run.first_questions()
    while asked:
        report.num_prompts += len(asked)
        run.answer([question for _, question in asked])
        asked = run.next_questions(asked)
    report.seconds = time.monotonic() - began
    for row in run.answers():
        report.num_answers += 1
        report.num_tokens += len(row["answer_ids"])
        report.num_unfinished += not row["finished"]
    require(
        report.num_answers > 0,
        f"prompts in {settings.prompts}",
        "none to answer",
        "take other data",
    )
    logger.info("%s", report)
    return report


def check_answers(path: Path, target: PreTrainedModel, processing_class: Processing) -> None:
    """Refuses answers of another target than the one that is to be trained for.

    Files without a word on who wrote them are taken, and answers of a server by their chat template alone.

    Raises:
        ValueError: If the target or its chat template has changed since.
    """
    if not meta_path(path).is_file():
        logger.info("nothing stands beside %s that says which target wrote its answers", path)
        return
    known = read_meta(path).get("target")
    if not isinstance(known, dict):
        return
    now = {
        **target_identity(target),
        "chat_template": text_identity(ChatTemplate(processing_class).text),
    }
    names = {"config": "settings", "weights": "weights", "chat_template": "chat template"}
    changed = [told for name, told in names.items() if name in known and known[name] != now[name]]
    if changed:
        raise ValueError(
            f"expected the target that wrote the answers of {path}, got one whose {' and '.join(changed)} differ: it "
            "changed since; let it answer again into another file, or load what it was"
        )


# Which row of the prompts, and the prompt: a row of the answers to be
Question = tuple[int, dict[str, Any]]


@dataclass
class _Run:
    """One call of [`regenerate`]."""

    settings: RegenerateSettings
    target: PreTrainedModel | OpenAIClient
    processing_class: Processing
    draft: PreTrainedModel | None
    report: Regenerated = field(default_factory=Regenerated)
    done: set[str] = field(default_factory=set[str])
    seen: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.processing_class)
        self.rows = RowFile(self.settings.prompts)

    def begin(self) -> None:
        """Reads what has been answered before, and refuses what is not this run's."""
        output = self.settings.output
        target = self.target
        if isinstance(target, OpenAIClient):
            by = {"server_model": served_model(target)}
        else:
            by = target_identity(target)
        made = {
            "target": {**by, "chat_template": text_identity(self.template.text)},
            **self.settings.sampling(),
        }
        if not output.exists():
            write_rows(meta_path(output), [made])
            return
        known = read_meta(output)
        changed = [name for name in made if known.get(name) != made[name]]
        what = f"{output} as this target with these settings began it"
        require(not changed, what, f"one with another {' and '.join(changed)}", NEW_FILE)
        repair(output)
        self.done = {row["id"] for row in self.answers()}

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yields what has been answered."""
        if not self.settings.output.is_file():
            return
        rows = RowFile(self.settings.output)
        for at, row in enumerate(rows):
            good = (
                isinstance(row.get("id"), str)
                and isinstance(row.get("answer_ids"), list)
                and "finished" in row
            )
            require(good, f"an answer in {rows.where(at)}", row, NEW_FILE)
            yield row

    def first_questions(self) -> list[Question]:
        """Returns what is asked of each conversation first, in their order."""
        asked: list[Question] = []
        for at, row in enumerate(self.rows):
            messages = row.get("messages")
            good = isinstance(messages, list) and all(
                isinstance(m, dict) and "role" in m for m in messages
            )
            require(good, f"messages in {self.rows.where(at)}", row, "run `prepare`")
            users = _users(row["messages"])
            require(
                bool(users),
                f"a turn of the user's in {self.rows.where(at)}",
                row,
                "leave the row out",
            )
            stop = users[0]
            if self.settings.turns == "last":
                stop = users[-1]
            self._ask(asked, at, row, row["messages"][: stop + 1])
        return asked

    def next_questions(self, asked: Sequence[Question]) -> list[Question]:
        """Returns what is asked behind the answers to some questions."""
        more: list[Question] = []
        if self.settings.turns == "last":
            return more
        answers = {row["id"]: row for row in self.answers()}
        for at, question in asked:
            answer = answers.get(question["id"])
            if answer is None or not answer["finished"]:
                continue
            messages = self.rows[at]["messages"]
            users = _users(messages)
            number = len(_users(question["messages"]))
            if number >= len(users):
                continue
            between = messages[users[number - 1] + 1 : users[number]]
            if any(message["role"] != "assistant" for message in between):
                continue
            said = self.template.tokenizer.decode(answer["answer_ids"], skip_special_tokens=True)
            own = {"role": "assistant", "content": said}
            self._ask(more, at, question, [*question["messages"], own, messages[users[number]]])
        return more

    def _ask(
        self, asked: list[Question], at: int, row: Mapping[str, Any], messages: list[Any]
    ) -> None:
        """Adds a question, unless it has been asked."""
        names = [name for name in ("images", "chat_template_kwargs") if row.get(name)]
        question = {"messages": messages, **{name: row[name] for name in names}}
        name = content_id(question)
        if name in self.seen:
            self.report.left_out["duplicates"] += 1
            return
        self.seen.add(name)
        asked.append((at, {"id": name, **question}))

    def answer(self, questions: Sequence[dict[str, Any]]) -> None:
        """Answers questions, batches of similar length out of pools of some batches, and writes each batch."""
        pool = self.settings.batch_size * POOL_BATCHES
        for start in range(0, len(questions), pool):
            part = questions[start : start + pool]
            if all(question["id"] in self.done for question in part):
                continue
            placed = [resolved(question, self.settings.prompts.parent) for question in part]
            prompts = ChatDataset(placed, self.processing_class, answers=[[]] * len(part))
            limit = self.settings.max_length
            fitting = [
                at for at, size in enumerate(prompts.lengths) if limit is None or size < limit
            ]
            if len(fitting) < len(part):
                self.report.left_out["prompts longer than the greatest length"] += len(part) - len(
                    fitting
                )
            for chosen in sorted_batches(fitting, prompts.lengths, self.settings.batch_size):
                if any(part[at]["id"] not in self.done for at in chosen):
                    self._answer_batch(part, prompts, chosen)
            logger.info("%d answers of %d", start + len(part), len(questions))

    def _answer_batch(
        self, questions: Sequence[dict[str, Any]], prompts: ChatDataset, chosen: list[int]
    ) -> None:
        rows = [questions[at] for at in chosen]
        seed = json.dumps([self.settings.seed, *(row["id"] for row in rows)]).encode()
        number = int.from_bytes(hashlib.sha256(seed).digest()[:4], "big") >> 1
        if isinstance(self.target, OpenAIClient):
            written = self._by_server(self.target, prompts, chosen, number)
            lengths = [prompts.lengths[at] for at in chosen]
        else:
            examples = [prompts[at] for at in chosen]
            written = self._by_target(self.target, examples, number)
            lengths = [len(example.input_ids) for example in examples]
        lines: list[dict[str, Any]] = []
        for row, (ids, finished), length in zip(rows, written, lengths, strict=True):
            if not ids:
                self.report.left_out["empty answers"] += 1
            elif row["id"] not in self.done:
                row = resolved(row, self.settings.prompts.parent, self.settings.output.parent)
                lines.append(
                    {
                        **row,
                        "answer_ids": ids,
                        "finished": finished,
                        "num_tokens": length + len(ids),
                    }
                )
        append_rows(self.settings.output, lines)
        self.done.update(line["id"] for line in lines)
        self.report.num_new += len(lines)

    def _by_target(
        self, target: PreTrainedModel, examples: Sequence[Any], seed: int
    ) -> list[Answer]:
        settings = self.settings
        tokenizer = self.template.tokenizer
        ends = end_tokens(target)
        if not ends and tokenizer.eos_token_id is not None:
            ends = [tokenizer.eos_token_id]
        what = "an end token of the target's"
        require(bool(ends), what, None, "set generation_config.eos_token_id")
        padding = padding_of(tokenizer, ends[0])
        options: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "pad_token_id": padding,
        }
        sampled = settings.temperature > 0
        options["do_sample"] = sampled
        if sampled:
            options |= {
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k,
            }
        batch = collate(examples, padding, padding_side="left").to(target.device)
        with torch.random.fork_rng(enabled=sampled):
            if sampled:
                torch.manual_seed(seed)
            written = generated(target, batch, ends, self.draft, **options)
        return [(ids, ids[-1] in ends) for ids in written]

    def _by_server(
        self, server: OpenAIClient, prompts: ChatDataset, chosen: Sequence[int], seed: int
    ) -> list[Answer]:
        settings = self.settings
        rows = [prompts.rows[at] for at in chosen]
        lengths = [None if _has_images(prompts.rows[at]) else prompts.lengths[at] for at in chosen]
        options: dict[str, Any] = {
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
        }
        options |= {"top_p": settings.top_p, "seed": seed}
        if settings.top_k:
            options["top_k"] = settings.top_k
        return served_answers(server, self.template, rows, lengths, options)


def _users(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [at for at, message in enumerate(messages) if message["role"] == "user"]


def _has_images(row: Mapping[str, Any]) -> bool:
    contents = [message.get("content") for message in row["messages"]]
    return (
        any(block["type"] == "image" for c in contents if isinstance(c, list) for block in c)
        or "images" in row
    )
