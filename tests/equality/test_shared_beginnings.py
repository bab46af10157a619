"""A beginning that texts share is prefilled twice at most, also where no text can be gone on from midway."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_hf import RunningBatch
from dflash_hf.generation import kept_prefixes
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.filling import Filling
from dflash_hf.generation.kept_prefixes import KeptPrefixes
from helpers.half import half
from helpers.running import END, Asked, answer_alone, asked, batch_oracle, drive
from helpers.vision import shallow_vision_target, vision_prompts
from tiny import shallow_target, tiny_draft

LONG: dict[str, Any] = {"max_position_embeddings": 2048}
WINDOWS = ["qwen3-sliding", "mistral", "gemma2", "gemma3", "gpt-oss"]
RECURRENT = ["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2", "bamba", "granite-hybrid"]
SYSTEM = 120
# The layers of a draft that sees all tokens of a text.
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}


def behind(beginning: torch.Tensor, ends: list[int], seed: int) -> list[Asked]:
    """Returns requests that share a beginning `[n]` and no token more, with ends of these lengths."""
    requests = asked(ends, seed, num_new=(4, 8))
    for number, one in enumerate(requests):
        one.ids[0, 0] = 20 + number
        one.ids = torch.cat([beginning, one.ids[0]])[None]
    return requests


def system_prompt(seed: int = 1, length: int = SYSTEM) -> torch.Tensor:
    (one,) = asked([length], seed)
    return one.ids[0]


def answered(batch: RunningBatch, one: Asked) -> int:
    """Checks the answer to a request; returns how many tokens of its prompt did not go through the target."""
    settings: dict[str, Any] = {**one.images, **one.settings}
    id = batch.add(one.ids, **settings)
    text: list[int] = []
    while id in batch.ids:
        for new in batch.step():
            if new.id == id:
                text += new.token_ids
    assert text == one.truth
    return batch.ended[id].num_kept_tokens


def chunk_ends(patch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of tokens behind each chunk of a prefill."""
    ends: list[int] = []
    run_chunk = Filling.run_chunk

    def noted(filling: Filling, *given: Any) -> None:
        run_chunk(filling, *given)
        ends.append(filling.seen)

    patch.setattr(Filling, "run_chunk", noted)
    return ends


def lengths(batch: RunningBatch, is_shared: bool) -> list[int]:
    """Returns the lengths of the kept texts that are shared beginnings, or are not, the least recently used first."""
    return [len(one.ids) for one in batch._kept.kept if one.is_shared is is_shared]


@pytest.mark.parametrize(
    ("family", "dtype"),
    half(WINDOWS + RECURRENT, {"float32": torch.float32, "float64": torch.float64}),
)
def test_the_third_request_goes_on_from_the_beginning(family: str, dtype: torch.dtype) -> None:
    target: Any = shallow_target(family, **LONG)
    target.to(dtype)
    requests = behind(system_prompt(), [5, 30, 9, 1], 2)
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30, prefill_chunk_size=50)
    assert [answered(batch, one) for one in requests] == [0, 0, SYSTEM, SYSTEM]
    assert lengths(batch, is_shared=True) == [SYSTEM]


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("size", [7, 64, SYSTEM - 1, SYSTEM, SYSTEM + 1, 1000])
def test_a_prefill_stops_once_behind_what_is_shared(size: int) -> None:
    target = shallow_target("qwen3.5", **LONG)
    requests = behind(system_prompt(), [20, 30, 9], 3)
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30, prefill_chunk_size=size)
    seen: list[list[int]] = []
    for one, num_kept in zip(requests, [0, 0, SYSTEM], strict=True):
        with pytest.MonkeyPatch.context() as patch:
            ends = chunk_ends(patch)
            assert answered(batch, one) == num_kept
        seen.append(ends)
        assert ends[-1] == one.ids.shape[1]
    assert SYSTEM in seen[1]
    # One chunk more than without a stop, at most.
    num_chunks = math.ceil(requests[1].ids.shape[1] / size)
    assert len(seen[1]) in (num_chunks, num_chunks + 1)


