"""A server with vLLM's chat interface and no model: its answers are made up, and take the time that real ones take.

    python benchmarks/harness/stub_server.py --tokenizer demos/toy/target --port 8001

It answers as many requests at once as it has slots; others wait. An answer follows from the conversation and the seed,
its length from a wide distribution, its time from its length. Prompts beyond the context are refused with status 400.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

import typer

MODEL = "stub"
# Of the lengths of answers, a log-normal distribution: most are short, some ten times as long.
MEDIAN_TOKENS = 300
SPREAD = 0.8
PREFILL_SECONDS = 0.05

# Messages -> tokens of the prompt.
Encode = Callable[[list[dict[str, Any]]], list[int]]


def _answers_all(handler: Handler, body: dict[str, Any]) -> bool:
    return False


@dataclass(slots=True)
class Behaviour:
    """How a server answers.

    Args:
        encode (callable): Messages -> the tokens of the prompt.
        letters (`list[int]`): Tokens that answers are made of.
        end (`int`): The token that ends an answer.
        slots (`int`): Requests that are answered at once.
        context (`int`): Tokens of the longest prompt.
        seconds_per_token (`float`): Of an answer.
        before (callable): May refuse or break a request, and then returns True.
        tells_ids (`bool`): Whether answers have the tokens of prompt and answer, as vLLM's have.
        text (callable): Tokens -> their text.
        asked (`Counter`): Messages as JSON -> how often they were answered.
    """

    encode: Encode
    letters: list[int]
    end: int
    slots: int = 64
    context: int = 2048
    seconds_per_token: float = 0.0
    before: Callable[[Handler, dict[str, Any]], bool] = _answers_all
    tells_ids: bool = True
    text: Callable[[list[int]], str] = str
    asked: Counter[str] = field(default_factory=Counter[str])


class StubServer(ThreadingHTTPServer):
    """Listens at once; answers while `serve` runs."""

    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, port: int, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.behaviour = behaviour
        self.free = threading.Semaphore(behaviour.slots)
        self.lock = threading.Lock()
        self.connections: list[Any] = []

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def die(self) -> None:
        """Stops to listen, and breaks what is under way."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that have gone."""


class Handler(BaseHTTPRequestHandler):
    """Of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def stub(self) -> StubServer:
        """Whose connection it is."""
        server: Any = self.server
        return server

    def setup(self) -> None:
        """Notes the connection, so that a server that dies can break it."""
        super().setup()
        self.stub.connections.append(self.connection)

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing to the screen."""

    def reply(self, told: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Sends an object as JSON, with a status and headers of HTTP."""
        content = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Lists the model."""
        self.reply({"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        """Answers a conversation."""
        behaviour = self.stub.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if behaviour.before(self, body):
            return
        prompt = behaviour.encode(body["messages"])
        if len(prompt) > behaviour.context:
            sentence = f"This model's maximum context length is {behaviour.context} tokens"
            self.reply({"error": {"message": sentence}}, 400)
            return
        ids, is_cut = answer_of(body, behaviour)
        with self.stub.free:
            time.sleep(PREFILL_SECONDS * (behaviour.seconds_per_token > 0))
            time.sleep(behaviour.seconds_per_token * len(ids))
        said = behaviour.text(ids if is_cut else ids[:-1])
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": said},
            "finish_reason": "length" if is_cut else "stop",
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        told: dict[str, Any] = {"choices": [choice], "usage": usage}
        if behaviour.tells_ids:
            choice["token_ids"] = ids
            told["prompt_token_ids"] = prompt
        with self.stub.lock:
            behaviour.asked[json.dumps(body["messages"])] += 1
        self.reply(told)


def answer_of(body: dict[str, Any], behaviour: Behaviour) -> tuple[list[int], bool]:
    """Returns the tokens of an answer, which follow from the conversation and the seed, and whether it is cut."""
    named = json.dumps([body["messages"], body.get("seed"), body.get("temperature")])
    draw = random.Random(hashlib.sha256(named.encode()).digest())
    length = max(1, round(MEDIAN_TOKENS * draw.lognormvariate(0, SPREAD)))
    limit = body["max_tokens"]
    ids = [draw.choice(behaviour.letters) for _ in range(min(length, limit))]
    is_cut = length >= limit
    if not is_cut:
        ids.append(behaviour.end)
    return ids, is_cut


def behaviour_of(tokenizer: Any, **options: Any) -> Behaviour:
    """Returns a behaviour with a tokenizer of Transformers'."""

    def encode(messages: list[dict[str, Any]]) -> list[int]:
        found = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(found["input_ids"])

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    letters = tokenizer("The quick brown fox jumps over it.", add_special_tokens=False)["input_ids"]
    return Behaviour(
        encode=encode, letters=list(letters), end=tokenizer.eos_token_id, text=text, **options
    )


def main(
    tokenizer: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    slots: Annotated[int, typer.Option(min=1)] = 64,
    context: Annotated[int, typer.Option(min=1)] = 2048,
    seconds_per_token: float = 0.004,
) -> None:
    """Serves until it is killed."""
    from transformers import AutoTokenizer

    behaviour = behaviour_of(
        AutoTokenizer.from_pretrained(tokenizer),
        slots=slots,
        context=context,
        seconds_per_token=seconds_per_token,
    )
    StubServer(port, behaviour).serve_forever()


if __name__ == "__main__":
    typer.run(main)
