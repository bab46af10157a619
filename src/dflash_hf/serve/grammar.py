"""This module forces answers into a form: a JSON schema, a regular expression, a grammar or a call of a tool.

llguidance compiles a form to an automaton, which computes a mask of the tokens that may come next. llguidance is a
wheel without dependencies, compiles a schema in milliseconds, says why a schema cannot be met, and bounds its own
work.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from dflash_hf.errors import one_line, shown
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.refusal import Refusal, has_whole_characters, need

MAX_FORM = 262_144  # letters
# llguidance goes down by recursion from each rule of a form to the next one, and needs about 16 KB of stack per rule.
# A form of `MAX_FORM` letters has up to ten thousand rules, and a stack that is too small ends the process. Unused
# pages of a stack take no memory.
STACK_BYTES = 2**29
# White space between the parts of JSON: one space, or a new line with spaces. Without a bound a sample may never end.
LAYOUT = {"whitespace_pattern": r" ?|\n {0,32}"}
OBJECT = {"type": "object"}
COMBINED = {"$ref", "allOf", "anyOf", "oneOf"}  # keys by which a schema includes other schemas
# How many tokens without a text may come within a mark. All other tokens have at least one byte.
NUM_TEXTLESS = 4
STARTING = threading.Lock()  # the size of stacks holds for all threads that start
KINDS = ("json", "regex", "choice", "grammar")  # keys of vLLM's `structured_outputs`


class FormProcessor(LogitsProcessor):
    """Allows only the tokens that the form allows next.

    Args:
        matcher: llguidance's automaton.
        num_columns (`int`): Columns of the prompt.
        tokenizer: The tokenizer that decodes the answer, to find the mark.
        behind (`str`): The mark after which the form begins, if the prompt has begun thoughts; empty otherwise.
    """

    is_row_wise = True
    shapes_proposals = True

    def __init__(self, matcher: Any, num_columns: int, tokenizer: Any, behind: str) -> None:
        self.matcher = matcher
        self.tokenizer = tokenizer
        self.behind = behind
        self.num_columns = num_columns
        self.read: list[int] = []  # tokens that the automaton has read
        # Tokens of the answer up to and including the mark, after which the form begins. None before the mark.
        self.opening: list[int] | None = None
        if not behind:
            self.opening = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> torch.FloatTensor:
        """Returns the scores `[1, V]`, with -inf for the tokens that the form forbids; `input_ids` is `[1, T]`.

        Raises:
            ValueError: If the form is too complex for the automaton at this token.
        """
        answer = input_ids[0, self.num_columns :].tolist()
        self._look_for_the_begin(answer)
        if self.opening is None:
            return cast(torch.FloatTensor, scores)
        self._advance(answer[len(self.opening) :])
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[: scores.shape[1]].astype(bool)
        error = self.matcher.get_error()
        if error:
            what = "a form that the automaton can follow"
            raise ValueError(f"expected {what}, got {one_line(error)}; make it simpler")
        is_allowed = torch.from_numpy(allowed).to(scores.device)
        return cast(torch.FloatTensor, scores.masked_fill(~is_allowed, float("-inf")))

    def _look_for_the_begin(self, answer: list[int]) -> None:
        """Lets the form begin after the tokens that end with the mark."""
        # The mark that was found before may have been in a proposal that was rejected.
        if self.opening is not None and answer[: len(self.opening)] != self.opening:
            self.opening = None
        if self.opening is None:
            num_last = len(self.behind.encode()) + NUM_TEXTLESS
            said = str(self.tokenizer.decode(answer[-num_last:], skip_special_tokens=False))
            if self.behind in said:
                self.opening = answer

    def _advance(self, ids: list[int]) -> None:
        """Brings the automaton into the state after these tokens."""
        num_same = 0
        for mine, theirs in zip(self.read, ids, strict=False):
            if mine != theirs:
                break
            num_same += 1
        if num_same < len(self.read):
            self.matcher.rollback(len(self.read) - num_same)
        # The automaton reads only up to the end of the form, but proposals may go on after it.
        num_read = self.matcher.try_consume_tokens(ids[num_same:])
        self.read = ids[: num_same + num_read]


class Form:
    """A form that was compiled once. Every answer gets its own processor.

    Args:
        pair (`Pair`): The pair that answers.
        grammar (`str`): The form, as llguidance takes it.
        param (`str`): The field of the request that contains the form.

    Raises:
        Refusal: If the form is invalid or too large, or cannot be met.
    """

    def __init__(self, pair: Pair, grammar: str, param: str) -> None:
        what = f"a form of at most {MAX_FORM} letters"
        need(len(grammar) <= MAX_FORM, param, what, len(grammar), "shorten it")
        self.pair = pair
        self.matcher = compiled(grammar, pair, param)
        error = self.matcher.get_error()
        if error:
            sentence = f"expected a form that can be met, got {one_line(error)}; change it"
            raise Refusal(sentence, 400, "invalid_value", param)

    def processor(self, num_columns: int, behind: str) -> FormProcessor:
        """Returns a processor for one answer. The arguments are those of [`FormProcessor`]."""
        return FormProcessor(self.matcher.deep_copy(), num_columns, self.pair.tokenizer, behind)


def compiled(grammar: str, pair: Pair, param: str) -> Any:
    """Returns llguidance's automaton of a form. A thread with a large stack compiles it, because forms may be deep."""
    make = library(param).LLMatcher
    tokens = vocabulary(pair, param)
    with ThreadPoolExecutor(max_workers=1) as pool:
        with STARTING:
            usual = threading.stack_size(STACK_BYTES)
            try:
                making = pool.submit(make, tokens, grammar, log_level=0)
            finally:
                threading.stack_size(usual)
        return making.result()


