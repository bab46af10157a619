"""This module defines jobs and engines. An engine takes jobs and reports their tokens.

The server uses only the methods of an [`Engine`]. It submits jobs, and each job gets its events from the engine's
thread. The engine of a pair decodes several jobs together ([`dflash_hf.serve.rows`]). [`Alone`] answers the jobs that
cannot share a batch, by the target's `generate`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from dflash_hf.errors import one_line
from dflash_hf.generation.logprobs import TokenLogprob, logprobs_of
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.serve.answers import StopSearch
from dflash_hf.target_model.parts import end_tokens


class Ended(Exception):
    """Raised inside `generate` to end it, because the client has disconnected or the server stops."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a job's tokens are chosen.

    Args:
        max_new_tokens (`int`): Maximum number of tokens of the answer.
        options (`dict[str, Any]`): Further arguments of `generate`, by name.
        processors (`tuple[LogitsProcessor, ...]`): Logits processors that run beside those of `generate`.
        stops (`tuple[str, ...]`): Texts that end the answer.
        hidden (`frozenset[int]`): Tokens that have no text.
        seed (`int`, *optional*): Seed of the random numbers. Without a seed, the random numbers differ in every
            answer.
        num_logprobs (`int`): How many of the most likely tokens are reported at each place, with their
            log-probabilities; -1 for no log-probabilities.
    """

    max_new_tokens: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    processors: tuple[LogitsProcessor, ...] = ()
    stops: tuple[str, ...] = ()
    hidden: frozenset[int] = frozenset()
    seed: int | None = None
    num_logprobs: int = -1


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The number of tokens and proposals in the verifies of one job.

    Args:
        committed (`tuple[int, ...]`): Tokens committed by each verify, the bonus token included.
        accepted (`tuple[int, ...]`): Proposals that each verify accepted.
        proposed (`tuple[int, ...]`): Proposals that each verify checked.
        num_kept_tokens (`int`): Tokens at the beginning of the prompt whose keys and values were kept from other
            texts.
    """

    committed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    proposed: tuple[int, ...] = ()
    num_kept_tokens: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens committed per verify, the bonus token included; None if nothing was verified."""
        if not self.committed:
            return None
        return sum(self.committed) / len(self.committed)

    @property
    def num_used(self) -> int:
        """Proposals that became tokens of the answer."""
        kept = zip(self.accepted, self.committed, strict=True)
        return sum(min(accepted, committed) for accepted, committed in kept)

    @property
    def num_rejected(self) -> int:
        """Proposals that did not become tokens of the answer."""
        return sum(self.proposed) - self.num_used


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """New tokens of a job."""

    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Done:
    """The end of a job without an error.

    Args:
        is_cut (`bool`): Whether the limit ended the job, and not an end token or a stop text.
        counts (`Counts`): The numbers of its verifies.
        logprobs (`list[TokenLogprob]`): One per token of the answer, if the job asks for log-probabilities.
    """

    is_cut: bool
    counts: Counts
    logprobs: list[TokenLogprob]


Event = Tokens | Done | Exception


class Job:
    """One answer to generate.

    Args:
        name (`str`): Name of the job in the log.
        inputs (`dict[str, torch.Tensor]`): The prompt, one row, as `generate` takes it.
        sampling (`Sampling`): How its tokens are chosen.
        receive (callable): Gets the events of the job, in the engine's thread: first `Tokens`, any number of times,
            then once `Done` or the exception that was raised.
    """

    def __init__(
        self,
        name: str,
        inputs: dict[str, Tensor],
        sampling: Sampling,
        receive: Callable[[Event], None],
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.sampling = sampling
        self.receive = receive
        # Once this is set, the job ends at its next step, or before its first one.
        self.gone = threading.Event()
        self.submitted = time.perf_counter()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.inputs["input_ids"].shape[1])

    def check(self, stopping: threading.Event) -> None:
        """Raises `Ended` if the server stops or the client of the job has disconnected."""
        if stopping.is_set():
            raise Ended("the server stops")
        if self.gone.is_set():
            raise Ended("the client has gone")


class Engine(Protocol):
    """The methods by which the server gets answers."""

    def submit(self, job: Job) -> None:
        """Takes a job. The job's `receive` gets the events of the job."""
        ...

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in the engine's thread, between two steps, and returns its result."""
        ...

    def stop(self) -> None:
        """Ends all jobs at the next step, and also every job that comes later."""
        ...


