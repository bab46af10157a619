"""benchmarks/serve_load.py counts answers, refusals and clients that left, and reports what is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import serve_load

from helpers.scripts import record_of, run_script


def test_a_few_requests_at_once() -> None:
    found = run_script(serve_load.main, "--requests", "10", "--at-once", "4", "--seed", "1")
    assert found.exit_code == 0, found.output
    record = record_of(found)
    assert (record["wrong"], record["tracebacks"], record["exit_status"]) == (0, 0, 0)
    assert record["right"] + record["refused"] + record["broken off"] == 10
    assert record["refused"] > 0
    assert record["broken off"] > 0
    assert record["at the end right"] == 1
    assert min(record["server_mib_after_a_fifth"], record["server_mib"]) > 0


def test_what_is_wrong_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    message = SimpleNamespace(message=SimpleNamespace(content="another's"))
    told = SimpleNamespace(create=lambda **_: SimpleNamespace(choices=[message]))
    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=told))
    request = {"messages": [], "stream": False, "max_tokens": 1}
    assert serve_load.answer(client, request, "another's") == "right"
    assert serve_load.answer(client, request, "mine").startswith("wrong: ")

    for status, sentence in ((500, "expected"), (400, "Internal")):
        told = SimpleNamespace(
            status_code=status, text="", json=lambda said=sentence: {"error": {"message": said}}
        )
        monkeypatch.setattr(serve_load.httpx, "post", lambda *_, told=told, **__: told)
        assert serve_load.malform("http://x", b"", 400).startswith("wrong: ")
