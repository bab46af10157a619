"""`dflash-hf serve` as OpenAI's client meets it: answers are plain `generate`'s, and nothing sent breaks it."""

from __future__ import annotations

import base64
import io
import json
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import APIError, BadRequestError, NotFoundError
from PIL import Image

from dflash_hf.bench.cells import Options
from dflash_hf.bench.server import server_method
from dflash_hf.cli.demo import read_prompts
from dflash_hf.cli.pair import named_pair
from dflash_hf.data.openai_client import OpenAIClient, run_async
from dflash_hf.pair.answers import encode_prompt, tokenizer_of
from dflash_hf.pair.loading import load_pair
from dflash_hf.serve.penalties import SaidPenalty
from dflash_hf.training.chat_template import ChatTemplate
from dflash_hf.training.server import ServerCheck, check_servers, checked_answer
from helpers.served import Served
from helpers.source_tree import ROOT

TOY = ROOT / "demos" / "toy"
ADDS = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
FOREVER = {"2": -100}  # biases: no end of sequence
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Ends with status 0 on SIGTERM, in the middle of an answer, which is told so."""
    server = Served(tmp_path_factory.mktemp("text"), "--pair", "text", is_fork=False)
    yield server
    pieces = iter(ask(server, ADDS, stream=True, logit_bias=FOREVER, max_tokens=900))
    next(pieces), next(pieces)
    assert server.ended_by(signal.SIGTERM) == 0, server.log
    with pytest.raises(APIError) as caught:
        list(pieces)
    assert caught.value.message == "the server stops"
    assert caught.value.type == "server_error"
    assert "then Ended: the server stops" in server.log
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Ends with status 130 on Ctrl-C."""
    server = Served(tmp_path_factory.mktemp("vision"), "--pair", "vision")
    yield server
    assert server.ended_by(signal.SIGINT) == 130, server.log
    assert server.log.endswith("Interrupted.\n")
    assert "Traceback" not in server.log


@cache
def pair(name: str) -> tuple[Any, Any, Any]:
    return load_pair(*named_pair(name))


@cache
def chats() -> list[tuple[Messages, str, int]]:
    """A conversation of each kind, one of several turns among them, and what plain `generate` answers."""
    found = [row["messages"] for row in read_prompts(TOY / "held_out.jsonl", 1)]
    return [(messages, *generated("text", messages)) for messages in found]


def ask(server: Served, messages: Messages, **options: Any) -> Any:
    sent: Any = messages
    return server.client.chat.completions.create(model=server.name, messages=sent, **options)


def joined(pieces: Any) -> tuple[str, str, int]:
    """The text of a stream, why it ended, and its number of tokens."""
    text, reason, num_tokens = "", "", 0
    for piece in pieces:
        for choice in piece.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        num_tokens = piece.usage.completion_tokens if piece.usage else num_tokens
    return text, reason, num_tokens


def both_ways(server: Served, messages: Messages, **options: Any) -> tuple[str, str, int]:
    """What [`joined`] returns, of an answer that came in pieces and came whole."""
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    found = joined(ask(server, messages, **with_usage, **options))
    whole = ask(server, messages, **options)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == found[:2]
    assert whole.usage.completion_tokens == found[2]
    return found


def all_both_ways(
    server: Served, chats: Sequence[Messages], **options: Any
) -> list[tuple[str, str, int]]:
    """What [`both_ways`] returns of each; whole answers come at once: a step of several rows costs as one of one."""
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    found = [joined(ask(server, messages, **with_usage, **options)) for messages in chats]
    with ThreadPoolExecutor(len(chats)) as clients:
        wholes = clients.map(lambda messages: ask(server, messages, **options), chats)
        for streamed, whole in zip(found, wholes, strict=True):
            choice = whole.choices[0]
            told = (choice.message.content, choice.finish_reason, whole.usage.completion_tokens)
            assert told == streamed
    return found


def generated(
    name: str, prompt: Any, draft: bool = False, template: bool = True, **settings: Any
) -> tuple[str, int]:
    """Text and number of tokens of `generate`, plain unless `draft`."""
    target, assistant, processor = pair(name)
    inputs = encode_prompt(processor, prompt, torch.device("cpu"), template=template)
    settings = {"max_new_tokens": 600, "do_sample": False, **settings}
    if draft:
        settings["assistant_model"] = assistant
    ids = target.generate(**inputs, **settings, tokenizer=tokenizer_of(processor))[
        0, inputs["input_ids"].shape[1] :
    ]
    return str(tokenizer_of(processor).decode(ids, skip_special_tokens=True)), len(ids)


