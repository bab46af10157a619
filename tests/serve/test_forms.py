"""Answers of a given form: valid whatever is sampled, and refused in a sentence where no answer can have it."""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from dflash_hf.serve.grammar import Form, FormProcessor
from dflash_hf.serve.markup import open_thoughts
from helpers.half import half
from helpers.scripted_server import Found, InProcess, random_pair

pytest.importorskip("llguidance")
validate: Any = pytest.importorskip("jsonschema").validate

HELLO = [{"role": "user", "content": "Hello."}]
KNOWS_TOOLS = (
    "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
PARAMETERS = {
    "type": "object",
    "properties": {"dry": {"type": "boolean"}, "mode": {"enum": ["a", "b"]}},
    "required": ["dry", "mode"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in "fg"
]


@pytest.fixture(scope="module")
def server() -> Iterator[InProcess]:
    running = InProcess(random_pair(KNOWS_TOOLS, 1024))
    yield running
    running.close()


def drawn_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers are short: nested objects, lists, enums, numbers and texts with escapes."""
    kinds = ["enum", "integer", "boolean", "text", "escaped", "null"]
    if depth < 2:
        kinds += ["object", "list", "object"]
    kind = draw.choice(kinds)
    if depth == 0:
        kind = "object"
    if kind == "object":
        names = draw.sample(["a", "b c", 'd"e', "f\\g", "\u00e9"], draw.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: drawn_schema(draw, depth + 1) for name in names},
            "required": names,
            "additionalProperties": False,
        }
    if kind == "list":
        return {"type": "array", "items": drawn_schema(draw, depth + 1), "maxItems": 2}
    plain: dict[str, dict[str, Any]] = {
        "enum": {"enum": ["x", 5, None, 'say "y"', "a\\b\n"]},
        "integer": {"type": "integer", "minimum": -20, "maximum": 300},
        "boolean": {"type": "boolean"},
        "text": {"type": "string", "maxLength": 8},
        "escaped": {"type": "string", "pattern": '^[a"\\\\\\n]{1,4}$'},
        "null": {"type": "null"},
    }
    return plain[kind]


@functools.cache
def answers_alone(server: InProcess) -> tuple[list[dict[str, Any]], list[str]]:
    """Requests, free ones and of a form, and their answers where no other row runs."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    bodies: list[dict[str, Any]] = [{"seed": seed, "max_tokens": 60} for seed in range(4)]
    bodies += [{"response_format": form, "seed": seed} for seed in range(2)]
    return bodies, [asked(server, **body).content for body in bodies]


def asked(server: InProcess, streamed: bool = False, **fields: Any) -> Found:
    sent = {"messages": HELLO, "temperature": 1.0, "max_tokens": 700, **fields}
    return server.ask("http", streamed, True, sent)


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(start, marks=pytest.mark.slow) for start in (25, 50, 75))]
)
def test_sampled_json_meets_its_schema(server: InProcess, start: int) -> None:
    def check(seed: int) -> None:
        schema = drawn_schema(random.Random(seed))
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        found = asked(server, streamed=bool(seed % 2), response_format=form, seed=seed)
        assert (found.status, found.reasons) == (200, ["stop"]), (seed, found)
        validate(json.loads(found.content), schema)

    # Eight clients at once: a step of eight rows costs little more than one of a single row.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(start, start + 25)))


def test_shaped_proposals_change_no_answer(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(seed: int) -> str:
        schema = drawn_schema(random.Random(seed))
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return asked(server, response_format=form, seed=seed).content

    answers: dict[bool, list[str]] = {}
    for shapes in (True, False):
        monkeypatch.setattr(FormProcessor, "shapes_proposals", shapes)
        with ThreadPoolExecutor(5) as pool:
            answers[shapes] = list(pool.map(answer, range(5)))
    assert answers[True] == answers[False]


def test_forms_are_decoded_beside_other_rows(server: InProcess) -> None:
    bodies: list[dict[str, Any]] = []
    for seed in range(4):
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": drawn_schema(random.Random(seed))},
        }
        bodies.append({"response_format": form, "seed": seed, "frequency_penalty": 0.25 * seed})
    bodies += [{"seed": seed, "max_tokens": 20} for seed in range(2)]
    alone = [asked(server, **body).content for body in bodies]
    rows: list[int] = []
    engine: Any = server.pair.engine
    step = engine.batch.step

    def counted() -> Any:
        rows.append(engine.batch.num_running)
        return step()

    engine.batch.step = counted
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: asked(server, **body).content, bodies))
    engine.batch.step = step
    assert together == alone
    assert max(rows) > 2