def library(param: str) -> Any:
    """Returns the module llguidance. Raises `Refusal` if it is not installed."""
    try:
        import_module("llguidance.hf")
        return import_module("llguidance")
    except ImportError:
        sentence = f"expected llguidance for {param}, got none; pip install 'dflash-hf[serve]'"
        raise Refusal(sentence, 400, "unsupported_parameter", param) from None


def vocabulary(pair: Pair, param: str) -> Any:
    """Returns the target's tokens in llguidance's form, made once. Raises `Refusal` for a slow tokenizer."""
    what = f"a target with a fast tokenizer for {param}"
    kind = type(pair.tokenizer).__name__
    is_fast = isinstance(pair.tokenizer, PreTrainedTokenizerFast)
    need(is_fast, param, what, kind, "leave it out", "unsupported_parameter")
    if pair.vocabulary is None:
        ends = pair.target.generation_config.eos_token_id
        pair.vocabulary = library(param).hf.from_tokenizer(
            pair.tokenizer, n_vocab=pair.vocab_size, eos_token=ends
        )
    return pair.vocabulary


def response_form(
    body: dict[str, Any], tools: list[Any], has_parallel_calls: bool, pair: Pair
) -> Form | None:
    """Returns the form that `response_format` or `structured_outputs` asks for; None if neither asks for one.

    Under `response_format`, an answer may consist of calls of `tools` instead, as at OpenAI. This is possible only if
    the target's family has a form of calls.
    """
    asked = body.get("response_format", {"type": "text"})
    param = "response_format"
    need(isinstance(asked, dict), param, "response_format as an object", asked)
    kind = asked.get("type")
    kinds = ("text", "json_object", "json_schema")
    what = f"the type of response_format among {', '.join(kinds)}"
    need(kind in kinds, param, what, kind, code="unsupported_value")
    outputs = body.get("structured_outputs")
    if outputs is not None:
        need(kind == "text", param, "one form", "two", "leave one out")
        return _structured(outputs, pair)
    if kind == "text":
        return None
    schema: Any = OBJECT
    if kind == "json_schema":
        named = asked.get("json_schema")
        is_good = isinstance(named, dict) and isinstance(named.get("schema", OBJECT), dict)
        need(is_good, param, "json_schema with a schema", named)
        schema = named.get("schema", OBJECT)
    form = Form(pair, json_form(schema, param), param)
    if not tools or not has_form_of_calls(pair):
        return form
    lines = (
        "start: calls | answer",
        *lines_of_calls(tools, has_parallel_calls),
        f"answer: %json {json.dumps({**schema, 'x-guidance': LAYOUT})}",
    )
    try:
        return Form(pair, "\n".join(lines), param)
    except Refusal as refusal:
        # The answer keeps the form that was asked for. The refused part is in the tools' schemas, which clients write.
        pair.note(f"no calls beside {param}, {one_line(refusal)}")
        return form


