"""Many jobs for several servers: each server has a number of requests in flight, and takes the next job when one ends.

A server that fails is set aside and asked again later, with longer and longer pauses; the others go on with its jobs.
A job that is refused for good (too long a prompt) is given up, and so is one that fails again and again at a server
that does what it did before. No job ends the run: it ends where no server answers any more.
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

# Statuses with which a server refuses a request for good: it is malformed, too large, or of the wrong form.
FOR_GOOD = (400, 413, 422)
# Statuses of a server, or of what stands before it, that cannot answer anybody at the moment.
BUSY = (429, 502, 503, 504)
MAX_FAILURES = 5  # of a job, until it is given up
FAILURES_ASIDE = 3  # of a server in a row, until it is set aside
FIRST_PAUSE = 1.0  # seconds
LONGEST_PAUSE = 10.0
LONGEST_ASKED_PAUSE = 300.0  # that a server can ask for
# Seconds for which no server answers, until the run ends: one that is started again loads its weights first.
PATIENCE = 1800.0
# Jobs that wait in the queue for each one in flight: they are made when they are needed.
QUEUED_PER_REQUEST = 2
QUEUE_CHECK_SECONDS = 0.05


class OtherPromptError(ValueError):
    """Raised for an answer to another prompt than ours, or in another form: asking again gives the same."""


@dataclass(slots=True)
class Job:
    """Something that a server is to do.

    Args:
        num_failures (`int`): How often a server failed with it.
    """

    num_failures: int = 0


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(slots=True)
class _Server:
    """A server, and how it does."""

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
    """Servers that share jobs.

    Args:
        clients (sequence of [`OpenAIClient`]): The servers.
        at_once (`int`): Requests in flight for each.
        ask (callable): Has a client do a job, and keeps the result. It raises what the client raises, and
            [`OtherPromptError`].
        check (callable): Has a client do what it did before, to tell whose fault a failure is. It raises the same.
        give_up (callable): Takes a job that no server can do, and the reason.
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
        """Has all jobs done or given up.

        Args:
            jobs (iterable): Read as far as they are needed.

        Raises:
            ValueError: If no server answers any more, or one makes other prompts than before.
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
        """Puts jobs into the queue, a few more than there are requests in flight."""
        most = QUEUED_PER_REQUEST * self.at_once * len(self.servers)
        for job in jobs:
            while self._jobs.qsize() >= most:
                await asyncio.sleep(QUEUE_CHECK_SECONDS)
            self._jobs.put_nowait(job)
            await asyncio.sleep(0)

    async def _work(self, server: _Server) -> None:
        """Is one of a server's requests in flight, again and again."""
        while True:
            await server.is_well.wait()
            job = await self._jobs.get()
            if server.is_well.is_set():
                await self._try(server, job)
            else:  # set aside while this waited for a job
                self._jobs.put_nowait(job)
            self._jobs.task_done()

    async def _try(self, server: _Server, job: AnyJob) -> None:
        """Has a server do a job; puts it back, or gives it up, where the server cannot."""
        try:
            await self.ask(server.client, job)
        except NoTextError as error:
            server.succeed()
            self.give_up(job, str(error))
        except OtherPromptError as error:
            await self._doubt(server, job, error)
        except httpx.HTTPStatusError as error:
            await self._take_status(server, job, error)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # nobody has seen the job
            self._set_aside(server, error)
            self._jobs.put_nowait(job)
        except (httpx.HTTPError, ValueError) as error:
            await self._fail(server, job, error)
        else:
            server.succeed()

    async def _take_status(
        self, server: _Server, job: AnyJob, error: httpx.HTTPStatusError
    ) -> None:
        """Does what a status of the server's asks for."""
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
        """Counts a failure that may be the job's fault or the server's, and tries the job again behind the others."""
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
        """Gives a job up if its server still does what it did before; else it is the server's fault."""
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
        """Asks a server for nothing until it is well again, and not before some seconds have gone by."""
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
        """Waits until a server is there again."""
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
        """Ends the run where no server has answered for too long."""
        latest = max(server.last_success for server in self.servers)
        are_failing = all(server.is_failing() for server in self.servers)
        if are_failing and time.monotonic() - latest > PATIENCE:
            raise ended([server.client for server in self.servers], error)


def ended(clients: Iterable[OpenAIClient], error: Exception) -> ValueError:
    """Returns the error of servers that do not answer; one that says what is expected stays as it is."""
    reason = one_line(error)
    if is_ours(error):
        return ValueError(reason)
    urls = listed((client.url for client in clients), " or ")
    reason = reason or type(error).__name__
    return ValueError(
        f"expected answers of {urls}, got {reason}; start it, and run this again: it goes on"
    )


def _pause(number: int) -> float:
    """Seconds before the next try, the first one's number 0: twice as long each time, and never all at once."""
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(number, 30))
    return longest * random.uniform(0.5, 1.0)


def _asked_pause(response: httpx.Response) -> float:
    """Seconds for which a server asks to be left alone; 0 where it does not say, or gives a date."""
    text = response.headers.get("retry-after", "")
    if not text.strip().isdigit():
        return 0.0
    return min(float(text), LONGEST_ASKED_PAUSE)
