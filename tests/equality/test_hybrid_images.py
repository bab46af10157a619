"""Pictures on recurrent targets: Qwen3.5's vision-language models, alone, in mixed batches and with the cache that is
returned. Later turns on a kept cache are in `test_vision.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf.block.cache_name import CACHE_NAME
from helpers.hybrid import use_float64_rules
from helpers.static import set_engine, tensor_oracle, use_tapes
from helpers.turns import check_caches
from helpers.vision import (
    VISION_HYBRIDS,
    Grid,
    shallow_vision_target,
    vision_prompts,
    vision_target,
)
from tiny import oracle_draft, tiny_draft, tiny_target, truth_of

NEW = 18
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
ROWS: dict[str, list[list[Grid]]] = {
    "several sizes": [[(4, 6), (2, 2), (8, 4)]],
    "mixed batch": [[(4, 4)], [], [(2, 8), (6, 4)]],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("name", VISION_HYBRIDS)
def test_images_give_the_plain_text(name: str, rows: list[list[Grid]]) -> None:
    target = shallow_vision_target(name)
    inputs = vision_prompts(target, name, rows, 0)
    ref = target.generate(**inputs, **GREEDY)
    assert len(set(ref[:, -NEW:].flatten().tolist())) > 8
    for block_size in (2, 8, 16):
        draft = oracle_draft(target, truth_of(inputs, ref), block_size, block_size)
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert 1.0 < draft.last_stats.acceptance_length < block_size


@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
def test_images_over_fixed_buffers(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch)
    target = shallow_vision_target("qwen3.5-vl")
    inputs = vision_prompts(target, "qwen3.5-vl", ROWS["mixed batch"], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8)
    set_engine(draft, engine)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == engine
    assert 1.0 < draft.last_stats.acceptance_length < 8.0


def test_the_cache_after_images_is_plain_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = shallow_vision_target("qwen3.5-vl")
    use_float64_rules(monkeypatch, target)
    inputs = vision_prompts(target, "qwen3.5-vl", [[(4, 4)]], 0)
    settings = {**GREEDY, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **settings)
    draft = oracle_draft(target, truth_of(inputs, plain.sequences), 1, 6)
    ours = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(ours.sequences, plain.sequences)
    check_caches(ours[CACHE_NAME], plain[CACHE_NAME])


def test_a_draft_of_the_text_model_works_on_the_vision_model() -> None:
    target, text = vision_target("qwen3.5-vl"), tiny_target("qwen3.5")
    inputs = vision_prompts(target, "qwen3.5-vl", ROWS["mixed batch"], 0)
    ref = target.generate(**inputs, **GREEDY)
    for draft in (tiny_draft(text), oracle_draft(text, truth_of(inputs, ref), 0, 5)):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1.2