LIMIT = 17  # of an answer whose beginning tells enough


@cache
def sum_said(limit: int = LIMIT) -> tuple[str, int]:
    """What plain `generate` answers to `ADDS`, and its number of tokens."""
    return generated("text", ADDS, max_new_tokens=limit)


# ---- what is answered


def test_answers_are_those_of_plain_generate(text: Served) -> None:
    found = all_both_ways(text, [messages for messages, _, _ in chats()])
    assert found == [(expected, "stop", num_tokens) for _, expected, num_tokens in chats()]


def test_the_draft_is_used_and_usage_is_counted(text: Served) -> None:
    model: Any = text.name
    messages: Any = ADDS
    raw = text.client.chat.completions.with_raw_response.create(model=model, messages=messages)
    assert float(raw.headers["x-acceptance-length"]) > 4
    answer = raw.parse()
    assert answer.model == "text"
    assert answer.usage is not None
    length = encode_prompt(pair("text")[2], ADDS, torch.device("cpu"))["input_ids"].shape[1]
    assert answer.usage.prompt_tokens == length
    assert answer.usage.total_tokens == length + answer.usage.completion_tokens
    assert f"{answer.id}: {answer.usage.completion_tokens} tokens in" in text.log
    assert "acceptance length" in text.log


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits(text: Served, name: str) -> None:
    for limit in (1, 2, LIMIT):
        expected, num_tokens = sum_said(limit)
        assert num_tokens == limit
        assert both_ways(text, ADDS, **{name: limit}) == (expected, "length", num_tokens)


def test_without_a_limit_an_answer_may_fill_the_context(text: Served) -> None:
    messages = [{"role": "user", "content": "Compute 41 + 80. " * 86}]
    length = encode_prompt(pair("text")[2], messages, torch.device("cpu"))["input_ids"].shape[1]
    assert 900 < length < 1000
    answer = ask(text, messages, logit_bias=FOREVER)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (length, 1024)
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(
        BadRequestError, match=f"together at most 1024 tokens, got a prompt of {length} beside"
    ):
        ask(text, messages, max_tokens=1025 - length)


@pytest.mark.parametrize("stop", ["Step 2", ["carry", "Step 3:"], ["\n"], "nowhere"])
def test_stops_are_those_of_generate(text: Served, stop: str | list[str]) -> None:
    expected, num_tokens = generated("text", ADDS, stop_strings=stop, max_new_tokens=80)
    reason = "length" if stop == "nowhere" else "stop"
    for one in [stop] if isinstance(stop, str) else stop:
        expected = expected.partition(one)[0]
    assert both_ways(text, ADDS, stop=stop, max_tokens=80) == (expected, reason, num_tokens)


def test_penalties_and_biases_are_those_of_generate(text: Served) -> None:
    length = encode_prompt(pair("text")[2], ADDS, torch.device("cpu"))["input_ids"].shape[1]
    # The last penalties are as strong as may be: in a longer answer they change the text.
    for frequency, presence, limit in ((-1.0, 0.5, 24), (0.5, 0.0, 24), (2.0, 2.0, 64)):
        penalty = SaidPenalty(frequency, presence, length)
        settings = {"logits_processor": [penalty], "max_new_tokens": limit}
        expected, _ = generated("text", ADDS, **settings)
        sent = {"frequency_penalty": frequency, "presence_penalty": presence}
        assert both_ways(text, ADDS, **sent, max_tokens=limit)[0] == expected
    assert expected != sum_said(64)[0], "a strong penalty changes the text"
    token = int(tokenizer_of(pair("text")[2])("Step", add_special_tokens=False)["input_ids"][0])
    expected, _ = generated("text", ADDS, sequence_bias={(token,): -100.0}, max_new_tokens=24)
    assert "Step" in sum_said(24)[0]
    assert "Step" not in expected
    assert both_ways(text, ADDS, logit_bias={str(token): -100}, max_tokens=24)[0] == expected


