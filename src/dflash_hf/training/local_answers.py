"""This module lets a local target answer prompts in batches, in one process or several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dflash_hf.data.row_files import RowFile, append_rows
from dflash_hf.errors import require
from dflash_hf.target_model.parts import end_tokens
from dflash_hf.training.answer_rows import (
    TOO_LONG,
    Answer,
    Answering,
    Question,
    answer_row,
    answers_in,
)
from dflash_hf.training.chat_dataset import ChatDataset
from dflash_hf.training.collators import POOL_BATCHES, collate, sorted_batches
from dflash_hf.training.identity import target_identity
from dflash_hf.training.questions import PlacedQuestions, Questions
from dflash_hf.training.target_answers import (
    generated,
    padding_of,
    random_numbers_of,
)


def _go_on() -> None:
    """Returns immediately. This is the `wait` of a single process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The place of this process among the processes that share the answering.

    Each process holds the whole target, or belongs to a group that holds the target together and answers the same
    prompts.

    Args:
        rank, size (`int`): The index of this process's group, and the number of groups. A process that holds the whole
            target is a group.
        wait (callable): A function that returns when all processes have called it.
        writes (`bool`): Whether this process writes the answers of its group. One process of each group does.
    """

    rank: int = 0
    size: int = 1
    wait: Callable[[], object] = _go_on
    writes: bool = True

    @property
    def is_first(self) -> bool:
        """True for the one process that does the work that is done once for all processes."""
        return self.rank == 0 and self.writes

    def part_of(self, path: Path) -> Path:
        """Returns the file that this process writes to: `path` for a single group, else a part to be merged later."""
        if self.size == 1:
            return path
        return path.with_suffix(f".rank{self.rank}.jsonl")


ALONE = Ranks()


class LocalAnswers:
    """Lets the target answer prompts in batches of similar length. A batch is cut from a pool of several batches.

    Each pool belongs to one process. The content of a batch and its random numbers do not depend on the number of
    processes.

    Args:
        common ([`Answering`]): The settings of the answers, and the file to write.
        target (`PreTrainedModel`): The target.
        draft (`PreTrainedModel`, *optional*): A draft for the target.
        ranks ([`Ranks`]): The processes.
    """

    def __init__(
        self,
        common: Answering,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        ranks: Ranks,
    ) -> None:
        self.common = common
        self.settings = common.settings
        self.target = target
        self.draft = draft
        self.ranks = ranks
        self._num_pools = 0  # the number of pools so far, over all rounds
        self._pools: dict[str, int] = {}  # id of a prompt -> its pool

    def identity(self) -> dict[str, Any]:
        """Returns the hashes that identify the target."""
        return target_identity(self.target)

    def answer(self, questions: Questions, done: Set[str]) -> None:
        """Answers the questions that are not done, together with the other processes.

        Args:
            done (set of `str`): The ids of questions that have been answered before.

        Raises:
            ValueError: If the disk is full. The answers so far are kept.
        """
        size = self.settings.batch_size * POOL_BATCHES
        own: list[range] = []  # the questions of each pool of this process
        for start in range(0, len(questions), size):
            pool = range(start, min(start + size, len(questions)))
            if self._num_pools % self.ranks.size == self.ranks.rank:
                own.append(pool)
            self._pools |= {questions.ids[at]: self._num_pools for at in pool}
            self._num_pools += 1
        for pool in own:
            num_done = sum(questions.ids[at] in done for at in pool)
            self.common.progress.expect(len(pool), num_done)
        for pool in own:
            if any(questions.ids[at] not in done for at in pool):
                self._answer_pool([questions[at] for at in pool], done)
        self.ranks.wait()
        if self.ranks.is_first:
            self._merge()
        self.ranks.wait()

    def _answer_pool(self, pool: Sequence[Question], done: Set[str]) -> None:
        """Answers the batches of a pool that have a question without an answer."""
        common = self.common
        placed = PlacedQuestions(common.prompts, pool)
        prompts = ChatDataset(placed, common.processing_class, answers=[[]] * len(pool))
        limit = self.settings.max_length
        fitting = [at for at, size in enumerate(prompts.lengths) if limit is None or size < limit]
        num_left_out = len(pool) - len(fitting)
        if num_left_out:
            common.report.left_out[TOO_LONG] += num_left_out
            common.progress.add(num_left_out, 0)
        for chosen in sorted_batches(fitting, prompts.lengths, self.settings.batch_size):
            batch = [question for _, question in (pool[at] for at in chosen)]
            if any(question["id"] not in done for question in batch):
                self._answer_batch(batch, [prompts[at] for at in chosen], done)

    def _answer_batch(
        self, batch: Sequence[dict[str, Any]], examples: Sequence[Any], done: Set[str]
    ) -> None:
        """Answers a batch, and writes the answers that do not exist yet."""
        seed = json.dumps([self.settings.seed, *(question["id"] for question in batch)]).encode()
        number = int.from_bytes(hashlib.sha256(seed).digest()[:4], "big") >> 1
        answers = self._by_target(examples, number)
        lines = [
            answer_row(self.settings, question, answer, len(example.input_ids))
            for question, answer, example in zip(batch, answers, examples, strict=True)
            if question["id"] not in done
        ]
        if self.ranks.writes:
            append_rows(self.ranks.part_of(self.settings.output), lines)
        self.common.report.num_new += len(lines)
        self.common.progress.add(len(lines), sum(len(line["answer_ids"]) for line in lines))

    def _by_target(self, examples: Sequence[Any], seed: int) -> list[Answer]:
        """Returns the target's answers to the prompts of a batch."""
        settings = self.settings
        tokenizer = self.common.template.tokenizer
        ends = end_tokens(self.target)
        if not ends and tokenizer.eos_token_id is not None:
            ends = [tokenizer.eos_token_id]
        what = "an end-of-sequence token of the target"
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
                "min_p": settings.min_p,
            }
        batch = collate(examples, padding, padding_side="left").to(self.target.device)
        with random_numbers_of(seed, self.target.device):
            written = generated(self.target, batch, ends, self.draft, **options)
        return [Answer(ids=ids, is_finished=ids[-1] in ends) for ids in written]

    def _merge(self) -> None:
        """Appends the answers of all processes to the output, in the order in which one process would write them."""
        parts = self.settings.parts()
        if not parts:
            return
        output = self.settings.output
        there = {row["id"] for row in answers_in(output)}
        places: list[tuple[int, int, int]] = []  # pool, file, row
        files = [RowFile(path) for path in parts]
        merged: list[Path] = []
        for number, file in enumerate(files):
            # A killed run may have left answers to later turns. They stay in their file until that round.
            is_known = True
            for at, row in enumerate(file):
                name = row["id"]
                is_known = is_known and name in self._pools
                if name in self._pools and name not in there:
                    there.add(name)
                    places.append((self._pools[name], number, at))
            if is_known:
                merged.append(file.path)
        append_rows(output, (files[number][at] for _, number, at in sorted(places)))
        for path in merged:
            path.unlink()
