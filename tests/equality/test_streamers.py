"""Transformers' streamers, and consumers that do not wait for the end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForCausalLM,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from dflash_hf import DFlashDraftModel

TOY = Path(__file__).parents[2] / "demos" / "toy"
NEW = 60


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DFlashDraftModel, Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(TOY / "target")
    messages = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    target = AutoModelForCausalLM.from_pretrained(TOY / "target")
    return target, DFlashDraftModel.from_pretrained(TOY / "draft"), tokenizer, inputs


class Stop(StoppingCriteria):
    """Set by a consumer that has seen enough."""

    def __init__(self) -> None:
        self.is_set, self.longest = threading.Event(), 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.longest = input_ids.shape[1]
        return self.is_set.is_set()


def test_text_streamer_prints_what_plain_generate_prints(
    pair: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft, tokenizer, inputs = pair
    printed = []
    for assistant in (None, draft):
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        target.generate(**inputs, max_new_tokens=NEW, streamer=streamer, assistant_model=assistant)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0]) > 40


def test_iterator_streamers_give_the_whole_text(pair: Any) -> None:
    target, draft, tokenizer, inputs = pair
    ref = target.generate(**inputs, max_new_tokens=NEW)
    text = tokenizer.decode(ref[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def run(streamer: Any) -> threading.Thread:
        settings = {**inputs, "max_new_tokens": NEW, "streamer": streamer, "assistant_model": draft}
        thread = threading.Thread(target=target.generate, kwargs=settings)
        thread.start()
        return thread

    streamer = TextIteratorStreamer(
        tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True
    )
    thread = run(streamer)
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == text
    assert len(pieces) > 2

    async def consume() -> str:
        streamer = AsyncTextIteratorStreamer(
            tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True
        )
        thread = run(streamer)
        found = "".join([piece async for piece in streamer])
        thread.join()
        return found

    assert asyncio.run(consume()) == text


def test_a_consumer_that_has_seen_enough_ends_the_run(pair: Any) -> None:
    target, draft, tokenizer, inputs = pair
    ref = target.generate(**inputs, max_new_tokens=NEW)
    stop = Stop()

    class Enough(TextIteratorStreamer):
        """Stops the run, from where the text arrives, at its second piece."""

        num = 0

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.num += 1
            if self.num == 2:
                stop.is_set.set()
            super().on_finalized_text(text, stream_end)

    streamer = Enough(tokenizer, skip_prompt=True, timeout=60)
    out = target.generate(
        **inputs,
        max_new_tokens=NEW,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([stop]),
        assistant_model=draft,
    )
    assert inputs["input_ids"].shape[1] < out.shape[1] < ref.shape[1]
    assert out.shape[1] == stop.longest
    assert torch.equal(out, ref[:, : out.shape[1]])


def test_the_run_after_a_consumer_that_raises_is_right(pair: Any) -> None:
    target, draft, tokenizer, inputs = pair

    class Broken(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            raise BrokenPipeError("the reader is gone")

    with pytest.raises(BrokenPipeError):
        target.generate(
            **inputs, max_new_tokens=NEW, streamer=Broken(tokenizer), assistant_model=draft
        )
    ref = target.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(target.generate(**inputs, max_new_tokens=NEW, assistant_model=draft), ref)
