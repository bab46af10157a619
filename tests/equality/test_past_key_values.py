"""A cache passed in or asked for: advanced as plain `generate` advances it, left alone on errors, or refused.

How turns are compared is in `helpers/turns.py`; what the draft keeps between them is tested in `test_kept_context.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.generation import BaseStreamer

from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.generation import user_cache
from helpers.families import build
from helpers.half import half, pairs
from helpers.turns import (
    CACHES,
    GREEDY,
    NEW,
    answer_mask,
    arm,
    check_blocks,
    check_caches,
    next_turn,
    real_tokens,
    recording_draft,
    turn,
)
from tiny import VOCAB, prompts, tiny_draft, tiny_target


@pytest.mark.parametrize(
    ("family", "lengths", "kind", "whole"),
    pairs(
        ["qwen3", "llama", "qwen3-sliding", "gemma3", "mistral"],
        {"one": [9], "three": [4, 11, 7]},
        list(CACHES),
        {"whole": True, "new": False},
    ),
)
def test_three_turns(family: str, lengths: list[int], kind: str, whole: bool) -> None:
    target = tiny_target(family)
    inputs = prompts(lengths, 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target)
    for seed in range(3):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed, whole=whole)
        ids, mask = next_turn(ids, mask, seed)


@pytest.mark.parametrize(
    ("family", "kind", "whole"),
    half(["qwen3", "llama"], list(CACHES), {"whole": True, "new": False}),
)
def test_rows_that_end_early(family: str, kind: str, whole: bool) -> None:
    target = tiny_target(family)
    inputs = prompts([4, 11, 7], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target, 3)
    ends = []
    for seed in range(3):
        # Tokens that occur, so that some rows end and leave gaps of several blocks behind them.
        free = target.generate(input_ids=ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
        eos = [int(free[0, 2]), int(free[1, 6])]
        prompt = ids.shape[1]
        ids, mask = turn(
            target,
            draft,
            caches,
            ids,
            mask,
            seed=seed,
            whole=whole,
            eos_token_id=eos,
            pad_token_id=0,
        )
        ends.append((mask[:, prompt:].sum(dim=1)).tolist())
        assert draft.last_stats.num_target_forwards > 1 + max(
            len(row) for row in draft.last_stats.num_committed
        )
        ids, mask = next_turn(ids, mask, seed)
    assert all(len(set(turn_ends)) > 1 for turn_ends in ends)


def test_rows_that_end_in_the_same_verify_at_different_tokens() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([4, 7], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (DynamicCache(), DynamicCache())
    draft = recording_draft(target, 8)
    free = target.generate(**inputs, **GREEDY)[:, ids.shape[1] :]
    eos = [int(free[0, 2]), int(free[1, 3])]
    ids, mask = turn(target, draft, caches, ids, mask, seed=10, eos_token_id=eos, pad_token_id=0)
    committed = draft.last_stats.num_committed
    assert (len(committed[0]), sum(committed[0])) == (1, 2)
    assert (len(committed[1]), sum(committed[1])) == (1, 3)
    # The first row's last token was no proposal: neither this verify nor a later one has run the target over it.
    assert draft.last_stats.num_accepted[0] == [1]
    ids, mask = next_turn(ids, mask, 1)
    turn(target, draft, caches, ids, mask)


def test_padding_called_real_is_attended_to_as_in_generate() -> None:
    target = tiny_target("qwen3")
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
    caches = (DynamicCache(), DynamicCache())
    free = target.generate(ids, **GREEDY)
    settings = {**GREEDY, "eos_token_id": int(free[0, 9]), "pad_token_id": int(free[0, 9])}
    draft = tiny_draft(target)
    for seed in range(2):
        mask = torch.ones_like(ids)
        ref = target.generate(ids, attention_mask=mask, **settings, **{CACHE_NAME: caches[0]})
        out = target.generate(
            ids, attention_mask=mask, **settings, **{CACHE_NAME: caches[1]}, assistant_model=draft
        )
        assert torch.equal(out, ref)
        check_caches(caches[1], caches[0])
        ids, _ = next_turn(ref, torch.ones_like(ref), seed)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_cache_that_is_returned_is_plain_generates(family: str) -> None:
    target = tiny_target(family)
    inputs = prompts([4, 11], 5)
    mask = inputs["attention_mask"]
    free = target.generate(**inputs, **GREEDY)
    settings = {**GREEDY, "return_dict_in_generate": True}
    if family == "qwen3":
        settings |= {"eos_token_id": int(free[0, 15]), "pad_token_id": 0}
    draft = recording_draft(target)
    plain = target.generate(**inputs, **settings)
    after = answer_mask(
        plain.sequences, mask, [settings["eos_token_id"]] if family == "qwen3" else None
    )
    arm(draft, real_tokens(plain.sequences, after), 1)
    ours = target.generate(**inputs, **settings, assistant_model=draft)
    assert torch.equal(ours.sequences, plain.sequences)
    # Padding has no place in the run's cache, and plain `generate` fills it with what nothing may look at.
    columns = torch.ones(2, plain.sequences.shape[1] - 1)
    columns[:, : mask.shape[1]] = mask
    check_caches(ours[CACHE_NAME], plain[CACHE_NAME], columns)
    ids, mask = next_turn(plain.sequences, after, 2)
    caches = (plain[CACHE_NAME], ours[CACHE_NAME])
    given = {"input_ids": ids, "attention_mask": mask}
    ref = target.generate(**given, **GREEDY, **{CACHE_NAME: caches[0]})
    truth = real_tokens(ref, answer_mask(ref, mask, None))
    arm(draft, truth, 2)
    assert torch.equal(
        target.generate(**given, **GREEDY, **{CACHE_NAME: caches[1]}, assistant_model=draft), ref
    )
    check_blocks(draft, target, truth, [0, 0])


def test_no_cache_is_kept_where_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    monkeypatch.setattr(
        user_cache.UserCache, "__init__", lambda *args: pytest.fail("made a cache to keep")
    )
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=tiny_draft(target))


@pytest.mark.parametrize("kind", CACHES)
def test_prefill_in_chunks(kind: str) -> None:
    target = tiny_target("qwen3-sliding")
    inputs = prompts([9, 15], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target)
    for seed in range(2):
        given = {"input_ids": ids, "attention_mask": mask}
        ref = target.generate(**given, **GREEDY, **{CACHE_NAME: caches[0]})
        truth = real_tokens(ref, answer_mask(ref, mask, None))
        arm(draft, truth, seed)
        settings = {**GREEDY, "prefill_chunk_size": 4}
        assert torch.equal(
            target.generate(**given, **settings, **{CACHE_NAME: caches[1]}, assistant_model=draft),
            ref,
        )
        check_caches(caches[1], caches[0])
        check_blocks(draft, target, truth, [0, 0])
        ids, mask = next_turn(ref, answer_mask(ref, mask, None), seed, num=11)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("phimoe", {"sliding_window": 24}),
        (
            "qwen2_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 24,
                "layer_types": ["sliding_attention"] * 4,
            },
        ),
    ],
)
def test_windows_of_masks_alone_need_a_cache_that_slides(
    family: str, settings: dict[str, Any]
) -> None:
    target = build(family, **settings)
    draft = tiny_draft(target, 4)

    def generate(columns: int, cache: Cache, **kwargs: Any) -> Tensor:
        return target.generate(**prompts([columns], 3), **GREEDY, **{CACHE_NAME: cache}, **kwargs)

    # A run that stays within the window: the prompt and all but the last of the new tokens.
    longest = 24 - (NEW - 1)
    assert torch.equal(
        generate(longest, DynamicCache(), assistant_model=draft), generate(longest, DynamicCache())
    )
    ref = generate(longest + 1, DynamicCache())
    keeps_all = DynamicCache()
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model\.config\)"):
        generate(longest + 1, keeps_all, assistant_model=draft)
    assert not keeps_all.get_seq_length()
    slides = DynamicCache(config=target.config)
    assert torch.equal(generate(longest + 1, slides, assistant_model=draft), ref)


def test_embeddings_of_the_whole_conversation() -> None:
    target = tiny_target("qwen3")
    inputs = prompts([9, 15], 3)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = (DynamicCache(), DynamicCache())
    draft = recording_draft(target)
    for seed in range(2):
        given = {
            "inputs_embeds": target.get_input_embeddings()(ids).detach(),
            "attention_mask": mask,
        }
        ref = target.generate(**given, **GREEDY, **{CACHE_NAME: caches[0]})
        ids, mask = torch.cat([ids, ref], dim=1), torch.cat([mask, torch.ones_like(ref)], dim=1)
        truth = real_tokens(ids, mask)
        arm(draft, truth, seed)
        out = target.generate(**given, **GREEDY, **{CACHE_NAME: caches[1]}, assistant_model=draft)
        assert torch.equal(out, ref)
        check_caches(caches[1], caches[0])
        check_blocks(draft, target, truth, [0, 0])
        ids, mask = next_turn(ids, mask, seed)


class Failing(BaseStreamer):
    """Raises at the n-th run of tokens."""

    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.after, self.error = after, error

    def put(self, value: Tensor) -> None:
        self.after -= 1
        if self.after < 0:
            raise self.error("on purpose")

    def end(self) -> None:
        """Is not reached."""


def contents(cache: Cache) -> list[Any]:
    """What a layer holds: everything but the scratch behind a static layer's length."""
    held: list[Any] = []
    for layer in cache.layers:
        length = int(layer.get_seq_length())
        tensors = [t if t is None else t.clone() for t in (layer.keys, layer.values)]
        if type(layer) is StaticLayer and layer.keys is not None:
            tensors = [t[:, :, :length] for t in tensors]
        held.append((length, *tensors))
    return held


