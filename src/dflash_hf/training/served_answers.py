"""This module lets servers answer prompts. Each row is written as soon as its answer arrives.

A prompt that no server can answer is written to a file of errors, with its line and the reason, and is not asked
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from dflash_hf.data.openai_client import NoTextError, OpenAIClient, run_async
from dflash_hf.data.prompt_files import MEDIA, blocks_of
from dflash_hf.data.row_files import RowAppender
from dflash_hf.training.answer_rows import (
    TOO_LONG,
    Answering,
    Question,
    answer_row,
)
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.chat_template import today
from dflash_hf.training.questions import PlacedQuestions, Questions
from dflash_hf.training.server import ServerCheck, check_servers, checked_answer, request_of
from dflash_hf.training.server_pool import Job, ServerPool

# The number of prompts that are tokenized at once, while servers answer other prompts.
CHUNK = 32


@dataclass(slots=True, kw_only=True)
class PromptJob(Job):
    """A prompt that a server should answer.

    Args:
        row (`int`): The number of the row in the prompts' file.
        question (`dict`): The prompt. The paths of its images are relative to the folder of the prompts.
        placed (mapping): The prompt with full paths of its images.
        length (`int`): The number of tokens of the prompt. It is approximate if the prompt has images.
    """

    row: int
    question: dict[str, Any]
    placed: Mapping[str, Any]
    length: int


class ServedAnswers:
    """Lets servers answer prompts.

    Args:
        common ([`Answering`]): The settings of the answers, and the file to write.
        servers (sequence of [`OpenAIClient`]): The servers that run the target.
    """

    def __init__(self, common: Answering, servers: Sequence[OpenAIClient]) -> None:
        self.common = common
        self.settings = common.settings
        self.servers = servers
        options: Mapping[str, Any] = {}
        if len(common.prompts):
            options = common.prompts[0].get("chat_template_kwargs") or {}
        self.check = ServerCheck(common.processing_class, options, self.settings.of_server(0))
        self.answers = RowAppender(self.settings.output)
        self.errors = RowAppender(self.settings.errors)

    def identity(self) -> dict[str, Any]:
        """Returns the target's name, which identifies it. The addresses of the servers do not count.

        Raises:
            ValueError: If a server does not answer, or does not run the target.
        """
        return {"server_model": check_servers(self.servers, self.check)}

    def answer(self, questions: Questions, done: Set[str]) -> None:
        """Lets the servers answer the questions that are not done.

        Args:
            done (set of `str`): The ids of questions that have an answer, or that no server could answer.

        Raises:
            ValueError: If no server answers any more, a server encodes prompts differently than before, or the disk is
                full. The answers so far are kept.
        """
        pending = [at for at, name in enumerate(questions.ids) if name not in done]
        self.common.progress.expect(len(questions), len(questions) - len(pending))

        async def answer() -> None:
            pool = ServerPool(
                self.servers,
                self.settings.batch_size,
                ask=self._ask,
                check=self.check.ask,
                give_up=self._give_up,
            )
            await pool.run(self._jobs(questions, pending))

        if pending:
            with self.answers, self.errors:
                run_async(answer)

    def _jobs(self, questions: Questions, pending: Sequence[int]) -> Iterator[PromptJob]:
        """Yields the pending prompts that are short enough. They are read in chunks."""
        limit = self.settings.max_length
        for start in range(0, len(pending), CHUNK):
            part = [_of_today(questions[at]) for at in pending[start : start + CHUNK]]
            placed = PlacedQuestions(self.common.prompts, part)
            dataset = ChatDataset(placed, self.common.processing_class, answers=[[]] * len(part))
            for (row, question), whole, length in zip(part, placed, dataset.lengths, strict=True):
                if limit is not None and length >= limit:
                    self.common.report.left_out[TOO_LONG] += 1
                    self.common.progress.add(1, 0)
                else:
                    yield PromptJob(row=row, question=question, placed=whole, length=length)

    async def _ask(self, server: OpenAIClient, job: PromptJob) -> None:
        """Lets a server answer a prompt, and writes the answer."""
        body = request_of(self.common.template, job.placed, self.settings.of_server(job.row))
        reply = await server.ask(body)
        has_image = has_images(job.placed)
        exact_length = None if has_image else job.length
        answer = checked_answer(server, self.common.template, reply, exact_length)
        length = reply.prompt_tokens if has_image else job.length
        if not answer.ids:
            raise NoTextError(f"expected a text as the answer of {server.url}, got nothing")
        self.answers.append(answer_row(self.settings, job.question, answer, length))
        self.common.report.num_new += 1
        self.common.report.num_inexact += not answer.is_exact
        self.common.progress.add(1, len(answer.ids))

    def _give_up(self, job: PromptJob, reason: str) -> None:
        """Writes a prompt without an answer to the file of errors."""
        line = self.common.prompts.line_number(job.row)
        self.errors.append({"id": job.question["id"], "line": line, "reason": reason})
        self.common.progress.add(1, 0)


def _of_today(asked: Question) -> Question:
    """Returns a question with today's date as its `prompt_date`, because a server's template writes today's date."""
    row, question = asked
    if "prompt_date" not in question:
        return asked
    return row, {**question, "prompt_date": today()}


def has_images(row: Mapping[str, Any]) -> bool:
    """Returns True if a row has images or videos, in its messages or beside them."""
    in_messages = any(block["type"] in MEDIA for block in blocks_of(row["messages"]))
    return in_messages or "images" in row
