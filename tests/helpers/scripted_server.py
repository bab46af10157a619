"""The server's application on a port of this process, whose engine says what a test wants said."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from openai import APIStatusError, OpenAI
from transformers import AutoTokenizer

from dflash_hf.cli.pair import named_pair
from dflash_hf.serve.app import build_app
from dflash_hf.serve.engine import Counts, Done, Job, Tokens
from dflash_hf.serve.pair import Pair
from tiny import shallow_target, tiny_draft


class Script:
    """An engine whose answers are known: a text, so many tokens at a time, up to the limit.

    It knows no stop texts: it goes on until its job is gone, as an engine of many rows may.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.run = 3  # tokens at a time
        self.prompt: list[int] = []  # of the job that came last

    def say(self, *texts: str) -> int:
        """Sets texts, each in tokens of its own; returns their number of tokens, the end token included."""
        self.ids = []
        for text in texts:
            self.ids += self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.ids.append(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        return len(self.ids)

    def submit(self, job: Job) -> None:
        self.prompt = job.inputs["input_ids"][0].tolist()
        limit = job.sampling.max_new_tokens
        ids = self.ids[:limit]
        for start in range(0, len(ids), self.run):
            job.receive(Tokens(ids=ids[start : start + self.run]))
        is_cut = len(self.ids) > limit
        counts = Counts(committed=(2, 3), accepted=(1, 2), proposed=(4, 4))
        job.receive(Done(is_cut=is_cut, counts=counts, logprobs=[]))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def stop(self) -> None:
        pass


def random_pair(template: str, max_length: int) -> Pair:
    """A pair of few random weights that knows the bundled tokenizer's tokens: for answers whose words do not matter.

    Args:
        template (`str`): The chat template.
        max_length (`int`): Tokens of a prompt and its answer, at most.
    """
    folder, _ = named_pair("text")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    target: Any = shallow_target(
        "qwen3", vocab_size=len(tokenizer), max_position_embeddings=max_length
    ).float()
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    draft = tiny_draft(target, mask_token_id=tokenizer.convert_tokens_to_ids("<|MASK|>"))
    return Pair(target, draft, tokenizer, name="text", encoding={}, note=lambda line: None)


@dataclass
class Found:
    """An answer, or a refusal, the same in whatever way it was asked for."""

    status: int = 200
    error: dict[str, Any] = field(default_factory=dict[str, Any])
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    reasons: list[str] = field(default_factory=list[str])
    usage: Any = None
    logprobs: list[Any] = field(default_factory=list[Any])
    acceptance: list[Any] = field(default_factory=list[Any])


class InProcess:
    """A server in a thread of this process; `pair.engine` may be another one from one request to the next."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.real = pair.engine
        config = uvicorn.Config(build_app(pair), lifespan="off", log_level="warning")
        self.server = uvicorn.Server(config)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.client = OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(60)

    def ask(self, way: str, is_streamed: bool, is_chat: bool, fields: dict[str, Any]) -> Found:
        """Asks by OpenAI's client or by raw HTTP."""
        sent = {"model": self.pair.name, **fields}
        if is_streamed:
            sent["stream"] = True
        if way == "openai":
            return self._by_client(is_chat, sent)
        path = "completions"
        if is_chat:
            path = "chat/completions"
        reply = httpx.post(f"{self.url}/{path}", json=sent, timeout=60)
        if reply.status_code != 200:
            return Found(status=reply.status_code, error=reply.json()["error"])
        if not is_streamed:
            return read([reply.json()])
        events = reply.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]", events
        return read([json.loads(event.removeprefix("data: ")) for event in events[:-1]])

    def _by_client(self, is_chat: bool, sent: dict[str, Any]) -> Found:
        create: Any = self.client.completions.create
        if is_chat:
            create = self.client.chat.completions.create
        try:
            # What OpenAI's client has no argument for goes into its extra body.
            names = ("model", "messages", "prompt", "stream", "tools")
            known = {name: sent[name] for name in names if name in sent}
            extra = {name: value for name, value in sent.items() if name not in names}
            reply = create(**known, extra_body=extra)
        except APIStatusError as error:
            return Found(status=error.status_code, error=dict(error.body))  # pyright: ignore
        if sent.get("stream"):
            return read([chunk.model_dump() for chunk in reply])
        return read([reply.model_dump()])


def read(parts: list[dict[str, Any]]) -> Found:
    """Reads a whole answer, or the chunks of one, all the same."""
    found = Found()
    names: dict[int, list[str]] = {}
    choices: list[dict[str, Any]] = []
    for part in parts:
        found.usage = part.get("usage") or found.usage
        choices += part["choices"]
    # Chunks of several choices come in turn.
    choices.sort(key=lambda choice: choice["index"])
    for choice in choices:
        message = choice.get("message") or choice.get("delta") or {}
        found.content += message.get("content") or choice.get("text") or ""
        found.reasoning += message.get("reasoning") or ""
        for place, call in enumerate(message.get("tool_calls") or []):
            key = call.get("index")
            if key is None:
                key = place
            entry = names.setdefault(key, ["", ""])
            entry[0] += call["function"]["name"] or ""
            entry[1] += call["function"]["arguments"] or ""
            assert call["id"], call
        if choice.get("finish_reason"):
            found.reasons.append(choice["finish_reason"])
            found.acceptance.append(choice.get("acceptance_length"))
        logprobs = choice.get("logprobs")
        if logprobs:
            found.logprobs += logprobs.get("content") or logprobs.get("token_logprobs") or []
    found.calls = [(name, json.loads(arguments)) for name, arguments in names.values()]
    return found
