"""This module distributes many jobs over several servers. Each server has a fixed number of requests in flight.

A server that fails is set aside and tried again later, after longer and longer pauses. The other servers continue with
its jobs. A job is given up if a server refuses it permanently (for example because its prompt is too long), or if it
fails repeatedly while the server still answers the check. A failed job does not end the run. The run ends if no server
answers any more.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx

from dflash_hf.data.openai_client import NoTextError, OpenAIClient
from dflash_hf.errors import is_ours, listed, one_line

logger = logging.getLogger(__name__)

# Statuses with which a server permanently refuses a request: it is malformed, too large, or of the wrong form.
FOR_GOOD = (400, 413, 422)
# Statuses of a server, or of a proxy before it, that cannot answer any request at the moment.
BUSY = (429, 502, 503, 504)
MAX_FAILURES = 5  # failures of a job until it is given up, if its server passes the check
FAILURES_ASIDE = 3  # consecutive failures of a server until it is set aside
FIRST_PAUSE = 1.0  # seconds
LONGEST_PAUSE = 10.0
LONGEST_ASKED_PAUSE = 300.0  # the longest pause that a server can request
# The run ends if no server answers for this number of seconds. A restarted server first has to load its weights.
PATIENCE = 1800.0
# The queue holds this number of jobs per request in flight. Jobs are made when they are needed.
QUEUED_PER_REQUEST = 2
QUEUE_CHECK_SECONDS = 0.05


class OtherPromptError(ValueError):
    """Raised for an answer to another prompt, or in another form. Another request would give the same answer."""


@dataclass(slots=True)
class Job:
    """A job for a server.

    Args:
        num_failures (`int`): The number of times that the job has failed.
    """

    num_failures: int = 0


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(slots=True)
class _Server:
    """A server and its state."""

    client: OpenAIClient
    is_well: asyncio.Event = field(default_factory=asyncio.Event)
    num_failures: int = 0  # in a row
    num_pauses: int = 0  # in a row
    last_success: float = field(default_factory=time.monotonic)

    def is_failing(self) -> bool:
        return self.num_failures > 0 or self.num_pauses > 0 or not self.is_well.is_set()

    def succeed(self) -> None:
        self.num_failures = 0
        self.num_pauses = 0
        self.last_success = time.monotonic()


class ServerPool(Generic[AnyJob]):
    """A pool of servers that share jobs.

    Args:
        clients (iterable of [`OpenAIClient`]): The servers.
        at_once (`int`): The number of requests in flight for each server.
        ask (callable): Lets a client do a job, and keeps the result. It raises the errors of the client, and
            [`OtherPromptError`].
        check (callable): Repeats a request that a client has answered before, to find out whether the server or the
            job causes a failure. It raises the same errors.
        give_up (callable): It is called with a job that no server can do, and the reason.
    """

    def __init__(
        self,
        clients: Iterable[OpenAIClient],
        at_once: int,
        ask: Callable[[OpenAIClient, AnyJob], Awaitable[None]],
        check: Callable[[OpenAIClient], Awaitable[None]],
        give_up: Callable[[AnyJob, str], None],
    ) -> None:
        self.servers = [_Server(client) for client in clients]
        self.at_once = at_once
        self.ask = ask
        self.check = check
        self.give_up = give_up
        self._jobs: asyncio.Queue[AnyJob] = asyncio.Queue()
        self._returns: set[asyncio.Task[None]] = set()

    async def run(self, jobs: Iterable[AnyJob]) -> None:
        """Runs until all jobs are done or given up.

        Args:
            jobs (iterable): The jobs. They are read when they are needed.

        Raises:
            ValueError: If no server answers any more, or a server encodes prompts differently than before.
        """
        try:
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                for server in self.servers:
                    await stack.enter_async_context(server.client)
                    server.is_well.set()
                self._group = group
                tasks = [
                    group.create_task(self._work(server))
                    for server in self.servers
                    for _ in range(self.at_once)
                ]
                await self._feed(jobs)
                await self._jobs.join()
                for task in (*tasks, *self._returns):
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _feed(self, jobs: Iterable[AnyJob]) -> None:
        """Puts jobs into the queue, which holds only a few more jobs than requests in flight."""
        most = QUEUED_PER_REQUEST * self.at_once * len(self.servers)
        for job in jobs:
            while self._jobs.qsize() >= most:
                await asyncio.sleep(QUEUE_CHECK_SECONDS)
            self._jobs.put_nowait(job)
            await asyncio.sleep(0)

    async def _work(self, server: _Server) -> None:
        """Takes a job, sends it to a server, and repeats this. There is one such task per request in flight."""
        while True:
            await server.is_well.wait()
            job = await self._jobs.get()
            if server.is_well.is_set():
                await self._try(server, job)
            else:  # the server was set aside while this task waited for a job
                self._jobs.put_nowait(job)
            self._jobs.task_done()

    async def _try(self, server: _Server, job: AnyJob) -> None:
        """Lets a server do a job. If the server fails, the job is put back into the queue or given up."""
        try:
            await self.ask(server.client, job)
        except NoTextError as error:
            server.succeed()
            self.give_up(job, str(error))
        except OtherPromptError as error:
            await self._doubt(server, job, error)
        except httpx.HTTPStatusError as error:
            await self._take_status(server, job, error)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # job not sent
            self._set_aside(server, error)
            self._jobs.put_nowait(job)
        except (httpx.HTTPError, ValueError) as error:
            await self._fail(server, job, error)
        else:
            server.succeed()

    async def _take_status(
        self, server: _Server, job: AnyJob, error: httpx.HTTPStatusError
    ) -> None:
        """Handles an error status of a server: gives the job up, sets the server aside, or counts a failure."""
        status = error.response.status_code
        if status in FOR_GOOD:
            server.succeed()
            self.give_up(job, one_line(error))
        elif status in BUSY:
            self._set_aside(server, error, _asked_pause(error.response))
            self._jobs.put_nowait(job)
        else:
            await self._fail(server, job, error)

    async def _fail(self, server: _Server, job: AnyJob, error: Exception) -> None:
        """Counts a failure of job and server, and puts the job at the end of the queue, or doubts it."""
        job.num_failures += 1
        server.num_failures += 1
        self._check_patience(error)
        if server.num_failures >= FAILURES_ASIDE:
            self._set_aside(server, error)
        if job.num_failures >= MAX_FAILURES:
            await self._doubt(server, job, error)
            return
        await asyncio.sleep(_pause(job.num_failures - 1))
        self._jobs.put_nowait(job)

    async def _doubt(self, server: _Server, job: AnyJob, error: Exception) -> None:
        """Gives a job up if its server passes the check. Otherwise sets the server aside and puts the job back."""
        try:
            await self.check(server.client)
        except OtherPromptError:
            raise
        except (httpx.HTTPError, ValueError) as reason:
            job.num_failures = 0
            self._set_aside(server, reason)
            self._jobs.put_nowait(job)
        else:
            server.succeed()
            self.give_up(job, one_line(error))

    def _set_aside(self, server: _Server, error: Exception, seconds: float = 0.0) -> None:
        """Stops sending jobs to a server until it answers again, but at least for some seconds."""
        if not server.is_well.is_set():
            return
        server.is_well.clear()
        self._check_patience(error)
        logger.warning(
            "%s is set aside and asked again later: %s", server.client.url, one_line(error)
        )
        task = self._group.create_task(self._bring_back(server, seconds))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _bring_back(self, server: _Server, seconds: float) -> None:
        """Waits until a server answers again, and then lets it take jobs."""
        while True:
            await asyncio.sleep(max(seconds, _pause(server.num_pauses)))
            server.num_pauses += 1
            try:
                await server.client.models()
                break
            except (httpx.HTTPError, ValueError) as error:
                self._check_patience(error)
        logger.warning("%s is asked again", server.client.url)
        server.num_failures = 0
        server.is_well.set()

    def _check_patience(self, error: Exception) -> None:
        """Ends the run if no server has answered for too long."""
        latest = max(server.last_success for server in self.servers)
        are_failing = all(server.is_failing() for server in self.servers)
        if are_failing and time.monotonic() - latest > PATIENCE:
            raise ended([server.client for server in self.servers], error)


def ended(clients: Iterable[OpenAIClient], error: Exception) -> ValueError:
    """Returns the error for servers that do not answer. The text of an error of this package is kept."""
    reason = one_line(error)
    if is_ours(error):
        return ValueError(reason)
    urls = listed((client.url for client in clients), " or ")
    reason = reason or type(error).__name__
    return ValueError(
        f"expected answers of {urls}, got {reason}; start it, and run this again: it goes on"
    )


def _pause(number: int) -> float:
    """Returns the seconds before retry `number` (from 0). They double each time, and are random to spread retries."""
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(number, 30))
    return longest * random.uniform(0.5, 1.0)


def _asked_pause(response: httpx.Response) -> float:
    """Returns the seconds of a response's `Retry-After` header, or 0 if it has none or gives a date."""
    text = response.headers.get("retry-after", "")
    if not text.strip().isdecimal():
        return 0.0
    return min(float(text), LONGEST_ASKED_PAUSE)
