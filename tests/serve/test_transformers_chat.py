"""`transformers chat`, the command of Transformers itself, in a terminal against `dflash-hf serve`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dflash_hf.cli.pair import named_pair
from dflash_hf.pair.answers import encode_prompt
from dflash_hf.pair.loading import load_pair
from dflash_hf.serve.app import build_app
from dflash_hf.serve.pair import Pair
from helpers import forked_python
from helpers.served import Served
from helpers.terminal import Terminal

COMMAND = "from transformers.cli.transformers import main; main()"
# In its offline mode, which a fork's libraries have read before, the Hub's client asks no server at all.
ONLINE = "import huggingface_hub; huggingface_hub.constants.HF_HUB_OFFLINE = False; "
ADDS = "Compute 41 + 80 - 99 + 14."
ASKED = "<me>:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(tmp_path_factory.mktemp("served"), "--pair", "text")
    yield running
    running.ended_by(signal.SIGTERM)


@cache
def pair() -> tuple[Any, Any, Any]:
    return load_pair(*named_pair("text"))


def generated(*turns: str, **settings: Any) -> str:
    """What `generate` answers to the last turn; the others are the user's and the assistant's in turns."""
    target, draft, tokenizer = pair()
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
    inputs = encode_prompt(tokenizer, messages, torch.device("cpu"))
    ids = target.generate(**inputs, **settings, assistant_model=draft)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def chat(server: Served, folder: Path, *flags: str) -> Terminal:
    command = [sys.executable, "-c", COMMAND, "chat", "--user", "me", "text", server.url, *flags]
    # In its offline mode the Hub's client asks no server at all, not even this one.
    return Terminal(command, folder, HF_HUB_OFFLINE="0")


def last_said(shown: str) -> str:
    """The answer that stands on the screen at last: it is shown anew with each piece."""
    return " ".join(shown.rpartition("<text>:")[2].split())


def test_a_conversation_has_the_answers_of_generate(server: Served, tmp_path: Path) -> None:
    terminal = chat(server, tmp_path, "do_sample=False")
    try:
        assert "text was already loaded." in terminal.wait_for(ASKED)
        first = generated(ADDS, max_new_tokens=256, do_sample=False)
        terminal.type(ADDS)
        assert last_said(terminal.wait_for(ASKED)).endswith(" ".join(first.split()))
        terminal.type("!set max_new_tokens=5")
        terminal.wait_for(ASKED)
        second = generated(ADDS, first, "Compute 2 + 3.", max_new_tokens=5, do_sample=False)
        terminal.type("Compute 2 + 3.")
        shown = terminal.wait_for("Generation stopped after reaching the token limit.")
        assert last_said(shown).endswith(" ".join(second.split()))
        terminal.type("n")
        terminal.wait_for(ASKED)
        terminal.type("!exit")
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_another_model_is_said_in_a_sentence(server: Served) -> None:
    words = ["-c", ONLINE + COMMAND, "chat", "--user", "me", "gpt-4o", server.url]
    run = forked_python.run(words, {**os.environ, "COLUMNS": "200"}, 60)
    assert run.returncode != 0
    shown = " ".join(f"{run.stdout} {run.stderr}".split())
    assert "expected 'text' as model, got 'gpt-4o'" in shown


def asked(server: Served, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": ADDS}], **fields}
    return httpx.post(f"{server.url}/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    "flags",
    [
        {"max_new_tokens": 7, "do_sample": False, "temperature": 0.3, "transformers_version": "5"},
        {"max_new_tokens": 9, "do_sample": True, "temperature": 1.5, "top_k": 3, "top_p": 0.9},
        {"max_new_tokens": 9, "do_sample": True},
        {"max_new_tokens": 30, "do_sample": False, "repetition_penalty": 1.5, "eos_token_id": 2},
    ],
    ids=["greedy", "warpers", "defaults", "repetition"],
)
def test_flags_do_what_they_do_in_generate(server: Served, flags: dict[str, Any]) -> None:
    settings = {name: value for name, value in flags.items() if name != "transformers_version"}
    torch.manual_seed(3)
    expected = generated(ADDS, **settings)
    reply = asked(server, generation_config=json.dumps(flags), seed=3)
    assert reply.json()["choices"][0]["message"]["content"] == expected
    # What a request says itself comes first, as it does in Transformers' own server.
    short = asked(server, generation_config=json.dumps(flags), seed=3, max_tokens=2).json()
    assert short["usage"]["completion_tokens"] == 2
    newer = asked(server, generation_config=json.dumps(flags), seed=3, max_completion_tokens=2)
    assert newer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "expected generation_config as an object in JSON, got '{'"),
        ("[]", "expected generation_config as an object in JSON"),
        (5, "expected generation_config as an object in JSON, got 5"),
        ('{"stop_strings": "\\ud800"}', "expected generation_config as an object in JSON"),
        ('{"num_beams": 4}', "expected generation_config with max_new_tokens, "),
        ('{"do_sample": 1}', "expected do_sample as true or false, got 1"),
        ('{"eos_token_id": 5}', "expected eos_token_id as the target has it, got 5"),
        ('{"max_new_tokens": 0}', "expected max_tokens as a whole number from 1"),
    ],
)
def test_flags_that_are_not_done_are_refused(server: Served, config: Any, sentence: str) -> None:
    reply = asked(server, generation_config=config)
    assert reply.status_code == 400
    assert sentence in reply.json()["error"]["message"]


def test_a_client_that_goes_away_while_it_loads_is_no_error() -> None:
    app = build_app(Pair(*pair(), name="text", encoding={}, note=str))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/load_model",
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert all(message["type"].startswith("http.response.") for message in sent)
    assert all(message.get("status", 200) < 500 for message in sent)


def test_loading_tells_that_the_model_is_there(server: Served) -> None:
    url = f"{server.url.removesuffix('/v1')}/load_model"
    told = httpx.post(url, json={"model": "text"}).text
    assert told == 'data: {"status":"ready","model":"text","cached":true}\n\n'
    assert '"status":"error"' in httpx.post(url, json={"model": 5}).text
    for body in ({"json": []}, {"content": b"{"}):
        headers = {"content-type": "application/json"}
        assert httpx.post(url, **body, headers=headers).status_code == 400
    # What is left of a body that was not read ends with its connection.
    unread = httpx.post(url, content=b"{}", headers={"content-type": "text/plain"})
    assert (unread.status_code, unread.headers["connection"]) == (415, "close")
