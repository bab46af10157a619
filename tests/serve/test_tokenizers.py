"""The server over tokenizers of any kind: special tokens in answers, ids without an embedding, slow tokenizers."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoProcessor, ByT5Tokenizer

from dflash_hf.serve.messages import read_messages
from dflash_hf.serve.pair import Pair
from dflash_hf.serve.refusal import Refusal
from helpers.processors import PARTS_ONLY, published_folder, qwen_target, qwen_tokenizer
from helpers.scripted_server import Found, InProcess
from tiny import tiny_draft, tiny_target

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
SAID = ["a", "</think>", "b", "c", "d", "e"]
Serve = Callable[..., InProcess]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a tiny pair with a tokenizer; other arguments are `Pair`'s."""
    running: list[InProcess] = []

    def begin(tokenizer: Any, num_tokens: int, max_rows: int, says: list[int]) -> InProcess:
        target = tiny_target("qwen3", vocab_size=num_tokens).float()
        draft = tiny_draft(target)
        # Each of these tokens is followed by the next one.
        biases = {tuple(says[: end + 1]): 50.0 + 100.0 * end for end in range(len(says))}
        config: Any = target.generation_config
        config.sequence_bias = biases or None
        pair = Pair(target, draft, tokenizer, name="tiny", encoding={}, note=str, max_rows=max_rows)
        running.append(InProcess(pair))
        return running[-1]

    yield begin
    for server in running:
        server.close()


def marked_tokenizer() -> Any:
    """A tokenizer of bytes whose family marks thoughts by special tokens."""
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def both_ways(server: InProcess, is_chat: bool, **fields: Any) -> Found:
    """An answer that is the same whole and in pieces."""
    fields = {"temperature": 0, **fields}
    whole = server.ask("http", False, is_chat, fields)
    pieces = server.ask("http", True, is_chat, fields)
    assert (whole.status, pieces.status) == (200, 200), (whole.error, pieces.error)
    assert (whole.content, whole.reasons) == (pieces.content, pieces.reasons)
    return whole


@pytest.mark.parametrize("max_rows", [4, 1])
def test_stops_are_found_in_what_the_client_sees(serve: Serve, max_rows: int) -> None:
    tokenizer = marked_tokenizer()
    says = tokenizer.convert_tokens_to_ids(SAID)
    server = serve(tokenizer, len(tokenizer) + 9, max_rows, says)
    for stop, content, reason, number in [
        (["zz"], "a</think>bcde", "length", 6),
        (["ab"], "a</think>bcde", "length", 6),
        (["</think>"], "a", "stop", 2),
        (["k>bc"], "a</thin", "stop", 4),
    ]:
        found = both_ways(server, True, **HELLO, max_tokens=6, stop=stop)
        assert (found.content, found.reasons) == (content, [reason]), stop
        assert found.usage["completion_tokens"] == number
    # A plain completion has no marks.
    for stop, content, reason in [(["ab"], "", "stop"), (["</think>"], "abcde", "length")]:
        found = both_ways(server, False, prompt="hi", max_tokens=6, stop=stop)
        assert (found.content, found.reasons) == (content, [reason]), stop


def test_special_tokens_without_a_name_are_no_text(serve: Serve) -> None:
    tokenizer = marked_tokenizer()
    # As in the files of Llama 3: special, and none of those that the tokenizer's config names.
    tokenizer.backend_tokenizer.add_special_tokens(["<|eom|>"])
    assert "<|eom|>" not in tokenizer.all_special_tokens
    says = tokenizer.convert_tokens_to_ids(["a", "</think>", "<|eom|>", "b"])
    server = serve(tokenizer, len(tokenizer), 4, says)
    asked: dict[str, Any] = {**HELLO, "max_tokens": 4}
    assert both_ways(server, True, **asked).content == "a</think>b"
    assert both_ways(server, True, **asked, stop=">b").content == "a</think"
    found = server.ask("http", False, True, {**asked, "temperature": 0, "logprobs": True})
    assert len(found.logprobs) == 3


@pytest.mark.parametrize("max_rows", [4, 1])
def test_ids_that_the_tokenizer_does_not_have_are_no_text(serve: Serve, max_rows: int) -> None:
    """The head of Qwen3 has more rows than its tokenizer has tokens."""
    tokenizer = marked_tokenizer()
    num_tokens = len(tokenizer)
    says = [*tokenizer.convert_tokens_to_ids(["a"]), num_tokens + 3]
    server = serve(tokenizer, num_tokens + 90, max_rows, says)
    asked = {"max_tokens": 2, "temperature": 0}
    for is_stream in (False, True):
        chat = {**HELLO, **asked, "logprobs": True, "top_logprobs": 20}
        found = server.ask("http", is_stream, True, chat)
        assert (found.status, found.content, found.reasons) == (200, "a", ["length"]), found.error
        assert [entry["token"] for entry in found.logprobs] == ["a"]
        assert 0 < len(found.logprobs[0]["top_logprobs"]) < 20
        assert all(one["token"] for one in found.logprobs[0]["top_logprobs"])
        found = server.ask("http", is_stream, False, {"prompt": "hi", **asked, "logprobs": 5})
        assert found.status == 200, found.error