def test_sampling_is_that_of_generate_with_draft_and_seed(text: Served) -> None:
    hello: Messages = [{"role": "user", "content": "Hello."}]

    def sampled(seed: int) -> str:
        return both_ways(text, hello, temperature=1.5, top_p=0.95, seed=seed, max_tokens=20)[0]

    texts = list[str]()
    for seed in range(3):
        torch.manual_seed(seed)
        settings = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "max_new_tokens": 20}
        texts.append(generated("text", hello, draft=True, **settings)[0])
    assert len(set(texts)) == 3
    # All at once: a seed is that of its own request.
    with ThreadPoolExecutor(3) as clients:
        assert list(clients.map(sampled, range(3))) == texts
    assert both_ways(text, ADDS, temperature=0, seed=1, max_tokens=LIMIT)[0] == sum_said()[0]
    free = [
        ask(text, hello, temperature=2, max_tokens=20).choices[0].message.content for _ in range(2)
    ]
    ask(text, hello, temperature=2, max_tokens=1, seed=5)
    free.append(ask(text, hello, temperature=2, max_tokens=20).choices[0].message.content)
    ask(text, hello, temperature=2, max_tokens=1, seed=5)
    free.append(ask(text, hello, temperature=2, max_tokens=20).choices[0].message.content)
    assert len(set(free)) == 4, "without a seed each is another"


def test_plain_completions(text: Served) -> None:
    prompt = "<|im_start|>user\nCompute 41 + 80.<|im_end|>\n<|im_start|>assistant\n"
    for settings in ({}, {"max_tokens": 9}, {"stop": "carry"}):
        names = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}
        expected, num_tokens = generated(
            "text",
            prompt,
            template=False,
            **{names[name]: value for name, value in settings.items()},
        )
        expected = expected.partition(str(settings.get("stop", "\0")))[0]
        options: Any = settings
        whole = text.client.completions.create(model=text.name, prompt=prompt, **options)
        assert whole.usage is not None
        assert (whole.choices[0].text, whole.usage.completion_tokens) == (expected, num_tokens)
        pieces = text.client.completions.create(
            model=text.name, prompt=prompt, stream=True, **options
        )
        assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_parts_nulls_and_fields_without_effect(text: Served) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": ADDS[0]["content"]}], "name": None}
    ]
    parts[0]["tool_calls"] = []  # as some clients send back what they were sent
    neutral = {
        "n": 1,
        "presence_penalty": 0,
        "user": "me",
        "stop": None,
        "logprobs": False,
    }
    assert both_ways(text, parts, **neutral, max_tokens=LIMIT)[0] == sum_said()[0]


def test_several_at_once_get_their_own_answers(text: Served) -> None:
    def answers(shift: int) -> list[str]:
        order = [*chats()[shift:], *chats()[:shift]]
        return [joined(ask(text, messages, stream=True))[0] for messages, _, _ in order]

    expected = [answer for _, answer, _ in chats()]
    with ThreadPoolExecutor(3) as clients:
        for shift, found in enumerate(clients.map(answers, range(3))):
            assert found == [*expected[shift:], *expected[:shift]]


def test_models_and_health(text: Served) -> None:
    assert [model.id for model in text.client.models.list()] == ["text"]
    assert text.client.models.retrieve("text").owned_by == "dflash-hf"
    with pytest.raises(NotFoundError, match="expected 'text' as model, got 'gpt-4o'"):
        text.client.models.retrieve("gpt-4o")
    assert httpx.get(f"{text.url.removesuffix('/v1')}/health").json() == {"status": "ok"}


def test_our_own_clients_understand_it(text: Served) -> None:
    messages, expected, num_tokens = chats()[0]
    client = OpenAIClient(text.url)
    turn = server_method(client, {})([messages], Options(max_new_tokens=600), 0)[0]
    assert (turn.text, turn.new_tokens, turn.finish_reason) == (expected, num_tokens, "stop")
    template = ChatTemplate(pair("text")[2])
    options = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 3}
    assert check_servers([client], ServerCheck(pair("text")[2], {}, options)) == "text"

    async def reply() -> Any:
        async with client:
            return await client.ask({"messages": messages, "max_tokens": 600, **options})

    answer = checked_answer(client, template, run_async(reply), None)
    said = template.tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert (said, answer.is_finished, answer.is_exact) == (expected, True, True)


def test_top_k_and_min_p_are_those_of_generate(text: Served) -> None:
    hello: Messages = [{"role": "user", "content": "Hello."}]
    for options in ({"top_k": 2}, {"min_p": 0.5}, {"top_k": 0, "min_p": 0.0}):
        torch.manual_seed(4)
        settings = {"do_sample": True, "temperature": 1.8, "max_new_tokens": 20, **options}
        expected = generated("text", hello, draft=True, **settings)[0]
        sent = {"temperature": 1.8, "seed": 4, "max_tokens": 20, "extra_body": dict(options)}
        assert both_ways(text, hello, **sent)[0] == expected
    greedy = {"temperature": 0, "extra_body": {"top_k": -1, "min_p": 0}}
    assert both_ways(text, ADDS, **greedy, max_tokens=LIMIT)[0] == sum_said()[0]


