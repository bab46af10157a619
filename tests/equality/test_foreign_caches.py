"""Targets whose forward does something else with the cache than it is told: no text comes from another cache.

Each fault is put into a target that works. What a caller sees is a refusal before the forward at fault has committed a
token: nothing but the prompt and tokens of plain `generate` has reached the streamer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.generation.streamers import BaseStreamer

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.target_model.reentry import KEYWORD
from helpers.static import set_engine
from tiny import oracle_draft, prompts, shallow_target, truth_of

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
WAYS = [("qwen3", "eager"), ("qwen3", "static"), ("gemma3", "eager")]


@cache
def plain_text(family: str) -> Tensor:
    """What plain `generate` makes of the prompt, by a target that is as it was built."""
    return shallow_target(family).generate(**prompts([9], 0), **GREEDY)


class Collected(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.ids = list[int]()

    def put(self, value: Tensor) -> None:
        """Keeps a prompt or new tokens."""
        self.ids += value.reshape(-1).tolist()

    def end(self) -> None:
        """Does nothing."""


class WriteOnly(DynamicCache):
    """Hands keys on to another cache, and gives back the new ones alone."""

    def __init__(self, other: Cache) -> None:
        super().__init__()
        self.other = other

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes, and does not read."""
        self.other.update(keys, values, *args, **kwargs)
        return keys, values


def wrap(
    module: nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]], only_verifies: bool
) -> None:
    """Has a module's forward called with other keywords, from now on or in verifies alone."""
    original: Any = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_meant = not only_verifies or KEYWORD in kwargs
        return original(*args, **(change(kwargs) if is_meant else kwargs))

    module.forward = forward


def renames(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Passes the cache on under a name that nobody reads."""
    return {("own_states" if name == CACHE_NAME else name): value for name, value in kwargs.items()}


def drops(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Passes no cache on."""
    return {name: value for name, value in kwargs.items() if name != CACHE_NAME}


def uses_none(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Passes no cache on, and asks for none."""
    return {**drops(kwargs), "use_cache": False}


def replaced_by(cache: Cache) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Passes one cache on, always the same, and so in a verify what the prefill or the last verify has written."""
    return lambda kwargs: {**kwargs, CACHE_NAME: cache}


def writes_only(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Passes on a cache that is written and not read."""
    return {**kwargs, CACHE_NAME: WriteOnly(kwargs[CACHE_NAME])}


FAULTS: dict[str, Callable[[Any, bool], None]] = {
    "renames": lambda target, late: wrap(target, renames, late),
    "drops": lambda target, late: wrap(target, drops, late),
    "use_cache=False": lambda target, late: wrap(target, uses_none, late),
    "replaces": lambda target, late: wrap(
        target, replaced_by(DynamicCache(config=target.config)), late
    ),
    "inner model replaces": lambda target, late: wrap(
        target.model, replaced_by(DynamicCache(config=target.config)), late
    ),
    "inner model drops": lambda target, late: wrap(target.model, drops, late),
    "a layer's own": lambda target, late: wrap(
        target.model.layers[1].self_attn, replaced_by(DynamicCache(config=target.config)), late
    ),
    "a layer drops": lambda target, late: wrap(target.model.layers[1], drops, late),
    "a layer only writes": lambda target, late: wrap(
        target.model.layers[1].self_attn, writes_only, late
    ),
}


@pytest.mark.parametrize("only_verifies", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("family", "engine"), WAYS)
def test_no_token_comes_from_another_cache(
    family: str, fault: str, only_verifies: bool, engine: str
) -> None:
    target = shallow_target(family)
    inputs = prompts([9], 0)
    plain = plain_text(family)
    draft = oracle_draft(target, truth_of(inputs, plain), 0)
    set_engine(draft, engine)
    FAULTS[fault](target, only_verifies)
    streamer = Collected()
    with pytest.raises((RuntimeError, ValueError), match="expected"):
        target.generate(**inputs, **GREEDY, assistant_model=draft, streamer=streamer)
    # The prompt, and at most the token that a prefill decides.
    prompt = inputs["input_ids"].shape[1]
    assert len(streamer.ids) <= prompt + 1
    assert streamer.ids == plain[0, : len(streamer.ids)].tolist()


@pytest.mark.parametrize("only_verifies", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_cache_passed_in_is_left_as_it_was(fault: str, only_verifies: bool) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([9], 0)
    plain = plain_text("qwen3")
    draft = oracle_draft(target, truth_of(inputs, plain), 0)
    cache = DynamicCache(config=target.config)
    target(inputs["input_ids"][:, :5], use_cache=True, **{CACHE_NAME: cache})
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    FAULTS[fault](target, only_verifies)
    # Some fail in the target's own prefill, as in plain `generate`.
    with pytest.raises((RuntimeError, ValueError), match="expected" if only_verifies else None):
        target.generate(**inputs, **GREEDY, assistant_model=draft, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 5
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_a_forward_may_use_a_cache_it_did_not_ask_for() -> None:
    target = shallow_target("qwen3")
    inputs = prompts([9], 0)
    plain = plain_text("qwen3")
    draft = oracle_draft(target, truth_of(inputs, plain), 0)
    wrap(target, lambda kwargs: {**kwargs, "use_cache": False}, only_verifies=True)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), plain)