class Alone:
    """Answers single jobs by the target's `generate` with the draft.

    Args:
        target, draft, tokenizer: The pair.
        note (callable): Gets a line of text about each job.
        stopping (`threading.Event`): Once set, a job ends at its next step.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        note: Callable[[str], None],
        stopping: threading.Event,
    ) -> None:
        self.target: Any = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.note = note
        self.stopping = stopping

    def run(self, job: Job) -> None:
        """Answers a job, and reports its end to it."""
        feed = _Feed(job, self.stopping)
        started = time.perf_counter()
        end: Done | Exception
        try:
            end = self._generate(job, feed)
        except Exception as error:
            end = error
        tell_end(job, end, feed.num_tokens, time.perf_counter() - started, self.note)

    def _generate(self, job: Job, feed: _Feed) -> Done:
        job.check(self.stopping)
        sampling = job.sampling
        options = dict(sampling.options)
        if sampling.processors:
            options["logits_processor"] = list(sampling.processors)
        stop = StopsAt(self.tokenizer, sampling, job.num_prompt_tokens)
        if sampling.stops:
            options["stopping_criteria"] = [stop]
        wants_logprobs = sampling.num_logprobs >= 0
        if wants_logprobs:
            options |= {"return_dict_in_generate": True, "output_logits": True}
        if sampling.seed is None:
            torch.seed()  # otherwise the random numbers would follow from the seed of the job before
        else:
            torch.manual_seed(sampling.seed)
        output = self.target.generate(
            **job.inputs,
            **options,
            max_new_tokens=sampling.max_new_tokens,
            assistant_model=self.draft,
            tokenizer=self.tokenizer,  # for stop strings of the target's `generation_config`
            streamer=feed,
        )
        ids = output
        logits: tuple[Tensor, ...] = ()
        if wants_logprobs:
            ids = output.sequences
            logits = output.logits
        new = ids[0, job.num_prompt_tokens :].tolist()
        of_row = [scores[0] for scores in logits]
        logprobs = logprobs_of(of_row, new, sampling.num_logprobs)
        is_ended = (
            new[-1] in end_tokens(self.target)
            or stop.is_said(new)
            or self._ends_with_own_string(ids)
        )
        is_full = len(new) >= sampling.max_new_tokens
        return Done(is_cut=is_full and not is_ended, counts=self._counts(), logprobs=logprobs)

    def _ends_with_own_string(self, ids: Tensor) -> bool:
        """Whether a stop string of the target's `generation_config` is at the end of `ids` `[1, T]`."""
        strings = self.target.generation_config.stop_strings
        if strings is None:
            return False
        criterion: Any = StopStringCriteria(self.tokenizer, strings)
        ends: Tensor = criterion(ids, None)
        return bool(ends[0])

    def _counts(self) -> Counts:
        stats: Any = self.draft.last_stats
        return Counts(
            committed=tuple(stats.num_committed[0]),
            accepted=tuple(stats.num_accepted[0]),
            proposed=tuple(stats.proposed_of(0)),
        )


def tell_end(
    job: Job, end: Done | Exception, num_tokens: int, seconds: float, note: Callable[[str], None]
) -> None:
    """Reports the end of a job to it, and notes a line about it. Unexpected errors are noted with their traceback."""
    if isinstance(end, Done):
        length = end.counts.acceptance_length or 0.0
        how = f"{len(end.counts.committed) + 1} forwards, acceptance length {length:.2f}"
    else:
        how = f"then {type(end).__name__}: {one_line(end)}"
        if not isinstance(end, Ended | ValueError):
            note("".join(traceback.format_exception(end)))
    job.receive(end)
    note(f"{job.name}: {num_tokens} tokens in {seconds:.2f} s, {how}")


class _Feed(BaseStreamer):
    """Reports the tokens of a job as they are generated, and ends its run if nobody waits for more."""

    def __init__(self, job: Job, stopping: threading.Event) -> None:
        self.job = job
        self.stopping = stopping
        self.has_begun = False
        self.num_tokens = 0

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, and then the tokens of each step. Raises `Ended` if nobody waits for more."""
        self.job.check(self.stopping)
        if not self.has_begun:
            self.has_begun = True
            return
        ids: list[int] = value.reshape(-1).tolist()
        self.num_tokens += len(ids)
        self.job.receive(Tokens(ids=ids))

    def end(self) -> None:
        """Does nothing, because [`Alone.run`] reports the end."""


class StopsAt(StoppingCriteria):
    """Stops a row once its answer contains a stop text. The prompt is not searched.

    Args:
        tokenizer: The tokenizer that decodes the answer.
        sampling (`Sampling`): Contains the stop texts, and the tokens that have no text.
        num_columns (`int`): Columns of the prompt.
    """

    is_row_wise = True

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, num_columns: int
    ) -> None:
        self.search = StopSearch(tokenizer, sampling.hidden, sampling.stops)
        self.num_columns = num_columns
        self.num_read = 0  # tokens of the answer that have been searched

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Returns whether the row stops, `[1]`. `input_ids` `[1, T]` are the tokens of the row so far."""
        has_stopped = self.is_said(input_ids[0, self.num_columns :].tolist())
        return cast(torch.BoolTensor, torch.tensor([has_stopped], device=input_ids.device))

    def is_said(self, ids: list[int]) -> bool:
        """Returns whether a stop text is in the answer `ids`, which must begin with the `ids` of the call before."""
        for token_id in ids[self.num_read :]:
            self.search.add(token_id)
        self.num_read = len(ids)
        return self.search.is_stopped
