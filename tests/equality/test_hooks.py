"""Hooks of the user's that call models in the middle of a forward: they get what they get under plain `generate`.

The nested calls are compared with the same calls outside, the text with plain `generate`'s, and every block of the
draft with one forward over the text, which shows whether a tap has recorded something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from dflash_hf import generate_batch, iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.target_model.parts import find_target
from helpers.half import half
from helpers.hybrid import use_float64_rules
from helpers.static import set_engine
from helpers.turns import Recording, arm, check_blocks, recording_draft
from tiny import oracle_draft, prompts, tiny_draft, tiny_target, truth_of

pytestmark = pytest.mark.same_on_every_release

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
WHOLLY = ["qwen3-sliding", "qwen3.5"]
SOME = ["qwen3", "gemma3", "lfm2", "bamba"]
PLACES = ["1", "within"]
Work = Callable[[], Tensor]
# Longer than the windows of the targets.
OTHER: dict[str, Any] = prompts([5, 12], 9)
DRAFTED = prompts([9], 4)


def work_of(target: PreTrainedModel, name: str) -> Work:
    """What a hook may do, by its name, returning a tensor that is the same every time."""
    model: Any = target
    sibling: Any = None
    inner: Any = None
    if name.startswith("sibling"):
        sibling = type(target)(target.config).to(target.dtype).eval()
        assert sibling.config is target.config
    if name == "another draft":
        plain = target.generate(**DRAFTED, max_new_tokens=4, do_sample=False)
        inner = oracle_draft(target, truth_of(DRAFTED, plain), 0)

    def in_turns() -> Tensor:
        cache = DynamicCache(config=target.config)
        model(
            OTHER["input_ids"][:, :9],
            attention_mask=OTHER["attention_mask"][:, :9],
            **{CACHE_NAME: cache},
        )
        return model(
            OTHER["input_ids"][:, 9:], attention_mask=OTHER["attention_mask"], **{CACHE_NAME: cache}
        ).logits

    works: dict[str, Work] = {
        "call": lambda: model(**OTHER).logits,
        "decoder": lambda: model.model(**OTHER).last_hidden_state,
        "cache": in_turns,
        "generate": lambda: model.generate(**OTHER, max_new_tokens=2, do_sample=False),
        "sibling": lambda: sibling(**OTHER).logits,
        "sibling's decoder": lambda: sibling.model(**OTHER).last_hidden_state,
        "sibling's text": lambda: sibling.generate(**OTHER, max_new_tokens=2, do_sample=False),
        "another draft": lambda: model.generate(
            **DRAFTED, max_new_tokens=4, do_sample=False, assistant_model=inner
        ),
    }
    return works[name]


@contextmanager
def hooked(module: nn.Module, work: Work, before: bool) -> Iterator[list[Tensor]]:
    """Runs `work` in every forward of a module but those that it runs itself; gives what it returned."""
    busy, seen = [False], list[Tensor]()

    def hook(*args: Any) -> None:
        if busy[0]:
            return
        busy[0] = True
        try:
            seen.append(work().clone())
        finally:
            busy[0] = False

    handle = (
        module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
    )
    try:
        yield seen
    finally:
        handle.remove()


def module_of(target: PreTrainedModel, place: str) -> nn.Module:
    layers: Any = target.get_submodule("model.layers")
    if place == "model":
        return target
    if place == "within":  # the last part of what mixes the second layer's tokens
        names = ("self_attn", "linear_attn", "conv", "mamba")
        mixer = next(
            getattr(layers[1], name) for name in names if getattr(layers[1], name, None) is not None
        )
        return list(mixer.children())[-1]
    return layers[int(place)]


def exact_target(monkeypatch: pytest.MonkeyPatch, family: str) -> PreTrainedModel:
    """A target that computes in float64 throughout."""
    target = tiny_target(family)
    if find_target(target).recurrences:
        use_float64_rules(monkeypatch, target)
    return target


@torch.no_grad()
def check(
    target: PreTrainedModel, name: str, place: str, before: bool, engine: Any = "eager"
) -> None:
    inputs = prompts([4, 9, 7], 0)
    work = work_of(target, name)
    module = module_of(target, place)
    expected = work()
    with hooked(module, work, before) as seen:
        ref = target.generate(**inputs, **GREEDY)
    assert all(torch.equal(tensor, expected) for tensor in seen)
    draft: Recording = recording_draft(target)
    truth = truth_of(inputs, ref)
    arm(draft, truth, 3)
    set_engine(draft, engine)
    with hooked(module, work, before) as seen:
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(seen) >= draft.last_stats.num_target_forwards
    assert all(torch.allclose(tensor, expected, rtol=0, atol=1e-9) for tensor in seen)
    assert draft.last_stats.acceptance_length > 1.2
    check_blocks(draft, target, truth, [0, 0, 0])


NAMES = [
    "call",
    "decoder",
    "cache",
    "generate",
    "sibling",
    "sibling's decoder",
    "sibling's text",
    "another draft",
]


@pytest.mark.parametrize(
    ("family", "name", "place"),
    [*half(WHOLLY, NAMES, PLACES), *half(SOME, ["call", "another draft"], PLACES)],
)
def test_in_a_layer(monkeypatch: pytest.MonkeyPatch, family: str, name: str, place: str) -> None:
    check(exact_target(monkeypatch, family), name, place, before=False)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("place", PLACES)
def test_one_layer_called_by_a_hook(attention: str, place: str) -> None:
    target: Any = tiny_target("qwen3-sliding")
    target.set_attn_implementation(attention)
    inputs = prompts([9], 0)
    states = target.model.embed_tokens(OTHER["input_ids"][:1])
    angles = target.model.rotary_emb(states, torch.arange(states.shape[1])[None])

    def work() -> Tensor:
        # No tap is on it
        return target.model.layers[3](states, position_embeddings=angles, attention_mask=None)

    expected = work()
    module = module_of(target, place)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    with hooked(module, work, before=False) as seen:
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(seen) >= draft.last_stats.num_target_forwards
    assert all(torch.equal(tensor, expected) for tensor in seen)


@pytest.mark.parametrize(
    ("family", "name", "before"),
    half(WHOLLY, ["call", "decoder", "generate", "sibling"], [False, True]),
)
def test_around_the_model(
    monkeypatch: pytest.MonkeyPatch, family: str, name: str, before: bool
) -> None:
    check(exact_target(monkeypatch, family), name, "model", before)


@pytest.mark.parametrize("name", ["call", "sibling", "generate"])
@pytest.mark.parametrize("family", WHOLLY)
def test_over_fixed_buffers(monkeypatch: pytest.MonkeyPatch, family: str, name: str) -> None:
    check(exact_target(monkeypatch, family), name, "2", before=True, engine="static")


def test_a_nested_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that catch what they have caused: nothing of the failed call is left."""
    target = exact_target(monkeypatch, "qwen3.5")
    model: Any = target
    inputs = prompts([4, 9], 0)
    ref = target.generate(**inputs, **GREEDY)

    def work() -> Tensor:
        layers: Any = target.get_submodule("model.layers")
        handle = layers[3].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**OTHER)
        handle.remove()
        return torch.zeros(1)

    draft = recording_draft(target)
    arm(draft, truth_of(inputs, ref), 3)
    with hooked(module_of(target, "1"), work, before=True):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    check_blocks(draft, target, truth_of(inputs, ref), [0, 0])


