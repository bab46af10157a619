"""One target in several threads, with and without drafts: each gets what it would get alone."""

from __future__ import annotations

import copy
import io
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, TextIteratorStreamer
from transformers.generation import BaseStreamer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from dflash_hf.target_model.parts import find_target
from dflash_hf.target_model.reentry import RAGGED_BLOCK, ragged_attention
from dflash_hf.undo import Hook, hooked
from tiny import oracle_draft, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
TIMEOUT = 240  # seconds: a slow machine is no failure


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Runs something in another thread and waits; a deadlock is a failure and not a hang."""
    results: Queue[Any] = Queue()

    def run() -> None:
        try:
            results.put(work())
        except Exception as error:  # handed to the test, whatever it is
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    result = results.get(timeout=TIMEOUT)
    if isinstance(result, Exception):
        raise result
    return result


@contextmanager
def in_the_middle(
    layer: nn.Module, work: Callable[[], Any], forward: int = 3
) -> Iterator[list[Any]]:
    """Runs `work` in another thread while this one is inside `layer`, at the third forward (a verify) or another."""
    here, calls, results = threading.get_ident(), [0], []

    def hook(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == here:
            calls[0] += 1
            if calls[0] == forward:
                results.append(in_a_thread(work))

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield results
    finally:
        handle.remove()


def plain(
    target: PreTrainedModel, seed: int, lengths: list[int]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs = prompts(lengths, seed)
    return inputs, target.generate(**inputs, **GREEDY)


# Not three rows under eager: in float64 it computes NaN for padding (tiny.py).
@pytest.mark.parametrize(
    ("attention", "lengths"), [("eager", [6]), ("sdpa", [6]), ("sdpa", [4, 11, 7])]
)
def test_anything_may_run_in_the_middle_of_a_verify(attention: str, lengths: list[int]) -> None:
    target = shallow_target("qwen3-sliding")
    target.set_attn_implementation(attention)
    twin = type(target)(target.config).double().eval()  # another model of the same config object
    twin.generation_config = target.generation_config
    inputs, ref = plain(target, 0, lengths)
    others, other = plain(target, 1, [9])
    twin_ref = twin.generate(**others, **GREEDY)
    logits = target(**others).logits

    def work() -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                target(**others).logits,
                target.generate(**others, **GREEDY),
                target.generate(
                    **others,
                    **GREEDY,
                    assistant_model=oracle_draft(target, truth_of(others, other), 5),
                ),
                twin.generate(**others, **GREEDY),
                twin.generate(**others, **GREEDY, assistant_model=tiny_draft(twin)),
                copy.deepcopy(target).generate(**others, **GREEDY),
                target.config._attn_implementation,
            ]

    draft = oracle_draft(target, truth_of(inputs, ref), 2)
    with in_the_middle(target.model.layers[1], work) as results:
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert 1.0 < draft.last_stats.acceptance_length < 8.0
    seen, text, drafted, twin_text, twin_drafted, copied, setting = results[0]
    torch.testing.assert_close(seen, logits, rtol=1e-12, atol=1e-12)
    for result in (text, drafted, copied):
        assert torch.equal(result, other)
    assert torch.equal(twin_text, twin_ref)
    assert torch.equal(twin_drafted, twin_ref)
    assert setting == attention


def test_many_threads_at_once() -> None:
    target = shallow_target("gemma3")
    cases = [plain(target, seed, [4 + seed, 9, 3][: 1 + seed % 3]) for seed in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(job: int) -> bool:
        inputs, ref = cases[job % len(cases)]
        draft = oracle_draft(target, truth_of(inputs, ref), job) if job % 3 else None
        return torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)

    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(work, range(18))) == [True] * 18
    finally:
        sys.setswitchinterval(interval)


def test_a_consumer_may_generate_while_it_is_fed() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("demos/toy/target")
    target = shallow_target("qwen3", vocab_size=len(tokenizer))
    inputs, ref = plain(target, 0, [6])
    # Nothing is buffered, so the run waits inside `put` until the consumer has finished its own.
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=TIMEOUT)
    streamer.text_queue = Queue(maxsize=1)
    draft = oracle_draft(target, truth_of(inputs, ref), 1)
    run = threading.Thread(
        target=target.generate,
        kwargs={**inputs, **GREEDY, "streamer": streamer, "assistant_model": draft},
        daemon=True,
    )
    run.start()
    text = ""
    for piece in streamer:
        assert torch.equal(target.generate(**inputs, **GREEDY), ref)
        assert torch.equal(
            target.generate(**inputs, **GREEDY, assistant_model=tiny_draft(target)), ref
        )
        text += piece
    run.join(TIMEOUT)
    assert text == tokenizer.decode(ref[0, 6:])


class Waiting(BaseStreamer):
    """Generates in another thread, and in its own, whenever it gets something."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self.work = work
        self.results: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.results += [self.work(), in_a_thread(self.work)]

    def end(self) -> None:
        return


