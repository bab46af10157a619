"""Pictures: the same text as plain `generate` on vision targets, alone and in mixed left-padded batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash_hf.taps import Taps
from dflash_hf.target import find_target
from helpers.vision import IMAGE, VIDEO, VISION, Grid, vision_prompts, vision_target
from tiny import oracle_draft, tiny_draft, truth_of

NEW = 24
ROWS: dict[str, list[list[Grid]]] = {
    "one picture": [[(4, 4)]],
    "several sizes": [[(4, 6), (2, 2), (8, 4)]],
    "no picture": [[]],
    "mixed batch": [[(4, 4)], [], [(2, 8), (6, 4)]],
    "batch without pictures": [[], [], []],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("name", VISION)
def test_pictures_give_the_plain_text(name: str, rows: list[list[Grid]]) -> None:
    target = vision_target(name)
    for seed, block_size in enumerate([2, 5, 8, 16]):
        inputs = vision_prompts(target, name, rows, seed)
        ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        draft = oracle_draft(target, truth_of(inputs, ref), seed, block_size)
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref)
        assert 1.0 < draft.last_stats.acceptance_length < block_size


def test_a_prompt_may_end_in_a_picture() -> None:
    # The last token's rows of positions then differ, and each is counted on.
    target = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 8)], [(8, 2)]], 0, words=(5, 5))
    inputs |= {name: inputs[name][:, :-5] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    assert (inputs["input_ids"][:, -1] == IMAGE).all()
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 5)
    assert torch.equal(target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref)


def test_a_sampled_text_about_pictures_is_the_same_at_every_block_size() -> None:
    target = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    texts: list[Tensor] = []
    for block_size in (2, 7):
        torch.manual_seed(0)
        draft = tiny_draft(target, block_size)
        settings = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
    assert len(texts[0]) == 6
    assert torch.equal(texts[0], texts[1])


def test_no_picture_reaches_a_verify() -> None:
    target = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 4)]], 0)
    seen: list[set[str]] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append({name for name, value in kwargs.items() if value is not None})

    handle = target.register_forward_pre_hook(look, with_kwargs=True)
    target.generate(**inputs, max_new_tokens=4, do_sample=False, assistant_model=tiny_draft(target))
    handle.remove()
    assert seen[0] & {"pixel_values", "mm_encoder_outputs"}  # newer Transformers encode the pictures before
    names = {"input_ids", "position_ids", "past_key_values", "use_cache", "return_dict", "ragged"}
    assert len(seen) > 1
    assert all(names == verify for verify in seen[1:])


def test_a_draft_counts_picture_tokens_one_by_one() -> None:
    target = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    draft = oracle_draft(target, [[0]] * 3, 0)
    target.generate(**inputs, max_new_tokens=1 + 1, do_sample=False, assistant_model=draft)
    assert draft.positions[:, 0].tolist() == inputs["attention_mask"].sum(dim=1).tolist()


def test_taps_are_before_deepstack_which_changes_picture_tokens_only() -> None:
    target = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    layers = find_target(target).layers
    given: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: given.append(args[0].clone())) for layer in layers[1:]
    ]
    with torch.no_grad(), Taps(layers, [0, 1, 2]) as taps:
        target(**inputs)
        tapped = taps.take().chunk(3, dim=-1)
    for handle in handles:
        handle.remove()
    is_image = inputs["input_ids"] == IMAGE
    num_added = len(target.config.vision_config.deepstack_visual_indexes)
    for layer in range(3):
        differs = (tapped[layer] != given[layer]).any(dim=-1)
        assert torch.equal(differs, is_image & (layer < num_added))


def test_a_target_that_counts_positions_itself_is_refused_before_any_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Qwen2.5-Omni's thinker does.
    target = vision_target("qwen3-vl")
    prepare = type(target).prepare_inputs_for_generation

    def without_positions(self: Any, *args: Any, **kwargs: Any) -> Any:
        return prepare(self, *args, **kwargs) | {"position_ids": None}

    monkeypatch.setattr(type(target), "prepare_inputs_for_generation", without_positions)
    calls: list[int] = []
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 4)]], 0)
    with pytest.raises(ValueError, match="which counts them itself"):
        target.generate(**inputs, max_new_tokens=4, assistant_model=tiny_draft(target))
    assert not calls


def conversation(first: dict[str, Tensor], answer: Tensor, more: dict[str, Tensor], sizes: list[list[int]]) -> Any:
    """What a Qwen processor makes of both turns: row by row, all pictures of a row, `sizes` of them in either turn."""
    ids = torch.cat([answer, more["input_ids"]], dim=1)
    gap = torch.ones_like(answer[:, first["input_ids"].shape[1] :])
    mask = torch.cat([first["attention_mask"], gap, more["attention_mask"]], dim=1)
    types = torch.cat([first["mm_token_type_ids"], 0 * gap.int(), more["mm_token_type_ids"]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types}
    grids, patches = [[], []], [[], []]
    for index, turn in enumerate((first, more)):
        if "pixel_values" in turn:
            grids[index] = list(turn["image_grid_thw"])
            patches[index] = list(turn["pixel_values"].split(turn["image_grid_thw"].prod(dim=1).tolist()))
    order = [turn for row in range(len(ids)) for turn in (0, 1) for _ in range(sizes[turn][row])]
    if order:
        inputs["image_grid_thw"] = torch.stack([grids[turn].pop(0) for turn in order])
        inputs["pixel_values"] = torch.cat([patches[turn].pop(0) for turn in order])
    return inputs


TURNS: dict[str, tuple[list[list[Grid]], list[list[Grid]]]] = {
    "then text": ([[(4, 4)]], [[]]),
    "after text": ([[]], [[(4, 6)]]),
    "in both": ([[(4, 4)]], [[(2, 6), (4, 2)]]),
    "batch": ([[(4, 4)], [], [(2, 6), (4, 4)]], [[(2, 2)], [(6, 4)], []]),
}


@pytest.mark.parametrize("whole", [True, False], ids=["all pictures", "new pictures"])
@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS.keys())
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_a_later_turn_brings_pictures_to_a_kept_cache(
    name: str, turns: tuple[list[list[Grid]], list[list[Grid]]], whole: bool
) -> None:
    target = vision_target(name)
    settings = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    first, more = vision_prompts(target, name, turns[0], 0), vision_prompts(target, name, turns[1], 1)
    answer = target.generate(**first, **settings)
    both = conversation(first, answer, more, [[len(row) for row in turn] for turn in turns])
    ref = target.generate(**both, **settings)
    draft = oracle_draft(target, truth_of(first, ref), 0, 5)
    draft.truth = [
        row[keep.bool()].tolist() + tail
        for row, keep, tail in zip(
            both["input_ids"], both["attention_mask"], ref[:, both["input_ids"].shape[1] :].tolist(), strict=True
        )
    ]
    cache = DynamicCache(config=target.config.get_text_config())
    assert torch.equal(target.generate(**first, **settings, assistant_model=draft, past_key_values=cache), answer)
    # Another conversation in between leaves its positions in the model.
    target.generate(**vision_prompts(target, name, [[(8, 8)]], 3), max_new_tokens=2)
    if not whole:
        both["pixel_values"] = more.get("pixel_values")
    out = target.generate(**both, **settings, assistant_model=draft, past_key_values=cache)
    assert torch.equal(out, ref)
    assert draft.last_stats.acceptance_length > 1.2


def test_pictures_that_do_not_fit_a_kept_cache_are_refused() -> None:
    target = vision_target("qwen3-vl")
    settings = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    first, more = (vision_prompts(target, "qwen3-vl", [[grid]], 0) for grid in [(4, 4), (2, 6)])
    answer = target.generate(**first, **settings)
    both = conversation(first, answer, more, [[1], [1]])
    cache = DynamicCache(config=target.config.get_text_config())
    settings |= {"assistant_model": tiny_draft(target), "past_key_values": cache}
    target.generate(**first, **settings)
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({"image_grid_thw": more["image_grid_thw"]}, "image_grid_thw of all 2 images"),
        ({"pixel_values": both["pixel_values"][:-1]}, "pixel_values of 28 patches .* or 12"),
        ({"mm_token_type_ids": more["mm_token_type_ids"]}, "of the whole conversation"),
        ({"mm_token_type_ids": 2 * both["mm_token_type_ids"]}, "no videos"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            target.generate(**{**both, **change}, **settings)