# ---- images


def shown(image: Image.Image, kind: str = "PNG") -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    code = base64.b64encode(buffer.getvalue()).decode()
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{kind.lower()};base64,{code}", "detail": "high"},
    }


def with_images(content: Any) -> Any:
    """A turn's content as OpenAI's clients send it: images by what is in them."""
    if isinstance(content, str):
        return content
    return [shown(Image.open(part["path"])) if "path" in part else part for part in content]


def test_images_are_seen_as_generate_sees_them(vision: Served) -> None:
    rows = read_prompts(TOY / "vision" / "held_out.jsonl", 1)
    sent = [
        [{**turn, "content": with_images(turn["content"])} for turn in row["messages"]]
        for row in rows
    ]
    expected = list[tuple[str, str, int]]()
    for row in rows:
        said, num_tokens = generated("vision", row["messages"], max_new_tokens=40)
        expected.append((said, "length" if num_tokens == 40 else "stop", num_tokens))
    assert {reason for _, reason, _ in expected} == {"length", "stop"}
    assert all_both_ways(vision, sent, max_tokens=40) == expected


def test_stops_where_a_processor_encodes(vision: Served) -> None:
    row = next(
        row
        for row in read_prompts(TOY / "vision" / "held_out.jsonl", 1)
        if row["kind"] == "describe"
    )
    messages = [{**turn, "content": with_images(turn["content"])} for turn in row["messages"]]
    assert (
        both_ways(vision, messages, stop=["."])[0] + "."
        == generated("vision", row["messages"], stop_strings=["."])[0]
    )


