"""Prompts of unlike lengths go through the target in groups: less padding, the same texts and acceptance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation import row_groups
from dflash_hf.generation.row_groups import RowGroup, groups_of
from dflash_hf.target_model.parts import find_target
from helpers.vision import vision_prompts, vision_target
from helpers.whole_blocks import use_whole_blocks
from tiny import (
    DFLASH2,
    DSPARK,
    FAMILIES,
    oracle_draft,
    prompts,
    shallow_target,
    tiny_draft,
    tiny_target,
    truth_of,
)

LENGTHS = [4, 19, 7, 7, 1, 18]
# As many forwards as there are lengths.
ALL_LENGTHS = [(1, 19), (1, 18), (2, 7), (1, 4), (1, 1)]
TOGETHER = [(6, 19)]
SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Makes any padding worth a forward; returns the list for [`note_prefills`]."""
    monkeypatch.setattr(row_groups, "TOKENS_OF_A_FORWARD", 0)
    return []


def note_prefills(target: Any, shapes: list[tuple[int, int]], patches: pytest.MonkeyPatch) -> None:
    """Notes the shapes of a target's prefills from here on."""
    prefill = type(target)._prefill

    def noted(model: Any, ids: torch.Tensor, *given: Any, **others: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return prefill(model, ids, *given, **others)

    patches.setattr(type(target), "_prefill", noted)


@pytest.mark.parametrize(
    ("lengths", "price", "groups"),
    [
        ([5], 0, [([0], 5)]),
        ([5, 5, 5], 0, [([0, 1, 2], 5)]),
        ([3, 9, 3, 8], 0, [([1], 9), ([3], 8), ([0, 2], 3)]),
        # The first cut spares three rows one column each, the second two rows five.
        ([3, 9, 3, 8], 3, [([1, 3], 9), ([0, 2], 3)]),
        ([3, 9, 3, 8], 12, [([1, 3, 0, 2], 9)]),
    ],
)
def test_a_group_ends_where_the_spared_padding_pays(
    lengths: list[int], price: int, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "TOKENS_OF_A_FORWARD", price)
    assert groups_of(lengths) == [RowGroup(*group) for group in groups]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_acceptance_are_those_of_one_forward(
    family: str, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target(family)
    inputs = prompts(LENGTHS, 1)
    ref = target.generate(**inputs, **SETTINGS)
    kind = [{}, DFLASH2, DSPARK][list(FAMILIES).index(family) % 3]
    draft = oracle_draft(target, truth_of(inputs, ref), 1, 6, **kind)
    use_whole_blocks(draft)
    note_prefills(target, shapes, monkeypatch)
    assert torch.equal(target.generate(**inputs, **SETTINGS, assistant_model=draft), ref)
    accepted = draft.last_stats.num_accepted
    # A recurrent layer's states are not put together.
    assert shapes == (TOGETHER if find_target(target).recurrences else ALL_LENGTHS)
    monkeypatch.setattr(row_groups, "TOKENS_OF_A_FORWARD", 10**6)
    shapes.clear()
    draft.arm(truth_of(inputs, ref), 1)
    assert torch.equal(target.generate(**inputs, **SETTINGS, assistant_model=draft), ref)
    assert shapes == TOGETHER
    assert draft.last_stats.num_accepted == accepted
    assert draft.last_stats.acceptance_length > 1.2


@pytest.mark.parametrize("family", ["qwen3-sliding", "gemma3"])
def test_the_draft_has_the_context_of_one_forward(
    family: str, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that reads its context proposes the same: its weights are drawn, so its tokens follow from all of it."""
    target = tiny_target(family)
    inputs = prompts(LENGTHS, 2)
    written: list[list[torch.Tensor]] = []
    for price in (0, 10**6):
        monkeypatch.setattr(row_groups, "TOKENS_OF_A_FORWARD", price)
        draft = tiny_draft(target, 6)
        seen: list[torch.Tensor] = []
        begin = draft.forward_block

        def noted(
            embeds: Any, cache: Any, context: Any = None, seen: Any = seen, begin: Any = begin
        ) -> Any:
            if not seen:
                seen.extend(buffer.clone() for buffer in cache.buffers())
            return begin(embeds, cache, context)

        monkeypatch.setattr(draft, "forward_block", noted)
        use_whole_blocks(draft)
        target.generate(**inputs, **SETTINGS, assistant_model=draft)
        written.append(seen)
    apart, together = written
    assert apart
    for one, other in zip(apart, together, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other)


def test_sampled_texts_are_those_of_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    inputs = prompts(LENGTHS, 3)
    draft = tiny_draft(target, 6)
    texts: list[torch.Tensor] = []
    for price in (0, 10**6):
        monkeypatch.setattr(row_groups, "TOKENS_OF_A_FORWARD", price)
        torch.manual_seed(5)
        sampled = SETTINGS | {"do_sample": True, "temperature": 0.8}
        texts.append(target.generate(**inputs, **sampled, assistant_model=draft))
    assert torch.equal(*texts)


KEPT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "outputs": lambda target: {"return_dict_in_generate": True},
    "chunks": lambda target: {"prefill_chunk_size": 5},
    "a cache": lambda target: {CACHE_NAME: DynamicCache(config=target.config)},
}


@pytest.mark.parametrize("asked", KEPT)
def test_whoever_sees_the_prefill_gets_one_of_all_rows(
    asked: str, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("qwen3")
    inputs = prompts(LENGTHS, 4)
    ref = target.generate(**inputs, **SETTINGS)
    draft = oracle_draft(target, truth_of(inputs, ref), 4, 6)
    note_prefills(target, shapes, monkeypatch)
    out = target.generate(**inputs, **SETTINGS, **KEPT[asked](target), assistant_model=draft)
    assert torch.equal(getattr(out, "sequences", out), ref)
    assert shapes == TOGETHER


def test_hooks_of_a_user_see_one_forward_of_all_rows(
    shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("qwen3")
    inputs = prompts(LENGTHS, 6)
    ref = target.generate(**inputs, **SETTINGS)
    draft = oracle_draft(target, truth_of(inputs, ref), 6, 6)
    note_prefills(target, shapes, monkeypatch)
    handle = target.lm_head.register_forward_hook(lambda *given: None)
    out = target.generate(**inputs, **SETTINGS, assistant_model=draft)
    handle.remove()
    assert torch.equal(out, ref)
    assert shapes == TOGETHER


def test_prompts_with_images_go_together(
    shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 4)], [], [(4, 8), (4, 4)]], 0)
    ref = target.generate(**inputs, **SETTINGS)
    draft = tiny_draft(target, 6)
    note_prefills(target, shapes, monkeypatch)
    out = target.generate(**inputs, **SETTINGS, assistant_model=draft)
    assert torch.equal(out, ref)
    assert shapes == [tuple(inputs["input_ids"].shape)]


def test_a_target_that_drops_its_cache_is_refused_as_with_one_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target("qwen3")
    inputs = prompts(LENGTHS, 7)
    draft = tiny_draft(target, 6)
    prefill = type(target)._prefill

    def without_cache(*given: Any, **others: Any) -> Any:
        outputs = prefill(*given, **others)
        outputs[CACHE_NAME] = None
        return outputs

    monkeypatch.setattr(type(target), "_prefill", without_cache)
    said: list[str] = []
    for price in (0, 10**6):
        monkeypatch.setattr(row_groups, "TOKENS_OF_A_FORWARD", price)
        with pytest.raises(RuntimeError, match="expected a cache from the prefill") as error:
            target.generate(**inputs, **SETTINGS, assistant_model=draft)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_hook_on_the_draft_sees_all_rows_at_once(
    shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("qwen3")
    inputs = prompts(LENGTHS, 8)
    draft = tiny_draft(target, 6)
    note_prefills(target, shapes, monkeypatch)
    handle = draft.fc.register_forward_hook(lambda *given: None)
    target.generate(**inputs, **SETTINGS, assistant_model=draft)
    handle.remove()
    assert shapes == TOGETHER
