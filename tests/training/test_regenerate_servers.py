"""Answers through several servers: each prompt has one answer or one error, whatever the servers do meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.stub_server import Behaviour, Handler, StubServer, behaviour_of
from transformers import AutoProcessor, AutoTokenizer

from dflash_hf.training import ChatDataset, OpenAIClient, server_pool
from dflash_hf.training.answer_rows import RegenerateSettings
from dflash_hf.training.chat_template import today
from dflash_hf.training.regenerate import regenerate
from helpers import answer_by_servers, forked_python
from helpers.processors import picture, published_folder, write_cut_image
from helpers.templates import FAMILIES
from helpers.training_command import SMALL, TOY, said, train

NUM_PROMPTS = 30
LONG = "long " * 30
CONTEXT = 120  # tokens, one a byte: the long ones are beyond it
Before = Callable[[Handler, dict[str, Any]], bool]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return FAMILIES["smollm2"].tokenizer()


class Servers:
    """Stub servers that can die and come back."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.running: list[StubServer] = []

    def start(self, before: Before | None = None, port: int = 0, **options: Any) -> StubServer:
        behaviour = behaviour_of(self.tokenizer, context=CONTEXT, slots=8, **options)
        if before is not None:
            behaviour = replace(behaviour, before=before)
        return self.listen(port, behaviour)

    def listen(self, port: int, behaviour: Behaviour) -> StubServer:
        server = StubServer(port, behaviour)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.running.append(server)
        return server

    def come_back(self, server: StubServer) -> StubServer:
        return self.listen(server.server_address[1], server.behaviour)


