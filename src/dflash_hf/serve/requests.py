"""What clients may ask: every field is looked at before anything runs, and what is wrong refused in a sentence.

Transformers' handlers take a body as it is: what is malformed, or not done, shows as a `KeyError` or not at all.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.cli.serving.utils import GenerateManager

from dflash_hf.data.image_files import MAX_FILE_BYTES, read_image
from dflash_hf.errors import is_a, require, shown
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.pair.answers import Processor, tokenizer_of

MAX_BODY = 64 * 2**20  # bytes
MAX_CHARACTERS = 4_000_000  # of all texts: a tokenizer reads them before anyone else is answered
MAX_IMAGES = 16
MAX_STOPS = 16
MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**32 - 1
ROLES = ("system", "developer", "user", "assistant", "tool")
FIX = "correct the request"

# Field -> lowest and highest number, and whether it is a whole one.
NUMBERS = {
    "max_tokens": (1, MAX_TOKENS, True),
    "max_completion_tokens": (1, MAX_TOKENS, True),
    "seed": (0, MAX_SEED, True),
    "temperature": (0, 2, False),
    "top_p": (0, 1, False),
    "frequency_penalty": (0, 2, False),  # Transformers' handlers make it repetition_penalty - 1
}
COMMON = frozenset(
    ("model", "stream", "stop", "max_tokens", "seed", "temperature", "top_p", "frequency_penalty")
)
CHAT = COMMON | {"messages", "tools", "logit_bias", "max_completion_tokens", "chat_template_kwargs"}
COMPLETION = COMMON | {"prompt"}
LOWEST_TEMPERATURE = 0.01  # but for 0: scores are divided by it
# Fields that nothing here heeds, with the values at which nothing needs to; any, where the text does not depend on it.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    # The last is vLLM's: who sends it does without.
    **dict.fromkeys(
        (
            "user",
            "metadata",
            "store",
            "service_tier",
            "stream_options",
            "safety_identifier",
            "return_token_ids",
        )
    ),
}
# Names of a chat template's that are not its options.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class Refusal(ValueError):
    """A request that is not answered: `status` is that of the response, `code` OpenAI's word for the reason."""

    def __init__(self, sentence: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code


class Pair:
    """A target with its draft and its tokenizer or processor, as clients ask for it.

    Args:
        target, draft, processor: The pair.
        name (`str`): What clients call it.
        encoding (`dict`): Options of the chat template, where a request has none.
        note (callable): Gets a line about each request.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        processor: Processor,
        *,
        name: str,
        encoding: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self.target: Any = target
        self.draft = draft
        self.processor = processor
        self.tokenizer = tokenizer_of(processor)
        self.name = name
        self.encoding = encoding
        self.note = note
        config = target.config.get_text_config(decoder=True)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 2**31)
        self.vocab_size = int(config.vocab_size)
        self.template = str(
            getattr(processor, "chat_template", None) or self.tokenizer.chat_template or ""
        )
        self.takes_images = processor is not self.tokenizer
        self.stopping = threading.Event()  # once set, every run ends
        self.generation: Any = GenerateManager()  # has the thread


def check(data: bytes, fields: frozenset[str], pair: Pair) -> dict[str, Any]:
    """Returns what a body asks, in fields that Transformers' handler takes, images read.

    Args:
        data (`bytes`): The body.
        fields (`frozenset[str]`): Those of the endpoint, `CHAT` or `COMPLETION`.
        pair (`Pair`): Who is asked.

    Raises:
        Refusal: With status 404, if another model is asked for.
        ValueError: If anything else is wrong.
    """
    try:
        body: Any = json.loads(data)
        # Halves of a character, which no tokenizer reads, end here
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError(
            f"expected JSON of whole characters as the body, got {shown(data[:80])}; {FIX}"
        ) from None
    require(isinstance(body, dict), "a JSON object as the body", body, FIX)
    asked = _common(_without_nulls(body), fields, pair)
    if fields is CHAT:
        _check_chat(asked, pair)
    else:
        _check_text(asked.get("prompt"), "prompt")
    length = len(str(asked))  # images have been read, and are short here
    require(
        length <= MAX_CHARACTERS,
        f"at most {MAX_CHARACTERS} characters of text",
        length,
        "shorten it",
    )
    return _without_nulls(asked)


def _check_chat(asked: dict[str, Any], pair: Pair) -> None:
    """What only chats have; messages and biases become what the handler takes."""
    require(bool(pair.template), "a target with a chat template", "none", "ask /v1/completions")
    asked["messages"] = _messages(asked.get("messages"), pair)
    tools = asked.get("tools")
    if tools:
        require(isinstance(tools, list), "tools as a list", tools, FIX)
        good = all(isinstance(tool, dict) and _has_name(tool.get("function")) for tool in tools)
        require(good, "tools with a function that has a name", tools, FIX)
        require(
            _mentions(pair.template, "tools"),
            "no tools, of which the chat template knows none",
            tools,
            FIX,
        )
    options = asked.get("chat_template_kwargs", {})
    require(isinstance(options, dict), "chat_template_kwargs as an object", options, FIX)
    for name in options:
        good = name not in RESERVED and _mentions(pair.template, name)
        require(good, "options that the chat template has in chat_template_kwargs", name, FIX)
    if "logit_bias" in asked:
        asked["logit_bias"] = _biases(asked["logit_bias"], pair.vocab_size)


def _common(body: dict[str, Any], fields: frozenset[str], pair: Pair) -> dict[str, Any]:
    """The fields that are heeded, after what both endpoints have in common has been looked at."""
    model = body.get("model", pair.name)
    if model != pair.name:
        raise Refusal(
            f"expected {pair.name!r} as model, got {shown(model)}; {FIX}", 404, "model_not_found"
        )
    for name, value in body.items():
        if name in fields:
            continue
        require(name in NEUTRAL, "fields that this server has", name, "leave it out")
        values = NEUTRAL[name]
        # By their texts: True is equal to 1.
        is_neutral = values is None or json.dumps(value) in map(json.dumps, values)
        require(
            is_neutral, f"{name}, if at all, as {values and values[0]!r}", value, "leave it out"
        )
    asked = {name: value for name, value in body.items() if name in fields} | {"model": pair.name}
    for name, (low, high, is_whole) in NUMBERS.items():
        value: Any = asked.get(name, low)
        good = is_a(value, int, float)
        kind = "a number"
        if is_whole:
            good = is_a(value, int)
            kind = "a whole number"
        require(good and low <= value <= high, f"{name} as {kind} from {low} to {high}", value, FIX)
    # By the older name, which the handlers of every Transformers know
    if "max_completion_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    temperature: Any = asked.get("temperature", 0)
    good = temperature == 0 or temperature >= LOWEST_TEMPERATURE
    require(good, f"temperature as 0 or at least {LOWEST_TEMPERATURE}", temperature, FIX)
    require(
        isinstance(asked.get("stream", False), bool),
        "stream as true or false",
        asked.get("stream"),
        FIX,
    )
    if "stop" in asked:
        stops = asked["stop"]
        if isinstance(stops, str):
            stops = [stops]
        good = isinstance(stops, list) and len(stops) <= MAX_STOPS
        require(good, f"stop as a text or a list of at most {MAX_STOPS}", stops, FIX)
        for stop in stops:
            _check_text(stop, "each stop")
        asked["stop"] = stops or None
    return asked


def _messages(messages: Any, pair: Pair) -> list[dict[str, Any]]:
    """The conversation, with images in the place of their addresses."""
    require(
        isinstance(messages, list) and bool(messages), "messages, a list of turns", messages, FIX
    )
    turns: list[dict[str, Any]] = []
    num_images = 0
    for message in messages:
        require(isinstance(message, dict), "turns with role and content in messages", message, FIX)
        turn = _without_nulls(message)
        require(
            turn.get("role") in ROLES,
            f"role of each turn among {', '.join(ROLES)}",
            turn.get("role"),
            FIX,
        )
        content = turn.get("content")
        calls = _tool_calls(turn.pop("tool_calls", []))
        if calls:
            turn["tool_calls"] = calls
            content = turn.get("content", "")
        if isinstance(content, list):
            num_images += sum(
                isinstance(part, dict) and part.get("type") == "image_url" for part in content
            )
            require(
                num_images <= MAX_IMAGES, f"at most {MAX_IMAGES} images", num_images, "send fewer"
            )
            turn["content"] = [_part(part, pair) for part in content]
        else:
            _check_text(content, "content of each turn (or a list of parts)", may_be_empty=True)
        turns.append(turn)
    return turns


def _part(part: Any, pair: Pair) -> dict[str, Any]:
    """A part of a message, its image read."""
    is_known = isinstance(part, dict) and part.get("type") in ("text", "image_url")
    require(is_known, "parts of type text or image_url", part, FIX)
    if part["type"] == "text":
        _check_text(part.get("text"), "text of each part of type text", may_be_empty=True)
        return part
    require(
        pair.takes_images, "texts, which are all that this target reads", "an image", "leave it out"
    )
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    kind = ""
    code = ""
    if isinstance(url, str):
        kind, _, code = url.partition(",")
    # Neither files nor addresses: which ones the server may read is not for clients to say.
    is_data = re.fullmatch(r"data:[\w/+.-]*;base64", kind) is not None
    require(is_data, "each image as data:image/...;base64,...", url, "send what is in it")
    limit = MAX_FILE_BYTES // 3 * 4 + 4
    require(
        len(code) <= limit,
        f"at most {limit} letters of base64 for each image",
        len(code),
        "shrink it",
    )
    try:
        data = base64.b64decode(code, validate=True)
    except ValueError:
        raise ValueError(
            f"expected base64 in each image, got {shown(code)}; encode it anew"
        ) from None
    return {"type": "image_url", "image_url": {"url": read_image(Path("an image"), data).image}}


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """The calls of a turn, with arguments that are an object."""
    require(isinstance(calls, list), "tool_calls as a list", calls, FIX)
    for call in calls:
        good = isinstance(call, dict) and _has_name(call.get("function"))
        require(good, "tool_calls with a function that has a name", call, FIX)
        arguments = call["function"].get("arguments")
        read = arguments
        if isinstance(arguments, str):
            read = _read_json(arguments)
        good = isinstance(read, dict)
        require(good, "arguments of each of tool_calls as an object in JSON", arguments, FIX)
    return calls


def _read_json(text: str) -> Any:
    """What a text says in JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _biases(biases: Any, vocab_size: int) -> dict[str, float] | None:
    """Token id -> what is added to its score."""
    require(isinstance(biases, dict), "logit_bias as an object", biases, FIX)
    for token, bias in biases.items():
        good = re.fullmatch(r"\d{1,9}", token) is not None and int(token) < vocab_size
        require(good, f"token ids below {vocab_size} in logit_bias", token, FIX)
        good = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        require(good, "numbers from -100 to 100 in logit_bias", bias, FIX)
    return {token: float(bias) for token, bias in biases.items()} or None


def _check_text(text: Any, what: str, may_be_empty: bool = False) -> None:
    """Raises unless it is a text."""
    require(isinstance(text, str) and (bool(text) or may_be_empty), f"a text as {what}", text, FIX)


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _mentions(template: str, name: str) -> bool:
    """Whether a chat template has a word in it."""
    return name in re.findall(r"\w+", template)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """As if what is null had been left out."""
    return {name: value for name, value in fields.items() if value is not None}
