"""Chats with images are rows of a running batch: their texts, and those beside them, are those of each alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dflash_hf import RunningBatch, generate_batch
from dflash_hf.generation.prompt_images import PromptImages
from helpers.running import END, Asked, answer_alone, batch_oracle, drive, place_oracle
from helpers.static import Tape, set_engine, use_tapes
from helpers.vision import Grid, shallow_vision_target, vision_prompts, vision_target
from helpers.whole_blocks import use_whole_blocks
from tiny import tiny_draft

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
PENALISED: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3}
PICTURES: list[list[Grid]] = [[], [(2, 2)], [(8, 8)], [(4, 4), (2, 6)], [(2, 4), (6, 4), (2, 2)]]
OF_IMAGES = ("pixel_values", "image_grid_thw", "mm_token_type_ids")


def about_images(
    target: Any,
    name: str,
    num: int,
    seed: int,
    kinds: tuple[dict[str, Any], ...] = (GREEDY,),
    num_new: tuple[int, int] = (1, 30),
) -> list[Asked]:
    """Returns requests, some about images and some of text alone."""
    chance = random.Random(seed)
    found: list[Asked] = []
    for number in range(num):
        pictures = PICTURES[number % len(PICTURES)]
        words = (chance.choice([1, 3, 9, 40]),)
        inputs = vision_prompts(target, name, [pictures], 100 * seed + number, words)
        # Of a chat without images a processor makes token types too.
        images = {key: inputs[key] for key in OF_IMAGES if key in inputs}
        if pictures:
            images["pixel_values"] = images["pixel_values"].to(target.dtype)
        settings = {"max_new_tokens": chance.randint(*num_new), "eos_token_id": [END, END + 1]}
        settings |= kinds[number % len(kinds)]
        found.append(Asked(inputs["input_ids"], settings, 50 * seed + number, images=images))
    return found


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl", "qwen3-vl-moe", "qwen3.5-vl"])
def test_texts_are_those_of_each_prompt_alone(name: str) -> None:
    target = shallow_vision_target(name)
    requests = about_images(target, name, 8, 1, num_new=(20, 30))
    answer_alone(target, requests)
    draft = batch_oracle(target)
    use_whole_blocks(draft)
    found = drive(RunningBatch(target, draft, prefill_chunk_size=40), requests, 4)
    assert found["answered"] == 8
    assert found["most"] > 2


@pytest.mark.same_on_every_release
def test_rows_that_are_broken_off_change_no_other() -> None:
    target: Any = shallow_vision_target("qwen3-vl")
    target.to(torch.float32)
    requests = about_images(target, "qwen3-vl", 12, 0, num_new=(10, 20))
    answer_alone(target, requests)
    batch = RunningBatch(target, batch_oracle(target), max_rows=4, prefill_chunk_size=25)
    found = drive(batch, requests, 0, cancelled=0.4)
    assert found["broken"] > 1
    assert found["most"] > 2


@pytest.mark.same_on_every_release
def test_rows_about_images_have_settings_of_their_own() -> None:
    target = shallow_vision_target("qwen3-vl")
    requests = about_images(target, "qwen3-vl", 9, 3, (GREEDY, SAMPLED, PENALISED), (4, 20))
    own = tiny_draft(target)
    own.generation_config.proposal = "shared_noise"
    answer_alone(target, requests, own)
    draft = batch_oracle(target)
    draft.generation_config.proposal = "shared_noise"
    found = drive(RunningBatch(target, draft), requests, 3, cancelled=0.1)
    assert found["most"] > 3


@pytest.mark.usefixtures("whole_trees")
def test_trees_about_images() -> None:
    target = shallow_vision_target("qwen3-vl")
    requests = about_images(target, "qwen3-vl", 8, 4)
    answer_alone(target, requests)
    draft = batch_oracle(target)
    draft.generation_config.num_tree_nodes = 12
    drive(RunningBatch(target, draft), requests, 4)


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("engine", ["static", "cuda_graph"])
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5-vl"])
def test_captured_steps_over_rows_about_images(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=64)
    target = vision_target(name)
    requests = about_images(target, name, 12, 1, num_new=(20, 40))
    answer_alone(target, requests)
    draft = place_oracle(target)
    set_engine(draft, engine)
    batch = RunningBatch(target, draft, max_rows=4, prefill_chunk_size=40)
    found = drive(batch, requests, 1, cancelled=0.2)
    assert found["most"] > 2
    assert (Tape.num_replays > 0) == (engine == "cuda_graph")


def test_no_row_sees_what_another_left_on_the_model() -> None:
    """The offset behind images is an attribute of the model, which any call may have set last."""
    target: Any = shallow_vision_target("qwen3-vl")
    requests = about_images(target, "qwen3-vl", 7, 5, num_new=(12, 20))
    answer_alone(target, requests)
    batch = RunningBatch(target, batch_oracle(target), prefill_chunk_size=20)
    step = batch.step

    def spoiled() -> Any:
        target.model.rope_deltas = torch.full((1, 1), 1000)
        return step()

    batch.step = spoiled
    found = drive(batch, requests, 5)
    assert found["most"] > 2


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5-vl"])
def test_a_next_turn_goes_on_where_the_images_are_the_same(name: str) -> None:
    target: Any = shallow_vision_target(name)
    first = about_images(target, name, 4, 6, num_new=(10, 10))[3]
    first.settings["eos_token_id"] = None
    answer_alone(target, [first])
    said = torch.tensor([first.truth])
    second = about_images(target, name, 3, 7)
    text_alone = second[0]
    text_alone.images["pixel_values"] = first.images["pixel_values"][:0]
    text_alone.images["image_grid_thw"] = first.images["image_grid_thw"][:0]

    def turn(changed: slice, new: Asked) -> Asked:
        """The second turn, `new` behind the first one, of which some patches are changed."""
        of_first = first.images["pixel_values"].clone()
        of_first[changed] *= -1
        types = (first.images["mm_token_type_ids"], torch.zeros_like(said).int())
        images = {
            "pixel_values": torch.cat([of_first, new.images["pixel_values"]]),
            "image_grid_thw": torch.cat(
                [first.images["image_grid_thw"], new.images["image_grid_thw"]]
            ),
            "mm_token_type_ids": torch.cat([*types, new.images["mm_token_type_ids"]], dim=1),
        }
        return Asked(torch.cat([first.ids, said, new.ids], dim=1), first.settings, 0, images=images)

    same = turn(slice(0, 0), text_alone)
    more = turn(slice(0, 0), second[2])
    # The second image of the first turn has the last 12 patches.
    other = turn(slice(20, None), text_alone)
    answer_alone(target, [same, more, other])
    # Without windows, the draft too can go on from the middle of a text.
    draft = tiny_draft(target, layer_types=["full_attention"] * 2)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30, prefill_chunk_size=20)
    num_whole = first.ids.shape[1] + len(first.truth) - 1
    marks = first.images["mm_token_type_ids"][0].nonzero()[:, 0].tolist()
    # The first image has four tokens.
    num_before_second = marks[4]
    assert num_before_second > 16
    # Of a hybrid there is no state before the end of the text.
    num_part = 0 if name == "qwen3.5-vl" else num_before_second
    assert answered(batch, first) == (first.truth, 0)
    of_first = batch._kept.kept.copy()
    for one, num_kept in ((more, num_whole), (other, num_part), (same, num_whole)):
        # Every second turn finds the first one alone.
        batch._kept.kept = of_first.copy()
        assert answered(batch, one) == (one.truth, num_kept)


def answered(batch: RunningBatch, one: Asked) -> tuple[list[int], int]:
    """Returns the answer to one request, and how many tokens of its prompt were taken from an earlier text."""
    settings: dict[str, Any] = {**one.images, **one.settings}
    id = batch.add(one.ids, **settings)
    text: list[int] = []
    while batch.ids:
        for new in batch.step():
            text += new.token_ids
    return text, batch.ended[id].num_kept_tokens


def test_tokens_of_an_image_that_are_text_are_not_taken_for_it() -> None:
    target: Any = shallow_vision_target("qwen3-vl")
    seen = about_images(target, "qwen3-vl", 3, 8, num_new=(10, 10))[2]
    read = Asked(seen.ids, seen.settings, 0)
    longer = Asked(torch.cat([seen.ids, seen.ids], dim=1), seen.settings, 0)
    requests = [seen, read, longer, *about_images(target, "qwen3-vl", 5, 9)]
    answer_alone(target, requests)
    batch = RunningBatch(target, batch_oracle(target), max_kept_bytes=2**30)
    drive(batch, requests, 6)


def test_a_chunk_ends_at_no_place_within_an_image() -> None:
    types = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0]])
    grids = torch.tensor([[1, 4, 4], [1, 2, 4]])
    inputs = {"mm_token_type_ids": types, "image_grid_thw": grids}
    inputs["pixel_values"] = torch.arange(24)[:, None]
    images = PromptImages(inputs)
    assert [(image.first, image.end) for image in images.images] == [(2, 6), (7, 9)]
    ends = [images.end_of_chunk(0, end) for end in range(1, 12)]
    assert ends == [1, 2, 2, 2, 2, 6, 7, 7, 9, 10, 11]
    # An image that is longer than a chunk is a chunk of its own.
    assert images.end_of_chunk(2, 4) == 6
    assert images.of_chunk(inputs, 0, 2) == {"pixel_values": None, "image_grid_thw": None}
    second = images.of_chunk(inputs, 6, 11)
    assert second["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert second["pixel_values"].flatten().tolist() == list(range(16, 24))
    both = images.of_chunk(inputs, 0, 11)
    assert both["pixel_values"].equal(inputs["pixel_values"])


def test_many_prompts_with_images() -> None:
    target = shallow_vision_target("qwen3-vl")
    requests = about_images(target, "qwen3-vl", 6, 7)
    answer_alone(target, requests)
    inputs: list[Any] = []
    for one in requests:
        mask = torch.ones_like(one.ids)
        inputs.append({"input_ids": one.ids, "attention_mask": mask, **one.images, **one.settings})
    answers = list(generate_batch(target, tiny_draft(target), inputs, max_new_tokens=1))
    assert sorted(answer.index for answer in answers) == list(range(6))
    for answer in answers:
        assert answer.token_ids == requests[answer.index].truth


def test_images_that_are_refused() -> None:
    target = shallow_vision_target("qwen3-vl")
    one = about_images(target, "qwen3-vl", 3, 8)[2]
    batch = RunningBatch(target, tiny_draft(target))
    images = one.images
    grids = images["image_grid_thw"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"image_grid_thw": None}, "together, got \"no \\['image_grid_thw'"),
        ({"mm_token_type_ids": None}, "together, got \"no \\['mm_token_type_ids'"),
        ({"mm_token_type_ids": 1 - images["mm_token_type_ids"]}, "1 for the 16 image tokens alone"),
        ({"image_grid_thw": grids // 2}, "image tokens"),
        ({"pixel_values": images["pixel_values"][:4]}, "pixel_values of 64 patches"),
        ({"pixel_values_videos": images["pixel_values"]}, "images as image_grid_thw"),
    ]
    for changed, message in cases:
        settings: dict[str, Any] = {**images, **changed}
        with pytest.raises(ValueError, match=message):
            batch.add(one.ids, max_new_tokens=5, **settings)
    assert batch.ids == []
    gemma = shallow_vision_target("gemma3")
    inputs = vision_prompts(gemma, "gemma3", [[(4, 4)]], 0)
    del inputs["attention_mask"]
    batch = RunningBatch(gemma, tiny_draft(gemma))
    settings = dict(inputs)
    with pytest.raises(ValueError, match=r"images for a target of qwen2_5_vl, .* got 'gemma3'"):
        batch.add(settings.pop("input_ids"), max_new_tokens=5, **settings)
