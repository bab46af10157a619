"""Many requests at once to `dflash-hf serve`: no crash, no hang, no answer mixed up.

A server of the bundled pair is started in a process of its own. Nine tenths of the requests are good: chats and plain
completions, whole and streamed, greedy and sampled, with limits and stops; each answer has to be that of `generate`,
without the draft where it is greedy. A tenth is malformed, which has to be refused, or broken off: streams that are
left, clients that wait for nothing, half a request. In the end the server has to answer once more and to end with
status 0. Which request is what follows from the seed.

    python benchmarks/serve_load.py                                 # 1,000 requests, 8 at once; minutes on two cores

The last line is the record; the exit status is 1 if anything was not as it has to be. Its seconds are of a server that
is disturbed on purpose: no measurement of its speed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import psutil
import torch
import typer
from harness.served import server
from openai import OpenAI

from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.pair import BUNDLED, named_pair
from dflash_hf.pair.answers import encode_prompt
from dflash_hf.pair.loading import load_pair

TIMEOUT = 300  # seconds after which a client takes the server for hung: it waits for all before it
NUM_BROKEN = 5  # ways to break off
ENDLESS = {"max_tokens": 800, "logit_bias": {"2": -100}}  # no end of sequence
HELLO = [{"role": "user", "content": "Hello."}]
# What is sent in place of a request -> the status that it has to get.
MALFORMED: list[tuple[bytes, int]] = [
    (b"", 400),
    (b'{"messages": [', 400),
    (b"[]", 400),
    (b'{"messages": []}', 400),
    (b'{"messages": [{"role": "user"}]}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": "gpt-4o"}', 404),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000000000}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        400,
    ),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}], "stream": true}', 400),
]


class Oracle:
    """What `generate` answers, each request once."""

    def __init__(self) -> None:
        self.target, self.draft, self.tokenizer = load_pair(*named_pair("text"))
        self.model: Any = self.target
        self.known: dict[str, str] = {}

    def text(self, request: dict[str, Any]) -> str:
        """Returns the text of a request's answer; sampled ones need the draft, whose noise is keyed otherwise."""
        key = json.dumps({name: request[name] for name in sorted(request) if name != "stream"})
        if key not in self.known:
            prompt = request.get("messages", request.get("prompt"))
            inputs = encode_prompt(
                self.tokenizer, prompt, torch.device("cpu"), template="messages" in request
            )
            settings: dict[str, Any] = {
                "max_new_tokens": request["max_tokens"],
                "stop_strings": request.get("stop"),
            }
            if "seed" in request:
                torch.manual_seed(request["seed"])
                settings |= {
                    "do_sample": True,
                    "temperature": request["temperature"],
                    "assistant_model": self.draft,
                }
            ids = self.model.generate(**inputs, **settings, tokenizer=self.tokenizer)
            new = ids[0, inputs["input_ids"].shape[1] :]
            text = str(self.tokenizer.decode(new, skip_special_tokens=True))
            for stop in request.get("stop", []):
                text = text.partition(stop)[0]
            self.known[key] = text
        return self.known[key]


def good_request(draw: random.Random, chats: list[Any]) -> dict[str, Any]:
    """Returns one of some hundred requests."""
    request: dict[str, Any] = {"stream": draw.random() < 0.5, "max_tokens": draw.choice([1, 7, 32])}
    kind = draw.choice(["chat", "chat", "stop", "sampled", "completion"])
    if kind == "sampled":
        return {**request, "messages": HELLO, "seed": draw.randrange(8), "temperature": 1.5}
    if kind == "completion":
        return {**request, "prompt": draw.choice(chats)[0]["content"][: draw.choice([20, 40])]}
    if kind == "stop":
        request["stop"] = ["1", "e"]
    return {**request, "messages": draw.choice(chats)}


def answer(client: OpenAI, request: dict[str, Any], expected: str) -> str:
    """Sends a good request; returns how it went."""
    sent: Any = {**request, "model": "text"}
    if "prompt" in request:
        found = client.completions.create(**sent)
        texts = [piece.choices[0].text for piece in (found if request["stream"] else [found])]
    elif request["stream"]:
        texts = [
            piece.choices[0].delta.content or "" for piece in client.chat.completions.create(**sent)
        ]
    else:
        texts = [client.chat.completions.create(**sent).choices[0].message.content]
    return (
        "right"
        if "".join(texts) == expected
        else f"wrong: {request}: {''.join(texts)!r}, not {expected!r}"
    )