def form_that_fails() -> dict[str, str]:
    """A grammar that llguidance takes, and gives up on behind 12 letters: too much may follow them."""
    names = [f"r{number}" for number in range(2500)]
    rules = [f'{name}: "x" "{name}" "y"' for name in names]
    first = ["start: HEAD rest", "HEAD: /[ab]{12}/", f"rest: {' | '.join(names)}"]
    return {"grammar": "\n".join([*first, *rules])}


def error_of(server: InProcess, streamed: bool, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """Asks for an answer that fails; returns the pieces that come before its error, and the error object."""
    sent = {"model": "text", "messages": HELLO, "stream": streamed, "temperature": 1.0, **fields}
    reply = httpx.post(f"{server.url}/chat/completions", json=sent, timeout=60)
    if not streamed:
        assert reply.status_code == 400
        return [], reply.json()["error"]
    parts = [event.removeprefix("data: ") for event in reply.text.strip().split("\n\n")]
    # Nothing comes behind the error.
    *chunks, last = map(json.loads, parts)
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    return deltas, last["error"]


@pytest.mark.parametrize(
    ("streamed", "shapes"),
    half({"stream": True, "whole": False}, {"shaped": True, "not shaped": False}),
)
def test_a_form_that_fails_ends_its_answer_alone(
    server: InProcess, monkeypatch: pytest.MonkeyPatch, streamed: bool, shapes: bool
) -> None:
    monkeypatch.setattr(FormProcessor, "shapes_proposals", shapes)
    bodies, answers = answers_alone(server)
    steps: list[tuple[int, bool]] = []
    engine: Any = server.pair.engine
    step = engine.batch.step

    def noted() -> Any:
        new = step()
        steps.append((engine.batch.num_running, any(one.finished == "error" for one in new)))
        return new

    engine.batch.step = noted
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(asked, server, **body) for body in bodies]
        fails = pool.submit(error_of, server, streamed, structured_outputs=form_that_fails())
        pieces, error = fails.result()
        together = [other.result().content for other in others]
    engine.batch.step = step
    assert together == answers
    assert [has_error for _, has_error in steps].count(True) == 1
    assert max(num_running for num_running, _ in steps) > 2
    assert error["message"].startswith("expected a form that the automaton can follow, got Parser")
    assert error["type"] == "invalid_request_error"
    assert re.fullmatch("[ab]{0,12}", "".join(pieces))
    assert bool("".join(pieces)) is streamed


def test_any_object_and_other_forms(server: InProcess) -> None:
    for seed, temperature in ((1, 0), (3, 1.0)):
        form = {"type": "json_object"}
        found = asked(server, response_format=form, seed=seed, temperature=temperature)
        assert found.reasons == ["stop"]
        assert isinstance(json.loads(found.content), dict)
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", 'a "b"']}, 'yes|no|a "b"'),
        ({"grammar": 'start: "(" /[0-9]{1,3}/ ")"'}, r"\([0-9]{1,3}\)"),
    ]
    for form, pattern in forms:
        for seed in range(4):
            found = asked(server, structured_outputs=form, seed=seed)
            assert re.fullmatch(pattern, found.content), (form, found.content)
            assert found.reasons == ["stop"]


def test_a_tool_that_must_be_called_is_called(server: InProcess) -> None:
    named = {"type": "function", "function": {"name": "g"}}
    for choice in ("required", named):
        for streamed in (False, True):
            found = asked(server, streamed, tools=TOOLS, tool_choice=choice, seed=2)
            assert found.reasons == ["tool_calls"]
            assert found.content == ""
            for name, arguments in found.calls:
                validate(arguments, PARAMETERS)
                assert choice == "required" or name == "g"
            assert choice == "required" or len(found.calls) == 1


