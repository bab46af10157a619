"""OpenAI's contract, case by case: each asked by OpenAI's client and by raw HTTP, streamed and whole."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from openai import APIError
from transformers.cli.serving.utils import get_response_template

from dflash_hf.bench.server import counters
from dflash_hf.cli.pair import named_pair
from dflash_hf.data.openai_client import OpenAIClient, run_async
from dflash_hf.pair.loading import load_pair
from dflash_hf.serve.engine import Counts, Job, Tokens
from dflash_hf.serve.markup import MarkupReader
from dflash_hf.serve.messages import read_messages
from dflash_hf.serve.metrics import Metrics, Tracked
from dflash_hf.serve.pair import Pair
from helpers.half import half
from helpers.scripted_server import Found, InProcess, Script, read
from helpers.whole_blocks import use_whole_blocks

# A template that renders everything that a turn may have.
RICH = """{% for tool in tools or [] %}<|im_start|>tool {{ tool | tojson }}<|im_end|>{% endfor -%}
{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif -%}
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
ADDS: list[dict[str, Any]] = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "dry": {"type": "boolean"}},
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"path": "/", "dry": true}}\n</tool_call>'
PARAMETERS = "<parameter=path>\n/\n</parameter>\n<parameter=dry>\ntrue\n</parameter>"
XML = f"<tool_call>\n<function=f>\n{PARAMETERS}\n</function>\n</tool_call>"
BARE = '<tool_call>\n{"name": "f"}\n</tool_call>'
GEMMA = '<|tool_call>call:f{path:<|"|>/<|"|>,dry:true}<tool_call|>'
ARGUMENTS = {"path": "/", "dry": True}
CLOSED_EARLY = CALL.replace('"/"', '"</tool_call>"')
CLOSES = r'"a \"</tool_call>\n</tool_call>"'  # an argument in JSON
ENDS = {"logit_bias": {"2": 100}}  # the end token, whatever is asked
BYTE = {"logit_bias": {"131": 100}}  # the first byte of a character, and never the rest
MOMENT = 3.0  # seconds that a busy machine may take longer
WAYS = [(way, streamed) for way in ("openai", "http") for streamed in (False, True)]