@pytest.mark.parametrize(
    ("failure", "kind", "turns"),
    half(
        {"1-RuntimeError": (1, RuntimeError), "4-KeyboardInterrupt": (4, KeyboardInterrupt)},
        list(CACHES),
        [0, 1],
    ),
)
def test_an_error_leaves_the_cache_as_it_was(
    failure: tuple[int, type[BaseException]], kind: str, turns: int
) -> None:
    after, error = failure
    target = tiny_target("gemma3")
    caches = (CACHES[kind](target), CACHES[kind](target))
    draft = recording_draft(target)
    inputs = prompts([9], 2)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for seed in range(turns):
        ids, mask = turn(target, draft, caches, ids, mask, seed=seed)
        ids, mask = next_turn(ids, mask, seed)
    before, length = contents(caches[1]), int(caches[1].get_seq_length())
    arm(draft, [[]], 0)
    with pytest.raises(error, match="on purpose"):
        target.generate(
            ids,
            **GREEDY,
            **{CACHE_NAME: caches[1]},
            assistant_model=draft,
            streamer=Failing(after, error),
        )
    assert int(caches[1].get_seq_length()) == length
    now = contents(caches[1])
    assert len(now) == len(before)
    for a, b in zip(now, before, strict=True):
        assert a[0] == b[0]
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
    turn(target, draft, caches, ids, mask)


