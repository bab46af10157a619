"""Videos: the same text as plain `generate` on targets that take them, with tensors made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_hf.block.cache_name import CACHE_NAME
from helpers.vision import END, IMAGE, PATCH, START, VIDEO, WORDS, shallow_vision_target
from tiny import oracle_draft, tiny_draft, truth_of

NEW = 18
# Patches in height and width of a picture; in time, height and width of a video
Size = tuple[int, ...]
ROWS: dict[str, list[list[Size]]] = {
    "one video": [[(2, 4, 4)]],
    "several": [[(1, 2, 6), (3, 4, 2)]],
    "beside pictures": [[(4, 4), (2, 4, 6), (2, 2)]],
    "mixed batch": [[(2, 4, 4)], [(4, 6)], [], [(2, 2), (3, 2, 4)]],
}


def prompts_with_videos(name: str, rows: list[list[Size]], seed: int) -> dict[str, Any]:
    """Left-padded prompts as the family's processor lays them out: Qwen3-VL writes a time before every frame."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [size for row in rows for size in row]
    inputs: dict[str, Any] = {}
    for dims, pixels, grids in (
        (2, "pixel_values", "image_grid_thw"),
        (3, "pixel_values_videos", "video_grid_thw"),
    ):
        if found := [(1,) * (3 - dims) + size for size in sizes if len(size) == dims]:
            inputs[grids] = torch.tensor(found)
            shape = int(inputs[grids].prod(dim=1).sum()), 3 * 2 * PATCH * PATCH
            inputs[pixels] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "qwen2.5-vl" and "video_grid_thw" in inputs:
        inputs["second_per_grid_ts"] = torch.tensor(
            [0.5 + index for index in range(len(inputs["video_grid_thw"]))]
        )

    def words(num: int) -> list[int]:
        return torch.randint(3, WORDS, (num,), generator=generator).tolist()

    texts: list[list[int]] = []
    for index, row in enumerate(rows):
        ids = words(3 + 2 * index)
        for size in row:
            token, times = (IMAGE, 1) if len(size) == 2 else (VIDEO, size[0])
            num = size[-2] * size[-1] // 4
            if name == "qwen3-vl" and len(size) == 3:
                for _ in range(times):
                    ids += [*words(2), START, *[token] * num, END]
            else:
                ids += [START, *[token] * (num * times), END]
            ids += words(3)
        texts.append(ids)
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in texts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in texts])
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types, **inputs}


def assert_same_text(target: Any, inputs: dict[str, Any], **settings: Any) -> None:
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, **settings)
    for seed, block_size in enumerate([4, 16]):
        truth = truth_of({"attention_mask": torch.ones_like(ref)}, ref)
        num = len(ref) // len(inputs["input_ids"])
        masks = inputs["attention_mask"].repeat_interleave(num, dim=0)
        truth = [row[int(mask.argmax()) :] for row, mask in zip(truth, masks, strict=True)]
        draft = oracle_draft(target, truth, seed, block_size)
        out = target.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft, **settings
        )
        assert torch.equal(out, ref)
        assert 1.2 < draft.last_stats.acceptance_length < block_size


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_videos_give_the_plain_text(name: str, rows: list[list[Size]]) -> None:
    assert_same_text(shallow_vision_target(name), prompts_with_videos(name, rows, 0))


def test_a_prompt_may_end_in_a_video() -> None:
    target = shallow_vision_target("qwen2.5-vl")
    inputs = prompts_with_videos("qwen2.5-vl", [[(3, 2, 4)], [(2, 4, 4)]], 0)
    inputs |= {
        name: inputs[name][:, :-4] for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    assert (inputs["input_ids"][:, -1] == VIDEO).all()
    assert_same_text(target, inputs)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_several_answers_to_each_video(name: str) -> None:
    target = shallow_vision_target(name)
    inputs = prompts_with_videos(name, ROWS["mixed batch"], 0)
    settings = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
    texts: list[Tensor] = []
    for block_size in (2, 7):
        torch.manual_seed(0)
        texts.append(
            target.generate(**inputs, **settings, assistant_model=tiny_draft(target, block_size))
        )
    assert len(texts[0]) == 8
    assert torch.equal(texts[0], texts[1])


def later_turn(rows: list[list[Size]]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A target, a first turn of text, and the whole conversation after a second one with what `rows` says."""
    target = shallow_vision_target("qwen3-vl")
    settings = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    first, more = prompts_with_videos("qwen3-vl", [[]], 0), prompts_with_videos("qwen3-vl", rows, 1)
    answer = target.generate(**first, **settings)
    both = {**more, "input_ids": torch.cat([answer, more["input_ids"]], dim=1)}
    both["attention_mask"] = torch.ones_like(both["input_ids"])
    both["mm_token_type_ids"] = torch.nn.functional.pad(
        more["mm_token_type_ids"], (answer.shape[1], 0)
    )
    return target, first, both


def test_a_video_may_come_in_a_later_turn_of_a_kept_cache() -> None:
    target, first, both = later_turn([[(2, 4, 4)]])
    settings = {"do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    caches = [DynamicCache(config=target.config.get_text_config()) for _ in range(2)]
    answer = target.generate(**first, **settings, max_new_tokens=6, **{CACHE_NAME: caches[0]})
    ref = target.generate(**both, **settings, max_new_tokens=NEW, **{CACHE_NAME: caches[0]})
    draft = oracle_draft(target, ref.tolist(), 0, 5)
    settings |= {"assistant_model": draft, CACHE_NAME: caches[1]}
    assert torch.equal(target.generate(**first, **settings, max_new_tokens=6), answer)
    assert torch.equal(target.generate(**both, **settings, max_new_tokens=NEW), ref)
    assert draft.last_stats.acceptance_length > 1.2


def test_a_video_beside_a_cached_image_is_refused_early() -> None:
    target, first, both = later_turn([[(4, 4), (2, 4, 4)]])
    cache = DynamicCache(config=target.config.get_text_config())
    settings = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    settings |= {"assistant_model": tiny_draft(target), CACHE_NAME: cache}
    target.generate(**first, **settings)
    seen = cache.get_seq_length()
    with pytest.raises(ValueError, match="no videos in a conversation with a cache"):
        target.generate(**both, **settings)
    assert cache.get_seq_length() == seen
