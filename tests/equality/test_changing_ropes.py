"""RoPEs whose frequencies follow the largest position of a call: plain text, or a refusal before any work.

Transformers goes by positions, so whatever shifts them moves the boundary: positions passed in, masks that are longer
than the prompt, pictures. A run in which a verify would cross it earlier than plain decoding does is refused.
"""

from __future__ import annotations

import collections
import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.target_model.parts import find_target
from helpers.changing_ropes import BOUNDARY, DEFAULT, TARGETS, check, draw, flat, per_layer
from helpers.static import tensor_oracle
from tiny import prompts, tiny_draft, tiny_target, truth_of

NUM = 9
GREEDY: dict[str, Any] = {"do_sample": False}
# What each way of shifting makes of a prompt of `NUM` columns.
SHIFTS: dict[str, Any] = {
    "positions": lambda num: {"position_ids": torch.arange(NUM)[None] + num},
    "mask": lambda num: {"attention_mask": torch.ones(1, NUM + num, dtype=torch.long)},
}


@cache
def built(name: str) -> PreTrainedModel:
    """A target to copy: what a "dynamic" RoPE does depends on the calls before."""
    return TARGETS[name]()


def texts(
    target: PreTrainedModel, inputs: dict[str, Tensor], block: int, **settings: Any
) -> list[Tensor]:
    """Plain `generate`'s text and ours, each from a fresh copy of the target."""
    try:
        plain = copy.deepcopy(target).generate(**{**inputs, **settings}, **GREEDY)
    except UnboundLocalError:  # Transformers 5.16, see `helpers.changing_ropes.check`
        pytest.skip("plain generate itself fails on this release")
    drafted = copy.deepcopy(target)
    draft = tensor_oracle(drafted, truth_of(inputs, plain), 0, block)
    return [plain, drafted.generate(**{**inputs, **settings}, **GREEDY, assistant_model=draft)]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_shifted_positions_reach_the_boundary(name: str, shift: str) -> None:
    """The last call that fits gives plain text, with one position more it is refused."""
    inputs, new, block = prompts([NUM], 0), 10, 5
    room = BOUNDARY - NUM - new - (block - 1)
    for num in (0, room):
        assert torch.equal(
            *texts(built(name), inputs, block, max_new_tokens=new, **SHIFTS[shift](num))
        )
    for num in (room + 1, 12, 22):
        with pytest.raises(
            ValueError, match=rf"stays within 32 positions.* got a prompt up to {NUM + num} and"
        ):
            texts(built(name), inputs, block, max_new_tokens=new, **SHIFTS[shift](num))


def test_every_kind_of_layer_has_a_boundary_of_its_own() -> None:
    target = built("gemma3-longrope-default")
    assert torch.equal(*texts(target, prompts([8], 0), 5, max_new_tokens=20))
    for length, new, block in ((28, 30, 5), (20, 20, 16)):
        with pytest.raises(ValueError, match="stays within 32 positions"):
            texts(target, prompts([length], 0), block, max_new_tokens=new)
    # Beyond the boundary of one kind, and on the way to the other's.
    target = built("gemma3-longrope-longrope")
    assert torch.equal(*texts(target, prompts([34], 0), 4, max_new_tokens=10))
    assert torch.equal(*texts(target, prompts([50], 0), 4, max_new_tokens=10))
    with pytest.raises(ValueError, match="stays within 48 positions"):
        texts(target, prompts([34], 0), 4, max_new_tokens=20)


def test_what_each_type_compares_with() -> None:
    found = {
        name: [tuple(rope) for rope in find_target(built(name)).facts.ropes] for name in TARGETS
    }
    dynamic, long = ("dynamic", BOUNDARY, False), ("longrope", BOUNDARY, True)
    assert found == {
        **{name: [dynamic if name.endswith("dynamic") else long] for name in TARGETS},
        "gemma3-longrope-default": [long],
        "gemma3-longrope-longrope": [("longrope", 48, True), long],
    }
    assert not find_target(per_layer(DEFAULT, DEFAULT, 256)).facts.ropes
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert not find_target(flat("llama", yarn, 128)).facts.ropes


def with_cache(
    name: str, inputs: dict[str, Tensor], past: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A copy of a target, and what its `generate` is given with `past` of the columns in a cache."""
    target = copy.deepcopy(built(name))
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(inputs["input_ids"][:, :past], **{CACHE_NAME: cache})
    return target, {**inputs, **GREEDY, "max_new_tokens": 8, CACHE_NAME: cache}


def test_a_cache_from_below_goes_on_beyond() -> None:
    """Its keys keep the frequencies that they were made with."""
    inputs = prompts([40], 0)
    target, settings = with_cache("llama-longrope", inputs, 20)
    ref = target.generate(**settings)
    target, settings = with_cache("llama-longrope", inputs, 20)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 5)
    assert torch.equal(target.generate(**settings, assistant_model=draft), ref)


def test_a_cache_that_plain_generate_makes_anew_is_refused() -> None:
    """Phi-3 drops one from below once there are more columns than the boundary."""
    inputs = prompts([40], 0)
    target, settings = with_cache("phi3-longrope", inputs, 20)
    with pytest.raises(ValueError, match="stays within 32 columns"):
        target.generate(**settings, assistant_model=tiny_draft(target))
    assert settings[CACHE_NAME].get_seq_length() == 20
    target, settings = with_cache("phi3-longrope", inputs, 35)
    ref = target.generate(**settings)
    target, settings = with_cache("phi3-longrope", inputs, 35)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 5)
    assert torch.equal(target.generate(**settings, assistant_model=draft), ref)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int8, torch.uint8, torch.int16]
)
def test_positions_that_are_counted_on_otherwise_are_refused(dtype: torch.dtype) -> None:
    target, inputs = tiny_target("llama"), prompts([NUM], 0)
    positions = torch.arange(NUM, dtype=dtype)[None]
    with pytest.raises(
        ValueError, match=rf"expected position_ids of dtype int64 or int32, got {dtype}"
    ):
        target.generate(
            **inputs, position_ids=positions, assistant_model=tiny_draft(target), **GREEDY
        )


def outcomes(seeds: range) -> collections.Counter[bool | None]:
    """How many of the cases with these seeds gave plain text, were refused, or have no plain text."""
    cases = [draw(seed) for seed in seeds]
    return collections.Counter(check(case, built(case.target)) for case in cases)


def test_random_calls_give_plain_text_or_are_refused() -> None:
    counts = outcomes(range(24))
    assert min(counts[True], counts[False]) >= 5, counts


@pytest.mark.slow
def test_three_hundred_random_calls() -> None:
    counts = outcomes(range(100, 400))
    print(f"{counts[True]} gave plain text, {counts[False]} were refused")
    assert min(counts[True], counts[False]) >= 60, counts
