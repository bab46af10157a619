"""How a request ends that is not answered: its client goes away, `generate` fails, the server has no parts.

The application is called in this process, so that a step of the target can be held, and forwards counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message
from torch import Tensor
from typer.testing import CliRunner

from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.cli.main import app
from dflash_hf.cli.pair import named_pair
from dflash_hf.cli.serve import note, remarks
from dflash_hf.generation import prefill, running_batch
from dflash_hf.pair.answers import encode_prompt, warm_up
from dflash_hf.pair.loading import load_pair
from dflash_hf.serve.app import build_app, guards
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.requests import MAX_TOOLS
from dflash_hf.training.chat_template import ChatTemplate
from dflash_hf.training.server import request_of
from helpers.scripted_server import InProcess

ASKED = {"messages": [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]}
# A prompt that is longer than others with their answers, and an answer that has no end token.
LONG = {
    "messages": [{"role": "user", "content": "Compute 41 + 80 - 99 + 14. " * 20}],
    "max_tokens": 400,
    "logit_bias": {"2": -100},
}
TOO_LONG = 300  # tokens
HELD_AT = 4  # forwards of the target


@cache
def loaded() -> tuple[Any, Any, Any]:
    """The bundled pair; every test leaves it as it was."""
    return load_pair(*named_pair("text"))


def served(max_rows: int) -> Pair:
    return Pair(*loaded(), name="x", encoding={}, note=str, max_rows=max_rows)


class Held:
    """The bundled pair, served; the target's fourth forward waits until it is let go."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.noted = threading.Condition()
        self.forwards = 0
        self.reached, self.let_go = threading.Event(), threading.Event()
        self.pair = Pair(*loaded(), name="text", encoding={}, note=self.note)
        self.app: ASGIApp = build_app(self.pair)
        self.hook = self.pair.target.register_forward_pre_hook(self.hold)
        self.queued = 0
        self.pair.engine.submit = self.counted(self.pair.engine.submit)

    def counted(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.queued += 1
            return submit(*args, **kwargs)

        return counting

    def note(self, line: str) -> None:
        with self.noted:
            self.notes.append(line)
            self.noted.notify_all()

    def hold(self, *_: Any) -> None:
        self.forwards += 1
        if self.forwards == HELD_AT:
            self.reached.set()
            assert self.let_go.wait(60)

    def wait_for_notes(self, number: int) -> list[str]:
        with self.noted:
            assert self.noted.wait_for(lambda: len(self.notes) >= number, timeout=60), self.notes
            return self.notes


class Client:
    """A client that asks, and goes away when told to; `sent` is what it got."""

    def __init__(self, app: ASGIApp, **asked: Any) -> None:
        self.body = json.dumps({**ASKED, **asked}).encode()
        self.sent: list[Message] = []
        self.leaves = asyncio.Event()
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        self.task = asyncio.ensure_future(self.run(app(scope, self.receive, self.send)))

    async def run(self, call: Any) -> None:
        await call

    async def receive(self) -> Message:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def goes(self) -> None:
        """Goes away, and lets the server hear of it."""
        self.leaves.set()
        for _ in range(20):
            await asyncio.sleep(0)

    def got(self) -> tuple[int, str]:
        """Status and body of what came."""
        return self.sent[0]["status"], b"".join(
            message.get("body", b"") for message in self.sent[1:]
        ).decode()


@pytest.fixture
def held() -> Iterator[Held]:
    server = Held()
    yield server
    server.let_go.set()
    server.pair.engine.stop()
    server.pair.engine.call(int)  # behind its last step
    server.hook.remove()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "in pieces"])
def test_a_run_ends_with_the_step_in_which_its_client_went(held: Held, stream: bool) -> None:
    async def scenario() -> None:
        leaving = Client(held.app, stream=stream)
        await asyncio.to_thread(held.reached.wait, 60)
        waiting = Client(held.app, stream=stream)
        while held.queued < 2:  # for its turn behind the held one
            await asyncio.sleep(0.001)
        await waiting.goes()
        await leaving.goes()
        held.let_go.set()
        await asyncio.gather(leaving.task, waiting.task)

    asyncio.run(scenario())
    first, second = held.wait_for_notes(2)
    assert "then Ended: the client has gone" in first
    assert held.forwards == HELD_AT, "the held one was the last, and the second request had none"
    assert ": 0 tokens in" in second


def test_others_are_answered_after_a_client_went(held: Held) -> None:
    async def scenario() -> tuple[int, str]:
        leaving = Client(held.app)
        await asyncio.to_thread(held.reached.wait, 60)
        await leaving.goes()
        staying = Client(held.app)
        held.let_go.set()
        await staying.task
        return staying.got()

    status, body = asyncio.run(scenario())
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"].endswith(
        "The final answer is \\boxed{36}."
    )