def test_a_forced_argument_may_have_the_mark_that_ends_calls(server: InProcess) -> None:
    says = {"a": "</tool_call>"}
    parameters = {"properties": {"a": {"const": says["a"]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asks: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "seed": 2}
    for streamed in (False, True):
        found = asked(server, streamed, **asks, parallel_tool_calls=False)
        assert (found.calls, found.content) == ([("f", says)], "")
        assert found.reasons == ["tool_calls"]


def test_one_call_is_made_without_parallel_calls(server: InProcess) -> None:
    asks: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 0}
    several = asked(server, **asks)
    assert len(several.calls) > 1
    one = asked(server, **asks, parallel_tool_calls=False)
    assert one.calls == several.calls[:1]
    assert one.reasons == ["tool_calls"]
    # The answer ends behind it.
    assert one.usage["completion_tokens"] < several.usage["completion_tokens"]
    streamed = asked(server, streamed=True, **asks, parallel_tool_calls=False)
    assert streamed.calls == one.calls


def test_a_tool_may_name_arguments_in_parts(server: InProcess) -> None:
    parts = [
        {"properties": {name: {"type": "boolean"}}, "required": [name]} for name in ("dry", "wet")
    ]
    mode = {"mode": {"enum": ["a", "b"]}}
    parameters = {"type": "object", "properties": mode, "required": ["mode"], "anyOf": parts}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    # Under this seed the answer ends with two calls, one of each part.
    found = asked(server, tools=[tool], tool_choice="required", seed=16, max_tokens=300)
    assert found.reasons == ["tool_calls"]
    assert len(found.calls) == 2
    for _, arguments in found.calls:
        validate(arguments, parameters)


@pytest.mark.parametrize("has_several", [True, False])
def test_an_answer_of_a_form_may_be_calls(server: InProcess, has_several: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asks: dict[str, Any] = {"tools": TOOLS, "response_format": named, "max_tokens": 300}
    asks["parallel_tool_calls"] = has_several

    def answer(seed: int) -> Found:
        return asked(server, seed=seed, **asks)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, range(8)))
    reasons = Counter(found.reasons[0] for found in answers)
    assert set(reasons) == {"tool_calls", "stop"}
    for found in answers:
        assert found.status == 200, found.error
        if found.reasons == ["stop"]:
            validate(json.loads(found.content), schema)
            assert not found.calls
            continue
        assert not found.content
        assert has_several or len(found.calls) == 1
        for _, arguments in found.calls:
            validate(arguments, PARAMETERS)
    # Calls that are forbidden are no part of the form.
    found = asked(server, seed=0, **{**asks, "tool_choice": "none"})
    validate(json.loads(found.content), schema)


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {"dry": {"type": "boolean"}}}])
def test_forced_arguments_are_an_object(server: InProcess, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    def answer(seed: int) -> Found:
        choice = {"function": {"name": "f"}}
        return asked(server, max_tokens=200, tools=[tool], tool_choice=choice, seed=seed)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(answer, range(4)))
    for found in answers:
        assert found.status == 200, found.error
        assert re.search(r'"arguments"\s*:\s*[^{\s]', found.content) is None, found
        # A free object may go on up to the limit.
        assert found.reasons == ["length"] or len(found.calls) == 1, found


def test_a_tool_of_an_unknown_schema_leaves_the_form(server: InProcess) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    form = schema(
        type="object", properties={"n": {"const": 1}}, required=["n"], additionalProperties=False
    )
    for seed in range(3):
        found = asked(server, tools=[tool], seed=seed, **form)
        assert found.status == 200, found.error
        assert json.loads(found.content) == {"n": 1}


def schema(**fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": fields}}
    return {"response_format": form}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (schema(allOf=[{"type": "integer"}, {"type": "string"}]), "response_format"),
    (schema(enum=[]), "response_format"),
    (schema(type="banana"), "response_format"),
    (schema(enum=["x" * 300_000]), "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": 5}, "response_format"),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"nonsense": 1}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "h"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
]


