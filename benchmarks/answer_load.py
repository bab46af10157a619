"""Answers to many prompts through two servers of which one is killed and started again: none missing, none twice.

The servers are processes without a model (`harness/stub_server.py`): answers take the time that real ones take, and a
tenth of the prompts is longer than their context. Before and behind the stage as many clients as it has ask the same
servers the same prompts and do nothing else. Their tokens per second, once all are busy, are what the servers give; no
server dies meanwhile.

    python benchmarks/answer_load.py          # 10,000 prompts, 2 x 64 requests in flight; a quarter of an hour

The last line is the record. The exit status is 1 if a prompt is missing or was answered twice, or if the stage, from
its first request to its last answer and with one server away for a while, reached less than 0.9 of the servers' own
throughput.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import torch
import typer
from harness import stub_server
from harness.machine import RESULTS, ROOT, LoadWatch, provenance
from harness.report import finish
from transformers import AutoTokenizer

from dflash_hf.training import OpenAIClient
from dflash_hf.training.answer_rows import RegenerateSettings
from dflash_hf.training.regenerate import regenerate

TOKENIZER = ROOT / "demos" / "toy" / "target"
FLOOR = 0.9
# Two measurements of the servers' own throughput that differ by more are no measure of it.
MAX_SPREAD = 0.03
CONTEXT = 512  # tokens of the servers' longest prompt
MAX_NEW_TOKENS = 1024
SECONDS_PER_TOKEN = 0.02  # of each of 64 answers at once
# The servers' own throughput is measured for a while, once the longest of the first answers has come.
WARM_UP_SECONDS = 30.0
OWN_SECONDS = 90.0
START_SECONDS = 120.0
DOWN_SECONDS = 5.0  # from the kill to the new start


class Server:
    """A server in a process of its own."""

    def __init__(self, slots: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.slots = slots
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        words = ["--tokenizer", TOKENIZER, "--port", self.port, "--slots", self.slots]
        words += ["--context", CONTEXT, "--seconds-per-token", SECONDS_PER_TOKEN]
        self.process = subprocess.Popen([sys.executable, stub_server.__file__, *map(str, words)])
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            try:
                httpx.get(f"{self.url}/v1/models").raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise RuntimeError(f"expected a server at {self.url}, got none in {START_SECONDS:.0f} s")

    def kill(self) -> None:
        """Kills it at once."""
        self.process.kill()
        self.process.wait()


@contextmanager
def two_servers(slots: int) -> Iterator[list[Server]]:
    """Starts two servers with `slots` each, and kills them at the end."""
    servers = [Server(slots), Server(slots)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


def write_prompts(path: Path, num_prompts: int, seed: int) -> list[bool]:
    """Writes prompts, a tenth of them too long; returns which."""
    draw = random.Random(seed)
    too_long: list[bool] = []
    lines: list[str] = []
    for number in range(num_prompts):
        is_long = draw.random() < 0.1
        text = f"{number}: compute {draw.randrange(100)} + {draw.randrange(100)}. "
        if is_long:
            text += "Compute 41 + 80. " * CONTEXT
        row = {"id": str(number), "messages": [{"role": "user", "content": text}]}
        lines.append(json.dumps(row) + "\n")
        too_long.append(is_long)
    path.write_text("".join(lines))
    return too_long


async def hammer(urls: list[str], at_once: int, prompts: list[Any], seconds: float) -> float:
    """Asks `at_once` prompts of each server for a while, and does nothing with the answers.

    Returns:
        `float`: Tokens per second of the answers that came behind the warm-up.
    """
    waiting = itertools.cycle(enumerate(prompts))
    began = time.perf_counter()
    num_tokens = 0

    async def ask(http: httpx.AsyncClient) -> None:
        nonlocal num_tokens
        for number, messages in waiting:
            body = {"model": stub_server.MODEL, "messages": messages, "max_tokens": MAX_NEW_TOKENS}
            body |= {"temperature": 0.0, "seed": number, "return_token_ids": True}
            reply = (await http.post("/v1/chat/completions", json=body)).json()
            if time.perf_counter() - began > WARM_UP_SECONDS and "usage" in reply:
                num_tokens += reply["usage"]["completion_tokens"]

    limits = httpx.Limits(max_connections=None)
    clients = [httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in urls]
    asking = [asyncio.create_task(ask(client)) for client in clients for _ in range(at_once)]
    await asyncio.sleep(WARM_UP_SECONDS + seconds)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    for client in clients:
        await client.aclose()
    # The servers go on with what was broken off
    await asyncio.sleep(MAX_NEW_TOKENS * SECONDS_PER_TOKEN)
    return num_tokens / seconds


def kill_and_restart(server: Server, output: Path, after: int, times: dict[str, float]) -> None:
    """Kills a server once some prompts are answered, and starts it again."""
    while not output.exists() or output.read_bytes().count(b"\n") < after:
        time.sleep(0.5)
    server.kill()
    times["killed"] = time.perf_counter()
    time.sleep(DOWN_SECONDS)
    server.start()
    times["back"] = time.perf_counter()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(
    prompts: Annotated[int, typer.Option(min=10)] = 10_000,
    at_once: Annotated[int, typer.Option(min=1)] = 64,
    seed: int = 0,
    own_seconds: Annotated[float, typer.Option(min=1)] = OWN_SECONDS,
    out: Path | None = None,
) -> None:
    """Runs the stage between two measurements of the servers, and counts what it left."""
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    load = LoadWatch()
    load.sample()
    with tempfile.TemporaryDirectory() as name, two_servers(at_once) as servers:
        folder = Path(name)
        too_long = write_prompts(folder / "prompts.jsonl", prompts, seed)
        rows = rows_of(folder / "prompts.jsonl")
        messages = [row["messages"] for row in rows]
        urls = [server.url for server in servers]
        own = [asyncio.run(hammer(urls, at_once, messages, own_seconds))]
        settings = RegenerateSettings(
            prompts=folder / "prompts.jsonl",
            output=folder / "answers.jsonl",
            batch_size=at_once,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        times: dict[str, float] = {}
        killer = threading.Thread(
            target=kill_and_restart, args=(servers[0], settings.output, prompts // 3, times)
        )
        killer.start()
        report = regenerate(settings, [OpenAIClient(url) for url in urls], tokenizer)
        killer.join()
        own.append(asyncio.run(hammer(urls, at_once, messages, own_seconds)))
        answers = rows_of(settings.output)
        errors = rows_of(settings.errors)
    load.stop()
    asked = [row["messages"][0]["content"] for row in answers]
    refused = [messages[row["line"] - 1][0]["content"] for row in errors]
    counts = Counter([*asked, *refused])
    wrong = sum(not too_long[row["line"] - 1] for row in errors)
    throughput = report.num_tokens / report.seconds
    ratio = throughput / max(own)
    facts = {
        "prompts": prompts,
        "too_long": sum(too_long),
        "in_flight_per_server": at_once,
        "answered": len(answers),
        "in_errors": len(errors),
        "errors_of_short_prompts": wrong,
        "twice": sum(count > 1 for count in counts.values()),
        "missing": prompts - len(counts),
        "seconds": round(report.seconds, 2),
        "tokens_per_second": round(throughput, 1),
        "tokens_per_second_of_the_servers_alone": [round(rate, 1) for rate in own],
        "throughput_over_the_servers_own": round(ratio, 3),
        "seconds_that_one_server_was_away": round(times["back"] - times["killed"], 2),
        "load": load.to_dict(),
    }
    is_quiet = max(own) / min(own) - 1 <= MAX_SPREAD
    record = {**facts, "provenance": provenance(torch.device("cpu"))}
    finish(record, out or RESULTS / "answer_load.json", is_quiet)
    is_whole = facts["twice"] == facts["missing"] == wrong == 0
    raise typer.Exit(not (is_whole and ratio >= FLOOR))


if __name__ == "__main__":
    typer.run(main)
