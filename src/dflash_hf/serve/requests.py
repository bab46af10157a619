"""This module reads requests. It checks every field before anything runs, and refuses wrong or unsupported fields."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from dflash_hf.data.prompt_files import NO_OPTIONS
from dflash_hf.errors import is_a, one_line, shown
from dflash_hf.pair.answers import TEXT_INPUTS, TOKEN_TYPES
from dflash_hf.serve.answers import hidden_tokens
from dflash_hf.serve.engine import Sampling
from dflash_hf.serve.flags import with_flags
from dflash_hf.serve.grammar import Form, response_form, tool_form
from dflash_hf.serve.markup import open_thoughts
from dflash_hf.serve.messages import (
    check_text,
    has_name,
    read_messages,
    without_images,
    without_nulls,
)
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.penalties import SaidPenalty
from dflash_hf.serve.refusal import FIX, Refusal, has_whole_characters, need
from dflash_hf.target_model.parts import find_target

MAX_BODY = 64 * 2**20  # bytes
MAX_CHARACTERS = 4_000_000  # of all texts: a tokenizer would read more of them for a long time
MAX_TOOLS = 262_144  # letters of all tools: templates write them token by token
MAX_STOPS = 16
MAX_CHOICES = 16
MAX_TOP = 20  # log-probabilities at each place
MAX_LOGIT_BYTES = 2**31  # of the scores that are kept for log-probabilities
MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**32 - 1

# Field -> lowest and highest number, and whether it must be a whole number.
NUMBERS = {
    "max_tokens": (1, MAX_TOKENS, True),
    "max_completion_tokens": (1, MAX_TOKENS, True),
    "n": (1, MAX_CHOICES, True),
    "seed": (0, MAX_SEED, True),
    "temperature": (0, 2, False),
    "top_p": (0, 1, False),
    "top_k": (-1, MAX_TOKENS, True),  # 0 and -1 are the whole vocabulary
    "min_p": (0, 1, False),
    "frequency_penalty": (-2, 2, False),
    "presence_penalty": (-2, 2, False),
    "repetition_penalty": (0.01, 100, False),
}
FLAGS = ("stream", "stream_options", "logprobs")
FORMS = ("response_format", "structured_outputs")
COMMON = frozenset((*NUMBERS, *FLAGS, *FORMS, "model", "stop", "logit_bias", "generation_config"))
CHAT = COMMON | {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "top_logprobs",
    "chat_template_kwargs",
}
COMPLETION = (COMMON | {"prompt"}) - {"max_completion_tokens"}
LOWEST_TEMPERATURE = 0.01  # apart from 0: scores are divided by the temperature
# Options of the chat template that a request must not set. A request may set `tools` there: the template writes them
# into the prompt, but the server does not look for their calls.
RESERVED_OPTIONS = (*NO_OPTIONS, "documents")
# Fields that are not supported -> the values that ask for nothing.
NOT_DONE: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
# Fields that change no text. The last one is vLLM's. Its clients can do without the token ids.
WITHOUT_EFFECT = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "return_token_ids",
    )
)
STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that can be answered.

    Args:
        is_chat (`bool`): Whether the request is a chat. Otherwise, it is a plain completion.
        inputs (`dict[str, torch.Tensor]`): The prompt, one row, on the target's device.
        sampling (`list[Sampling]`): One entry for each choice.
        is_streamed (`bool`): Whether the answer is sent in pieces.
        has_usage (`bool`): Whether a stream ends with its usage.
        tools (`list`): Tools that the target may call.
        has_parallel_calls (`bool`): Whether an answer may contain more than one call.
        num_top (`int`): How many of the most likely tokens are reported at each place, with their log-probabilities;
            -1 for no log-probabilities.
    """

    is_chat: bool
    inputs: dict[str, Tensor]
    sampling: list[Sampling]
    is_streamed: bool
    has_usage: bool
    tools: list[Any]
    has_parallel_calls: bool
    num_top: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.inputs["input_ids"].shape[1])


