"""Some clients of `dflash-hf serve` at once, against the same clients one after the other; and two turns of one.

    make real
    .venv/bin/dflash-hf bench prepare gsm8k --out build/smollm2/data
    .venv/bin/python benchmarks/serve_clients.py

Two servers answer the same questions as streams, one with a row for each client and one with `--max-rows 1`, in turns.
A server is in a process of its own and has answered one question before. The tokens per second are those of all
clients together, and the wait is that of the client whose first token came last. Then one client has a conversation of
two turns with the first kind of server: the second turn goes on from the kept text of the first. Writes
`serve_clients.json`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from harness.machine import MAX_BUSY_CORES, RESULTS, ROOT, LoadWatch, provenance
from harness.report import finish, show
from harness.served import server
from openai import OpenAI

from dflash_hf.bench.sets import load_questions

SMOLLM2 = ROOT / "build" / "smollm2"
TIMEOUT = 600  # seconds after which a client takes the server for hung
COLUMNS = [
    ("rows at once", "max_rows"),
    ("tokens", "tokens"),
    ("seconds", "seconds"),
    ("tokens/s", "tokens_per_second"),
    ("last first token, s", "longest_wait"),
]
TURN_COLUMNS = [
    ("tokens of the second turn's prompt", "prompt_tokens"),
    ("first token, s: first turn", "first_turn_wait"),
    ("second turn", "second_turn_wait"),
    ("second / first", "second_over_first"),
]

Messages = list[dict[str, str]]


class Streamed(NamedTuple):
    """How one client was answered."""

    text: str
    num_tokens: int
    num_prompt_tokens: int
    wait: float  # seconds from the beginning of all to this client's first text


def ask(client: OpenAI, model: str, messages: Messages, limit: int, begun: float) -> Streamed:
    """Asks for the next turn of a conversation and reads the stream to its end."""
    given: Any = messages
    stream: Any = client.chat.completions.create(
        model=model,
        messages=given,
        max_tokens=limit,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    waits: list[float] = []
    texts: list[str] = []
    usage: Any = None
    for piece in stream:
        if piece.choices and piece.choices[0].delta.content:
            waits.append(time.perf_counter() - begun)
            texts.append(piece.choices[0].delta.content)
        usage = piece.usage
    return Streamed("".join(texts), usage.completion_tokens, usage.prompt_tokens, waits[0])


def says(question: str) -> dict[str, str]:
    """Returns a question as a message."""
    return {"role": "user", "content": question}


def measured(client: OpenAI, questions: list[str], limit: int) -> dict[str, Any]:
    """Asks all questions at once, each from a client's thread."""
    model = client.models.list().data[0].id
    ask(client, model, [says("Hello.")], limit, time.perf_counter())
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(questions)) as pool:
        asked = [pool.submit(ask, client, model, [says(text)], limit, begun) for text in questions]
        answers = [one.result() for one in asked]
    seconds = time.perf_counter() - begun
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "tokens": num_tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(num_tokens / seconds, 1),
        "longest_wait": round(max(answer.wait for answer in answers), 2),
    }


def two_turns(client: OpenAI, opening: str, limit: int) -> dict[str, Any]:
    """Asks for two turns of a conversation that begins with a long text; the second one has a short question."""
    model = client.models.list().data[0].id
    messages = [says(opening)]
    first = ask(client, model, messages, limit, time.perf_counter())
    messages += [
        {"role": "assistant", "content": first.text},
        says("And which one is the hardest?"),
    ]
    second = ask(client, model, messages, limit, time.perf_counter())
    return {
        "prompt_tokens": second.num_prompt_tokens,
        "first_turn_wait": round(first.wait, 3),
        "second_turn_wait": round(second.wait, 3),
        "second_over_first": round(second.wait / first.wait, 3),
    }


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = SMOLLM2 / "target-bf16",
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")] = (
        ROOT / "demos" / "smollm2" / "draft"
    ),
    data: Annotated[
        Path, typer.Option(help="File of questions that `dflash-hf bench prepare` wrote.")
    ] = SMOLLM2 / "data" / "gsm8k.jsonl",
    clients: Annotated[int, typer.Option(min=2, help="Clients, with one question each.")] = 8,
    opening: Annotated[
        int,
        typer.Option(min=1, help="Questions that the first turn of a conversation consists of."),
    ] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Servers of each kind.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at most.")] = 128,
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "serve_clients.json",
) -> None:
    """Compare clients at once with clients one after the other."""
    asked = load_questions(str(data), data_dir=None, num_prompts=None, seed=0)
    every = [question.turns[0] for question in asked]
    texts = every[:clients]
    if len(texts) < clients:
        raise typer.BadParameter(
            f"expected {clients} questions in {data}, got {len(texts)}; lower --clients"
        )
    pair = ["--target", str(target), "--draft", str(draft), "--threads", "1"]
    # The servers are processes of their own: only the load before them is somebody else's.
    busy_cores = LoadWatch().sample()
    is_quiet = busy_cores is not None and busy_cores <= MAX_BUSY_CORES
    rows: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for max_rows in (clients, 1):
                options = [*pair, "--max-rows", str(max_rows)]
                with server(options, Path(folder) / "log") as (_, url):
                    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT)
                    rows.append({"max_rows": max_rows, **measured(client, texts, max_tokens)})
                    if max_rows > 1:
                        # Another text in each round.
                        first = number * opening % len(every)
                        text = "\n".join(every[first : first + opening])
                        conversations.append(two_turns(client, text, max_tokens))
                    client.close()
                typer.echo(json.dumps(rows[-1]), err=True)
    facts = {
        "benchmark": "serve_clients",
        "clients": clients,
        "max_tokens": max_tokens,
        "busy_cores_before": busy_cores,
        **provenance(torch.device("cpu")),
    }
    show(f"{clients} clients of a server", rows, COLUMNS)
    show("Two turns of a conversation", conversations, TURN_COLUMNS)
    finish({"provenance": facts, "rows": rows, "conversations": conversations}, out, is_quiet)


if __name__ == "__main__":
    typer.run(main)