def _structured(outputs: Any, pair: Pair) -> Form:
    """Returns the form of vLLM's field: a JSON schema, a regular expression, a choice or a Lark grammar."""
    param = "structured_outputs"
    is_one = isinstance(outputs, dict) and len(outputs) == 1 and next(iter(outputs)) in KINDS
    need(is_one, param, f"one of {', '.join(KINDS)} in structured_outputs", outputs)
    kind, value = next(iter(outputs.items()))
    if kind == "json":
        if isinstance(value, str):
            value = _read(value, param)
        return Form(pair, json_form(value, param), param)
    if kind == "choice":
        is_list = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
        need(is_list and bool(value), param, "choice as a list of texts", value)
        texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in value)
        return Form(pair, f"start: {texts}", param)
    need(isinstance(value, str) and bool(value), param, f"{kind} as a text", value)
    if kind == "regex":
        return Form(pair, library(param).LLMatcher.grammar_from_regex(value), param)
    return Form(pair, value, param)


def _read(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        sentence = f"expected a schema in JSON, got {shown(text)}; correct it"
        raise Refusal(sentence, 400, "invalid_value", param) from None


def json_form(schema: Any, param: str) -> str:
    """Returns the form of all JSON that meets a schema."""
    need(isinstance(schema, dict), param, "a schema as an object", schema)
    # A schema that comes as a text may contain halves of characters as escapes.
    need(has_whole_characters(schema), param, "a schema of whole characters", schema)
    return library(param).LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)


def _closed(parameters: Any) -> Any:
    """Returns the parameters of a tool, and forbids arguments that they do not name: no tool takes other arguments."""
    if parameters is None:
        return OBJECT
    if not isinstance(parameters, dict):
        return parameters
    # A schema may leave the type of the arguments open. Arguments that are not an object would not make a call.
    parameters = {**OBJECT, **parameters}
    if "properties" not in parameters:
        return parameters
    # The schemas that are included may name further arguments, and the whole schema would forbid these.
    if not COMBINED.isdisjoint(parameters):
        return parameters
    return {"additionalProperties": False, **parameters}


def tool_form(choice: Any, tools: list[Any], has_parallel_calls: bool, pair: Pair) -> Form | None:
    """Returns the form of the calls that `tool_choice` asks for; None if it asks for none.

    A named tool is called once. If `tool_choice` is `required`, the answer has one call of any tool, or several calls
    with `has_parallel_calls`.

    Raises:
        Refusal: If the request does not contain the named tool, or the target's family does not mark calls by
            `<tool_call>` and JSON.
    """
    param = "tool_choice"
    if choice in ("auto", "none"):
        return None
    chosen = tools
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        chosen = [tool for tool in tools if tool["function"]["name"] == name]
        what = "tool_choice as auto, none, required or one of the tools"
        need(bool(chosen), param, what, choice)
    need(bool(chosen), param, "tools beside tool_choice", "none")
    what = "tool_choice as auto or none, as calls of this target's family have no form here"
    is_known = has_form_of_calls(pair)
    need(is_known, param, what, choice, "leave it out", "unsupported_value")
    has_several = choice == "required" and has_parallel_calls
    lines = ("start: calls", *lines_of_calls(chosen, has_several))
    return Form(pair, "\n".join(lines), param)


def has_form_of_calls(pair: Pair) -> bool:
    """Returns whether the target's family marks calls by `<tool_call>` and JSON."""
    mark: dict[str, Any] = pair.markup.get("fields", {}).get("tool_calls", {})
    return mark.get("content") == "json" and mark.get("close") == "</tool_call>"


def lines_of_calls(tools: list[Any], has_several: bool) -> tuple[str, ...]:
    """Returns the lines of a Lark grammar whose rule `calls` is one call of these tools, or several calls."""
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        function = tool["function"]
        arguments = _closed(function.get("parameters"))
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        schemas.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {"anyOf": schemas, "x-guidance": LAYOUT}
    repeats = ""
    if has_several:
        repeats = '("\\n" call)*'
    return (
        f"calls: call {repeats}",
        'call: "<tool_call>\\n" one "\\n</tool_call>"',
        f"one: %json {json.dumps(schema)}",
    )