def test_what_is_no_image_is_refused(vision: Served) -> None:
    text = {"type": "text", "text": "What is this?"}
    png = shown(Image.new("RGB", (64, 64)))["image_url"]["url"]
    flat = shown(Image.new("L", (8_001, 8_001)))["image_url"]["url"]
    for url, sentence in [
        ("data:image/png;base64,AAAA", "expected an image (PNG, "),
        ("data:image/png;base64,%%%%", "expected base64 in each image"),
        (png[: len(png) // 2 // 4 * 4 + png.index(",") % 4 + 1], "expected"),
        (
            "http://127.0.0.1:9/x.png",
            "expected each image as data:image/...;base64,..., got 'http://127.0.0.1:9/x.png'",
        ),
        ("/etc/hostname", "expected each image as data:image/...;base64,..., got '/etc/hostname'"),
        (
            str(TOY / "vision" / "pictures" / "describe-0.png"),
            "expected each image as data:image/...;base64,..., got",
        ),
        (flat, "expected an image of at most 64 megapixels"),
        (shown(Image.new("L", (3000, 4)))["image_url"]["url"], "aspect ratio"),
        ("", "expected each image as"),
        (None, "expected each image as"),
        (5, "expected each image as"),
    ]:
        with pytest.raises(BadRequestError) as caught:
            ask(
                vision,
                [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": url}}, text],
                    }
                ],
            )
        assert sentence in str(caught.value), url
    with pytest.raises(BadRequestError, match="at most 16 images, got 17"):
        ask(vision, [{"role": "user", "content": [shown(Image.new("RGB", (32, 32)))] * 17}])


# ---- what is refused

NO_TURN = "expected messages, a list of turns"
LONG = "word " * 2000
LARGE = "x" * 4_000_000


def call_with(arguments: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool, as a turn of the assistant has it."""
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-4o"}, 404, "expected 'text' as model, got 'gpt-4o'"),
    ({"model": 5}, 404, "expected 'text' as model, got 5"),
    ({"messages": None}, 400, NO_TURN),
    ({"messages": []}, 400, NO_TURN),
    ({"messages": "hi"}, 400, NO_TURN),
    ({"messages": {"role": "user"}}, 400, NO_TURN),
    ({"messages": [5]}, 400, "expected turns with role and content in messages, got 5"),
    ({"messages": [{}]}, 400, "expected role of each turn among system, "),
    (
        {"messages": [{"role": "king", "content": "x"}]},
        400,
        "expected role of each turn among system, ",
    ),
    (
        {"messages": [{"role": ["user"], "content": "x"}]},
        400,
        "expected role of each turn among system, ",
    ),
    (
        {"messages": [{"role": "user"}]},
        400,
        "expected a text as content of each turn (or a list of parts), got None",
    ),
    (
        {"messages": [{"role": "user", "content": 7}]},
        400,
        "expected a text as content of each turn",
    ),
    (
        {"messages": [{"role": "user", "content": [7]}]},
        400,
        "expected parts of type text or image_url, got 7",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
        400,
        "expected parts of type text or",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "expected a text as text of each part",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "which are all that this target reads",
    ),
    (
        {"messages": [{"role": "user", "content": "a\ud800b"}]},
        400,
        "expected JSON of whole characters",
    ),
    (
        {"messages": [{"role": "user", "content": LONG}]},
        400,
        "together at most 1024 tokens, got a prompt of",
    ),
    (
        {"messages": [{"role": "user", "content": "x" * 4_000_000}]},
        400,
        "expected at most 4000000 characters",
    ),
    # Templates write the arguments of a call, whatever their names are.
    (
        {"messages": [{"role": "assistant", "tool_calls": [call_with({"image_url": LARGE})]}]},
        400,
        "expected at most 4000000 characters",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call_with({LARGE: 1})]}]},
        400,
        "expected at most 4000000 characters",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [5]}]},
        400,
        "expected tool_calls with a function that has",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        400,
        "expected tool_calls as a list, got 5",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
            ]
        },
        400,
        "expected arguments of each of tool_calls as an object in JSON, got '{'",
    ),
    # Half a character in what is nested, and in texts of JSON: there it is an escape.
    ({"metadata": {"a": [{"\ud83d": 1}]}}, 400, "expected JSON of whole characters"),
    ({"tools": [{"function": {"name": "\ud83d"}}]}, 400, "expected JSON of whole characters"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": ["\\ud83d"]}'}}],
                }
            ]
        },
        400,
        "expected arguments of each of tool_calls of whole characters, got",
    ),
    (
        {"structured_outputs": {"json": '{"properties": {"\\ud83d": {"type": "string"}}}'}},
        400,
        "expected a schema of whole characters, got",
    ),
    (
        {"structured_outputs": {"json": '{"enum": ["x\\ude00"]}'}},
        400,
        "expected a schema of whole characters, got",
    ),
    ({"max_tokens": 0}, 400, "expected max_tokens as a whole number from 1 to 2147483647, got 0"),
    ({"max_tokens": -1}, 400, "expected max_tokens as a whole number"),
    ({"max_tokens": 1.5}, 400, "expected max_tokens as a whole number"),
    ({"max_tokens": "9"}, 400, "expected max_tokens as a whole number"),
    ({"max_tokens": True}, 400, "expected max_tokens as a whole number"),
    ({"max_tokens": 10**30}, 400, "expected max_tokens as a whole number"),
    ({"max_tokens": 10**9}, 400, "expected a prompt and an answer of together at most 1024 tokens"),
    ({"max_completion_tokens": -5}, 400, "expected max_completion_tokens as a whole number"),
    ({"temperature": -1}, 400, "expected temperature as a number from 0 to 2, got -1"),
    ({"temperature": float("nan")}, 400, "expected temperature as a number from 0 to 2, got nan"),
    ({"temperature": 1e-300}, 400, "expected temperature as 0 or at least 0.01, got 1e-300"),
    ({"temperature": "hot"}, 400, "expected temperature as a number"),
    ({"top_p": 1.01}, 400, "expected top_p as a number from 0 to 1"),
    ({"seed": -1}, 400, "expected seed as a whole number from 0 to 4294967295, got -1"),
    ({"seed": 2**70}, 400, "expected seed as a whole number"),
    ({"frequency_penalty": -2.5}, 400, "expected frequency_penalty as a number from -2 to 2"),
    ({"stop": ""}, 400, "expected a text as each stop, got ''"),
    ({"stop": [""]}, 400, "expected a text as each stop, got ''"),
    ({"stop": 5}, 400, "expected stop as a text or a list of at most 16, got 5"),
    ({"stop": ["x"] * 17}, 400, "expected stop as a text or a list of at most 16"),
    ({"stream": "yes"}, 400, "expected stream as true or false, got 'yes'"),
    ({"logit_bias": {"x": 1}}, 400, "expected token ids below"),
    ({"logit_bias": {"99999999": 1}}, 400, "expected token ids below"),
    ({"logit_bias": {"-1": 1}}, 400, "expected token ids below"),
    ({"logit_bias": {"5": 1e9}}, 400, "expected numbers from -100 to 100 in logit_bias"),
    ({"logit_bias": [1]}, 400, "expected logit_bias as an object"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "of which the chat template knows none",
    ),
    ({"tools": 5}, 400, "expected tools as a list, got 5"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        400,
        "expected options that the chat template has in",
    ),
    (
        {"chat_template_kwargs": {"messages": []}},
        400,
        "expected options that the chat template has in",
    ),
    (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        400,
        "expected options that the chat template has in",
    ),
    ({"n": 17}, 400, "expected n as a whole number from 1 to 16, got 17"),
    ({"logprobs": 2}, 400, "expected logprobs as true or false, got 2"),
    (
        {"response_format": {"type": "xml"}},
        400,
        "expected the type of response_format among text, json_object, json_schema, got 'xml'",
    ),
    ({"top_a": 5}, 400, "expected fields that this server has, got 'top_a'"),
    ({"generation_config": {}}, 400, "expected generation_config as an object in JSON, got {}"),
]


def refusal(server: Served, path: str, **sent: Any) -> tuple[int, dict[str, Any]]:
    found = httpx.post(f"{server.url}/{path}", timeout=60, **sent)
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return found.status_code, error


def test_bad_requests_are_refused_in_a_sentence(text: Served) -> None:
    for number, (body, status, sentence) in enumerate(REFUSED):
        sent = json.dumps({"model": "text", "messages": ADDS, "stream": bool(number % 2), **body})
        headers = {"content-type": "application/json"}
        found, error = refusal(text, "chat/completions", content=sent, headers=headers)
        assert (found, error["type"]) == (status, "invalid_request_error"), (body, error)
        assert sentence in error["message"], (body, error)
    assert joined(ask(text, ADDS, stream=True, max_tokens=LIMIT))[0] == sum_said()[0]


def test_what_is_no_request_is_refused(text: Served) -> None:
    headers = {"content-type": "application/json"}
    deep = b"[" * 100_000 + b"]" * 100_000
    for content in (
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff\xfe",
        b'{"model": "text"',
        deep,
        b'{"seed": 1' + b"0" * 9999 + b"}",
    ):
        status, error = refusal(text, "chat/completions", content=content, headers=headers)
        assert status == 400, content[:20]
        assert error["message"].startswith("expected "), error
    status, error = refusal(
        text, "chat/completions", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert (status, error["message"]) == (
        415,
        "expected application/json as content-type, got text/plain; correct the request",
    )
    status, error = refusal(text, "completions", content=b" " * (64 * 2**20 + 1), headers=headers)
    assert (status, error["message"]) == (
        413,
        "expected a body of at most 64 MB, got more; shorten it",
    )
    status, error = refusal(text, "responses", json={})
    assert status == 404
    assert "expected one of POST /v1/chat/completions, " in error["message"]
    assert refusal(text, "models", json={})[0] == 405
    for prompt in (None, "", 5, ["a", "b"], [1, 2]):
        status, error = refusal(text, "completions", json={"prompt": prompt})
        assert (status, error["message"][:27]) == (400, "expected a text as prompt, ")
    assert refusal(text, "completions", json={"prompt": LONG})[0] == 400


# ---- clients that go away


def test_a_client_that_goes_away_ends_its_answer(text: Served) -> None:
    start = len(text.log)
    stream = ask(text, ADDS, stream=True, logit_bias=FOREVER, max_tokens=900)
    pieces = iter(stream)
    next(pieces), next(pieces)
    stream.close()
    log = text.waited_for(lambda log: "the client has gone" in log[start:])[start:]
    num_tokens = int(log.split(" tokens in")[0].split(": ")[-1])
    assert 0 < num_tokens < 900, log
    # Nor is an answer finished that comes whole, beside one that is streamed.
    held = ask(text, ADDS, stream=True, logit_bias=FOREVER, max_tokens=900)
    next(iter(held))
    body = {"messages": ADDS, "max_tokens": 900, "logit_bias": FOREVER}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{text.url}/chat/completions", json=body, timeout=0.3)
    held.close()
    text.waited_for(lambda log: log[start:].count("the client has gone") == 3)
    assert joined(ask(text, ADDS, stream=True, max_tokens=LIMIT))[0] == sum_said()[0]


def test_a_second_server_finds_no_place(text: Served, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"has ended \(2\)") as caught:
        Served(tmp_path, "--port", text.url.split(":")[-1].removesuffix("/v1"))
    assert "Error: expected a place to listen, got 127.0.0.1:" in str(caught.value)
    assert "(Address already in use); pass another --host or --port" in str(caught.value)
