"""A server is asked over HTTP, as vLLM and SGLang are: a real one, which streams, counts, and fails if asked to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_hf.bench.cells import Options
from dflash_hf.bench.run import run
from dflash_hf.bench.server import server_method
from dflash_hf.data.openai_client import NoTextError, OpenAIClient, run_async
from dflash_hf.serve.requests import NUMBERS
from helpers.bench_runs import TOY, answers_in, settings_in
from helpers.http_threads import running

HELLO = [{"role": "user", "content": "Hello."}]
WORDS = ["Good ", "day ", "to ", "you."]
# The first piece of an answer with thoughts, by the names that servers have given them.
THOUGHTS = {
    "thinking": {"reasoning": "Hm."},
    "thinking before": {"reasoning_content": "Hm."},
    "thinking twice": {"reasoning": "Hm.", "reasoning_content": "Hm."},
}
# What comes in place of words.
NO_TEXT = {
    "tools": {"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": "{}"}}]},
    "refusal": {"refusal": "I will not."},
    "silent": {"content": ""},
}
# Servers with counters of speculation, by what the names of these begin with.
COUNTERS = ("vllm", "llamacpp")
# A server of the kind `SAYS` + text replies the text to all that it is asked.
SAYS = "says "
# More than the connections that httpx keeps by default.
MANY = 120
# Ends of lines to `str.splitlines`, which may be in a text of JSON as they are.
ENDS = "a\u2028b\u2029c\u0085d"
PIECES = [
    {"choices": [{"delta": {"content": ENDS}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 7}},
]
STREAMED = "".join(f"data: {json.dumps(piece, ensure_ascii=False)}\r\n\r\n" for piece in PIECES)
PNG = next((TOY / "vision" / "pictures").rglob("*.png"))


class Small(ThreadingHTTPServer):
    """A server whose answers are `WORDS`, one token each; what it is asked is in `bodies`."""

    daemon_threads = True
    request_queue_size = MANY

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.bodies, self.calls = kind, list[dict[str, Any]](), 0
        self.gathered = threading.Barrier(MANY)
        self.at_once, self.most_at_once, self.lock = 0, 0, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Of one call."""

    protocol_version = "HTTP/1.1"
    server: Small

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the screen."""

    def reply(self, text: str, kind: str = "application/json", status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        kind, calls = self.server.kind, self.server.calls
        if kind.startswith(SAYS):
            self.reply(kind.removeprefix(SAYS))
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "small"}]}))
        elif self.path == "/metrics" and kind in COUNTERS:
            names = {"drafts": 3 * calls, "draft_tokens": 21 * calls, "accepted_tokens": 6 * calls}
            lines = [
                f'{kind}:spec_decode_num_{name}_total{{engine="0"}} {100 + value}'
                for name, value in names.items()
            ]
            for position, count in enumerate((3, 2, 1)):
                label = f'{{engine="0",position="{position}"}}'
                lines.append(
                    f"{kind}:spec_decode_num_accepted_tokens_per_pos_total{label} {count * calls}.0"
                )
            self.reply("# HELP something\n" + "\n".join(lines), "text/plain")
        elif self.path == "/get_server_info" and kind == "sglang":
            self.reply(json.dumps({"internal_states": [{"avg_spec_accept_length": 2.5}]}))
        elif self.path == "/get_server_info":
            self.reply("<html>an application of one page</html>", "text/html")
        else:
            self.reply("not here", "text/plain", 404)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        if server.kind == "broken":
            self.reply('{"message": "the model is too\\nlarge"}', status=500)
            return
        if server.kind.startswith(SAYS):
            self.reply(server.kind.removeprefix(SAYS))
            return
        if server.kind == "strict" and ("top_k" in body or body["max_tokens"] > 99):
            self.reply('{"message": "Unrecognized request"}', status=400)
            return
        if server.kind == "gathering":
            server.gathered.wait(timeout=30)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if server.kind == "curt":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        words = [] if server.kind in NO_TEXT else WORDS[: body["max_tokens"]]
        first = {**THOUGHTS, **NO_TEXT}.get(server.kind)
        if first is not None:
            self.event({"choices": [{"index": 0, "delta": first, "finish_reason": None}]})
        for word in words:
            time.sleep(0.02)
            self.event(
                {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
            )
        reason = "length" if len(words) == body["max_tokens"] else "stop"
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if server.kind == "mute":
            self.event({"error": {"message": "out of memory"}})
        if server.kind != "uncounted":
            self.event(
                {"choices": [], "usage": {"completion_tokens": len(words), "prompt_tokens": 7}}
            )
        with server.lock:
            server.calls += 1
            server.at_once -= 1
        self.piece(b"data: [DONE]\n\n")
        if server.kind == "curt":
            self.wfile.write(b"0\r\n\r\n")
            # The next request, which it reads no more, or the end of the connection.
            self.connection.recv(1, socket.MSG_PEEK)
        self.close_connection = True

    def event(self, event: dict[str, Any]) -> None:
        self.piece(f"data: {json.dumps(event)}\n\n".encode())

    def piece(self, text: bytes) -> None:
        if self.server.kind == "curt":
            text = b"%x\r\n%s\r\n" % (len(text), text)
        self.wfile.write(text)
        self.wfile.flush()


def asked(client: OpenAIClient, name: str, *body: Any) -> Any:
    """What a method of a client returns."""

    async def ask() -> Any:
        async with client:
            return await getattr(client, name)(*body)

    return run_async(ask)


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Generator[Small]:
    server = Small(request.param)
    with running(server):
        yield server


@pytest.mark.parametrize("small", [*COUNTERS, "sglang", "plain"], indirect=True)
def test_an_answer_is_what_the_server_says(small: Small) -> None:
    server = server_method(OpenAIClient(f"{small.url}/v1/"), {"enable_thinking": False})
    options = Options(batch=3, max_new_tokens=3, temperature=0.5, top_p=0.9)
    turns = server([HELLO] * 3, options, 2**40 + 5)
    assert small.most_at_once == 3, "a batch is asked at once"
    for turn in turns:
        assert (turn.text, turn.new_tokens, turn.prompt_tokens) == ("Good day to ", 3, 7)
        assert turn.finish_reason == "length"
        assert turn.ttft is not None
        assert 0.02 <= turn.ttft < turn.latency
        assert turn.wall_time < turn.latency
        assert turn.token_ids == []
    body = small.bodies[0]
    asked_for = {
        "model": "small",
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        # Without the filters that a server, or the checkpoint, has of its own.
        "top_k": -1,
        "min_p": 0,
        "seed": 5,
    }
    assert {name: body.get(name) for name in asked_for} == asked_for
    for name, (low, high, _) in NUMBERS.items():
        assert low <= body.get(name, low) <= high, "`dflash-hf serve` takes it"
    assert body["messages"] == HELLO
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    counted = {
        "num_drafts": 9,
        "num_draft_tokens": 63,
        "num_accepted_tokens": 18,
        "num_accepted_tokens_at_pos_0": 9,
        "num_accepted_tokens_at_pos_1": 6,
        "num_accepted_tokens_at_pos_2": 3,
    }
    counters = {
        **dict.fromkeys(COUNTERS, counted),
        "sglang": {"acceptance_length": 2.5},
        "plain": None,
    }
    assert [turn.counters for turn in turns] == [counters[small.kind], None, None]
    assert server([HELLO], Options(max_new_tokens=9), 0)[0].finish_reason == "stop"
    assert "top_k" not in small.bodies[-1], "greedy decoding looks at no filter"


@pytest.mark.parametrize("small", ["strict"], indirect=True)
def test_a_server_that_refuses_filters_is_asked_without_them(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    method = server_method(OpenAIClient(small.url), {})
    # Another reason to refuse says nothing of filters.
    with pytest.raises(httpx.HTTPStatusError, match=r"400 .*Unrecognized"):
        method([HELLO], Options(max_new_tokens=100, temperature=0.5), 3)
    assert "top_k" not in caplog.text
    options = Options(max_new_tokens=3, temperature=0.5)
    small.bodies.clear()
    for _ in range(2):
        (turn,) = method([HELLO], options, 3)
        assert turn.new_tokens == 3
    assert ["top_k" in body for body in small.bodies] == [True, False, False]
    assert ["min_p" in body for body in small.bodies] == [True, False, False]
    assert small.bodies[-1]["temperature"] == 0.5
    assert caplog.text.count("refuses top_k and min_p") == 1


@pytest.mark.parametrize("small", ["curt"], indirect=True)
def test_no_connection_is_used_again_behind_a_stream(small: Small) -> None:
    """The server closes it without a word, as llama.cpp's at times does."""
    turn = server_method(OpenAIClient(small.url), {})([HELLO], Options(max_new_tokens=9), 0)[0]
    assert turn.text == "".join(WORDS)