def chained(number: int) -> dict[str, Any]:
    """A schema of definitions, each of which goes on with the next one."""
    each: dict[str, Any] = {}
    for index in range(number):
        properties = {"a": {"$ref": f"#/$defs/d{index + 1}"}}
        each[f"d{index}"] = {"type": "object", "properties": properties}
    return {"$ref": "#/$defs/d0", "$defs": {**each, f"d{number}": {"type": "boolean"}}}


def test_a_form_of_many_rules_ends_no_server(server: InProcess) -> None:
    rules = "\n".join(f"r{index}: r{index + 1}" for index in range(15_000))
    terms = rules.replace("r", "R")
    forms: list[dict[str, Any]] = [
        {"json": chained(3000)},
        {"grammar": f'start: r0\n{rules}\nr15000: "b"'},
        {"grammar": f'start: R0\n{terms}\nR15000: "b"'},
    ]
    # Each has nearly as many letters as a form may have.
    assert min(len(str(form)) for form in forms) > 190_000
    for form in forms:
        found = asked(server, structured_outputs=form, max_tokens=4)
        assert found.status == 200, found.error
        assert found.content[:1] in ("{", "b")


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_form_that_cannot_be_met_is_refused(
    server: InProcess, fields: dict[str, Any], param: str
) -> None:
    for streamed in (False, True):
        found = asked(server, streamed, **fields)
        assert (found.status, found.error["param"]) == (400, param), found
        assert found.error["message"].startswith("expected ")


def test_a_form_begins_behind_the_thoughts(server: InProcess) -> None:
    tokenizer: Any = server.pair.tokenizer
    form = Form(server.pair, 'start: "yes" | "no"', "structured_outputs")
    processor = form.processor(2, "</think>")
    mark = tokenizer("so</think>", add_special_tokens=False)["input_ids"]
    scores = torch.zeros(1, server.pair.vocab_size)
    for num in range(len(mark)):
        ids = torch.tensor([[5, 6, *mark[:num]]])
        assert processor(ids, scores).equal(scores)
    # The mark was a proposal that the target has rejected.
    other = [*mark[:-1], 7]
    assert processor(torch.tensor([[5, 6, *mark]]), scores).isneginf().any()
    assert processor(torch.tensor([[5, 6, *other]]), scores).equal(scores)
    for said in ([], tokenizer("y", add_special_tokens=False)["input_ids"]):
        ids = torch.tensor([[5, 6, *mark, *said]])
        allowed = processor(ids, scores).isfinite()[0].nonzero().flatten().tolist()
        texts = {tokenizer.decode([*said, one]) for one in allowed}
        assert texts
        assert all("yes".startswith(text) or "no".startswith(text) for text in texts)


def test_a_form_goes_on_behind_a_rejected_end(server: InProcess) -> None:
    tokenizer: Any = server.pair.tokenizer
    form = Form(server.pair, 'start: "ab" | "a"', "structured_outputs")
    processor = form.processor(1, "")
    end: Any = server.pair.target.generation_config.eos_token_id
    letters = {one: tokenizer(one, add_special_tokens=False)["input_ids"] for one in "ab"}
    scores = torch.zeros(1, server.pair.vocab_size)
    # Proposals behind the answer's end, which the target has rejected.
    for proposed in ([*letters["a"], end, end], [*letters["a"], *letters["b"], end, *letters["a"]]):
        processor(torch.tensor([[5, *proposed]]), scores)
        allowed = processor(torch.tensor([[5, *letters["a"]]]), scores).isfinite()[0]
        assert allowed.nonzero().flatten().tolist() == sorted([end, *letters["b"]])


def test_open_thoughts_are_found_in_the_prompt(server: InProcess) -> None:
    begun = "<|im_start|>assistant\n"
    assert open_thoughts(server.pair.markup, begun) == ""
    assert open_thoughts(server.pair.markup, f"{begun}<think>\n") == "</think>"
    assert open_thoughts(server.pair.markup, f"{begun}<think>\n\n</think>\n\n") == ""
    assert open_thoughts({}, begun) == ""