def test_a_server_that_stops_says_so(held: Held) -> None:
    async def scenario() -> list[tuple[int, str]]:
        clients = [Client(held.app), Client(held.app, stream=True)]
        await asyncio.to_thread(held.reached.wait, 60)
        held.pair.engine.stop()
        held.let_go.set()
        await asyncio.gather(*(client.task for client in clients))
        return [client.got() for client in clients]

    (whole, body), (streamed, pieces) = asyncio.run(scenario())
    assert whole == 503
    assert json.loads(body)["error"] == {
        "message": "the server stops", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip
    assert streamed == 200
    assert json.loads(pieces.strip().rpartition("data: ")[2]) == json.loads(body)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RuntimeError('no "memory" \\ left\nat all'), 500, "server_error"),
        (ValueError("expected it otherwise; change it"), 400, "invalid_request_error"),
    ],
    ids=["unforeseen", "refused"],
)
def test_what_generate_raises_is_told(
    held: Held, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kind: str
) -> None:
    def fails(**_: Any) -> None:
        raise error

    async def scenario() -> list[tuple[int, str]]:
        clients = [Client(held.app), Client(held.app, stream=True)]
        await asyncio.gather(*(client.task for client in clients))
        return [client.got() for client in clients]

    with monkeypatch.context() as patch:
        patch.setattr(held.pair.target, "generate", fails)
        (whole, body), (_, pieces) = asyncio.run(scenario())
    assert whole == status
    assert json.loads(body)["error"]["type"] == kind
    assert " ".join(str(error).split()) in json.loads(body)["error"]["message"]
    assert json.loads(pieces.strip().rpartition("data: ")[2]) == json.loads(body)
    assert any("Traceback" in note for note in held.notes) == (status == 500)


