"""The name of the cache: Transformers says `cache` since 5.24, and takes older names of it; releases before know one.

What plain `generate` takes and returns under a name, a call with a draft does too.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from dflash_hf import iterate
from dflash_hf.block.cache_name import ACCEPTED_NAMES, CACHE_NAME, given_cache
from tiny import oracle_draft, prompts, shallow_target, tiny_draft, truth_of

GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
OLD_NAMES = [name for name in ACCEPTED_NAMES if name != CACHE_NAME]


def test_the_name_is_the_one_that_forwards_fill() -> None:
    filled = shallow_target("qwen3")(torch.tensor([[5, 6, 7]]), use_cache=True)
    assert isinstance(filled, CausalLMOutputWithPast)
    assert list(filled.keys()) == ["logits", CACHE_NAME]
    assert filled[CACHE_NAME].get_seq_length() == 3


@pytest.mark.parametrize("name", ACCEPTED_NAMES)
def test_a_cache_is_taken_under_each_name_of_plain_generate(name: str) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([9], 0)
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Transformers' own, about the old names
        plain = target.generate(
            **inputs, **GREEDY, return_dict_in_generate=True, **{name: caches[0]}
        )
        draft = oracle_draft(target, truth_of(inputs, plain.sequences), 0)
        settings = {"assistant_model": draft, "return_dict_in_generate": True, name: caches[1]}
        ours = target.generate(**inputs, **GREEDY, **settings)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours[CACHE_NAME] is caches[1]
    for layer, reference in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(layer.keys, reference.keys)


@pytest.mark.parametrize("returned", [True, False])
def test_an_output_has_plain_generates_fields_and_the_statistics(returned: bool) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([9], 0)
    given = {CACHE_NAME: DynamicCache(config=target.config)} if returned else {}
    plain = target.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    draft = tiny_draft(target)
    ours = target.generate(
        **inputs, **GREEDY, return_dict_in_generate=True, assistant_model=draft, **given
    )
    assert set(ours.keys()) == set(plain.keys()) | {"speculative"}


def test_caches_under_two_names_are_refused_before_any_work() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    cache = DynamicCache(config=target.config)
    for other in OLD_NAMES:
        two = {CACHE_NAME: cache, other: DynamicCache(config=target.config)}
        with pytest.raises(ValueError, match="expected one cache, got") as caught:
            target.generate(**prompts([9], 0), **GREEDY, assistant_model=draft, **two)
        assert str(caught.value).endswith(f"pass it as {CACHE_NAME} alone")
        with pytest.raises(ValueError, match="expected one cache, got"):
            iterate(target, draft, **prompts([9], 0), **GREEDY, **two)
    assert given_cache({CACHE_NAME: cache, **dict.fromkeys(OLD_NAMES)}) is cache
    assert given_cache(dict.fromkeys(ACCEPTED_NAMES)) is None
    assert cache.get_seq_length() == 0


def test_the_drafts_forward_takes_both_names_and_not_at_once() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    width = len(draft.config.target_layer_ids) * draft.config.target_hidden_size
    noise = torch.randn(1, 4, draft.config.hidden_size, dtype=draft.dtype)
    context = torch.randn(1, 6, width, dtype=draft.dtype)
    outputs = []
    for name in ("cache", "past_key_values"):
        cache = DynamicCache()
        output = draft(noise_embeds=noise, context_hidden_states=context, **{name: cache})
        assert output[CACHE_NAME] is cache
        assert cache.get_seq_length() == 10
        outputs.append(output.last_hidden_state)
    assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="expected one cache, got 'cache and past_key_values'"):
        draft(noise_embeds=noise, context_hidden_states=context, cache=cache, past_key_values=cache)


def test_a_call_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([5, 9], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = target.generate(**inputs, **GREEDY)
        draft = oracle_draft(target, truth_of(inputs, plain), 0)
        settings: dict[str, Any] = {
            **GREEDY,
            "assistant_model": draft,
            "return_dict_in_generate": True,
        }
        for extra in ({}, {"do_sample": True}, {CACHE_NAME: DynamicCache(config=target.config)}):
            target.generate(**inputs, **{**settings, **extra})
        list(iterate(target, draft, **inputs, **GREEDY))
    assert not [
        record.message for record in caplog.records if "deprecated" in record.message.lower()
    ]
