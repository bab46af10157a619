"""This module is the engine of a pair. Jobs are rows of one running batch, and join and leave between two steps.

Everything happens in one thread, in turns ([`BatchEngine.turn`]): jobs join, all rows make one step, and rows leave.
If the batch refuses a job, `generate` answers this job alone after the rows before it have ended. The jobs behind it
wait until then, so that all jobs begin in the order in which they came. Only a job that the batch refuses while it
reads the prompt begins later: it begins after all jobs that the batch has taken in by then.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import InferenceThread

from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.errors import one_line
from dflash_hf.generation.request_stats import NewTokens, RequestStats
from dflash_hf.generation.running_batch import RunningBatch
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.serve.answers import StopSearch
from dflash_hf.serve.engine import Alone, Counts, Done, Ended, Job, Tokens, tell_end
from dflash_hf.serve.refusal import Refusal

ROWS_ON_CPU = 8


def rows_for(target: PreTrainedModel) -> int:
    """Returns how many jobs are decoded together by default.

    On a GPU this is one job: by default, `generate` captures its steps there, but a running batch decodes eagerly.
    """
    if target.device.type == "cuda":
        return 1
    return ROWS_ON_CPU


def no_room_beside(error: Exception | None) -> Refusal:
    """Returns the refusal of an answer for which other answers have left no memory."""
    what = "memory for this answer beside the others"
    return Refusal(f"expected {what}, got less ({one_line(error)}); ask again later", 503)


class BatchedJob:
    """One job in the batch.

    Args:
        job (`Job`): The job.
        tokenizer: The tokenizer that decodes the tokens, to find stop texts.
    """

    def __init__(self, job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
        self.job = job
        self.search = StopSearch(tokenizer, job.sampling.hidden, job.sampling.stops)
        self.started = time.perf_counter()
        self.stats = RequestStats()  # replaced by the batch's statistics once the job has joined
        self.ids: list[int] = []
        self.committed: list[int] = []  # tokens committed by each verify
        self.has_ended = False
        self.is_cut = False  # whether the limit has ended the answer
        self.is_refused = False  # whether the batch could not begin with the job
        self.error: Exception | None = None  # any other error that has ended the job

    def take(self, new: NewTokens) -> None:
        """Takes the tokens of a step, up to the token that completes a stop text."""
        try:
            self._take(new)
        # The job ends, because tokens of this step may be lost, and the next tokens would follow a gap.
        except Exception as error:
            self.has_ended = True
            self.error = error

    def _take(self, new: NewTokens) -> None:
        if self.has_ended:
            return
        if new.finished == "error":
            self.has_ended = True
            self.error = self.stats.exception
            self.is_refused = self.error is None
            return
        is_first = not self.ids
        taken: list[int] = []
        for token_id in new.token_ids:
            self.ids.append(token_id)
            taken.append(token_id)
            self.search.add(token_id)
            if self.search.is_stopped:
                break
        # The first token comes from the prefill, and not from a verify.
        if not is_first:
            self.committed.append(len(taken))
        self.has_ended = self.search.is_stopped or new.finished is not None
        self.is_cut = new.finished == "length" and not self.search.is_stopped
        self.job.receive(Tokens(ids=taken))

    def done(self) -> Done:
        """Returns the end of the job: whether the limit cut it, the counts of its verifies, and log-probabilities."""
        num_verifies = len(self.committed)
        counts = Counts(
            committed=tuple(self.committed),
            accepted=tuple(self.stats.accepted[:num_verifies]),
            proposed=tuple(self.stats.proposed[:num_verifies]),
            num_kept_tokens=self.stats.num_kept_tokens,
        )
        logprobs = self.stats.logprobs[: len(self.ids)]
        return Done(is_cut=self.is_cut, counts=counts, logprobs=logprobs)


class BatchEngine:
    """Answers several jobs together, in a thread of its own.

    Args:
        target, draft, tokenizer: The pair.
        note (callable): Gets a line of text about each job.
        max_rows (`int`): Maximum number of jobs that are decoded together. With 1, `generate` answers each job.
        max_kept_bytes (`int`): Maximum size of the keys and values that are kept from the last texts.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        note: Callable[[str], None],
        max_rows: int,
        max_kept_bytes: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.note = note
        self.max_rows = max_rows
        self._new_batch = functools.partial(
            RunningBatch, target, draft, max_rows=max_rows, max_kept_bytes=max_kept_bytes
        )
        self.batch = self._new_batch()
        self.stopping = threading.Event()
        self.one_by_one = Alone(target, draft, tokenizer, note, self.stopping)
        self.thread = InferenceThread()
        # Only the thread uses the following attributes.
        self.rows: dict[int, BatchedJob] = {}  # by the batch's ids, also for jobs that wait in it
        self.alone: deque[Job] = deque()  # jobs that `generate` will answer
        self.waiting: deque[Job] = deque()  # jobs behind them
        self.has_turn = False  # whether a turn is queued

    def submit(self, job: Job) -> None:
        """Queues a job for the thread, which takes it between two turns."""
        self.thread.submit(self._take, job)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in the thread, between two turns."""
        return self.thread.submit(function, *args).result()

    def stop(self) -> None:
        """Ends all rows after the running step, and all jobs that wait."""
        self.stopping.set()

    def _take(self, job: Job) -> None:
        self.waiting.append(job)
        if not self.has_turn:
            self.has_turn = True
            self.turn()

    def turn(self) -> None:
        """Makes one turn, and queues the next turn behind the jobs that have come in the meantime.

        An error that cannot be traced to one job ends all jobs, and the next job finds an empty batch.
        """
        try:
            self._work()
        except Exception as error:
            self._end_all(error)
        self.has_turn = bool(self.rows or self.alone or self.waiting)
        if self.has_turn:
            self.thread.submit(self.turn)

    def _work(self) -> None:
        """Takes jobs in, runs one step, and removes the jobs that have ended."""
        self._drop_unwanted()
        while self.waiting and not self.alone:
            self._join(self.waiting.popleft())
        if self.rows:
            self._step()
        elif self.alone:
            self.one_by_one.run(self.alone.popleft())
        self._drop_unwanted()

    def _join(self, job: Job) -> None:
        """Adds a job to the batch, or to the jobs that are answered alone."""
        if self.max_rows == 1:
            self.alone.append(job)
            return
        sampling = job.sampling
        # The inputs may contain images. The mask is not needed, because a single prompt has no padding.
        inputs: dict[str, Any] = dict(job.inputs)
        ids = inputs.pop("input_ids")
        inputs.pop("attention_mask", None)
        options = dict(sampling.options)
        if sampling.processors:
            options["logits_processor"] = list(sampling.processors)
        seed = sampling.seed
        if seed is None:
            # Otherwise, the random numbers would follow from the seed of an earlier job.
            seed = torch.seed()
        row = BatchedJob(job, self.tokenizer)
        try:
            id = self.batch.add(
                ids,
                max_new_tokens=sampling.max_new_tokens,
                seed=seed,
                on_tokens=row.take,
                num_logprobs=sampling.num_logprobs,
                **inputs,
                **options,
            )
        except ValueError as error:
            # `generate` answers this job, or says what is wrong with it.
            self.note(f"{job.name}: alone, {one_line(error)}")
            self.alone.append(job)
        except Exception as error:
            tell_end(job, error, 0, 0.0, self.note)
        else:
            row.stats = self.batch.stats_of(id)
            self.rows[id] = row

    def _step(self) -> None:
        """Runs a step over the rows, and removes the rows that have ended."""
        is_shared = len(self.rows) > 1
        try:
            self.batch.step()
        except Exception as error:
            self._end_lost(error)
        refused: list[Job] = []
        for id, row in list(self.rows.items()):
            if row.is_refused:
                self.note(f"{row.job.name}: alone, {row.stats.error}")
                refused.append(row.job)
                del self.rows[id]
            elif row.has_ended:
                has_no_room = isinstance(row.error, OutOfRoomError)
                # Later, without other rows, there may be room. With no other rows now, the answer is simply too long.
                if has_no_room and is_shared:
                    row.error = no_room_beside(row.error)
                self._leave(id, row.error or row.done())
        # These jobs came before all jobs that wait to be answered alone.
        self.alone.extendleft(reversed(refused))

    def _end_lost(self, error: Exception) -> None:
        """Ends the rows that an error has removed from the batch."""
        left = self.batch.ids
        for id, row in list(self.rows.items()):
            if id not in left and not row.has_ended:
                self._leave(id, error)

    def _end_all(self, error: Exception) -> None:
        """Ends all jobs with an error, and begins with an empty batch."""
        jobs = [*(row.job for row in self.rows.values()), *self.alone, *self.waiting]
        self.rows.clear()
        self.alone.clear()
        self.waiting.clear()
        self.batch = self._new_batch()
        for job in jobs:
            tell_end(job, error, 0, 0.0, self.note)

    def _drop_unwanted(self) -> None:
        """Ends the rows and jobs that nobody waits for."""
        for id, row in list(self.rows.items()):
            ended = self._unwanted(row.job)
            if ended is not None:
                self._leave(id, ended)
        for jobs in (self.alone, self.waiting):
            for job in list(jobs):
                ended = self._unwanted(job)
                if ended is not None:
                    jobs.remove(job)
                    tell_end(job, ended, 0, 0.0, self.note)

    def _unwanted(self, job: Job) -> Ended | None:
        try:
            job.check(self.stopping)
        except Ended as ended:
            return ended
        return None

    def _leave(self, id: int, end: Done | Exception) -> None:
        """Removes a row from the batch, and reports the end to its job."""
        self.batch.cancel(id)
        row = self.rows.pop(id)
        tell_end(row.job, end, len(row.ids), time.perf_counter() - row.started, self.note)
