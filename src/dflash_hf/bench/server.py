"""A server with an OpenAI-style `/v1/chat/completions` (vLLM, SGLang, others) as a way of decoding.

Answers are streamed, for the time to their first token, and counted by the server's own `usage`. Conversations of a
batch are asked at the same time. What the server's own counters of speculation say is read before and after them:
vLLM's from `/metrics`, SGLang's from `/metrics` or `/get_server_info`. Nobody else should ask it meanwhile.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from dflash_hf.bench.answers import Turn
from dflash_hf.bench.cells import Options
from dflash_hf.bench.methods import Conversation
from dflash_hf.data.openai_client import TIMEOUT, first_model, sent_content
from dflash_hf.errors import one_line, require

# A line of Prometheus' text format: a name, labels, a value.
_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
# vLLM's counters (vllm/v1/spec_decode/metrics.py) and the names they have here.
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
# SGLang's gauge: a mean over its latest batches, no counter.
_GAUGE = "sglang:spec_accept_length"


@dataclass(slots=True, kw_only=True)
class Server:
    """A server, asked through its HTTP interface.

    Args:
        url (`str`): Where it is; `/v1` may be left out.
        model (`str`, *optional*): What the server calls the model; default the first one that it names.
        template_options (mapping): Sent as `chat_template_kwargs`, which vLLM and SGLang read.
    """

    url: str
    model: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT)

    def __call__(
        self, conversations: Sequence[Conversation], options: Options, seed: int
    ) -> list[Turn]:
        """Answers conversations at the same time; see [`dflash_hf.bench.methods.Method`].

        Raises:
            httpx.HTTPError: If the server cannot be reached, or refuses.
            ValueError: If it answers in another form.
        """
        if self.model is None:
            self.model = first_model(self.client)
        before = self.counters()
        started = time.perf_counter()
        with ThreadPoolExecutor(max_workers=len(conversations)) as pool:
            turns = list(pool.map(lambda row: self._ask(row, options, seed), conversations))
        seconds = time.perf_counter() - started
        turns = [replace(turn, wall_time=seconds / len(turns)) for turn in turns]
        turns[0] = replace(turns[0], counters=_moved(before, self.counters()))
        return turns

    def counters(self) -> dict[str, float]:
        """Returns the server's counters of speculation by vLLM's names, and `acceptance_length`, which is SGLang's
        mean; empty where it tells neither."""
        found: dict[str, float] = {}
        response = self.client.get("/metrics")
        for line in response.text.splitlines() if response.is_success else ():
            if (match := _METRIC.match(line)) is None:
                continue
            name = match.group(1).removesuffix("_total")
            labels = match.group(2) or ""
            value = match.group(3)
            if name in _COUNTERS:
                found[_COUNTERS[name]] = found.get(_COUNTERS[name], 0.0) + float(value)
            elif name == _PER_POSITION and (position := re.search(r'position="(\d+)"', labels)):
                key = f"num_accepted_tokens_at_pos_{position.group(1)}"
                found[key] = found.get(key, 0.0) + float(value)
            elif name == _GAUGE:
                found["acceptance_length"] = float(value)
        if found:
            return found
        response = self.client.get("/get_server_info")
        if response.is_success and "json" in response.headers.get("content-type", ""):
            info = response.json()
            states = info.get("internal_states") or [info]
            if (length := states[0].get("avg_spec_accept_length")) is not None:
                found["acceptance_length"] = float(length)
        return found

    def _ask(self, conversation: Conversation, options: Options, seed: int) -> Turn:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [
                {**message, "content": sent_content(message["content"])} for message in conversation
            ],
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": seed % 2**31,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.template_options:
            body["chat_template_kwargs"] = dict(self.template_options)
        pieces = list[str]()
        ttft = None
        reason = None
        usage = dict[str, Any]()
        started = time.perf_counter()
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise httpx.HTTPStatusError(
                    f"{response.status_code} {one_line(response.text)}",
                    request=response.request,
                    response=response,
                )
            for line in response.iter_lines():
                if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(
                        f"expected an answer of the server, got {one_line(event['error'])}; see its log"
                    )
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    piece = "".join(
                        delta.get(name) or "" for name in ("reasoning_content", "content")
                    )
                    if piece and ttft is None:
                        ttft = time.perf_counter() - started
                    pieces.append(piece)
                    reason = choice.get("finish_reason") or reason
        seconds = time.perf_counter() - started
        is_counted = "completion_tokens" in usage and "prompt_tokens" in usage
        require(
            is_counted,
            "usage at the end of the server's stream",
            usage,
            "it has to know stream_options",
        )
        return Turn(
            text="".join(pieces),
            token_ids=[],
            new_tokens=int(usage["completion_tokens"]),
            prompt_tokens=int(usage["prompt_tokens"]),
            wall_time=seconds,
            latency=seconds,
            ttft=ttft,
            finish_reason="length" if reason == "length" else "stop",
        )


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """What counters have moved by; the mean is what it is afterwards."""
    return {
        name: value if name == "acceptance_length" else value - before.get(name, 0.0)
        for name, value in after.items()
    } or None
