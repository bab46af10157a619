"""This module connects a request with the engine. It submits jobs and returns answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from typing import Any

from dflash_hf.serve.answers import Answer, StopReader, TextReader
from dflash_hf.serve.engine import Done, Event, Job, Tokens
from dflash_hf.serve.markup import MarkupReader, Piece
from dflash_hf.serve.metrics import Tracked
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.replies import DONE, Choice, Reply, event
from dflash_hf.serve.requests import Asked

Progress = tuple[Choice, list[Piece]]


class Exchange:
    """The answers to one request.

    Args:
        pair (`Pair`): The pair that answers.
        asked (`Asked`): The request.
        name (`str`): Id of the request.
    """

    def __init__(self, pair: Pair, asked: Asked, name: str) -> None:
        self.pair = pair
        self.asked = asked
        self.reply = Reply(name, pair.name, asked.is_chat, pair.tokenizer, asked.num_top)
        self.choices: list[Choice] = []
        self.jobs: list[Job] = []
        self.tracked: list[Tracked] = []
        # Events of all choices, each with the choice's number.
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        markup: dict[str, Any] = {}
        prefix = ""
        if asked.is_chat:
            markup = pair.markup
            prefix = str(pair.tokenizer.decode(asked.inputs["input_ids"][0]))
        for index, sampling in enumerate(asked.sampling):
            answer = Answer(
                text=TextReader(pair.tokenizer, sampling.hidden),
                stops=StopReader(sampling.stops),
                markup=MarkupReader(markup, prefix, asked.tools),
                has_parallel_calls=asked.has_parallel_calls,
            )
            self.choices.append(Choice(index=index, answer=answer))
            receive = functools.partial(self._receive, loop, index)
            self.jobs.append(Job(name, asked.inputs, sampling, receive))

    def submit(self) -> None:
        """Hands the jobs to the engine."""
        for job in self.jobs:
            self.tracked.append(Tracked(self.pair.metrics))
            self.pair.engine.submit(job)

    def end(self) -> None:
        """Tells the engine that nobody waits for these jobs any more. Those that have not ended count as aborted."""
        for job in self.jobs:
            job.gone.set()
        for tracked in self.tracked:
            tracked.abort()

    def _receive(self, loop: asyncio.AbstractEventLoop, index: int, event: Event) -> None:
        """Takes an event in the engine's thread."""
        # If the loop is closed, nobody reads the events any more.
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

    async def progress(self) -> AsyncGenerator[Progress]:
        """Yields each choice with its new pieces as they come. A choice that has ended has a `finish_reason`.

        Raises the exception with which a job ended.
        """
        num_running = len(self.jobs)
        while num_running:
            index, event = await self.events.get()
            choice = self.choices[index]
            pieces: list[Piece] = []
            if isinstance(event, Tokens):
                self.tracked[index].begin()
                # At a stop text, the engine itself ends the job, because it looks for stop texts in the same way.
                pieces = choice.answer.add(event.ids)
            elif isinstance(event, Done):
                choice.counts = event.counts
                choice.logprobs = event.logprobs
                pieces = choice.end(event.is_cut)
                num_prompt_tokens = self.asked.num_prompt_tokens
                num_tokens = len(choice.answer.ids)
                self.tracked[index].end(
                    choice.finish_reason, num_prompt_tokens, num_tokens, event.counts
                )
                num_running -= 1
            else:
                raise event
            choice.pieces += pieces
            yield choice, pieces

    async def whole(self) -> dict[str, Any]:
        """Returns all answers at once."""
        async for _ in self.progress():
            pass
        return self.reply.whole(self.choices, self.asked.num_prompt_tokens)

    async def stream(self) -> AsyncGenerator[str]:
        """Yields the events of a stream. Raises the exception with which a job ended."""
        for choice in self.choices:
            begun = self.reply.first(choice)
            if begun is not None:
                yield self._event(begun)
        async for choice, pieces in self.progress():
            told = [self.reply.piece(choice, piece) for piece in pieces]
            if choice.finish_reason:
                told.append(self.reply.last(choice))
            if told:
                yield "".join(self._event(chunk) for chunk in told)
        if self.asked.has_usage:
            yield event(self.reply.usage_chunk(self.choices, self.asked.num_prompt_tokens))
        yield DONE

    def _event(self, chunk: dict[str, Any]) -> str:
        """Returns a chunk as an event. If a usage comes last, the chunks before it have `null` as their usage."""
        if self.asked.has_usage:
            chunk["usage"] = None
        return event(chunk)