def test_all_that_wait_together_go_on_from_the_second() -> None:
    target = shallow_target("qwen3.5", **LONG)
    requests = behind(system_prompt(), [5, 30, 9, 1, 70], 4)
    answer_alone(target, requests)
    batch = RunningBatch(target, batch_oracle(target), max_kept_bytes=2**30)
    kept: dict[int, int] = {}
    step = batch.step

    def noted() -> Any:
        new = step()
        kept.update({id: stats.num_kept_tokens for id, stats in batch.ended.items()})
        return new

    batch.step = noted
    drive(batch, requests, 1)
    assert [kept[id] for id in range(5)] == [0, 0, SYSTEM, SYSTEM, SYSTEM]


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_where_any_part_will_do_nothing_more_is_copied(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target(family, **LONG)
    requests = behind(system_prompt(), [5, 30, 9], 5)
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target, **FULL), max_kept_bytes=2**30)
    ends = chunk_ends(monkeypatch)
    assert [answered(batch, one) for one in requests] == [0, SYSTEM, SYSTEM]
    assert ends == [one.ids.shape[1] for one in requests]
    assert lengths(batch, is_shared=True) == []


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("max_bytes", [0, 5000])
def test_where_nothing_is_kept_no_prefill_stops(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target("qwen3.5", **LONG)
    requests = behind(system_prompt(), [5, 30, 9], 6)
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=max_bytes)
    ends = chunk_ends(monkeypatch)
    assert [answered(batch, one) for one in requests] == [0, 0, 0]
    assert ends == [one.ids.shape[1] for one in requests]
    assert batch._kept.kept == []


@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3.5"])
def test_the_last_token_of_an_equal_prompt_is_not_kept(family: str) -> None:
    target = shallow_target(family, **LONG)
    (one,) = behind(system_prompt(), [1], 7)
    answer_alone(target, [one])
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    assert [answered(batch, one) for _ in range(4)] == [0, 0, SYSTEM, SYSTEM]


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("num_same", [15, 16])
def test_a_few_tokens_are_worth_no_stop(num_same: int) -> None:
    target = shallow_target("qwen3.5", **LONG)
    system = system_prompt()
    requests = behind(system, [9, 9], 8)
    # The same again, and some tokens of the first one's question.
    longer = system_prompt(9, num_same)
    more = behind(torch.cat([system, longer]), [5, 5], 9)
    answer_alone(target, requests + more)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    found = [answered(batch, one) for one in requests + more]
    assert found == [0, 0, SYSTEM, SYSTEM]
    is_worth_it = num_same >= 16
    shared = [SYSTEM, SYSTEM + num_same] if is_worth_it else [SYSTEM]
    assert sorted(lengths(batch, is_shared=True)) == shared


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("num_steps", [1, 2, 4, 5])
def test_a_cancelled_prefill_leaves_nothing_or_all(num_steps: int) -> None:
    target = shallow_target("qwen3.5", **LONG)
    requests = behind(system_prompt(), [90, 90, 9], 10)
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30, prefill_chunk_size=35)
    assert answered(batch, requests[0]) == 0
    id = batch.add(requests[1].ids, **requests[1].settings)
    for _ in range(num_steps):
        batch.step()
    assert batch.num_waiting == 1
    assert batch.cancel(id)
    is_kept = num_steps >= 4
    assert lengths(batch, is_shared=True) == [SYSTEM] * is_kept
    assert answered(batch, requests[2]) == SYSTEM * is_kept


def test_a_prefill_that_fails_leaves_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3.5", **LONG)
    requests = behind(system_prompt(), [90, 90, 9], 11)
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    assert answered(batch, requests[0]) == 0
    run_chunk = Filling.run_chunk

    def fails(filling: Filling, *given: Any) -> None:
        if filling.seen >= SYSTEM:
            raise RuntimeError("the target fails")
        run_chunk(filling, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Filling, "run_chunk", fails)
        batch.add(requests[1].ids, **requests[1].settings)
        with pytest.raises(RuntimeError, match="the target fails"):
            batch.step()
    assert batch.ids == []
    assert answered(batch, requests[2]) == SYSTEM


def test_a_beginning_without_room_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = shallow_target("qwen3.5", **LONG)
    requests = behind(system_prompt(), [5, 30, 9, 12], 12)
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    kept_prefixes.logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with monkeypatch.context() as patch:
        patch.setattr(kept_prefixes, "_copies_of_filled", full)
        assert [answered(batch, one) for one in requests[:2]] == [0, 0]
    assert "is not kept for others: no memory" in caplog.text
    assert lengths(batch, is_shared=True) == []
    assert [answered(batch, one) for one in requests[2:]] == [0, SYSTEM]