def malform(url: str, body: bytes, status: int) -> str:
    """Sends what is no request; returns how it went."""
    found = httpx.post(
        f"{url}/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=TIMEOUT,
    )
    good = found.status_code == status and found.json()["error"]["message"].startswith("expected ")
    return "refused" if good else f"wrong: {body!r}: {found.status_code} {found.text}"


def break_off(client: OpenAI, url: str, way: int, num_pieces: int) -> str:
    """Sends a request, or a part of one, and goes away."""
    if way == 0:
        messages: Any = HELLO
        stream: Any = client.chat.completions.create(
            model="text", messages=messages, stream=True, **ENDLESS
        )
        for _, _ in zip(range(num_pieces), stream, strict=False):
            pass
        stream.close()
        return "broken off"
    body = json.dumps({"messages": HELLO, "stream": way == 1, **ENDLESS}).encode()
    head = ("POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    sent = "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body
    sent = {3: sent[: len(sent) - 20], 4: sent[:30]}.get(way, sent)
    address = httpx.URL(url)
    with socket.create_connection(
        (address.host, address.port or 80), timeout=TIMEOUT
    ) as connection:
        connection.sendall(sent)
        time.sleep(num_pieces / 100)
    return "broken off"


def resident_mib(pid: int) -> float:
    """Returns the memory of a process in MiB."""
    return round(psutil.Process(pid).memory_info().rss / 2**20, 1)


def main(
    requests: Annotated[int, typer.Option(min=1)] = 1000,
    at_once: Annotated[int, typer.Option(min=1)] = 8,
    seed: int = 0,
) -> None:
    """Sends the requests, and says how they went."""
    torch.set_num_threads(1)
    draw, oracle = random.Random(seed), Oracle()
    chats = [row["messages"] for row in read_prompts(BUNDLED / "held_out.jsonl", 3)]
    with (
        tempfile.TemporaryDirectory() as folder,
        server(["--pair", "text"], Path(folder) / "log") as (process, url),
    ):
        client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT)
        calls = list[Any]()
        for _ in range(requests):
            which = draw.random()
            if which < 0.05:
                calls.append(partial(malform, url, *draw.choice(MALFORMED)))
            elif which < 0.1:
                calls.append(
                    partial(break_off, client, url, draw.randrange(NUM_BROKEN), draw.randrange(20))
                )
            else:
                request = good_request(draw, chats)
                calls.append(partial(answer, client, request, oracle.text(request)))
        start = time.perf_counter()
        # What a server keeps (texts, metrics, compiled masks) is there after the first requests.
        num_first = requests // 5
        with ThreadPoolExecutor(at_once) as pool:
            found = Counter(pool.map(lambda call: call(), calls[:num_first]))
            early = resident_mib(process.pid)
            found.update(pool.map(lambda call: call(), calls[num_first:]))
            late = resident_mib(process.pid)
        seconds = time.perf_counter() - start
        last = good_request(draw, chats)
        found[f"at the end {answer(client, last, oracle.text(last))}"] += 1
        client.close()
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=TIMEOUT)
        log = (Path(folder) / "log").read_text()
    wrong = [text for text in found if "wrong: " in text]
    for text in wrong:
        print(text)
    record = {
        "requests": requests, "at_once": at_once, "seed": seed, "seconds": round(seconds, 1), "exit_status": status,
        "tracebacks": log.count("Traceback"), "ended_early": log.count("the client has gone"), "wrong": len(wrong),
        **{name: found[name] for name in ("right", "refused", "broken off", "at the end right")},
        "different_answers": len(set(oracle.known.values())), "server_mib_after_a_fifth": early, "server_mib": late,
    }  # fmt: skip
    print(json.dumps(record))
    raise typer.Exit(bool(wrong or status or record["tracebacks"]))


if __name__ == "__main__":
    typer.run(main)
