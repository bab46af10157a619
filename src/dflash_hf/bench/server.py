"""This module makes a server with an OpenAI-style interface (vLLM, SGLang, others) a way of decoding.

Answers are streamed, so that the time to their first token is known. The server's own `usage` counts their tokens. The
conversations of a batch are asked at the same time. The server's own counters of speculation are read before and
after: those of vLLM and llama.cpp from `/metrics`, SGLang's from `/metrics` or `/get_server_info`. So nobody else
should ask the server meanwhile.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from dflash_hf.bench.answers import Turn
from dflash_hf.bench.cells import Options
from dflash_hf.bench.methods import Conversation, Method
from dflash_hf.data.openai_client import (
    Body,
    OpenAIClient,
    ServerAnswer,
    at_once,
    run_async,
    sent_messages,
)

# A line of Prometheus' text format: name, labels and value.
_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
# vLLM's counters (vllm/v1/spec_decode/metrics.py), which llama.cpp has too, and their names in this package.
_OWNERS = ("vllm:", "llamacpp:")
_COUNTERS = {
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
# SGLang's gauge, which is a mean over its latest batches and not a counter.
_GAUGE = "sglang:spec_accept_length"
MEAN = "acceptance_length"
# The statuses with which servers refuse a field or its value.
REFUSALS = (400, 422)

logger = logging.getLogger(__name__)


def server_method(server: OpenAIClient, template_options: Mapping[str, Any]) -> Method:
    """Returns a server as a method.

    The method raises `httpx.HTTPError` if the server cannot be reached or refuses. It raises `ValueError` if an answer
    has another form or no text. Thoughts that the server removes from an answer are not part of its text. If a server
    refuses filters of sampling, it is asked without them from then on.

    Args:
        template_options (mapping): Sent as `chat_template_kwargs`, which vLLM and SGLang read.
    """
    refuses_filters = False

    def answer(conversations: Sequence[Conversation], options: Options, seed: int) -> list[Turn]:
        nonlocal refuses_filters
        shared: dict[str, Any] = {
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": seed % 2**31,
        }
        if template_options:
            shared["chat_template_kwargs"] = dict(template_options)
        bodies = [{**shared, "messages": sent_messages(messages)} for messages in conversations]
        if options.temperature == 0 or refuses_filters:
            return run_async(lambda: _turns(server, bodies))
        # Servers have default filters, or apply the checkpoint's. In vLLM, SGLang, llama.cpp and our server, -1 means
        # all tokens. Some of them do not accept 0.
        filters = {"top_k": options.top_k or -1, "min_p": 0.0}
        try:
            return run_async(lambda: _turns(server, [{**body, **filters} for body in bodies]))
        except httpx.HTTPStatusError as error:
            # If the user asked for a number of tokens to sample from, it must not be left out.
            if error.response.status_code not in REFUSALS or options.top_k:
                raise
        turns = run_async(lambda: _turns(server, bodies))
        refuses_filters = True
        logger.warning(
            "%s refuses top_k and min_p, and is asked without them: it may apply filters of its own",
            server.url,
        )
        return turns

    return answer


async def _turns(server: OpenAIClient, bodies: Sequence[Body]) -> list[Turn]:
    """Returns the turns of a batch, all asked at the same time. The first turn has the changes of the counters."""
    async with server:
        await server.model()
        before = await counters(server)
        started = time.perf_counter()
        answers = await at_once(server.stream, bodies)
        wall_time = (time.perf_counter() - started) / len(answers)
        after = await counters(server)
    turns = [_turn(reply, wall_time) for reply in answers]
    # The counters are those of the whole call, so only its first row has them.
    turns[0] = replace(turns[0], counters=_moved(before, after))
    return turns


def _turn(answer: ServerAnswer, wall_time: float) -> Turn:
    return Turn(
        text=answer.text,
        token_ids=[],
        new_tokens=answer.new_tokens,
        prompt_tokens=answer.prompt_tokens,
        wall_time=wall_time,
        latency=answer.seconds,
        ttft=answer.ttft,
        finish_reason="length" if answer.is_cut else "stop",
    )


async def counters(server: OpenAIClient) -> dict[str, float]:
    """Returns a server's counters of speculation by vLLM's names, or SGLang's mean as `acceptance_length`.

    The result is empty if the server reports neither.
    """
    found: dict[str, float] = {}
    response = await server.http.get("/metrics")
    if response.is_success:
        found = _prometheus_counters(response.text)
    if found:
        return found
    response = await server.http.get("/get_server_info")
    is_json = "json" in response.headers.get("content-type", "")
    if response.is_success and is_json:
        info = response.json()
        states = info.get("internal_states") or [info]
        length = states[0].get("avg_spec_accept_length")
        if length is not None:
            found[MEAN] = float(length)
    return found


def _prometheus_counters(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _METRIC.match(line)
        if match is None:
            continue
        name = match.group(1).removesuffix("_total")
        value = match.group(3)
        if name == _GAUGE:
            found[MEAN] = float(value)
        for owner in _OWNERS:
            name = name.removeprefix(owner)
        if name in _COUNTERS:
            _add(found, _COUNTERS[name], value)
        elif name == _PER_POSITION:
            for position in _POSITION.findall(match.group(2) or ""):
                _add(found, f"num_accepted_tokens_at_pos_{position}", value)
    return found


def _add(found: dict[str, float], name: str, value: str) -> None:
    found[name] = found.get(name, 0.0) + float(value)


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Returns how far counters have moved. SGLang's mean is the value afterwards."""
    moved = {
        name: value if name == MEAN else value - before.get(name, 0.0)
        for name, value in after.items()
    }
    return moved or None