def read_request(data: bytes, is_chat: bool, pair: Pair) -> Asked:
    """Reads the body of a request, encodes its prompt and reads its images.

    Args:
        data (`bytes`): The body.
        is_chat (`bool`): Whether it came to `/v1/chat/completions`. Otherwise, it came to `/v1/completions`.
        pair (`Pair`): The pair that answers.

    Raises:
        Refusal: If the request cannot be answered. The status is 404 if it asks for another model.
    """
    body = read_object(data)
    fields = COMPLETION
    if is_chat:
        fields = CHAT
    _check_fields(body, fields, pair)
    body = with_flags(body, pair)
    _check_numbers(body)
    is_streamed = body.get("stream", False)
    need(isinstance(is_streamed, bool), "stream", "stream as true or false", is_streamed)
    what = "parallel_tool_calls as true or false"
    has_parallel_calls = body.get("parallel_tool_calls", True)
    need(isinstance(has_parallel_calls, bool), "parallel_tool_calls", what, has_parallel_calls)
    tools: list[Any] = []
    if is_chat:
        tools = _tools(body, pair)
        messages = read_messages(body.get("messages"), pair)
        options = _template_options(body, pair)
        _check_length(without_images(body["messages"]), body, is_chat, pair)
        inputs = _encoded_chat(messages, tools, options, pair)
    else:
        check_text(body.get("prompt"), "prompt", "prompt")
        _check_length(body["prompt"], body, is_chat, pair)
        inputs = dict(pair.tokenizer(body["prompt"], return_tensors="pt"))
    if pair.processor is pair.tokenizer or _is_text(inputs):
        # Many processors and some tokenizers make token types of a text. A running batch refuses them, and a target of
        # text would add them to the tokens.
        inputs = {name: value for name, value in inputs.items() if name in TEXT_INPUTS}
    _check_tokens(inputs, is_chat, pair)
    form = _form(body, tools, has_parallel_calls, pair)
    device = pair.target.device
    inputs = {name: value.to(device) for name, value in inputs.items()}
    num_top = _num_top(body, is_chat)
    limit = _limit(body, inputs, is_chat, pair)
    if num_top >= 0:
        num_bytes = limit * pair.vocab_size * 4
        what = f"at most {MAX_LOGIT_BYTES // (pair.vocab_size * 4)} tokens beside logprobs"
        need(num_bytes <= MAX_LOGIT_BYTES, "logprobs", what, limit, "lower the limit")
    num_columns = int(inputs["input_ids"].shape[1])
    markup: dict[str, Any] = {}
    if is_chat:
        markup = pair.markup
    behind = ""
    if form is not None:
        behind = open_thoughts(markup, str(pair.tokenizer.decode(inputs["input_ids"][0])))
    return Asked(
        is_chat=is_chat,
        inputs=inputs,
        sampling=[
            _with_form(one, form, num_columns, behind)
            for one in _sampling(body, pair, markup, limit, num_top, num_columns)
        ],
        is_streamed=is_streamed,
        has_usage=_has_usage(body.get("stream_options"), is_streamed),
        tools=tools,
        has_parallel_calls=has_parallel_calls,
        num_top=num_top,
    )


def read_object(data: bytes) -> dict[str, Any]:
    """Returns the fields of a body that are not null. Raises `Refusal` if the body is not a JSON object."""
    sentence = f"expected JSON of whole characters as the body, got {shown(data[:80])}; {FIX}"
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise Refusal(sentence, 400, "invalid_json") from None
    if not has_whole_characters(body):
        raise Refusal(sentence, 400, "invalid_json")
    if not isinstance(body, dict):
        raise Refusal(f"expected a JSON object as the body, got {shown(body)}; {FIX}")
    return without_nulls(body)


def _check_fields(body: dict[str, Any], fields: frozenset[str], pair: Pair) -> None:
    """Refuses another model, unsupported fields and unknown fields."""
    model = body.get("model", pair.name)
    if model != pair.name:
        sentence = f"expected {pair.name!r} as model, got {shown(model)}; {FIX}"
        raise Refusal(sentence, 404, "model_not_found", "model")
    for name, value in body.items():
        if name in fields or name in WITHOUT_EFFECT:
            continue
        what = "fields that this server has"
        need(name in NOT_DONE, name, what, name, "leave it out", "unknown_parameter")
        values = NOT_DONE[name]
        # The comparison is by JSON text, because True is equal to 1.
        is_neutral = json.dumps(value) in map(json.dumps, values)
        what = f"no {name}"
        if values:
            what = f"{name}, if at all, as {values[0]!r}"
        need(is_neutral, name, what, value, "leave it out", "unsupported_parameter")