@pytest.mark.parametrize("small", ["gathering"], indirect=True)
def test_no_row_waits_for_a_connection(small: Small) -> None:
    """The server answers none before all have come."""
    options = Options(batch=MANY, max_new_tokens=1)
    turns = server_method(OpenAIClient(small.url), {})([HELLO] * MANY, options, 0)
    assert [turn.text for turn in turns] == ["Good "] * MANY
    assert small.most_at_once == MANY


@pytest.mark.parametrize(
    ("small", "error", "sentence"),
    [
        ("broken", httpx.HTTPStatusError, '500 {"message": "the model is too'),
        ("uncounted", ValueError, "expected usage in the answer of http://"),
        ("mute", ValueError, "out of memory"),
        ("tools", NoTextError, "expected a text as the answer of http://.*, got calls of tools"),
        ("refusal", NoTextError, "got a refusal; ask for text alone"),
        ("silent", NoTextError, "got nothing; "),
    ],
    indirect=["small"],
)
def test_a_server_that_fails(small: Small, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence.replace("{", r"\{")):
        server_method(OpenAIClient(small.url), {})([HELLO], Options(max_new_tokens=4), 0)


@pytest.mark.parametrize(
    ("small", "sentence"),
    [
        (f"{SAYS}<html>", r"expected JSON in http://.*/v1/models, got something else \("),
        (f"{SAYS}[1]", r"expected a JSON object in http://.*/v1/models, got \[1\]; "),
        (
            f"{SAYS}{{}}",
            "expected a model with an id at http://.*/v1/models, got None; start the server",
        ),
        (
            f'{SAYS}{{"data": []}}',
            r"expected a model with an id at .*, got \[\]; start the server with one",
        ),
        (f'{SAYS}{{"data": ["x"]}}', r"expected a model with an id at .*, got \['x'\]; "),
        (
            f'{SAYS}{{"data": {{"id": "x"}}}}',
            "expected a model with an id at .*, got {'id': 'x'}; ",
        ),
        (f'{SAYS}{{"data": [{{}}]}}', r"expected a model with an id at .*, got \[{}\]; "),
    ],
    indirect=["small"],
)
def test_what_is_no_list_of_models_is_a_sentence(small: Small, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        asked(OpenAIClient(small.url), "model")


@pytest.mark.parametrize(
    ("small", "sentence"),
    [
        (f"{SAYS}<html>", r"expected JSON in the answer of http://.*, got something else \("),
        (f"{SAYS}[1]", r"expected a JSON object in the answer of http://.*, got \[1\]; "),
        (f'{SAYS}{{"choices": ["x"]}}', "expected a choice in the answer of http://.*, got {"),
        (
            f'{SAYS}{{"choices": [{{"message": "x"}}]}}',
            "expected a message in the answer of http://.*, got 'x'; ",
        ),
    ],
    indirect=["small"],
)
def test_what_is_no_answer_is_a_sentence(small: Small, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        asked(OpenAIClient(small.url, "small"), "ask", {"messages": HELLO})


@pytest.mark.parametrize(
    ("small", "sentence"),
    [
        (f"{SAYS}data: <html>", "expected JSON in the answer of http://.*, got something else"),
        (f"{SAYS}data: 1", "expected a JSON object in the answer of http://.*, got 1; "),
    ],
    indirect=["small"],
)
def test_what_is_no_piece_is_a_sentence(small: Small, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        asked(OpenAIClient(small.url, "small"), "stream", {"messages": HELLO})


@pytest.mark.parametrize("small", [f"{SAYS}{STREAMED}data: [DONE]"], indirect=True)
def test_only_line_feeds_end_the_lines_of_a_stream(small: Small) -> None:
    assert asked(OpenAIClient(small.url, "small"), "stream", {"messages": HELLO}).text == ENDS


@pytest.mark.parametrize("url", ["http://localhost:abc", "http://[::1", "http://x\n"])
def test_what_is_no_url_is_a_sentence(url: str) -> None:
    with pytest.raises(ValueError, match=r"^expected the URL of a server, got 'http.*; give one"):
        OpenAIClient(url)


@pytest.mark.parametrize("small", THOUGHTS, indirect=True)
def test_thoughts_are_no_part_of_what_is_scored(small: Small) -> None:
    answer = asked(OpenAIClient(small.url), "stream", {"messages": HELLO, "max_tokens": 9})
    assert (answer.thoughts, answer.text) == ("Hm.", "".join(WORDS))
    turn = server_method(OpenAIClient(small.url), {})([HELLO], Options(max_new_tokens=9), 0)[0]
    assert turn.text == "".join(WORDS)


@pytest.mark.parametrize("small", ["plain"], indirect=True)
def test_images_are_sent_along(small: Small) -> None:
    content = [{"type": "image", "path": str(PNG)}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    server_method(OpenAIClient(small.url), {})([messages], Options(max_new_tokens=1), 0)
    image, text = small.bodies[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")


@pytest.mark.parametrize("small", ["vllm"], indirect=True)
def test_a_run_over_a_server_loads_nothing(small: Small, tmp_path: Path) -> None:
    settings = settings_in(
        tmp_path,
        methods=("server",),
        server=small.url,
        target=None,
        draft=None,
        batch=(1, 2),
        system="Be brief.",
    )
    run(settings)
    found = answers_in(settings.out)
    for name in ("answers-server-batch1.jsonl", "answers-server-batch2.jsonl"):
        assert [answer.error for answer in found[name]] == [None] * 8
        assert [len(answer.turns) for answer in found[name]] == [1] * 5 + [2] * 3
    second = [body["messages"] for body in small.bodies if len(body["messages"]) == 4]
    assert second[0][0] == {"role": "system", "content": "Be brief."}
    assert second[0][2] == {"role": "assistant", "content": "".join(WORDS)}


def test_a_server_that_is_not_there_is_given_up(tmp_path: Path) -> None:
    settings = settings_in(
        tmp_path, methods=("server",), server="http://127.0.0.1:9", target=None, draft=None
    )
    run(settings)
    (row,) = json.loads((settings.out / "run.json").read_text())["methods"]
    assert row["failed"].startswith(
        "given up after 3 failures in a row, the last one: ConnectError: "
    )
    assert len(answers_in(settings.out)["answers-server.jsonl"]) == 3