def test_a_streamer_may_generate_with_a_draft_of_its_own() -> None:
    target = shallow_target("qwen3")
    inputs, ref = plain(target, 0, [6])
    others, other = plain(target, 1, [9])
    streamer = Waiting(
        lambda: target.generate(**others, **GREEDY, assistant_model=tiny_draft(target))
    )
    draft = oracle_draft(target, truth_of(inputs, ref), 1)
    assert torch.equal(
        target.generate(**inputs, **GREEDY, streamer=streamer, assistant_model=draft), ref
    )
    assert len(streamer.results) > 4
    assert all(torch.equal(result, other) for result in streamer.results)


def test_the_setting_is_seen_by_a_verify_alone_and_never_stored() -> None:
    model: Any = shallow_target("qwen3")
    target = find_target(model)
    attention = model.model.layers[0].self_attn
    ids = torch.arange(1, 9)[None]
    seen = list[Any]()

    def read() -> Any:
        return attention.config._attn_implementation

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(read())
        if len(seen) > 1:
            return
        seen.append(in_a_thread(read))
        seen.append(target.config._attn_implementation)
        seen.append(model.config._attn_implementation)
        seen.append(copy.deepcopy(attention).config._attn_implementation)
        model(ids)  # a call of the user's in a verify
        seen.append(read())
        raise RuntimeError("on purpose")

    handle = model.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    with ragged_attention(target):
        assert read() == "sdpa"
        with pytest.raises(RuntimeError, match="on purpose"):
            model(ids, ragged=None)
        assert seen == [RAGGED_BLOCK, "sdpa", "sdpa", "sdpa", "sdpa", "sdpa", RAGGED_BLOCK]
        assert read() == "sdpa"
        assert type(target.config)()._attn_implementation is None
        assert copy.deepcopy(target.config)._attn_implementation == "sdpa"
        model(ids)
        assert seen[7:] == ["sdpa"]
    handle.remove()
    assert read() == target.config._attn_implementation == "sdpa"
    target.config._attn_implementation = "eager"
    assert read() == "eager"
    with pytest.raises(RuntimeError, match="on purpose"), ragged_attention(target):
        raise RuntimeError("on purpose")
    assert read() == "eager"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_module_may_get_another_config_or_have_none() -> None:
    model: Any = shallow_target("qwen3")
    with ragged_attention(find_target(model)):
        pass
    attention = model.model.layers[0].self_attn
    other = copy.deepcopy(attention.config)
    attention.config = other
    assert attention.config is other
    assert "config" in vars(attention)
    del attention.config
    assert not hasattr(attention, "config")
    with pytest.raises(AttributeError):
        del attention.config
    with pytest.raises(AttributeError, match="no attribute 'config'"):
        attention.config  # noqa: B018
    assert not hasattr(type(attention), "config")


class HeldElsewhere(Qwen3Attention):
    """An attention whose config is a property, as remote code may have it."""

    @property
    def config(self) -> Any:
        return self.__dict__["_settings"]

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["_settings"] = config


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_config_may_be_a_property(attention: str) -> None:
    target: Any = shallow_target("qwen3")
    for layer in target.model.layers:
        held = layer.self_attn.__dict__.pop("config")
        layer.self_attn.__class__ = HeldElsewhere
        layer.self_attn.config = held
    target.set_attn_implementation(attention)
    inputs, ref = plain(target, 0, [6])
    draft = oracle_draft(target, truth_of(inputs, ref), 2)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    other = copy.deepcopy(held)
    layer.self_attn.config = other
    assert layer.self_attn.config is layer.self_attn.__dict__["_settings"] is other
    assert torch.equal(target.generate(**inputs, **GREEDY), ref)


@pytest.mark.parametrize("forward", [1, 3], ids=["prefill", "verify"])
def test_a_copy_made_in_the_middle_is_a_model_of_its_own(forward: int) -> None:
    target = shallow_target("qwen3")
    inputs, ref = plain(target, 0, [6])
    others, other = plain(target, 1, [9])
    draft = oracle_draft(target, truth_of(inputs, ref), 2)

    def work() -> PreTrainedModel:
        return copy.deepcopy(target)

    with in_the_middle(target.model.layers[1], work, forward) as results:
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    (copied,) = results
    assert torch.equal(copied.generate(**others, **GREEDY), other)
    own = oracle_draft(copied, truth_of(others, other), 3)
    assert torch.equal(copied.generate(**others, **GREEDY, assistant_model=own), other)
    assert 1.0 < own.last_stats.acceptance_length < 8.0


def test_a_target_may_be_saved_while_it_has_hooks() -> None:
    layer = nn.Linear(2, 2)
    seen: list[nn.Module] = []
    saved = io.BytesIO()
    with hooked(Hook(layer, lambda module, args, output: seen.append(module))):
        torch.save(layer, saved)
        copied = copy.deepcopy(layer)
        layer(torch.ones(2))
        saved.seek(0)
        for other in (copied, torch.load(saved, weights_only=False)):
            other(torch.ones(2))
    assert seen == [layer]