@pytest.mark.parametrize("max_rows", [4, 1])
def test_tokens_without_an_embedding_are_refused(serve: Serve, max_rows: int) -> None:
    tokenizer = marked_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|more|>"]})
    id = tokenizer.convert_tokens_to_ids("<|more|>")
    server = serve(tokenizer, id, max_rows, [])
    chat = {"messages": [{"role": "user", "content": "hi <|more|>"}]}
    completion = {"prompt": "hi <|more|>"}
    for is_chat, param, fields in ((True, "messages", chat), (False, "prompt", completion)):
        found = server.ask("http", False, is_chat, {**fields, "max_tokens": 4})
        assert (found.status, found.error["code"]) == (400, "invalid_value")
        assert found.error["param"] == param
        assert found.error["message"] == (
            f"expected tokens of the target, which are those below {id}, got ['<|more|>']; leave them out"
        )
    both_ways(server, False, prompt="hi", max_tokens=4)


def test_token_types_do_not_reach_a_target_of_text(serve: Serve) -> None:
    tokenizer = marked_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    server = serve(tokenizer, len(tokenizer), 4, tokenizer.convert_tokens_to_ids(["a", "b"]))
    assert both_ways(server, True, **HELLO, max_tokens=2).content == "ab"
    assert both_ways(server, False, prompt="hi", max_tokens=2).content == "ab"


@pytest.fixture
def vision(tmp_path: Path) -> Pair:
    """A tiny pair for images, with a processor as it is published."""
    processor: Any = AutoProcessor.from_pretrained(published_folder(tmp_path))
    target = qwen_target(processor)
    return Pair(target, tiny_draft(target), processor, name="x", encoding={}, note=str)


def test_large_images_stay_as_large_as_they_are(
    vision: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (2600, 2000)).save(buffer, "PNG")
    code = base64.b64encode(buffer.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{code}"}}
    sent = [{"role": "user", "content": [part]}] * 2
    turns = read_messages(sent, vision)
    assert [turn["content"][0]["image"].size for turn in turns] == [(2600, 2000)] * 2
    monkeypatch.setattr("dflash_hf.serve.messages.MAX_PIXELS_OF_ALL", 10_000_000)
    with pytest.raises(
        Refusal, match="together at most 10000000 pixels, got 10400000; shrink them"
    ):
        read_messages(sent, vision)


@pytest.mark.parametrize("template", PARTS_ONLY)
def test_texts_reach_templates_that_read_only_parts(template: str, vision: Pair) -> None:
    processor = vision.processor
    processor.chat_template = template
    pair = Pair(
        vision.target, tiny_draft(vision.target), processor, name="x", encoding={}, note=str
    )
    assert pair.takes_developer
    content = ["Be brief.", "2+2?", "", [{"type": "text", "text": "See:"}]]
    roles = ["system", "user", "assistant", "user"]
    sent = [{"role": role, "content": said} for role, said in zip(roles, content, strict=True)]
    text = processor.apply_chat_template(read_messages(sent, pair), tokenize=False)
    assert all(word in text for word in ("system\nBe brief.", "user\n2+2?", "user\nSee:")), text


def test_a_python_tokenizer_is_served(serve: Serve) -> None:
    tokenizer: Any = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    says = tokenizer("d\u00e9j\u00e0 vu", add_special_tokens=False)["input_ids"]
    server = serve(tokenizer, len(tokenizer), 4, says)
    asked = {**HELLO, "max_tokens": len(says)}
    assert both_ways(server, True, **asked).content == "d\u00e9j\u00e0 vu"
    assert both_ways(server, True, **asked, stop="\u00e0").content == "d\u00e9j"
    found = server.ask("http", False, True, {**asked, "logprobs": True})
    told = [entry["bytes"] for entry in found.logprobs]
    assert told == [[100], [195], [169], [106], [195], None, [32], [118], [117]]
    form = {"response_format": {"type": "json_object"}}
    found = server.ask("http", False, True, {**asked, **form})
    assert (found.status, found.error["code"]) == (400, "unsupported_parameter")
    assert "expected a target with a fast tokenizer for response_format" in json.dumps(found.error)