def test_states_that_cannot_move_on_are_no_copy_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = shallow_target("qwen3.5", **LONG)
    (one,) = behind(system_prompt(), [5], 20)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)

    def full(generator: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DFlashCandidateGenerator, "flush", full)
    batch.add(one.ids, **one.settings)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        batch.step()
    assert batch._kept.kept == []


@pytest.mark.same_on_every_release
def test_a_shared_beginning_outlives_the_texts_that_end() -> None:
    target = shallow_target("qwen3.5", **LONG)
    draft = tiny_draft(target)
    requests = behind(system_prompt(), [30] * 8, 13)
    others = asked([150] * 3, 14, num_new=(4, 8))
    answer_alone(target, requests + others)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    for one in requests[:2]:
        answered(batch, one)
    budget = batch._kept.num_bytes
    batch = RunningBatch(target, draft, max_kept_bytes=budget)
    # There is room for the beginning and two texts: those of the first requests go.
    assert [answered(batch, one) for one in requests] == [0, 0] + [SYSTEM] * 6
    assert lengths(batch, is_shared=True) == [SYSTEM]
    assert batch._kept.num_bytes <= budget
    # It goes too when nobody has used it for long.
    for one in others:
        answered(batch, one)
    assert lengths(batch, is_shared=True) == []


@pytest.mark.same_on_every_release
def test_rows_that_end_together_push_no_beginning_out() -> None:
    target = shallow_target("qwen3.5", **LONG)
    draft = tiny_draft(target)
    requests = behind(system_prompt(), [30] * 7, 19)
    for one in requests:
        one.settings |= {"max_new_tokens": 16, "eos_token_id": []}
    answer_alone(target, requests)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    for one in requests[:2]:
        answered(batch, one)
    batch = RunningBatch(target, draft, max_kept_bytes=batch._kept.num_bytes)
    together = [batch.add(one.ids, **one.settings) for one in requests[:6]]
    most = 0
    while batch.ids:
        batch.step()
        most = max(most, batch.num_running)
    assert most == len(together)
    # There is no room for what all six have left.
    assert len(lengths(batch, is_shared=False)) == 2
    assert answered(batch, requests[6]) == SYSTEM


def test_a_budget_for_one_text_keeps_the_newest() -> None:
    target = shallow_target("qwen3.5", **LONG)
    draft = tiny_draft(target)
    requests = behind(system_prompt(), [30] * 4, 15)
    answer_alone(target, requests)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    answered(batch, requests[0])
    size = batch._kept.num_bytes
    batch = RunningBatch(target, draft, max_kept_bytes=int(1.3 * size))
    for one in requests:
        assert answered(batch, one) == 0
        assert len(batch._kept.kept) == 1
        assert batch._kept.num_bytes <= 1.3 * size


@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3.5"])
def test_bfloat16_is_kept_as_it_is(family: str) -> None:
    target: Any = shallow_target(family, **LONG)
    target.to(torch.bfloat16)
    requests = behind(system_prompt(), [5, 30, 9], 16)
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    found: list[int] = []
    for one in requests:
        id = batch.add(one.ids, **one.settings)
        while id in batch.ids:
            batch.step()
        found.append(batch.ended[id].num_kept_tokens)
    assert found == [0, 0, SYSTEM]
    ended, shared = (
        next(one for one in batch._kept.kept if one.is_shared is is_shared)
        for is_shared in (False, True)
    )
    for name in ("target", "draft"):
        pairs = zip(getattr(shared, name).values(), getattr(ended, name).values(), strict=True)
        for mine, theirs in pairs:
            assert [part.dtype for part in mine] == [part.dtype for part in theirs]
    for name in ("windows", "states"):
        mine, theirs = (getattr(one.states, name) for one in (shared, ended))
        assert mine.keys() == theirs.keys()
        assert all(mine[index].dtype == theirs[index].dtype for index in mine)


def with_picture(target: PreTrainedModel, changed: Callable[[dict[str, Any]], None]) -> Asked:
    """Returns 40 words, a picture of 16 tokens and words behind it, with some of it changed."""
    inputs = vision_prompts(target, "qwen3.5-vl", [[(8, 8)]], 3, (40,))
    images = {
        "pixel_values": inputs["pixel_values"].to(target.dtype),
        "image_grid_thw": inputs["image_grid_thw"],
        "mm_token_type_ids": inputs["mm_token_type_ids"],
    }
    settings = {"max_new_tokens": 7, "eos_token_id": [END, END + 1], "do_sample": False}
    one = Asked(inputs["input_ids"].clone(), settings, 0, images=images)
    changed({"ids": one.ids, **images})
    return one