def quantised() -> Cache:
    class Layer(DynamicLayer):
        pass

    return Cache(layers=[Layer() for _ in range(4)])


def wrong_window(target: PreTrainedModel) -> Cache:
    return DynamicCache(config=tiny_target("qwen3-sliding").config)


def filled(target: PreTrainedModel, rows: int = 1, columns: int = 6) -> DynamicCache:
    cache = DynamicCache()
    target(torch.ones(rows, columns, dtype=torch.long), **{CACHE_NAME: cache})
    return cache


def interrupted(target: PreTrainedModel) -> Cache:
    cache = filled(target)
    cache.layers[1].crop(-1)
    return cache


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], Any], int, str]] = {
    "tuple": (lambda target: ((torch.zeros(1), torch.zeros(1)),), 8, "DynamicCache or StaticCache"),
    "offloaded": (
        lambda target: DynamicCache(config=target.config, offloading=True),
        8,
        "an offloaded cache",
    ),
    "other layers": (lambda target: quantised(), 8, f"layer 0 in {CACHE_NAME}, got 'Layer'"),
    "other window": (wrong_window, 8, "to keep all tokens"),
    "other depth": (
        lambda target: DynamicCache(config=tiny_target("qwen3", num_hidden_layers=6).config),
        8,
        "4 layers",
    ),
    "other rows": (lambda target: filled(target, rows=2), 8, "1 rows"),
    "nothing new": (filled, 6, "whole conversation"),
    "new without a mask": (filled, 3, "whole conversation"),
    "interrupted": (interrupted, 8, "interrupted"),
    "too short": (
        lambda target: StaticCache(config=target.config, max_cache_len=20),
        8,
        "room for the longest",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_caches_that_cannot_be_continued_are_refused(case: str) -> None:
    target = tiny_target("qwen3")
    make, columns, match = REFUSED[case]
    cache = make(target)
    calls: list[int] = []
    target.register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=match):
        target.generate(
            torch.ones(1, columns, dtype=torch.long),
            **GREEDY,
            **{CACHE_NAME: cache},
            assistant_model=tiny_draft(target),
        )
    assert not calls


def test_a_mask_that_fits_no_part_of_the_chat_is_refused() -> None:
    target = tiny_target("qwen3")
    with pytest.raises(ValueError, match="an attention_mask of 7"):
        target.generate(
            torch.ones(1, 3, dtype=torch.long),
            attention_mask=torch.ones(1, 7),
            **GREEDY,
            **{CACHE_NAME: filled(target)},
            assistant_model=tiny_draft(target),
        )


def test_a_static_cache_that_would_overflow_is_refused() -> None:
    target = tiny_target("mistral")
    cache = StaticCache(config=target.config, max_cache_len=8)
    with pytest.raises(ValueError, match="room for the longest"):
        target.generate(
            **prompts([4], 1), **GREEDY, **{CACHE_NAME: cache}, assistant_model=tiny_draft(target)
        )


def test_gaps_under_sliding_windows_are_refused() -> None:
    target = tiny_target("gemma3")
    with pytest.raises(ValueError, match="sliding windows, which plain generate counts in columns"):
        target.generate(
            torch.full((1, 4), 5),
            attention_mask=torch.tensor([[1, 1, 0, 1]]),
            **GREEDY,
            assistant_model=tiny_draft(target),
        )


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gaps_under_full_attention_equal_plain_generate(family: str) -> None:
    target = tiny_target(family)
    inputs = prompts([9, 12], 1)
    inputs["attention_mask"][0, 5:8] = 0
    inputs["attention_mask"][1, 4] = 0
    ref = target.generate(**inputs, **GREEDY)
    draft = recording_draft(target)
    truth = real_tokens(ref, answer_mask(ref, inputs["attention_mask"], None))
    arm(draft, truth, 1)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    check_blocks(draft, target, truth, [0, 0])
