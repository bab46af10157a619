"""The server over tokenizers of any kind: special tokens in answers, ids without an embedding, slow tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from dflash_hf.serve.pair import Pair
from helpers.scripted_server import Found, InProcess
from tiny import tiny_draft, tiny_target

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
Serve = Callable[..., InProcess]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a tiny pair with a tokenizer; other arguments are `Pair`'s."""
    running: list[InProcess] = []

    def begin(tokenizer: Any, num_tokens: int, max_rows: int, says: list[int]) -> InProcess:
        target = tiny_target("qwen3", vocab_size=num_tokens).float()
        draft = tiny_draft(target)
        # Each of these tokens is followed by the next one.
        biases = {tuple(says[: end + 1]): 50.0 + 100.0 * end for end in range(len(says))}
        config: Any = target.generation_config
        config.sequence_bias = biases or None
        pair = Pair(target, draft, tokenizer, name="tiny", encoding={}, note=str, max_rows=max_rows)
        running.append(InProcess(pair))
        return running[-1]

    yield begin
    for server in running:
        server.close()


def both_ways(server: InProcess, is_chat: bool, **fields: Any) -> Found:
    """An answer that is the same whole and in pieces."""
    fields = {"temperature": 0, **fields}
    whole = server.ask("http", False, is_chat, fields)
    pieces = server.ask("http", True, is_chat, fields)
    assert (whole.status, pieces.status) == (200, 200), (whole.error, pieces.error)
    assert (whole.content, whole.reasons) == (pieces.content, pieces.reasons)
    return whole


def test_a_python_tokenizer_is_served(serve: Serve) -> None:
    tokenizer: Any = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    says = tokenizer("d\u00e9j\u00e0 vu", add_special_tokens=False)["input_ids"]
    server = serve(tokenizer, len(tokenizer), 4, says)
    asked = {**HELLO, "max_tokens": len(says)}
    assert both_ways(server, True, **asked).content == "d\u00e9j\u00e0 vu"
    assert both_ways(server, True, **asked, stop="\u00e0").content == "d\u00e9j"
    found = server.ask("http", False, True, {**asked, "logprobs": True})
    told = [entry["bytes"] for entry in found.logprobs]
    assert told == [[100], [195], [169], [106], [195], None, [32], [118], [117]]
    form = {"response_format": {"type": "json_object"}}
    found = server.ask("http", False, True, {**asked, **form})
    assert (found.status, found.error["code"]) == (400, "unsupported_parameter")
    assert "expected a target with a fast tokenizer for response_format" in json.dumps(found.error)