def test_what_the_template_refuses_is_told(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = "{{ raise_exception('Roles must alternate.') }}"
    monkeypatch.setattr(held.pair.tokenizer, "chat_template", refuses)

    async def scenario() -> tuple[int, str]:
        client = Client(held.app, stream=True)
        await client.task
        return client.got()

    status, body = asyncio.run(scenario())
    assert status == 400
    message = json.loads(body)["error"]["message"]
    assert message == (
        "expected a conversation that the chat template takes, got TemplateError: Roles must alternate.; change it"
    )


def test_tools_and_options_reach_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, tokenizer = loaded()
    called = "{% for tool in tools or [] %} by {{ tool.function.name }}{% endfor %}"
    asked = "{{ messages[0].content }} thinks {{ enable_thinking }}"
    monkeypatch.setattr(tokenizer, "chat_template", asked + called)
    template = ChatTemplate(tokenizer)
    prompts = list[str]()

    def noted(input_ids: Tensor, **_: Any) -> None:
        prompts.append(tokenizer.decode(input_ids[0]))
        raise ValueError("expected nothing; go")

    monkeypatch.setattr(target, "generate", noted)
    app = build_app(
        Pair(
            target,
            draft,
            tokenizer,
            name="x",
            encoding={"enable_thinking": False},
            note=str,
            max_rows=1,  # `generate` alone is asked
        )
    )
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def scenario() -> None:
        for asked in (
            {},
            {"tools": tools},
            {"tools": tools, "chat_template_kwargs": {"enable_thinking": True}},
            # As training sends them, which reads no calls in an answer
            request_of(template, {**ASKED, "chat_template_kwargs": {"tools": tools}}, {}),
        ):
            await Client(app, **asked).task
        for asked, sentence in (
            ({"tools": tools, "chat_template_kwargs": {"tools": tools}}, "tools in one place"),
            ({"chat_template_kwargs": {"tools": "f"}}, "tools as a list"),
            ({"chat_template_kwargs": {"tools": ["f" * MAX_TOOLS]}}, "tools of at most"),
        ):
            client = Client(app, **asked)
            await client.task
            status, body = client.got()
            assert (status, sentence in body) == (400, True), body

    asyncio.run(scenario())
    asked = ASKED["messages"][0]["content"]
    assert prompts == [
        f"{asked} thinks False",
        f"{asked} thinks False by f",
        f"{asked} thinks True by f",
        f"{asked} thinks False by f",
    ]


@pytest.mark.parametrize("max_rows", [8, 1])
def test_stop_strings_of_the_target_end_an_answer(
    monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    target, _, tokenizer = loaded()
    monkeypatch.setattr(target.generation_config, "stop_strings", ["carry"])
    pair = served(max_rows)
    pair.engine.call(warm_up, *loaded(), "Hello.")
    prompt = encode_prompt(tokenizer, ASKED["messages"], target.device)
    ids = target.generate(**prompt, max_new_tokens=400, do_sample=False, tokenizer=tokenizer)
    new = ids[0, prompt["input_ids"].shape[1] :]

    async def scenario(limit: int) -> tuple[int, str]:
        client = Client(build_app(pair), **ASKED, max_tokens=limit)
        await client.task
        return client.got()

    # With the second limit the last allowed token completes the string.
    for limit in (400, len(new)):
        status, body = asyncio.run(scenario(limit))
        assert status == 200, body
        choice = json.loads(body)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == tokenizer.decode(new, skip_special_tokens=True)
        assert choice["message"]["content"].endswith("carry")


# ---- requests of browsers

PAGE = "http://localhost:3000"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def answered(
    host: str, origins: list[str], method: str, headers: dict[str, str], body: Any = None
) -> httpx.Response:
    """The response of a server that listens on `host` to one request."""
    transport = httpx.ASGITransport(build_app(served(8), guards(host, origins)))

    async def ask() -> httpx.Response:
        address = "http://localhost:8000"
        async with httpx.AsyncClient(transport=transport, base_url=address) as client:
            return await client.request(
                method, "/v1/chat/completions", headers=headers, json=body, timeout=60
            )

    return asyncio.run(ask())


@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_pages_of_an_allowed_origin_may_ask(allowed: str) -> None:
    reply = answered("127.0.0.1", [allowed], "OPTIONS", PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == allowed
    assert (
        reply.headers["access-control-allow-headers"]
        == (PREFLIGHT["access-control-request-headers"])
    )
    asked = {**ASKED, "max_tokens": 2}
    reply = answered("127.0.0.1", [allowed], "POST", {"origin": PAGE}, asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == allowed
    assert reply.headers["access-control-expose-headers"] == "x-acceptance-length"


def test_pages_of_other_origins_may_not_ask() -> None:
    elsewhere = {**PREFLIGHT, "origin": "http://evil.example"}
    assert answered("127.0.0.1", [PAGE], "OPTIONS", elsewhere).status_code == 400
    reply = answered("127.0.0.1", [], "OPTIONS", PREFLIGHT)
    assert reply.status_code == 405
    assert "access-control-allow-origin" not in reply.headers


def test_a_name_that_was_made_to_point_here_is_refused() -> None:
    for host, called, status in [
        ("127.0.0.1", "evil.example", 400),
        ("127.0.0.1", "evil.example:8000", 400),
        ("127.0.0.1", "localhost:9000", 200),
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "[::1]:8000", 200),
        ("127.0.0.1", "[::2]:8000", 400),
        ("0.0.0.0", "my.machine.example", 200),
    ]:
        asked = {**ASKED, "max_tokens": 1}
        assert answered(host, ["*"], "POST", {"host": called}, asked).status_code == status


# ---- a server that does not begin


def refused(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["serve", *arguments])
    assert found.exit_code == 2, found.output
    assert found.stdout == ""
    return " ".join(found.stderr.split())


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dflash_hf.serve.app")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert (
        "expected the packages of the server, got no uvicorn; pip install 'dflash-hf[serve]'"
        in refused("--port", "0")
    )
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert "got no FastAPI, Uvicorn or openai; pip install 'dflash-hf[serve]'" in refused(
        "--port", "0"
    )


def test_a_transformers_without_these_parts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dflash_hf.serve.app")
    for name in ("pair", "rows"):
        monkeypatch.delitem(sys.modules, f"dflash_hf.serve.{name}")
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.utils", ModuleType("utils"))
    assert "expected a Transformers whose server has a thread for runs" in refused("--port", "0")
    assert "cannot import name 'get_response_template'" in refused("--port", "0")


def test_wrong_options_are_said() -> None:
    for origin in (
        *("http://localhost:3000/", "localhost:3000", "https://*.example/x"),
        # No browser sends these, and origins are compared letter by letter
        *("https://*.example.com", "http://LocalHost:3000"),
    ):
        said = "expected an origin as --cors-origin, such as http://localhost:3000, or *, got"
        assert f"{said} '{origin}'; give scheme" in refused("--cors-origin", origin)
    assert "expected --pair, or --target and --draft, got both" in refused(
        "--pair", "text", "--draft", "x"
    )
    assert "expected --target beside --draft, got --draft alone" in refused("--draft", "x")
    assert "expected --pair among text, vision" in refused("--pair", "nonsense")
    assert "expected a JSON object as --chat-template-kwargs" in refused(
        "--chat-template-kwargs", "[]"
    )
    for name in ("tools", "documents", "continue_final_message"):
        assert f"expected options of the chat template, got '{name}'; leave it out" in refused(
            "--chat-template-kwargs", json.dumps({name: []})
        )
    assert "expected a place to listen, got no.such.host.invalid:8000" in refused(
        "--host", "no.such.host.invalid"
    )


def test_an_option_that_changes_nothing_is_said() -> None:
    kept = (
        "answers are decoded one at a time, and nothing is kept of them, so --kept-gib changes nothing; raise "
        "--max-rows"
    )
    assert remarks(served(1), False, 2.0) == [kept]
    for max_rows, kept_gib in ((1, None), (1, 0.0), (8, 2.0)):
        assert remarks(served(max_rows), False, kept_gib) == []


def test_a_target_without_known_marks_is_said() -> None:
    pair = served(8)
    pair.markup = {}
    said = "Transformers has no response template for qwen3, so reasoning stays in the text of an answer, and "
    assert remarks(pair, False, None) == [said + "requests with tools are refused"]
    pair.markup = {"fields": {"thinking": {}}}
    said = "Transformers' response template for qwen3 has no calls of tools, so requests with tools are refused"
    assert remarks(pair, False, None) == [said]


def test_answers_go_on_where_nobody_reads_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x")
    told: list[str] = []

    def noted(line: str) -> None:
        note(line)
        told.append(line)

    server = InProcess(Pair(*loaded(), name="text", encoding={}, note=noted))
    asked = {**ASKED, "max_tokens": 60, "n": 4}
    healthy = server.ask("http", False, True, asked).content
    monkeypatch.setattr("sys.stderr", broken)
    num_told = len(told)
    for _ in range(2):
        found = server.ask("http", False, True, asked)
        assert (found.status, found.content) == (200, healthy)
    assert len(told) > num_told
    server.close()
    with suppress(OSError):
        broken.close()


# ---- memory


@pytest.fixture
def crowded() -> Iterator[InProcess]:
    server = InProcess(Pair(*loaded(), name="text", encoding={}, note=lambda _: None))
    yield server
    server.close()


def without_room(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[Any], bool]) -> None:
    """Lets the buffers of a running batch have no room to grow."""
    room = running_batch.make_room

    def full(run: Any) -> None:
        if is_full(run):
            raise OutOfRoomError("expected room, got none")
        room(run)

    monkeypatch.setattr(running_batch, "make_room", full)


def refusal(server: InProcess, stream: bool) -> tuple[int, dict[str, Any], int]:
    """Asks for a long answer that fails; returns its status, the error object, and how many events came before it."""
    sent = {**LONG, "stream": stream}
    reply = httpx.post(f"{server.url}/chat/completions", json=sent, timeout=60)
    *chunks, last = reply.text.strip().split("\n\n")
    assert not any('"error"' in chunk for chunk in chunks)
    return reply.status_code, json.loads(last.removeprefix("data: "))["error"], len(chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "in pieces"])