def test_iterate() -> None:
    target = tiny_target("qwen3-sliding")
    inputs = prompts([9], 0)
    work = work_of(target, "call")
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    with hooked(module_of(target, "1"), work, before=False):
        steps = list(iterate(target, draft, **inputs, **GREEDY))
    assert torch.equal(torch.cat([step.committed[0] for step in steps]), ref[0, 9:])


class HooksInTurn(LogitsProcessor):
    """Hooks an MLP of the target and runs the target between two forwards; counts the calls of its hook."""

    is_row_wise = True

    def __init__(self, target: Any) -> None:
        self.target = target
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        def count(module: nn.Module, args: Any) -> None:
            self.num_calls += 1

        handle = self.target.model.layers[0].mlp.register_forward_pre_hook(count)
        try:
            self.target(input_ids)
        finally:
            handle.remove()
        return scores


def test_processors_of_rows_find_the_target_unchanged() -> None:
    target = tiny_target("qwen3")
    ref = target.generate(torch.tensor([[5, 6, 7]]), **GREEDY)[0, 3:].tolist()
    processor = HooksInTurn(target)
    draft = tiny_draft(target)
    inputs: list[Any] = [{"input_ids": [5, 6, 7], "logits_processor": [processor]}, [5, 6, 7]]
    answers = list(generate_batch(target, draft, inputs, **GREEDY))
    assert [answer.token_ids for answer in answers] == [ref, ref]
    # One token is chosen in the prefill, and the others in the steps.
    assert processor.num_calls >= len(ref)