@pytest.mark.parametrize("size", [5, 256])
def test_a_stop_is_never_within_an_image(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = shallow_vision_target("qwen3.5-vl")

    def other_patch(place: int) -> Asked:
        def change(parts: dict[str, Any]) -> None:
            parts["pixel_values"][place] *= -1

        return with_picture(target, change)

    def other_end(token: int) -> Asked:
        def change(parts: dict[str, Any]) -> None:
            parts["ids"][0, -1] = token

        return with_picture(target, change)

    pictures = [other_patch(place) for place in (0, 40, 60)]
    ends = [other_end(token) for token in (20, 21, 22)]
    answer_alone(target, pictures + ends)
    marks = pictures[0].images["mm_token_type_ids"][0].nonzero()[:, 0].tolist()
    first, end = marks[0], marks[-1] + 1
    assert first >= 16
    num_prompt = pictures[0].ids.shape[1]
    for requests, num_kept in ((pictures, first), (ends, num_prompt - 1)):
        batch = RunningBatch(
            target, tiny_draft(target), max_kept_bytes=2**30, prefill_chunk_size=size
        )
        with monkeypatch.context() as patch:
            seen = chunk_ends(patch)
            assert [answered(batch, one) for one in requests] == [0, 0, num_kept]
        assert not set(seen) & set(range(first + 1, end))
        assert lengths(batch, is_shared=True) == [num_kept]


@pytest.mark.parametrize("family", ["qwen3-sliding", "gpt-oss", "qwen3.5", "lfm2", "bamba"])
def test_random_arrivals_share_random_beginnings(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = shallow_target(family, **LONG)
    target.to(torch.float32)
    chance = random.Random(family)
    text = system_prompt(17, 160)
    requests = asked([chance.randint(1, 40) for _ in range(9)], 18, num_new=(1, 8))
    for one in requests:
        # Beginnings of one another, and texts of earlier requests.
        num_shared = chance.choice([0, 16, 40, 41, 100, 160])
        one.ids = torch.cat([text[:num_shared], one.ids[0]])[None]
    for one in chance.sample(requests, 3):
        before = chance.choice(requests)
        one.ids = torch.cat([before.ids[0], one.ids[0, -3:]])[None]
    answer_alone(target, requests)
    keep_shared = KeptPrefixes.keep_shared
    num_kept = 0

    def noted(*given: Any) -> None:
        nonlocal num_kept
        num_kept += 1
        keep_shared(*given)

    monkeypatch.setattr(KeptPrefixes, "keep_shared", noted)
    for number, size in enumerate([2**30, 200_000, 60_000]):
        batch = RunningBatch(
            target,
            batch_oracle(target),
            max_rows=3,
            prefill_chunk_size=chance.choice([13, 50, 300]),
            max_kept_bytes=size,
        )
        drive(batch, requests, number, cancelled=0.2)
        assert batch._kept.num_bytes <= size
    assert num_kept > 3


def noted_contexts(patch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that gets the draft's keys and values of each prompt, as far as its windows reach."""
    found: list[Any] = []
    join = RunningBatch._join

    def noted(batch: RunningBatch, row: Any, begun: Any) -> None:
        num = begun.filling.num_columns
        found.append(kept_prefixes._copies(begun.generator.draft_cache, 0, num))
        join(batch, row, begun)

    patch.setattr(RunningBatch, "_join", noted)
    return found


@pytest.mark.parametrize("window", ["of layers", "of the options", "none"])
def test_a_draft_has_the_context_that_it_has_alone(
    window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = behind(system_prompt(), [5, 30, 9], 21)
    answer_alone(target, requests)
    layers: dict[str, Any] = {} if window == "of layers" else FULL
    draft = tiny_draft(target, **layers)
    draft.generation_config.draft_window = 40 if window == "of the options" else None
    contexts = noted_contexts(monkeypatch)
    alone = RunningBatch(target, draft)
    assert [answered(alone, one) for one in requests] == [0, 0, 0]
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    # A draft that sees only the newest tokens of the first text cannot go on from its middle.
    second = SYSTEM if window == "none" else 0
    assert [answered(batch, one) for one in requests] == [0, second, SYSTEM]
    for mine, theirs in zip(contexts[3:], contexts[:3], strict=True):
        for index, pair in theirs.items():
            torch.testing.assert_close(mine[index], pair)