def test_who_has_no_room_beside_others_may_ask_again(
    crowded: InProcess, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    expected = crowded.ask("http", False, True, ASKED).content
    without_room(monkeypatch, lambda run: run.longest > TOO_LONG and len(run.rows.numbers) > 1)
    with ThreadPoolExecutor(3) as pool:
        refused = pool.submit(refusal, crowded, stream)
        others = [pool.submit(crowded.ask, "http", kind, True, ASKED) for kind in (False, True)]
        status, error, num_chunks = refused.result()
        assert [other.result().content for other in others] == [expected] * 2
    assert status == (200 if stream else 503)
    assert (num_chunks > 1) == stream
    assert error == {
        "message": "expected memory for this answer beside the others, got less (expected room, got none); "
        "ask again later",
        "type": "server_error", "param": None, "code": None,
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "in pieces"])
def test_who_has_no_room_alone_is_refused(
    crowded: InProcess, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    without_room(monkeypatch, lambda run: run.longest > TOO_LONG)
    status, error, num_chunks = refusal(crowded, stream)
    assert status == (200 if stream else 400)
    assert (num_chunks > 1) == stream
    assert (error["message"], error["type"]) == ("expected room, got none", "invalid_request_error")


def test_who_never_has_room_is_refused(crowded: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = crowded.ask("http", False, True, ASKED).content
    room = running_batch.begin_prefill

    def full(request: Any, *given: Any, **sizes: Any) -> Any:
        if request.input_ids.shape[1] > TOO_LONG:
            raise OutOfRoomError("expected room, got none")
        return room(request, *given, **sizes)

    for module in (running_batch, prefill):
        monkeypatch.setattr(module, "begin_prefill", full)
    with ThreadPoolExecutor(3) as pool:
        refused = pool.submit(refusal, crowded, False)
        others = [pool.submit(crowded.ask, "http", kind, True, ASKED) for kind in (False, True)]
        status, error, _ = refused.result()
        assert [other.result().content for other in others] == [expected] * 2
    assert (status, error["message"]) == (400, "expected room, got none")