@pytest.fixture
def servers(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr(server_pool, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(server_pool, "LONGEST_PAUSE", 0.2)
    found = Servers(tokenizer)
    yield found
    for server in found.running:
        server.shutdown()
        server.server_close()


def asked(folder: Path, name: str = "out.jsonl", **options: Any) -> RegenerateSettings:
    """How prompts are answered, every tenth of which is too long for the servers."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        lines: list[str] = []
        for at in range(NUM_PROMPTS):
            text = f"question {at}?" + LONG * (at % 10 == 9)
            row = {"id": str(at), "messages": [{"role": "user", "content": text}]}
            lines.append(json.dumps(row) + "\n")
        prompts.write_text("".join(lines))
    given = {"max_new_tokens": 20, "batch_size": 4, **options}
    return RegenerateSettings(prompts=prompts, output=folder / name, **given)


def clients(*servers: StubServer) -> list[OpenAIClient]:
    return [OpenAIClient(server.url) for server in servers]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    """Which question each row is of."""
    texts = [row["messages"][0]["content"] for row in rows]
    return sorted(int(text.split()[1].partition("?")[0]) for text in texts)


def answers_by_question(path: Path) -> dict[int, list[int]]:
    return {numbers([row])[0]: row["answer_ids"] for row in rows_of(path)}


SHORT = [at for at in range(NUM_PROMPTS) if at % 10 != 9]
TOO_LONG = [at for at in range(NUM_PROMPTS) if at % 10 == 9]


def assert_whole(settings: RegenerateSettings, report: Any) -> None:
    """Every prompt that the servers can answer is answered once, every other one is an error once."""
    assert numbers(rows_of(settings.output)) == SHORT
    errors = rows_of(settings.errors)
    assert sorted(row["line"] - 1 for row in errors) == TOO_LONG
    assert all("maximum context length" in row["reason"] for row in errors)
    assert (report.num_answers, report.num_errors) == (len(SHORT), len(TOO_LONG))


# ---- what servers do


@pytest.mark.timeout(60)
def test_a_server_dies_and_comes_back(tmp_path: Path, servers: Servers, tokenizer: Any) -> None:
    # Slow enough that there is something left to answer when it is back
    first = servers.start(seconds_per_token=0.01)
    second = servers.start(seconds_per_token=0.01)
    settings = asked(tmp_path)
    back: list[StubServer] = []

    def kill() -> None:
        while sum(first.behaviour.asked.values()) < 8:
            time.sleep(0.005)
        first.behaviour.asked.clear()
        first.die()
        time.sleep(0.2)
        back.append(servers.come_back(first))

    killer = threading.Thread(target=kill)
    killer.start()
    report = regenerate(settings, clients(first, second), tokenizer)
    killer.join()
    assert_whole(settings, report)
    assert back[0].behaviour.asked, "it was asked again"
    assert sum(second.behaviour.asked.values()) > 5
    again = regenerate(settings, clients(back[0], second), tokenizer)
    assert again.num_new == 0
    assert_whole(settings, again)


def refuse(status: int, times: int, headers: dict[str, str] | None = None) -> Before:
    """Refuses the first of the prompts' requests."""
    seen: list[float] = []

    def before(handler: Handler, body: dict[str, Any]) -> bool:
        if "question" not in body["messages"][0]["content"] or len(seen) >= times:
            return False
        seen.append(time.monotonic())
        handler.reply({"error": "not now"}, status, headers)
        return True

    return before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("status", [429, 503, 500, 502])
def test_a_busy_server_is_asked_again(
    tmp_path: Path, servers: Servers, tokenizer: Any, status: int
) -> None:
    server = servers.start(refuse(status, 9))
    settings = asked(tmp_path)
    assert_whole(settings, regenerate(settings, clients(server), tokenizer))


@pytest.mark.timeout(60)
def test_a_server_is_left_alone_as_long_as_it_asks(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    times: list[tuple[float, int]] = []
    refused = refuse(503, 1, {"Retry-After": "1"})

    def before(handler: Handler, body: dict[str, Any]) -> bool:
        is_refused = refused(handler, body)
        times.append((time.monotonic(), is_refused))
        return is_refused

    settings = asked(tmp_path, batch_size=1)
    report = regenerate(settings, clients(servers.start(before)), tokenizer)
    assert_whole(settings, report)
    at = [is_refused for _, is_refused in times].index(True)
    assert times[at + 1][0] - times[at][0] >= 1


@pytest.mark.parametrize(
    ("header", "seconds"), [("2", 2), (" 3 ", 3), ("soon", 0), ("²", 0), ("", 0), ("1.5", 0)]
)
def test_only_whole_seconds_are_a_pause(header: str, seconds: int) -> None:
    response = httpx.Response(503, headers={"Retry-After": header.encode("latin-1")})
    assert server_pool._asked_pause(response) == seconds


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["half", "broken", "dribble"])
def test_an_answer_that_comes_in_part_or_slowly(
    tmp_path: Path, servers: Servers, tokenizer: Any, kind: str
) -> None:
    done: list[int] = []

    def before(handler: Handler, body: dict[str, Any]) -> bool:
        if "question 3?" not in body["messages"][0]["content"] or done:
            return False
        done.append(1)
        content = b'{"choices": [{"message": {"content": "half'
        if kind == "dribble":
            content = json.dumps(
                {"choices": [{"message": {"content": "abc"}, "finish_reason": "length"}],
                 "usage": {"prompt_tokens": len(handler.stub.behaviour.encode(body["messages"])),
                           "completion_tokens": 3}}
            ).encode()  # fmt: skip
        size = len(content) + 100 * (kind == "half")
        handler.send_response(200)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        for letter in content:
            handler.wfile.write(bytes([letter]))
            if kind == "dribble":
                time.sleep(0.005)
        handler.close_connection = True
        return True

    settings = asked(tmp_path)
    report = regenerate(settings, clients(servers.start(before)), tokenizer)
    assert_whole(settings, report)
    assert done == [1]
    if kind == "dribble":  # the others did not wait for it
        assert numbers([rows_of(settings.output)[-1]]) == [3]


@pytest.mark.timeout(60)
def test_no_answer_waits_for_the_longest_one(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    def before(handler: Handler, body: dict[str, Any]) -> bool:
        if "question 0?" in body["messages"][0]["content"]:
            counts = handler.stub.behaviour.asked
            while sum("question" in said for said in list(counts)) < len(SHORT) - 1:
                time.sleep(0.01)
        return False

    settings = asked(tmp_path)
    report = regenerate(settings, clients(servers.start(before)), tokenizer)
    assert_whole(settings, report)


@pytest.mark.timeout(60)
def test_a_prompt_that_breaks_a_server_is_given_up(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    def before(handler: Handler, body: dict[str, Any]) -> bool:
        if "question 5?" not in body["messages"][0]["content"]:
            return False
        handler.reply({"error": "CUDA error"}, 500)
        return True

    settings = asked(tmp_path)
    report = regenerate(settings, clients(servers.start(before)), tokenizer)
    assert report.num_errors == len(TOO_LONG) + 1
    (broken,) = (row for row in rows_of(settings.errors) if "CUDA" in row["reason"])
    assert broken["line"] == 6
    assert numbers(rows_of(settings.output)) == [at for at in SHORT if at != 5]


@pytest.mark.timeout(60)
def test_held_out_prompts_without_an_answer_leave_out_the_evaluation(
    tmp_path: Path, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless one is asked for: then nothing else is asked, and the refusal says how to train without."""
    toy = Servers(AutoTokenizer.from_pretrained(TOY / "target"))
    server = toy.start()
    servers.running.append(server)
    asked(tmp_path)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    too_long = lines[9].replace(LONG, 8 * LONG)
    # The first one is held out
    (tmp_path / "prompts.jsonl").write_text("".join([too_long, *lines[:8]]))
    words = [*SMALL, "--num-eval", 1, "--server", server.url]
    words += ["--dataset", tmp_path / "prompts.jsonl"]
    learn = ["--stages", "prepare,regenerate,run"]
    out = tmp_path / "unasked"
    result = train(*words, *learn, "--output-dir", out)
    assert result.exit_code == 0, result.output
    assert "The draft is trained without an evaluation" in caplog.text
    assert len(rows_of(out / "answered" / "train.jsonl")) == 8
    assert len(rows_of(out / "answered" / "held_out.errors.jsonl")) == 1
    out = tmp_path / "asked"
    words += ["--output-dir", out]
    refusal = f"expected conversations that are held out in {out / 'answered'} for --eval-strategy"
    for _ in range(2):
        result = train(*words, *learn, "--eval-strategy", "epoch")
        assert result.exit_code == 2, result.output
        assert refusal in said(result)
    assert not (out / "answered" / "train.jsonl").exists()
    result = train(*words, "--stages", "prepare,regenerate")
    assert result.exit_code == 0, result.output
    assert refusal in said(train(*words, *learn))
    assert not (out / "run").exists()
    result = train(*words, *learn, "--eval-strategy", "no")
    assert result.exit_code == 0, result.output


@pytest.mark.timeout(60)
def test_answers_without_text_are_errors(tmp_path: Path, servers: Servers, tokenizer: Any) -> None:
    messages = {
        1: {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        2: {"content": None, "refusal": "No."},
        4: {"content": ""},
    }

    def before(handler: Handler, body: dict[str, Any]) -> bool:
        for at, message in messages.items():
            if f"question {at}?" in body["messages"][0]["content"]:
                usage = {
                    "prompt_tokens": len(handler.stub.behaviour.encode(body["messages"])),
                    "completion_tokens": 3,
                }
                choice = {"message": message, "finish_reason": "stop"}
                handler.reply({"choices": [choice], "usage": usage})
                return True
        return False

    settings = asked(tmp_path)
    report = regenerate(settings, clients(servers.start(before)), tokenizer)
    reasons = {row["line"] - 1: row["reason"] for row in rows_of(settings.errors)}
    for at, word in ((1, "calls of tools"), (2, "a refusal"), (4, "nothing")):
        assert f"got {word}" in reasons[at]
    assert report.num_errors == len(TOO_LONG) + 3
    assert numbers(rows_of(settings.output)) == [at for at in SHORT if at not in messages]


@pytest.mark.timeout(60)
def test_servers_that_never_come_back_end_the_run(
    tmp_path: Path, servers: Servers, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "PATIENCE", 1.0)
    server = servers.start(seconds_per_token=0.002)
    settings = asked(tmp_path)

    def kill() -> None:
        while sum(server.behaviour.asked.values()) < 8:
            time.sleep(0.005)
        server.die()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(
        ValueError, match=rf"expected answers of {server.url}, got .*; start it, and run this again"
    ):
        regenerate(settings, clients(server), tokenizer)
    killer.join()
    num_kept = len(rows_of(settings.output))
    assert num_kept >= 4
    elsewhere = servers.start()
    report = regenerate(settings, clients(elsewhere), tokenizer)
    assert report.num_new == len(SHORT) - num_kept
    assert_whole(settings, report)


# ---- what is asked, and what is written


def test_an_answer_does_not_depend_on_the_order(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    server = servers.start()
    one = asked(tmp_path, "one.jsonl", temperature=0.8, seed=7, batch_size=1)
    regenerate(one, clients(server), tokenizer)
    expected = answers_by_question(one.output)
    many = asked(tmp_path, "many.jsonl", temperature=0.8, seed=7, batch_size=16)
    slow = servers.start(seconds_per_token=0.001)
    regenerate(many, clients(slow, server), tokenizer)
    assert answers_by_question(many.output) == expected
    assert [row["id"] for row in rows_of(many.output)] != [row["id"] for row in rows_of(one.output)]
    other = asked(tmp_path, "other.jsonl", temperature=0.8, seed=8)
    regenerate(other, clients(server), tokenizer)
    assert answers_by_question(other.output) != expected


def test_sampling_is_told_in_full(tmp_path: Path, servers: Servers, tokenizer: Any) -> None:
    bodies: list[dict[str, Any]] = []

    def before(handler: Handler, body: dict[str, Any]) -> bool:
        bodies.append(body)
        return False

    server = servers.start(before)
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    for options, expected in (
        ({}, (20, 0.0, 1.0, -1, 0.0)),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "seed": 100},
            (20, 0.7, 0.8, 20, 0.1),
        ),
    ):
        bodies.clear()
        name = f"{len(options)}.jsonl"
        regenerate(asked(tmp_path, name, **options), clients(server), tokenizer)
        questions = [body for body in bodies if "question" in body["messages"][0]["content"]]
        for body in questions:
            assert tuple(body[name] for name in names) == expected
        seeds = {
            int(body["messages"][0]["content"].split()[1].partition("?")[0]): body["seed"]
            for body in questions
        }
        assert seeds == {at: options.get("seed", 0) + at for at in range(NUM_PROMPTS)}


def test_a_served_prompt_is_of_the_day_it_was_asked(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    """A server has the day from its own clock, and not from the row."""
    row = {"id": "a", "messages": [{"role": "user", "content": "question 0?"}]}
    dated = {**row, "id": "b", "messages": [{"role": "user", "content": "question 1?"}]}
    lines = [json.dumps(line) + "\n" for line in (row, {**dated, "prompt_date": "2020-01-02"})]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    settings = asked(tmp_path)
    regenerate(settings, clients(servers.start()), tokenizer)
    found = {numbers([row])[0]: row.get("prompt_date") for row in rows_of(settings.output)}
    assert found == {0: None, 1: today()}


def test_a_torn_line_is_answered_again(tmp_path: Path, servers: Servers, tokenizer: Any) -> None:
    server = servers.start()
    settings = asked(tmp_path)
    regenerate(settings, clients(server), tokenizer)
    for path in (settings.output, settings.errors):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - 7])
    report = regenerate(settings, clients(server), tokenizer)
    assert report.num_new == 1
    assert_whole(settings, report)


@pytest.mark.timeout(120)
def test_killed_it_goes_on_with_what_is_missing(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    first = servers.start(seconds_per_token=0.004)
    second = servers.start(seconds_per_token=0.004)
    settings = asked(tmp_path)
    log = tmp_path / "log"
    words = [answer_by_servers.__file__, settings.prompts, settings.output, first.url, second.url]
    process = forked_python.start(words, os.environ, log, log)
    while not settings.output.exists() or settings.output.read_bytes().count(b"\n") < 6:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    num_kept = settings.output.read_bytes().count(b"\n")
    assert num_kept < len(SHORT), "it was killed too late: the case shows nothing"
    # Others: the first two still answer what was under way
    third = servers.start()
    fourth = servers.start()
    report = regenerate(settings, clients(third, fourth), tokenizer)
    assert report.num_new == len(SHORT) - num_kept
    assert_whole(settings, report)
    counted = third.behaviour.asked + fourth.behaviour.asked
    questions = Counter({said: n for said, n in counted.items() if "question" in said})
    assert set(questions.values()) <= {1}, "nothing is asked twice"


def test_texts_that_are_tokenized_otherwise_are_counted(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    text = "good day"
    exact = servers.start(tells_ids=False)
    exact.behaviour.text = lambda ids: text
    report = regenerate(asked(tmp_path), clients(exact), tokenizer)
    assert (report.num_new, report.num_inexact) == (len(SHORT), 0)
    ids = tokenizer(text)["input_ids"]
    for row in rows_of(tmp_path / "out.jsonl"):
        assert row["answer_ids"] == [*ids, tokenizer.eos_token_id] if row["finished"] else ids
    odd = servers.start(tells_ids=False)
    odd.behaviour.text = lambda ids: "good <|im_end|> day"
    tokenizer_that_drops = FAMILIES["smollm2"].tokenizer()
    decode = tokenizer_that_drops.decode
    tokenizer_that_drops.decode = lambda ids, **options: decode(
        [token for token in ids if token < 256], **options
    )
    report = regenerate(asked(tmp_path, "odd.jsonl"), clients(odd), tokenizer_that_drops)
    assert (report.num_new, report.num_inexact) == (len(SHORT), len(SHORT))


@pytest.mark.parametrize("where", ["length", "ids"])
def test_another_tokenizer_is_refused_before_anything_is_asked(
    tmp_path: Path, servers: Servers, tokenizer: Any, where: str
) -> None:
    right = servers.start()
    wrong = servers.start()
    encode = wrong.behaviour.encode
    if where == "length":
        wrong.behaviour.encode = lambda messages: [*encode(messages), 5]
        sentence = rf"expected prompts of {wrong.url} as ours are, of \d+ tokens, got \d+; start it"
    else:
        wrong.behaviour.encode = lambda messages: [*encode(messages)[:-1], 5]
        sentence = rf"expected prompts of {wrong.url} with the tokens that ours have, .*, got \["
    with pytest.raises(ValueError, match=sentence):
        regenerate(asked(tmp_path), clients(right, wrong), tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    assert not any("question" in said for said in right.behaviour.asked)


def test_a_prompt_with_images_is_as_long_as_the_server_says(
    tmp_path: Path, servers: Servers
) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))

    def encode(messages: list[dict[str, Any]]) -> list[int]:
        content = messages[0]["content"]
        if any(block["type"] == "image_url" for block in content if isinstance(content, list)):
            return [5] * 77
        row = {"messages": messages}
        return ChatDataset([row], processor, answers=[[]])[0].input_ids

    behaviour = behaviour_of(processor.tokenizer, context=CONTEXT)
    behaviour.encode = encode
    server = servers.listen(0, behaviour)
    picture(24, 16).save(tmp_path / "a.png")
    user = {"role": "user", "content": "What?"}
    rows = [{"id": "a", "messages": [user], "images": ["a.png"]}, {"id": "b", "messages": [user]}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = asked(tmp_path)
    regenerate(settings, clients(server), processor)
    answered = rows_of(settings.output)
    sizes = {"images" in row: row["num_tokens"] - len(row["answer_ids"]) for row in answered}
    assert sizes == {True: 77, False: len(encode([user]))}


def test_a_full_disk_ends_the_run(
    tmp_path: Path, servers: Servers, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    server = servers.start()
    settings = asked(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("dflash_hf.data.row_files.SYNC_SECONDS", 0.0)
        real = os.fsync
        patch.setattr("os.fsync", lambda file: full() if settings.output.exists() else real(file))
        with pytest.raises(ValueError, match=r"expected to write to .*, got No space left on dev"):
            regenerate(settings, clients(server), tokenizer)
    assert_whole(settings, regenerate(settings, clients(server), tokenizer))


def test_a_server_that_is_not_there_is_named(
    tmp_path: Path, servers: Servers, tokenizer: Any
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ValueError, match=f"expected answers of {gone}, got .*; start it"):
        regenerate(asked(tmp_path), [*clients(servers.start()), OpenAIClient(gone)], tokenizer)


def test_an_image_that_cannot_be_read_is_named_by_its_line(
    tmp_path: Path, servers: Servers
) -> None:
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path / "processor"))

    def encode(messages: list[dict[str, Any]]) -> list[int]:
        return ChatDataset([{"messages": messages}], processor, answers=[[]])[0].input_ids

    behaviour = behaviour_of(processor.tokenizer, context=CONTEXT)
    behaviour.encode = encode
    server = servers.listen(0, behaviour)
    write_cut_image(tmp_path / "cut.png")
    user = {"role": "user", "content": "What?"}
    rows = [{"id": "a", "messages": [user]}, {"id": "b", "messages": [user]}]
    rows.append({"id": "c", "messages": [user], "images": ["cut.png"]})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentence = rf"image file is truncated.* \(line 3 of {prompts}\)"
    with pytest.raises(ValueError, match=sentence):
        regenerate(asked(tmp_path), clients(server), processor)