@dataclass(frozen=True)
class Case:
    """What is said or asked, and what has to come; only what is expected is looked at."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    says: str = ""  # by the script; empty asks the bundled pair
    markup: str = "qwen3"
    expected: dict[str, Any] = field(default_factory=dict[str, Any])
    is_chat: bool = True
    streams_only: bool = False
    cut: str = ""  # what of it the limit lets pass


def scripted(name: str, says: str, content: str, reason: str = "stop", **more: Any) -> Case:
    """A case with tools, in which the script says something."""
    fields = {"messages": HELLO, "tools": TOOLS, **more.pop("fields", {})}
    markup = more.pop("markup", "qwen3")
    cut = more.pop("cut", "")
    expected = {"content": content, "reasons": [reason], "calls": [], "reasoning": "", **more}
    return Case(name, fields, says, markup, expected, cut=cut)


def refused(name: str, fields: dict[str, Any], param: str, code: str, is_chat: bool = True) -> Case:
    """A case that is refused with status 400."""
    prompt: dict[str, Any] = {"messages": HELLO} if is_chat else {"prompt": "Hello."}
    expected = {"status": 400, "param": param, "code": code}
    return Case(name, {**prompt, **fields}, expected=expected, is_chat=is_chat)


CALLED = {"calls": [("f", ARGUMENTS)]}
TWICE = {"calls": [("f", ARGUMENTS), ("f", ARGUMENTS)]}
CASES = [
    # ---- why an answer ends
    Case("end_token_alone", {"messages": HELLO, "max_tokens": 1, **ENDS},
         expected={"content": "", "reasons": ["stop"], "completion_tokens": 1}),
    Case("end_token_of_a_completion", {"prompt": "Hello.", "max_tokens": 1, **ENDS},
         expected={"content": "", "reasons": ["stop"]}, is_chat=False),
    Case("limit_of_one", {"messages": ADDS, "max_tokens": 1},
         expected={"reasons": ["length"], "completion_tokens": 1}),
    Case("max_completion_tokens", {"messages": ADDS, "max_completion_tokens": 5},
         expected={"reasons": ["length"], "completion_tokens": 5}),
    scripted("limit_before_the_end_token", "one two", "one two", "length", cut="one two"),
    # ---- characters that are cut
    Case("one_broken_byte", {"messages": HELLO, "max_tokens": 1, **BYTE},
         expected={"content": "\ufffd", "reasons": ["length"]}),
    Case("three_broken_bytes", {"messages": HELLO, "max_tokens": 3, **BYTE},
         expected={"content": "\ufffd" * 3, "completion_tokens": 3}),
    Case("broken_bytes_of_a_completion", {"prompt": "Hello.", "max_tokens": 2, **BYTE},
         expected={"content": "\ufffd" * 2}, is_chat=False),
    scripted("cut_within_a_character", "a\u6f22", "a\ufffd", "length", fields={"max_tokens": 2}),
    # ---- stop texts
    scripted("stop_is_cut_off", "one two three", "one ", fields={"stop": "two"}),
    scripted("first_of_several_stops", "one two three", "one ", fields={"stop": ["three", "two"]}),
    scripted("stop_over_tokens", "x The final answer y", "x The fi", fields={"stop": ["nal answer"]}),
    scripted("stop_at_the_beginning", "one two", "", fields={"stop": ["one"]}),
    scripted("beginning_of_a_stop_is_text", "one twoo", "one twoo", fields={"stop": ["twooo"]}),
    scripted("stop_within_a_word", "abcabcabd", "abc", fields={"stop": ["abcabd"]}),
    scripted("stop_is_the_last_allowed", "one two and", "one ", fields={"stop": "two"}, cut="one two"),
    Case("stop_is_not_looked_for_in_the_prompt", {"prompt": "Step", "stop": [" 1x", "Step"], "max_tokens": 3},
         expected={"completion_tokens": 3, "reasons": ["length"]}, is_chat=False),
    # ---- usage
    Case("no_stream_options", {"messages": HELLO, "max_tokens": 2}, expected={"stream_usage": False}),
    Case("null_stream_options", {"messages": HELLO, "max_tokens": 2, "stream_options": None},
         expected={"stream_usage": False}),
    Case("empty_stream_options", {"messages": HELLO, "max_tokens": 2, "stream_options": {}},
         expected={"stream_usage": False}, streams_only=True),
    Case("usage_wanted", {"messages": HELLO, "max_tokens": 2, "stream_options": {"include_usage": True}},
         expected={"stream_usage": True}, streams_only=True),
    Case("null_include_usage", {"messages": HELLO, "max_tokens": 2, "stream_options": {"include_usage": None}},
         expected={"stream_usage": False}, streams_only=True),
    Case("usage_of_a_completion", {"prompt": "Hello.", "max_tokens": 2, "stream_options": {"include_usage": True}},
         expected={"stream_usage": True}, is_chat=False, streams_only=True),
    # ---- several answers
    Case("two_choices", {"messages": HELLO, "max_tokens": 4, "n": 2},
         expected={"reasons": ["length"] * 2, "completion_tokens": 8}),
    Case("three_completions", {"prompt": "Hello.", "max_tokens": 4, "n": 3},
         expected={"reasons": ["length"] * 3}, is_chat=False),
    # ---- log-probabilities
    Case("logprobs", {"messages": ADDS, "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
         expected={"num_logprobs": 4}),
    Case("logprobs_of_a_completion", {"prompt": "Hello.", "max_tokens": 4, "logprobs": 1},
         expected={"num_logprobs": 4}, is_chat=False),
    Case("no_logprobs", {"messages": ADDS, "max_tokens": 4, "logprobs": False}, expected={"num_logprobs": 0}),
    # ---- calls of tools
    scripted("a_call", CALL, "", "tool_calls", **CALLED),
    scripted("a_call_in_xml", XML, "", "tool_calls", markup="qwen3_5", **CALLED),
    scripted("a_call_of_gemma", GEMMA, "", "tool_calls", markup="gemma4", **CALLED),
    scripted("two_calls", f"{CALL}\n{CALL}", "", "tool_calls", **TWICE),
    scripted("two_calls_of_which_one_is_allowed", f"A\n{CALL}\n{CALL}", "A", "tool_calls",
             fields={"parallel_tool_calls": False}, **CALLED),
    scripted("text_around_a_call", f"A\n{CALL}\nB", "A\nB", "tool_calls", **CALLED),
    scripted("text_around_a_call_in_xml", f"A\n{XML}\nB", "A\nB", "tool_calls", markup="qwen3_5", **CALLED),
    scripted("white_space_behind_a_call", f"{CALL}\n", "", "tool_calls", **CALLED),
    scripted("white_space_behind_a_call_behind_text", f"A\n{CALL}\n", "A", "tool_calls", **CALLED),
    scripted("white_space_at_the_end_behind_a_call", f"{CALL}\nB\n", "B\n", "tool_calls", **CALLED),
    scripted("white_space_at_the_end_between_calls", f"A\n{CALL}\nB\n{CALL}\n", "A\nB", "tool_calls", **TWICE),
    scripted("a_call_without_arguments", BARE, "", "tool_calls", calls=[("f", {})]),
    scripted("half_a_character_in_a_call", CALL.replace("/\"", "\\ud83d\""), "", "tool_calls",
             calls=[("f", {"path": "\ufffd", "dry": True})]),
    scripted("a_close_mark_in_a_call", CALL.replace('"/"', CLOSES), "", "tool_calls",
             calls=[("f", {"path": "a \"</tool_call>\n</tool_call>", "dry": True})]),
    scripted("a_close_mark_in_a_call_of_gemma", GEMMA.replace("/", 'a "<tool_call|>'), "", "tool_calls",
             markup="gemma4", calls=[("f", {"path": 'a "<tool_call|>', "dry": True})]),
    scripted("a_close_mark_in_the_second_call", f"A\n{CALL}\n{CLOSED_EARLY}\nB", "A\nB", "tool_calls",
             calls=[("f", ARGUMENTS), ("f", {"path": "</tool_call>", "dry": True})]),
    scripted("limit_behind_a_close_mark_in_a_call", CLOSED_EARLY, CLOSED_EARLY.partition('",')[0], "length",
             cut=CLOSED_EARLY.partition('",')[0]),
    scripted("a_text_that_is_not_closed_before_a_call", f'<tool_call>{{"x": "</tool_call>\n{CALL}',
             '<tool_call>{"x": "</tool_call>', "tool_calls", **CALLED),
    scripted("a_call_with_infinity", CALL.replace("true", "1e999"), CALL.replace("true", "1e999")),
    scripted("a_call_without_json", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>"),
    scripted("a_call_without_a_name", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>'),
    scripted("a_quoted_mark", "Write `<tool_call>` to call.", "Write `<tool_call>` to call."),
    scripted("a_quoted_mark_before_a_call", f"No `<tool_call>`:\n{CALL}", "No `<tool_call>`:", "tool_calls", **CALLED),
    scripted("a_call_that_is_not_closed", CALL[:-12], CALL[:-12]),
    scripted("calls_are_text_without_tools", CALL, CALL, fields={"tools": []}),
    scripted("calls_are_text_under_tool_choice_none", CALL, CALL, fields={"tool_choice": "none"}),
    scripted("limit_behind_a_whole_call", f"{CALL}\n{CALL}", "<tool_call>", "length", cut=f"{CALL}\n<tool_call>",
             **CALLED),
    # ---- thoughts
    scripted("thoughts", "<think>\nso\n</think>\n\n4", "4", reasoning="so"),
    scripted("thoughts_that_are_cut", "<think>\nso it is", "", "length", reasoning="so it", cut="<think>\nso it"),
    scripted("white_space_at_the_end_behind_thoughts", "<think>\nso\n</think>\n\nA\n\nB", "A\n\n", reasoning="so",
             fields={"stop": "B"}),
    scripted("white_space_behind_thoughts", "\n<think>\nso\n</think>\n\nB", "", reasoning="so", fields={"stop": "B"}),
    scripted("white_space_at_the_end_of_thoughts", "<think>\nso\n\nB", "", reasoning="so\n\n", fields={"stop": "B"}),
    scripted("white_space_before_thoughts_that_are_cut", "\n<think>\nB", "", fields={"stop": "B"}),
    scripted("empty_thoughts_before_a_call", f"<think>\n\n</think>\n\n{CALL}", "", "tool_calls", **CALLED),
    scripted("a_mark_of_thoughts_in_the_text", "Use <think> tags.", "Use <think> tags."),
    # ---- what is refused, by name
    refused("unknown_field", {"nonsense": 1}, "nonsense", "unknown_parameter"),
    refused("response_format", {"response_format": {"type": "xml"}}, "response_format", "unsupported_value"),
    refused("parallel_tool_calls", {"parallel_tool_calls": 0}, "parallel_tool_calls", "invalid_value"),
    refused("echo", {"echo": True}, "echo", "unsupported_parameter", is_chat=False),
    refused("audio", {"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    refused("stream_options_as_a_number", {"stream_options": 5}, "stream_options", "invalid_value"),
    refused("stream_options_of_another_kind", {"stream_options": {"nonsense": 1}}, "stream_options", "invalid_value"),
    refused("top_logprobs_alone", {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    refused("too_many_choices", {"n": 17}, "n", "invalid_value"),
    refused("a_field_of_a_turn", {"messages": [{**HELLO[0], "audio": {"id": "x"}}]}, "messages", "unknown_parameter"),
    refused("a_limit_of_a_completion", {"max_tokens": 5000}, "prompt", "context_length_exceeded", is_chat=False),
    refused("a_text_beyond_the_context", {"prompt": "a" * 100_000}, "prompt", "context_length_exceeded",
            is_chat=False),
    refused("a_limit_beyond_the_context", {"max_tokens": 5000}, "messages", "context_length_exceeded"),
    refused("a_seed_of_a_text", {"seed": "x"}, "seed", "invalid_value"),
    refused("two_limits", {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "invalid_value"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[InProcess]:
    target, draft, tokenizer = load_pair(*named_pair("text"))
    tokenizer.chat_template = RICH
    # Acceptance is compared, which follows how much is verified.
    use_whole_blocks(draft)
    pair = Pair(target, draft, tokenizer, name="text", encoding={}, note=str)
    running = InProcess(pair)
    yield running
    running.close()


def prepare(server: InProcess, case: Case) -> dict[str, Any]:
    """Puts the engine and the markup of a case in place; returns its fields."""
    pair = server.pair
    pair.markup = markup_of(case.markup)
    if not case.says:
        pair.engine = server.real
        return case.fields
    script = Script(pair.tokenizer)
    pair.engine = script
    limit = script.say(case.cut, case.says.removeprefix(case.cut))
    if case.cut:
        limit = script.say(case.cut) - 1
        script.say(case.cut, case.says.removeprefix(case.cut))
    return {"max_tokens": limit, **case.fields}


def markup_of(family: str) -> dict[str, Any]:
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=family))
    return get_response_template(None, model) or {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(server: InProcess, case: Case) -> None:
    fields = prepare(server, case)
    answers: list[Found] = []
    for way, is_streamed in WAYS:
        if is_streamed or not case.streams_only:
            found = server.ask(way, is_streamed, case.is_chat, fields)
            check(found, case.expected, is_streamed)
            answers.append(found)
    # The same in all ways, but for the usage that a stream need not have.
    told = [(one.content, one.reasoning, one.calls, one.reasons) for one in answers]
    assert told == [told[0]] * len(told)
    lengths = [one.acceptance for one in answers]
    assert lengths == [lengths[0]] * len(lengths)


def check(found: Found, expected: dict[str, Any], is_streamed: bool) -> None:
    """Compares an answer with what a case expects."""
    if "param" in expected:
        told = (found.status, found.error["param"], found.error["code"])
        assert told == (expected["status"], expected["param"], expected["code"]), found.error
        assert found.error["type"] == "invalid_request_error"
        assert found.error["message"].startswith("expected ")
        return
    assert found.status == 200, found.error
    for name in ("content", "reasoning", "calls", "reasons"):
        if name in expected:
            assert getattr(found, name) == expected[name], name
    if is_streamed and "stream_usage" in expected:
        assert (found.usage is not None) == expected["stream_usage"]
    if found.usage is not None and "completion_tokens" in expected:
        assert found.usage["completion_tokens"] == expected["completion_tokens"]
    if "num_logprobs" in expected:
        assert len(found.logprobs) == expected["num_logprobs"]


@pytest.mark.parametrize(("markup", "says"), [("qwen3", CALL), ("qwen3_5", XML), ("gemma4", GEMMA)])
def test_a_cut_call_is_text_at_every_limit(server: InProcess, markup: str, says: str) -> None:
    case = Case("cut", {"messages": HELLO, "tools": TOOLS}, f"A\n{says}", markup)
    fields = prepare(server, case)
    script: Any = server.pair.engine
    for limit in range(1, len(script.ids)):
        cut = {**fields, "max_tokens": limit}
        whole = server.ask("http", False, True, cut)
        streamed = server.ask("http", True, True, cut)
        for found in (whole, streamed):
            is_complete = limit == len(script.ids) - 1
            assert found.calls == ([("f", ARGUMENTS)] if is_complete else []), limit
            assert found.reasons == ["length"], limit
        assert streamed.content == whole.content


@pytest.mark.parametrize("run", [1, 2, 7, 1000])
def test_pieces_do_not_depend_on_the_runs(server: InProcess, run: int) -> None:
    for says, markup, path in (
        (f"A\n{CALL}\nB", "qwen3", "/"),
        (f"A {XML}", "qwen3_5", "/"),
        (GEMMA, "gemma4", "/"),
        (f"A\n{CLOSED_EARLY}\nB", "qwen3", "</tool_call>"),
        (GEMMA.replace("/", "<tool_call|>"), "gemma4", "<tool_call|>"),
    ):
        fields = prepare(server, Case("run", {"messages": HELLO, "tools": TOOLS}, says, markup))
        script: Any = server.pair.engine
        script.run = run
        found = server.ask("http", True, True, fields)
        assert found.calls == [("f", {**ARGUMENTS, "path": path})]
        assert found.content == says.split("<")[0].strip() + "\nB" * says.endswith("B")


def test_white_space_at_the_end_stays_behind_marks_of_the_prompt() -> None:
    begun = "<|im_start|>assistant\n"
    for prompt in (begun, f"{begun}<think>\n\n</think>\n\n"):
        for says in ("A\n\n", "A \nB\n"):
            reader = MarkupReader(markup_of("qwen3"), prompt, ())
            pieces = [*reader.add(says), *reader.end()]
            assert "".join(piece.text for piece in pieces) == says


def test_calls_are_read_as_the_chat_template_asks_for_them() -> None:
    target, draft, tokenizer = load_pair(*named_pair("text"))
    asked = "{# <tool_call>\n<function=name>\n<parameter=key> #}"  # as Qwen3-Coder's template
    for asks, says in ((asked, XML), ("", CALL)):
        tokenizer.chat_template = RICH + asks
        pair = Pair(target, draft, tokenizer, name="text", encoding={}, note=str)
        reader = MarkupReader(pair.markup, "", TOOLS)
        pieces = [*reader.add(f"A\n{says}"), *reader.end()]
        called = [(p.name, json.loads(p.text)) for p in pieces if p.kind == "call"]
        assert called == [("f", ARGUMENTS)], asks


def test_a_close_mark_in_a_list_of_calls() -> None:
    field = {
        "open": "<calls>",
        "close": "</calls>",
        "content": "python-call-list",
        "transform_each": True,
        "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
    }
    template = {"start_anchor": "assistant", "fields": {"tool_calls": field, "content": {}}}
    for quote in "\"'":
        reader = MarkupReader(template, "", TOOLS)
        says = f"<calls>[f(path={quote}</calls>{quote}, dry=True)]</calls>"
        pieces = [*reader.add(says), *reader.end()]
        told = [(piece.name, json.loads(piece.text)) for piece in pieces]
        assert told == [("f", {"path": "</calls>", "dry": True})]


def test_only_a_mark_within_a_text_is_waited_for() -> None:
    for body in ('{"name": "f", }', '{"name": "f"', '{"name": "f\n', "{name: 5}", '{"a": "\\'):
        says = f"<tool_call>{body}</tool_call> and"
        reader = MarkupReader(markup_of("qwen3"), "", TOOLS)
        told = "".join(piece.text for piece in reader.add(says))
        assert told == says, body


def test_a_call_that_is_too_deep_is_text() -> None:
    says = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {"[" * 2000}{"]" * 2000}}}}}\n</tool_call>'
    reader = MarkupReader(markup_of("qwen3"), "", TOOLS)
    pieces = [*reader.add(says), *reader.end()]
    assert "".join(piece.text for piece in pieces) == says
    assert {piece.kind for piece in pieces} == {"content"}


def test_a_turn_that_is_too_deep_is_refused(server: InProcess) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    calls = [{"function": {"name": "f", "arguments": deep}}]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    found = server.ask("http", False, True, {"messages": [turn]})
    assert (found.status, found.error["param"]) == (400, "messages"), found.error


STOPS: dict[str, list[str]] = {
    "end_token": [],
    "Step 2": ["Step 2"],
    "carry": ["carry"],
    "line_break": ["\n"],
}


@pytest.mark.parametrize(("stop", "is_chat"), half(STOPS, {"chat": True, "completion": False}))
def test_the_last_allowed_token_may_end_it(
    server: InProcess, stop: list[str], is_chat: bool
) -> None:
    fields: dict[str, Any] = {
        "prompt": "<|im_start|>user\nCompute 41 + 80.<|im_end|>\n<|im_start|>assistant\n"
    }
    if is_chat:
        fields = {"messages": [{"role": "user", "content": "Compute 41 + 80."}]}
    fields["stop"] = stop
    fields = prepare(server, Case("last", fields))
    free = server.ask("http", False, is_chat, fields)
    number = free.usage["completion_tokens"]
    # One token more or less is the same question in every way.
    limits = [
        (number - 1, "length", WAYS[::3]),
        (number, "stop", WAYS),
        (number + 1, "stop", WAYS[:1]),
    ]
    for limit, reason, ways in limits:
        for way, is_streamed in ways:
            found = server.ask(way, is_streamed, is_chat, {**fields, "max_tokens": limit})
            assert found.reasons == [reason], (limit, way, is_streamed)
            assert limit < number or found.content == free.content


LOOKS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
RUNS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
# In JSON that is sent, two escapes of half a character each.
SMILES = [{"type": "function", "function": {"name": "f", "arguments": {"a": "\U0001f600"}}}]
FOUND = {"role": "tool", "tool_call_id": "1", "content": "3"}
PARTS = [{"type": "text", "text": "Compute 41"}, {"type": "text", "text": " + 80."}]
HISTORIES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": PARTS}],
    [*ADDS, {"role": "assistant", "content": "22", "reasoning_content": "so"}, *HELLO],
    [*ADDS, {"role": "assistant", "content": "Let me look.", "tool_calls": LOOKS}, FOUND],
    [*ADDS, {"role": "assistant", "content": "", "tool_calls": SMILES}, FOUND],
    [
        *ADDS,
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": RUNS},
        {"role": "tool", "name": "f", "content": "3"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "name": "Ann", "content": "Hi"}],
    [{"role": "developer", "content": "Be brief."}, *HELLO],
    [*ADDS, {"role": "assistant", "content": ""}, *HELLO],
]


@pytest.mark.parametrize("messages", HISTORIES)
def test_a_history_gives_the_templates_own_prompt(
    server: InProcess, messages: list[dict[str, Any]]
) -> None:
    fields = prepare(server, Case("history", {}, "ok"))
    ids = server.pair.processor.apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    for reasoning in ("reasoning_content", "reasoning"):
        sent = json.loads(json.dumps(messages).replace("reasoning_content", reasoning))
        for turn in sent:
            for call in turn.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        found = server.ask("openai", False, True, {**fields, "messages": sent})
        assert found.usage["prompt_tokens"] == len(ids)
        script: Any = server.pair.engine
        assert script.prompt == ids


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": " "}])
def test_a_call_without_arguments_has_an_empty_object(
    server: InProcess, arguments: dict[str, Any]
) -> None:
    calls = [{"type": "function", "function": {"name": "f", **arguments}}]
    turns = read_messages([{"role": "assistant", "tool_calls": calls}], server.pair)
    assert turns[0]["tool_calls"] == RUNS


IGNORES = """{% for turn in messages %}{% if turn.role in ('system', 'user', 'assistant') %}
{{- turn.role + ': ' + turn.content + '\n' }}{% endif %}{% endfor %}"""
REFUSES = """{% for turn in messages %}{% if turn.role not in ('system', 'user', 'assistant') %}
{{- raise_exception('unknown role') }}{% endif %}{{ turn.content }}{% endfor %}"""


@pytest.mark.parametrize("template", [IGNORES, REFUSES])
def test_a_developer_is_heard_where_a_template_knows_none(template: str) -> None:
    target, draft, tokenizer = load_pair(*named_pair("text"))
    tokenizer.chat_template = template
    pair = Pair(target, draft, tokenizer, name="text", encoding={}, note=str)
    asked = [{"role": "developer", "content": "Be brief."}, *HELLO]
    turns = read_messages(asked, pair)
    assert turns == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert "Be brief." in tokenizer.apply_chat_template(turns, tokenize=False)


def test_tools_whose_calls_would_not_be_found_are_refused(server: InProcess) -> None:
    fields = prepare(server, Case("llama", {"messages": HELLO}, "ok", markup="llama"))
    found = server.ask("http", False, True, {**fields, "tools": TOOLS})
    told = (found.status, found.error["param"], found.error["code"])
    assert told == (400, "tools", "unsupported_parameter")
    unread: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": "none"},
        {"chat_template_kwargs": {"tools": TOOLS}},
    ]
    for options in unread:
        assert server.ask("http", False, True, {**fields, **options}).content == "ok"


def test_parts_for_a_template_of_texts_are_lines() -> None:
    target, draft, tokenizer = load_pair(*named_pair("text"))
    pair = Pair(target, draft, tokenizer, name="text", encoding={}, note=str)
    assert not pair.takes_parts
    parts = [{"type": "text", "text": text} for text in ("Compute 41", "+ 80.")]
    turns = read_messages([{"role": "user", "content": parts}], pair)
    assert turns == [{"role": "user", "content": "Compute 41\n+ 80."}]


def test_log_probabilities_are_the_targets_own(server: InProcess) -> None:
    asked = {"messages": ADDS, "max_tokens": 6, "temperature": 1.5, "seed": 3}
    fields = prepare(server, Case("x", {**asked, "logprobs": True, "top_logprobs": 3}))
    found = server.ask("http", False, True, fields)
    pair = server.pair
    encoded = pair.processor.apply_chat_template(
        ADDS, add_generation_prompt=True, return_tensors="pt"
    )
    said = b"".join(bytes(entry["bytes"]) for entry in found.logprobs).decode()
    ids = pair.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(found.logprobs) == 6
    both = torch.cat([encoded["input_ids"], torch.tensor([ids])], dim=1)
    with torch.no_grad():
        logits = pair.target(both).logits[0, encoded["input_ids"].shape[1] - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    for place, (token, entry) in enumerate(zip(ids, found.logprobs, strict=True)):
        assert entry["logprob"] == pytest.approx(float(logprobs[place, token]), abs=1e-4)
        best = logprobs[place].topk(3).values.tolist()
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(best, abs=1e-4)
        assert entry["token"].encode() == bytes(entry["bytes"])


def test_a_choice_has_the_seed_plus_its_number(server: InProcess) -> None:
    fields = {"messages": HELLO, "max_tokens": 12, "temperature": 1.5}
    fields = prepare(server, Case("n", fields))
    texts = [
        server.ask("http", False, True, {**fields, "seed": seed}).content for seed in (7, 8, 9)
    ]
    reply = httpx.post(
        f"{server.url}/chat/completions", json={**fields, "seed": 7, "n": 3}, timeout=60
    )
    choices = reply.json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == texts
    assert len(set(texts)) > 1


def test_acceptance_is_told_whole_and_streamed(server: InProcess) -> None:
    fields = prepare(server, Case("acceptance", {"messages": ADDS, "max_tokens": 40}))
    sent = {**fields, "stream_options": {"include_usage": True}}
    streamed = server.ask("http", True, True, sent)
    whole = server.ask("http", False, True, fields)
    for found in (streamed, whole):
        assert found.usage["prompt_tokens_details"]["cached_tokens"] < found.usage["prompt_tokens"]
        details = found.usage["completion_tokens_details"]
        assert 0 < details["accepted_prediction_tokens"] < found.usage["completion_tokens"]
        assert details["rejected_prediction_tokens"] >= 0
        assert found.acceptance[0] > 4
    assert streamed.acceptance == whole.acceptance


def test_an_error_in_a_stream_is_one_object_and_the_end(server: InProcess) -> None:
    class Fails(Script):
        def submit(self, job: Job) -> None:
            job.receive(Tokens(ids=self.ids[:1]))
            job.receive(RuntimeError('no "memory" \\ left'))

    script = Fails(server.pair.tokenizer)
    script.say("one two")
    server.pair.engine = script
    for path, sent in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "x"})):
        whole = httpx.post(f"{server.url}/{path}", json=sent, timeout=60)
        assert whole.status_code == 500
        reply = httpx.post(f"{server.url}/{path}", json={**sent, "stream": True}, timeout=60)
        events = reply.text.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: ")) == whole.json()
        assert sum('"error"' in one for one in events) == 1
    sent_messages: Any = HELLO
    chats = server.client.chat.completions
    stream = chats.create(model="text", messages=sent_messages, stream=True)
    with pytest.raises(APIError) as caught:
        list(stream)
    assert caught.value.message == 'RuntimeError: no "memory" \\ left'
    assert caught.value.type == "server_error"


def test_clients_that_end_lines_anywhere_read_a_stream(server: InProcess) -> None:
    said = "a\u2028b\u2029c\u0085d"
    fields = prepare(server, Case("ends", {"messages": HELLO, "stream": True}, says=said))
    with httpx.stream("POST", f"{server.url}/chat/completions", json=fields, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line]
    chunks = [line.removeprefix("data: ") for line in lines if line != "data: [DONE]"]
    assert read([json.loads(chunk) for chunk in chunks]).content == said


def read_counters(address: str) -> dict[str, float]:
    client = OpenAIClient(address)

    async def read() -> dict[str, float]:
        async with client:
            return await counters(client)

    return run_async(read)


def test_metrics_have_vllms_names(server: InProcess) -> None:
    fields = prepare(server, Case("metrics", {"messages": ADDS, "max_tokens": 40}))
    address = server.url.removesuffix("/v1")
    before = read_counters(address)
    found = server.ask("http", False, True, fields)
    after = read_counters(address)
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    details = found.usage["completion_tokens_details"]
    both = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert moved["num_draft_tokens"] == both
    assert moved["num_accepted_tokens"] >= details["accepted_prediction_tokens"]
    assert moved["num_accepted_tokens_at_pos_0"] <= moved["num_drafts"]
    page = httpx.get(f"{address}/metrics").text
    labels = 'engine="0",model_name="text"'
    assert f"vllm:num_requests_running{{{labels}}} 0.0" in page
    assert f"vllm:num_requests_waiting{{{labels}}} 0.0" in page
    for name in ("generation_tokens_total", "prompt_tokens_total", "request_success_total"):
        assert f"vllm:{name}{{" in page
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert f"vllm:{name}_count{{{labels}}}" in page


def test_nothing_counts_behind_an_abort() -> None:
    metrics = Metrics("text")
    labels = {"model_name": "text", "engine": "0"}

    def value(name: str, **more: str) -> float | None:
        return metrics.registry.get_sample_value(f"vllm:{name}", {**labels, **more})

    for has_begun in (False, True):
        tracked = Tracked(metrics)
        if has_begun:
            tracked.begin()
        tracked.abort()
        # What the engine had on its way when the client went.
        tracked.begin()
        tracked.end("stop", 5, 3, Counts())
        tracked.abort()
        assert value("num_requests_waiting") == 0.0
        assert value("num_requests_running") == 0.0
    assert value("generation_tokens_total") == 0.0
    assert value("request_success_total", finished_reason="abort") == 2.0
    assert value("request_success_total", finished_reason="stop") is None


def half_a_request(server: InProcess, body: bytes, length: int) -> socket.socket:
    """Sends the beginning of a request that says how long it will be."""
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "",
        "",
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall("\r\n".join(head).encode() + body)
    return connection


def test_half_a_body_is_answered_and_others_go_on(server: InProcess) -> None:
    fields = prepare(server, Case("half", {"messages": HELLO, "max_tokens": 4}))
    began = time.monotonic()
    with half_a_request(server, b'{"messages": [', 5000) as connection:
        found = server.ask("http", False, True, fields)
        assert found.status == 200
        reply = "".join(iter(lambda: connection.recv(65536).decode(), ""))
    assert time.monotonic() - began < 5
    assert reply.startswith("HTTP/1.1 408 ")
    error = json.loads(reply.partition("\r\n\r\n")[2])["error"]
    assert error["code"] == "request_timeout"
    assert error["message"].startswith("expected the rest of the body within 1 s, got 14 bytes")


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/chat/comp", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le"]
)
def test_half_a_head_holds_up_nobody(server: InProcess, sent: bytes) -> None:
    fields = prepare(server, Case("half", {"messages": HELLO, "max_tokens": 4}))
    free = seconds_of(server, fields)
    waiting = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
    for connection in waiting:
        connection.sendall(sent)
    assert seconds_of(server, fields) < free + MOMENT
    for connection in waiting:
        connection.close()
    assert seconds_of(server, fields) < free + MOMENT


def seconds_of(server: InProcess, fields: dict[str, Any]) -> float:
    """How long an answer takes."""
    began = time.monotonic()
    assert server.ask("http", False, True, fields).status == 200
    return time.monotonic() - began


def test_a_slow_reader_gets_all_of_its_answer(server: InProcess) -> None:
    fields = prepare(server, Case("slow", {"messages": ADDS, "max_tokens": 60}))
    expected = server.ask("http", True, True, fields)
    body = json.dumps({**fields, "stream": True}).encode()
    with half_a_request(server, body, len(body)) as connection:
        free = seconds_of(server, fields)
        told = b""
        while not told.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            told += connection.recv(700)
            if len(told) % 5 == 0:
                assert seconds_of(server, fields) < free + MOMENT
    chunks = [line[6:] for line in told.decode().split("\n") if line.startswith("data: {")]
    assert read([json.loads(chunk) for chunk in chunks]).content == expected.content


def test_who_reads_slowly_holds_up_nobody(server: InProcess) -> None:
    fields = prepare(server, Case("slow", {"messages": HELLO, "n": 16}, says="one two " * 400))
    body = json.dumps({**fields, "stream": True}).encode()
    with half_a_request(server, body, len(body)) as connection:
        # Nothing of its answers is read, more of them than any buffer of a connection holds.
        assert connection.recv(1) == b"H"
        began = time.monotonic()
        found = server.ask("http", False, True, {**fields, "n": 1})
        assert found.reasons == ["stop"]
        assert time.monotonic() - began < 10


TOO_MUCH: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}] * 9000},
    {"messages": [{"role": "user", "content": "x" * 4_000_001}]},
    {"messages": [{"role": "user", "content": "word " * 700_000}]},
    {"stop": ["x"] * 17},
    {"n": 10**6},
    {"max_tokens": 10**9},
]


@pytest.mark.parametrize("fields", TOO_MUCH, ids=lambda fields: next(iter(fields)))
def test_too_much_is_refused_at_once(server: InProcess, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    found = server.ask("http", True, True, {"messages": HELLO, **fields})
    assert found.status == 400
    assert found.error["message"].startswith("expected ")
    assert time.monotonic() - began < 5