def _check_numbers(body: dict[str, Any]) -> None:
    for name, (low, high, is_whole) in NUMBERS.items():
        value: Any = body.get(name, low)
        is_number = is_a(value, int, float)
        kind = "a number"
        if is_whole:
            is_number = is_a(value, int)
            kind = "a whole number"
        is_good = is_number and low <= value <= high
        need(is_good, name, f"{name} as {kind} from {low} to {high}", value)
    temperature: Any = body.get("temperature", 0)
    is_good = temperature == 0 or temperature >= LOWEST_TEMPERATURE
    what = f"temperature as 0 or at least {LOWEST_TEMPERATURE}"
    need(is_good, "temperature", what, temperature)
    limits = {body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
    what = "the same max_tokens and max_completion_tokens"
    need(len(limits) <= 1, "max_tokens", what, sorted(limits), "leave one out")


def _check_length(texts: Any, body: dict[str, Any], is_chat: bool, pair: Pair) -> None:
    """Refuses texts that a tokenizer would read for a long time, and texts that cannot fit into the context."""
    length = _num_letters(texts)
    length += len(str(body.get("chat_template_kwargs", "")))
    what = f"at most {MAX_CHARACTERS} characters of text"
    param = _prompt_param(is_chat)
    need(length <= MAX_CHARACTERS, param, what, length, "shorten it")
    what = f"a text for a context of {pair.max_length} tokens"
    got = f"{length} characters"
    is_short = length <= pair.max_letters
    need(is_short, param, what, got, "shorten it", "context_length_exceeded")


def _prompt_param(is_chat: bool) -> str:
    """Returns the name of the field that contains the prompt."""
    if is_chat:
        return "messages"
    return "prompt"


def _num_letters(value: Any) -> int:
    """Counts the letters of all texts in a value. Names of fields count, because templates write argument names."""
    num_letters = 0
    # Recursion is avoided, because a value may be nested as deeply as JSON can be.
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            num_letters += len(part)
        elif isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += [*part, *part.values()]
    return num_letters


def _tools(body: dict[str, Any], pair: Pair) -> list[Any]:
    """Returns the tools that the target may call; none if `tool_choice` is `none`."""
    tools = body.get("tools", [])
    _check_tools(tools, "tools")
    are_named = all(isinstance(tool, dict) and has_name(tool.get("function")) for tool in tools)
    need(are_named, "tools", "tools with a function that has a name", tools)
    knows_tools = _mentions(pair.template, "tools")
    what = "no tools, of which the chat template knows none"
    need(not tools or knows_tools, "tools", what, tools, FIX, "unsupported_parameter")
    if body.get("tool_choice") == "none":
        return []
    what = "no tools, of whose calls no marks are known for this target"
    action = "send them in chat_template_kwargs, under which calls stay text"
    need(not tools or pair.finds_calls, "tools", what, tools, action, "unsupported_parameter")
    return tools


def _check_tools(tools: Any, param: str) -> None:
    """Refuses a value that is not a list, and a list that a tokenizer would read for a long time."""
    need(isinstance(tools, list), param, "tools as a list", tools)
    length = len(json.dumps(tools))
    what = f"tools of at most {MAX_TOOLS} letters"
    need(length <= MAX_TOOLS, param, what, length, "shorten them")


def _form(
    body: dict[str, Any], tools: list[Any], has_parallel_calls: bool, pair: Pair
) -> Form | None:
    """Returns the form that the answer must have, if any."""
    form = response_form(body, tools, has_parallel_calls, pair)
    calls = tool_form(body.get("tool_choice", "auto"), tools, has_parallel_calls, pair)
    is_one = form is None or calls is None
    need(is_one, "tool_choice", "tool_choice or a form", "both", "leave one out")
    return form or calls


def _template_options(body: dict[str, Any], pair: Pair) -> dict[str, Any]:
    what = "a target with a chat template"
    need(bool(pair.template), "messages", what, "none", "ask /v1/completions")
    param = "chat_template_kwargs"
    options = body.get(param, {})
    need(isinstance(options, dict), param, "chat_template_kwargs as an object", options)
    for name in options:
        is_known = name not in RESERVED_OPTIONS and _mentions(pair.template, name)
        need(is_known, param, "options that the chat template has in chat_template_kwargs", name)
    if "tools" in options:
        _check_tools(options["tools"], param)
        what = "tools in one place"
        need(not body.get("tools"), param, what, f"tools beside {param}", "leave one out")
    return {**pair.encoding, **options}


def _is_text(inputs: dict[str, Any]) -> bool:
    """Returns True if a processor has made inputs of a text alone, so that all token types are 0."""
    is_known = {*inputs} <= {*TEXT_INPUTS, *TOKEN_TYPES}
    return is_known and not any(bool(inputs[name].any()) for name in TOKEN_TYPES if name in inputs)


def _encoded_chat(
    messages: list[dict[str, Any]], tools: list[Any], options: dict[str, Any], pair: Pair
) -> dict[str, Tensor]:
    options = {"tools": tools or None, **options}
    try:
        encoded = pair.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            tokenize=True,
            **options,
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ValueError as error:
        raise Refusal(one_line(error), 400, "invalid_value", "messages") from error
    # The template may refuse a role or the form of a tool.
    except Exception as error:
        got = f"{type(error).__name__}: {one_line(error)}"
        sentence = f"expected a conversation that the chat template takes, got {got}; change it"
        raise Refusal(sentence, 400, "invalid_value", "messages") from error
    return dict(encoded)


def _check_tokens(inputs: dict[str, Tensor], is_chat: bool, pair: Pair) -> None:
    """Refuses a prompt with tokens that have no embedding. On a GPU, looking up such a token would end the process."""
    size = find_target(pair.target).vocab_size
    ids = inputs["input_ids"]
    is_unknown = ids >= size
    # The target replaces the tokens that stand for an image before the look-up.
    if "pixel_values" in inputs:
        is_unknown &= ids != getattr(pair.target.config, "image_token_id", -1)
    unknown = ids[is_unknown].tolist()
    tokens: Any = pair.tokenizer.convert_ids_to_tokens(unknown)
    what = f"tokens of the target, which are those below {size}"
    need(not unknown, _prompt_param(is_chat), what, tokens, "leave them out")


def _limit(body: dict[str, Any], inputs: dict[str, Tensor], is_chat: bool, pair: Pair) -> int:
    """Returns the maximum number of tokens of the answer. Refuses a prompt that leaves no room for the answer."""
    num_tokens = int(inputs["input_ids"].shape[1])
    room = pair.max_length - num_tokens
    asked = body.get("max_completion_tokens", body.get("max_tokens", 0))
    if not num_tokens or room < max(asked, 1):
        wanted = ""
        if asked:
            wanted = f" beside an answer of {asked}"
        raise Refusal(
            f"expected a prompt and an answer of together at most {pair.max_length} tokens, got a prompt of "
            f"{num_tokens}{wanted}; shorten the prompt or lower the limit",
            400,
            "context_length_exceeded",
            _prompt_param(is_chat),
        )
    return asked or min(pair.default_tokens, room)


def _sampling(
    body: dict[str, Any],
    pair: Pair,
    markup: dict[str, Any],
    limit: int,
    num_top: int,
    num_columns: int,
) -> list[Sampling]:
    """Returns how the tokens of each choice are chosen. If there is a seed, choice `i` gets the seed plus `i`."""
    options: dict[str, Any] = {}
    temperature: Any = body.get("temperature")
    if body.get("do_sample"):
        options["do_sample"] = True
    if temperature == 0:
        options["do_sample"] = False
    elif temperature is not None:
        options["do_sample"] = True
        options["temperature"] = float(temperature)
    if "top_p" in body and temperature != 0:
        options["top_p"] = float(body["top_p"])
    if "top_k" in body and temperature != 0:
        options["top_k"] = max(0, body["top_k"])
    if "min_p" in body and temperature != 0:
        options["min_p"] = float(body["min_p"])
    if "repetition_penalty" in body:
        options["repetition_penalty"] = float(body["repetition_penalty"])
    biases = _biases(body.get("logit_bias", {}), pair.vocab_size)
    if biases:
        options["sequence_bias"] = biases
    processors: tuple[LogitsProcessor, ...] = ()
    frequency = float(body.get("frequency_penalty", 0))
    presence = float(body.get("presence_penalty", 0))
    if frequency or presence:
        processors = (SaidPenalty(frequency, presence, num_columns),)
    stops = _stops(body.get("stop", []))
    hidden = hidden_tokens(pair.tokenizer, markup)
    found: list[Sampling] = []
    for index in range(body.get("n", 1)):
        seed = body.get("seed")
        if seed is not None:
            seed = (seed + index) % (MAX_SEED + 1)
        found.append(
            Sampling(
                max_new_tokens=limit,
                options=options,
                processors=processors,
                stops=stops,
                hidden=hidden,
                seed=seed,
                num_logprobs=num_top,
            )
        )
    return found


def _with_form(sampling: Sampling, form: Form | None, num_columns: int, behind: str) -> Sampling:
    """Returns the same sampling for an answer that must have a form."""
    if form is None:
        return sampling
    processors = (*sampling.processors, form.processor(num_columns, behind))
    return replace(sampling, processors=processors)


def _stops(stops: Any) -> tuple[str, ...]:
    if isinstance(stops, str):
        stops = [stops]
    is_good = isinstance(stops, list) and len(stops) <= MAX_STOPS
    need(is_good, "stop", f"stop as a text or a list of at most {MAX_STOPS}", stops)
    for stop in stops:
        check_text(stop, "stop", "each stop")
    return tuple(stops)


def _biases(biases: Any, vocab_size: int) -> dict[tuple[int, ...], float]:
    """Returns a map from token ids to the numbers that are added to their scores."""
    param = "logit_bias"
    need(isinstance(biases, dict), param, "logit_bias as an object", biases)
    for token, bias in biases.items():
        is_token = re.fullmatch(r"\d{1,9}", token) is not None and int(token) < vocab_size
        need(is_token, param, f"token ids below {vocab_size} in logit_bias", token)
        is_bias = is_a(bias, int, float) and -100 <= bias <= 100
        need(is_bias, param, "numbers from -100 to 100 in logit_bias", bias)
    return {(int(token),): float(bias) for token, bias in biases.items()}


def _num_top(body: dict[str, Any], is_chat: bool) -> int:
    """Returns how many top log-probabilities are reported at each place; -1 for none.

    OpenAI's two endpoints use different fields for this number.
    """
    wanted = body.get("logprobs", False)
    if not is_chat:
        if wanted is False:
            return -1
        is_good = is_a(wanted, int) and 0 <= wanted <= MAX_TOP
        need(is_good, "logprobs", f"logprobs as a whole number from 0 to {MAX_TOP}", wanted)
        return wanted
    need(isinstance(wanted, bool), "logprobs", "logprobs as true or false", wanted)
    top = body.get("top_logprobs", 0)
    is_good = is_a(top, int) and 0 <= top <= MAX_TOP
    need(is_good, "top_logprobs", f"top_logprobs as a whole number from 0 to {MAX_TOP}", top)
    need(wanted or not top, "top_logprobs", "top_logprobs beside logprobs", top, "set logprobs")
    if not wanted:
        return -1
    return top


def _has_usage(options: Any, is_streamed: bool) -> bool:
    """Returns whether a stream ends with its usage."""
    param = "stream_options"
    if options is None:
        return False
    need(is_streamed, param, "stream_options beside stream alone", options, "leave it out")
    need(isinstance(options, dict), param, "stream_options as an object", options)
    for name, value in options.items():
        is_known = name in STREAM_OPTIONS
        need(is_known, param, f"stream_options among {', '.join(STREAM_OPTIONS)}", name)
        is_flag = value is None or isinstance(value, bool)
        need(is_flag, param, f"{name} as true or false", value)
        is_done = name == "include_usage" or not value
        need(is_done, param, f"no {name}", value, "leave it out", "unsupported_parameter")
    return bool(options.get("include_usage"))


def _mentions(template: str, name: str) -> bool:
    """Returns whether a chat template contains a word."""
    return name in re.findall(r"\w+", template)
