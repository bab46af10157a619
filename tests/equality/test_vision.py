"""Pictures: the same text as plain `generate` on vision targets, alone and in mixed left-padded batches."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash_hf import DFlashCandidateGenerator, iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.parts import find_target
from dflash_hf.training.collators import Batch
from dflash_hf.training.forward import target_features
from helpers.half import half
from helpers.vision import (
    IMAGE,
    VIDEO,
    VISION,
    Grid,
    shallow_vision_target,
    vision_prompts,
    vision_target,
)
from tiny import MIXED, oracle_draft, shallow_target, tiny_draft, tiny_target, truth_of

NEW = 18
ROWS: dict[str, list[list[Grid]]] = {
    "one picture": [[(4, 4)]],
    "several sizes": [[(4, 6), (2, 2), (8, 4)]],
    "no picture": [[]],
    "mixed batch": [[(4, 4)], [], [(2, 8), (6, 4)]],
    "batch without pictures": [[], [], []],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("name", VISION)
def test_images_give_the_plain_text(name: str, rows: list[list[Grid]]) -> None:
    target = shallow_vision_target(name)
    # Every two of targets, rows and block sizes.
    seed = (list(VISION).index(name) + list(ROWS.values()).index(rows)) % 4
    block_size = [2, 5, 8, 16][seed]
    inputs = vision_prompts(target, name, rows, seed)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), seed, block_size)
    out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, ref)
    assert 1.0 < draft.last_stats.acceptance_length < block_size


def test_a_prompt_may_end_in_an_image() -> None:
    # The last token's rows of positions then differ, and each is counted on.
    target = shallow_vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 8)], [(8, 2)]], 0, words=(5, 5))
    inputs |= {
        name: inputs[name][:, :-5] for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    assert (inputs["input_ids"][:, -1] == IMAGE).all()
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 5)
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_sliding_windows_under_several_rows_of_positions(rows: list[list[Grid]]) -> None:
    # Windows count columns; the rows of positions count a picture by its sides.
    target = vision_target(
        "qwen2.5-vl", use_sliding_window=True, sliding_window=9, layer_types=MIXED
    )
    inputs = vision_prompts(target, "qwen2.5-vl", rows, 0)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    wide = vision_target("qwen2.5-vl")
    assert not torch.equal(wide.generate(**inputs, max_new_tokens=NEW, do_sample=False), ref)
    for block_size in (4, 16):
        draft = oracle_draft(target, truth_of(inputs, ref), 0, block_size)
        assert torch.equal(
            target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft),
            ref,
        )
        assert draft.last_stats.acceptance_length > 1.2


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_iterate_with_images_commits_what_generate_does(name: str) -> None:
    target = shallow_vision_target(name)
    inputs = vision_prompts(target, name, ROWS["mixed batch"], 0)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 5)
    rows: list[list[int]] = [[], [], []]
    for step in iterate(target, draft, **inputs, max_new_tokens=NEW, do_sample=False):
        # Something else with pictures during a pause is nobody's business.
        target(**vision_prompts(target, name, [[(8, 8)]], 7))
        for row, committed in zip(rows, step.committed, strict=True):
            row += committed.tolist()
    assert rows == ref[:, inputs["input_ids"].shape[1] :].tolist()
    assert draft.last_stats.acceptance_length > 1.2


def test_a_draft_of_the_text_model_works_on_the_vision_model() -> None:
    # As the published draft of Qwen3-8B does on Qwen3-VL-8B: the same width, depth and vocabulary.
    target = vision_target("qwen3-vl")
    text = tiny_target("qwen3")
    inputs = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for draft in (tiny_draft(text), oracle_draft(text, truth_of(inputs, ref), 0, 5)):
        assert (
            text.config.vocab_size
            == draft.config.vocab_size
            == target.config.text_config.vocab_size
        )
        assert torch.equal(
            target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft),
            ref,
        )
    assert draft.last_stats.acceptance_length > 1.2


def test_a_sampled_text_on_images_is_the_same_at_every_block() -> None:
    target = shallow_vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    texts: list[Tensor] = []
    for block_size in (2, 7):
        torch.manual_seed(0)
        draft = tiny_draft(target, block_size)
        settings = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
        texts.append(target.generate(**inputs, **settings, assistant_model=draft))
    assert len(texts[0]) == 6
    assert torch.equal(texts[0], texts[1])


def test_no_image_reaches_a_verify() -> None:
    target = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", [[(4, 4)]], 0)
    seen: list[set[str]] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append({name for name, value in kwargs.items() if value is not None})

    handle = target.register_forward_pre_hook(look, with_kwargs=True)
    target.generate(**inputs, max_new_tokens=4, do_sample=False, assistant_model=tiny_draft(target))
    handle.remove()
    # Newer Transformers encode the pictures before
    assert seen[0] & {"pixel_values", "mm_encoder_outputs"}
    names = {"input_ids", "position_ids", CACHE_NAME, "use_cache", "return_dict", "ragged"}
    assert len(seen) > 1
    assert all(names == verify for verify in seen[1:])


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_a_prefill_holds_tapped_layers_and_images_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = vision_target(name)
    inputs = vision_prompts(target, name, ROWS["mixed batch"], 0)
    width = target.config.text_config.hidden_size
    num_tokens = int((inputs["input_ids"] == IMAGE).sum())
    states: list[tuple[int, weakref.ref[Tensor]]] = []
    calls: list[int] = []
    # Per place: numbers held in rows that may be features of pictures, and the layers whose output on the prompt is.
    found: list[tuple[str, int, list[int]]] = []

    def count(place: str) -> None:
        # The prefill and the forward behind it; a look goes through all that Python holds
        if len(found) == 3:
            return
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        rows = [tensor for tensor in tensors if tensor.dim() == 2 and tensor.shape[1] == width]
        rows = [
            tensor
            for tensor in rows
            if len(tensor) <= num_tokens and not isinstance(tensor, nn.Parameter)
        ]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 8
            for tensor in rows
        }
        found.append(
            (place, sum(storages.values()), [index for index, ref in states if ref() is not None])
        )

    def observe(self: Any, taps: Tensor, positions: Tensor, rows: list[int]) -> None:
        assert taps.shape == (*inputs["input_ids"].shape, 2 * width)
        count("taps")
        original(self, taps, positions, rows)

    gc.collect()
    gc.freeze()  # neither what other tests have left
    original = DFlashCandidateGenerator.observe_prompt
    monkeypatch.setattr(DFlashCandidateGenerator, "observe_prompt", observe)
    target.model.visual.register_forward_hook(lambda *args: calls.append(1))
    for index, layer in enumerate(find_target(target).layers):
        layer.register_forward_hook(
            lambda module, args, output, index=index: states.append((index, weakref.ref(output)))
        )
    target.register_forward_pre_hook(lambda module, args: count("forward"))
    settings = {"max_new_tokens": 6, "do_sample": False}
    target.generate(**inputs, **settings)
    plain, found[:] = found[1], []
    target.generate(
        **inputs, **settings, assistant_model=tiny_draft(target, target_layer_ids=[0, 1])
    )
    assert len(calls) == 2  # one look at the pictures each
    assert [place for place, *_ in found[:3]] == ["forward", "taps", "forward"]
    assert found[1][1] >= num_tokens * width
    assert found[1][2] == [0, 1]
    # Newer Transformers hold what the vision tower made until `generate` returns, with and without a draft.
    assert found[2][1] <= plain[1]
    assert found[2][2] == []


def test_a_draft_counts_image_tokens_one_by_one() -> None:
    target = shallow_vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    draft = oracle_draft(target, [[0]] * 3, 0)
    target.generate(**inputs, max_new_tokens=1 + 1, do_sample=False, assistant_model=draft)
    assert draft.positions[:, 0].tolist() == inputs["attention_mask"].sum(dim=1).tolist()


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe"])
def test_deepstack_changes_image_tokens_of_its_layers_only(name: str) -> None:
    target = vision_target(name)
    inputs = vision_prompts(target, name, ROWS["mixed batch"], 0)
    layers = find_target(target).layers
    given: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: given.append(args[0].clone()))
        for layer in layers[1:]
    ]
    ids = [-1, 0, 1, 2, 3]
    with (
        torch.no_grad(),
        Taps(layers, ids).open() as taps,
        Taps(layers, ids, after_deepstack=True).open() as taps_after,
    ):
        target(**inputs)
        before, after = (each.take().chunk(len(ids), dim=-1) for each in (taps, taps_after))
    for handle in handles:
        handle.remove()
    is_image = inputs["input_ids"] == IMAGE
    num_added = len(target.config.vision_config.deepstack_visual_indexes)
    for layer, one, other in zip(ids, before, after, strict=True):
        assert torch.equal((one != other).any(dim=-1), is_image & (0 <= layer < num_added))
    assert all(torch.equal(one, other) for one, other in zip(after[1:4], given, strict=True))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_taps_are_on_the_configured_side_of_deepstack(
    after: bool,
) -> None:
    target = vision_target("qwen3-vl")
    inputs = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    layers = find_target(target).layers
    given: list[Tensor] = []
    hooks = {
        False: lambda index: layers[index].register_forward_hook(
            lambda *args: given.append(args[-1])
        ),
        True: lambda index: layers[index + 1].register_forward_pre_hook(
            lambda *args: given.append(args[-1][0])
        ),
    }
    handles = [hooks[after](index) for index in (0, 2)]
    with torch.no_grad():
        target(**inputs)
    for handle in handles:
        handle.remove()
    wanted = torch.cat(given, dim=-1)

    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    overrides = {"target_layer_ids": [0, 2], "tap_after_deepstack": after}
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 5, **overrides)
    seen: list[Tensor] = []
    draft.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert torch.equal(
        target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), ref
    )
    # What the draft is given of the prompts, without padding.
    real = inputs["attention_mask"].bool()
    prompts = torch.cat([state.flatten(0, -2) for state in seen])[: real.numel()]
    assert torch.equal(prompts.view(*real.shape, -1)[real], wanted[real])

    batch = Batch(
        input_ids=inputs["input_ids"],
        attention_mask=real,
        loss_mask=real,
        model_inputs={
            name: inputs[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")
        },
    )
    features = target_features(find_target(target), [0, 2], batch, after_deepstack=after).taps
    assert torch.equal(features[real], wanted[real])


def test_a_target_that_counts_positions_is_refused_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def conversation(
    first: dict[str, Tensor], answer: Tensor, more: dict[str, Tensor], sizes: list[list[int]]
) -> Any:
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
            patches[index] = list(
                turn["pixel_values"].split(turn["image_grid_thw"].prod(dim=1).tolist())
            )
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


@pytest.mark.parametrize(
    ("name", "turns", "whole"),
    half(
        ["qwen3-vl", "qwen2.5-vl", "qwen3.5-vl"],
        TURNS,
        {"all pictures": True, "new pictures": False},
    ),
)
def test_a_later_turn_brings_images_to_a_kept_cache(
    name: str, turns: tuple[list[list[Grid]], list[list[Grid]]], whole: bool
) -> None:
    target = shallow_vision_target(name)
    settings = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    first, more = (
        vision_prompts(target, name, turns[0], 0),
        vision_prompts(target, name, turns[1], 1),
    )
    answer = target.generate(**first, **settings)
    both = conversation(first, answer, more, [[len(row) for row in turn] for turn in turns])
    ref = target.generate(**both, **settings)
    draft = oracle_draft(target, truth_of(first, ref), 0, 5)
    draft.truth = [
        row[keep.bool()].tolist() + tail
        for row, keep, tail in zip(
            both["input_ids"],
            both["attention_mask"],
            ref[:, both["input_ids"].shape[1] :].tolist(),
            strict=True,
        )
    ]
    cache = DynamicCache(config=target.config.get_text_config())
    assert torch.equal(
        target.generate(**first, **settings, assistant_model=draft, **{CACHE_NAME: cache}), answer
    )
    # Another conversation in between leaves its positions in the model.
    target.generate(**vision_prompts(target, name, [[(8, 8)]], 3), max_new_tokens=2)
    if not whole:
        both["pixel_values"] = more.get("pixel_values")
    out = target.generate(**both, **settings, assistant_model=draft, **{CACHE_NAME: cache})
    assert torch.equal(out, ref)
    assert draft.last_stats.acceptance_length > 1.2


def test_a_later_turn_with_an_image_is_not_cut_into_chunks() -> None:
    name = "qwen3-vl"
    target = shallow_vision_target(name)
    settings = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    first, more = (vision_prompts(target, name, [[grid]], 0) for grid in [(4, 4), (2, 6)])
    answer = target.generate(**first, **settings)
    both = conversation(first, answer, more, [[1], [1]])
    ref = target.generate(**both, **settings)
    cache = DynamicCache(config=target.config.get_text_config())
    settings |= {"assistant_model": tiny_draft(target), CACHE_NAME: cache}
    target.generate(**first, **settings)
    out = target.generate(**both, **settings, prefill_chunk_size=5)
    assert torch.equal(out, ref)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
@pytest.mark.parametrize(
    "rows", [[[(4, 4)]], [[(4, 4)], [], [(2, 6), (4, 4)]]], ids=["one row", "batch"]
)
def test_a_later_turn_without_images_counts_on_as_generate(
    name: str, rows: list[list[Grid]]
) -> None:
    # The model remembers the difference of its last call, whosever it was. The same wrong text, where it is wrong.
    target = shallow_vision_target(name)
    settings = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    first, more = (
        vision_prompts(target, name, rows, 0),
        vision_prompts(target, name, [[] for _ in rows], 1),
    )
    others: list[list[list[Grid]]] = [
        rows,
        [[(8, 8)] for _ in rows],
        [[(8, 8)] for _ in (*rows, 0)],
    ]
    refs: list[Tensor] = []
    for other in others:
        caches = [DynamicCache(config=target.config.get_text_config()) for _ in range(2)]
        answer = target.generate(**first, **settings, **{CACHE_NAME: caches[0]})
        draft = oracle_draft(target, truth_of(first, answer), 0, 5)
        target.generate(**first, **settings, **{CACHE_NAME: caches[1]}, assistant_model=draft)
        gap = torch.ones_like(answer[:, first["input_ids"].shape[1] :])
        both = {
            "input_ids": torch.cat([answer, more["input_ids"]], dim=1),
            "attention_mask": torch.cat(
                [first["attention_mask"], gap, more["attention_mask"]], dim=1
            ),
        }
        between = vision_prompts(target, name, other, 0 if other is rows else 3)
        target.generate(**between, max_new_tokens=2)
        if len(other) != len(rows):
            for cache, assistant in zip(caches, ({}, {"assistant_model": draft}), strict=True):
                with pytest.raises(RuntimeError, match=r"[Ss]ize"):
                    target.generate(**both, **settings, **assistant, **{CACHE_NAME: cache})
            continue
        refs.append(target.generate(**both, **settings, **{CACHE_NAME: caches[0]}))
        draft.truth = truth_of(both, refs[-1])
        for row, mask in enumerate(both["attention_mask"]):
            real = [*mask.tolist(), *[1] * NEW]
            draft.truth[row] = [
                token for token, keep in zip(refs[-1][row].tolist(), real, strict=True) if keep
            ]
        target.generate(**between, max_new_tokens=2)
        out = target.generate(**both, **settings, **{CACHE_NAME: caches[1]}, assistant_model=draft)
        assert torch.equal(out, refs[-1])
        assert draft.last_stats.acceptance_length > 1.2
    assert not torch.equal(refs[0], refs[1])


def test_images_that_do_not_fit_a_kept_cache_are_refused() -> None:
    target = shallow_vision_target("qwen3-vl")
    settings = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    first, more = (vision_prompts(target, "qwen3-vl", [[grid]], 0) for grid in [(4, 4), (2, 6)])
    answer = target.generate(**first, **settings)
    both = conversation(first, answer, more, [[1], [1]])
    cache = DynamicCache(config=target.config.get_text_config())
    settings |= {"assistant_model": tiny_draft(target), CACHE_NAME: cache}
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


@pytest.mark.parametrize("name", ["paligemma", "qwen3-vl", "text"])
def test_labels_among_the_inputs_reach_no_forward(name: str) -> None:
    # PaliGemma's processor always makes them, and collators do.
    if name == "text":
        target = shallow_target("qwen3")
        inputs = {"input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]])}
        inputs["attention_mask"] = inputs["input_ids"].ne(0).long()
    else:
        target = shallow_vision_target(name)
        inputs = vision_prompts(target, name, [[(4, 4)], []], 0)
    inputs["labels"] = inputs["input_ids"].clone()
    ref = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 5)
    out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, ref)
    assert draft.last_stats.acceptance_length > 1.2


def test_new_images_behind_a_cache_refuse_several_sequences() -> None:
    # Transformers repeats encoded images by the image tokens of the whole text, of which some are in the cache.
    target = shallow_vision_target("qwen3-vl")
    settings = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    rows: list[list[Grid]] = [[(4, 4)], [(4, 4)]]
    first, more = (vision_prompts(target, "qwen3-vl", rows, seed) for seed in (0, 1))
    answer = target.generate(**first, **settings)
    both = conversation(first, answer, more, [[1, 1], [1, 1]])
    cache = DynamicCache(config=target.config.get_text_config())
    settings |= {"assistant_model": tiny_draft(target), CACHE_NAME: cache}
    target.generate(**first, **settings)
    cache.batch_repeat_interleave(2)
    num_columns = cache.get_seq_length()
    settings |= {"do_sample": True, "num_return_sequences": 2}
    with pytest.raises(
        ValueError, match="no num_return_sequences beside both cached and new images"
    ):
        target.generate(**both, **settings)
    assert cache.get_seq_length() == num_columns


def test_first_images_behind_a_cache_take_several_sequences() -> None:
    target = shallow_vision_target("qwen3-vl")
    settings = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    none: list[list[Grid]] = [[], []]
    first = vision_prompts(target, "qwen3-vl", none, 0)
    more = vision_prompts(target, "qwen3-vl", [[(4, 4)], [(4, 4)]], 1)
    answer = target.generate(**first, **settings)
    both = conversation(first, answer, more, [[0, 0], [1, 1]])
    # The likeliest token is drawn.
    drawn = {**settings, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    ref = target.generate(**both, **drawn)
    cache = DynamicCache(config=target.config.get_text_config())
    draft = {"assistant_model": tiny_draft(target), CACHE_NAME: cache}
    target.generate(**first, **settings, **draft)
    cache.batch_repeat_interleave(2)
    assert torch.equal(target.generate(**both, **drawn, **draft), ref)


def test_images_that_are_encoded_already_give_the_plain_text() -> None:
    target: Any = shallow_vision_target("qwen3-vl")
    if "mm_encoder_outputs" not in inspect.signature(target.forward).parameters:
        pytest.skip("this Transformers takes no encoded images")
    inputs: dict[str, Any] = vision_prompts(target, "qwen3-vl", ROWS["mixed batch"], 0)
    settings = {"max_new_tokens": NEW, "do_sample": False}
    ref = target.generate(**inputs, **settings)
    pixels = inputs.pop("pixel_values")
    with torch.no_grad():
        encoded = target.get_image_features(pixels, inputs["image_grid_thw"])
    inputs["mm_encoder_outputs"] = {"image": encoded}
    assert torch.equal(target.generate(**inputs, **settings), ref)
    draft = oracle_draft(target, truth_of(inputs, ref), 0, 5)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), ref)
    assert draft.last_stats.acceptance_length > 1.2
