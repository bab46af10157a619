"""Buffers that begin small and grow: any limit costs what the answer needs, and no text changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_hf import RunningBatch, iterate
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.generation import buffers, prefill
from dflash_hf.generation.request_stats import NewTokens
from helpers.running import Asked, answer_alone, asked
from helpers.static import set_engine, tensor_oracle, use_tapes
from helpers.turns import GREEDY as TURN
from helpers.turns import first_turn, next_turn, turn
from tiny import DFLASH2, oracle_draft, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
FAMILIES = ["qwen3", "qwen3-sliding", "gemma2", "qwen3.5", "bamba"]


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Begins every run with room for two tokens, and notes the lengths that caches grow to."""
    lengths, grow = list[int](), RaggedCache.grow

    def noted(self: RaggedCache, max_length: int) -> None:
        lengths.append(max_length)
        grow(self, max_length)

    monkeypatch.setattr(RaggedCache, "grow", noted)
    monkeypatch.setattr(prefill, "FIRST_ROOM", 2)
    monkeypatch.setattr(prefill, "FIXED_ROOM", 2)
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 8)
    return lengths


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text(family: str, engine: Any, grown: list[int]) -> None:
    target, inputs = shallow_target(family), prompts([4, 11, 7], 0)
    length: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    ref = target.generate(**inputs, **length)
    settings: dict[str, Any] = DFLASH2 if family == "qwen3" else {}
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 6, **settings)
    set_engine(draft, engine)
    assert torch.equal(target.generate(**inputs, **length, assistant_model=draft), ref)
    # Doubling from 2: some growths for both caches, and not one per step.
    assert 3 <= len(grown) // 2 <= 6
    assert draft.last_stats.acceptance_length > 1.2


def test_bytes_are_those_that_are_held(grown: list[int]) -> None:
    target, inputs = shallow_target("qwen3"), prompts([4, 11], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = oracle_draft(target, truth_of(inputs, ref), 0)
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    prefill.FIRST_ROOM = NEW
    whole = oracle_draft(target, truth_of(inputs, ref), 0)
    target.generate(**inputs, **GREEDY, assistant_model=whole)
    assert draft.last_stats.cache_bytes == whole.last_stats.cache_bytes


@pytest.mark.parametrize(
    "name", ["criterion", "processor", "scores", "streamer", "iterate", "rows-end"]
)
def test_what_looks_at_the_ids(name: str, grown: list[int]) -> None:
    target, inputs = shallow_target("qwen3-sliding"), prompts([4, 11, 7], 0)

    def never(ids: Tensor, scores: Any) -> Tensor:
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    settings: dict[str, Any] = {
        "criterion": {"stopping_criteria": [never]},
        "processor": {"repetition_penalty": 1.3},
        "scores": {"output_scores": True, "return_dict_in_generate": True},
        "rows-end": {"eos_token_id": [9, 17, 30], "return_dict_in_generate": True},
    }.get(name, {})
    settings = {**inputs, **GREEDY, **settings}
    ref: Any = target.generate(**settings)
    sequences = ref if isinstance(ref, Tensor) else ref.sequences
    draft = oracle_draft(target, truth_of(inputs, sequences), 0)
    if name == "iterate":
        steps = list(iterate(target, draft, **settings))
        for row in range(3):
            assert torch.equal(
                torch.cat([step.committed[row] for step in steps]), sequences[row, 11:]
            )
        return
    out: Any = target.generate(**settings, assistant_model=draft)
    assert torch.equal(out if isinstance(out, Tensor) else out.sequences, sequences)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-sliding"])
def test_caches_that_are_kept(family: str, grown: list[int]) -> None:
    """Texts, caches and the draft's context, over two turns and rows that end early."""
    target, draft, caches, ids, mask = first_turn(family, [4, 9, 6])
    assert grown
    draft.blocks = []
    ids, mask = next_turn(ids, mask, 1)
    turn(target, draft, caches, ids, mask, max_new_tokens=3 * TURN["max_new_tokens"])


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("limit", [10**7, 10**8])
def test_a_limit_far_beyond_the_answer(limit: int, engine: Any) -> None:
    target, inputs = shallow_target("qwen3"), prompts([4, 11], 0)
    text = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    settings: dict[str, Any] = {**inputs, "do_sample": False, "eos_token_id": text[:, -1].tolist()}
    ref = target.generate(**settings, max_new_tokens=limit)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0)
    set_engine(draft, engine)
    begun = time.process_time()
    assert torch.equal(
        target.generate(**settings, max_new_tokens=limit, assistant_model=draft), ref
    )
    assert time.process_time() - begun < 10
    rows = prefill.FIRST_ROOM if engine == "eager" else prefill.FIXED_ROOM + 2048
    assert draft.last_stats.cache_bytes < 2 * 8 * (rows + 20) * 6 * (2 * 2 * 16)


def test_no_room_to_grow(monkeypatch: pytest.MonkeyPatch, grown: list[int]) -> None:
    """The sentence comes when there is no room, and a cache passed in is as it was."""
    target, inputs = shallow_target("qwen3"), prompts([4, 11], 0)
    cache = DynamicCache(config=target.config)
    draft = tiny_draft(target)
    monkeypatch.setattr("dflash_hf.cache.size.free_memory", lambda device: 20_000)
    with pytest.raises(
        OutOfRoomError, match=r"rows can have at most [\d,]+ tokens: lower max_new_tokens"
    ):
        target.generate(**inputs, **GREEDY, **{CACHE_NAME: cache}, assistant_model=draft)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("width", [None, 1, 3])
def test_graphs_over_buffers_that_are_full_are_not_gone_back_to(
    width: int | None, monkeypatch: pytest.MonkeyPatch, grown: list[int]
) -> None:
    """With a criterion the host decides after every replay: once the run has grown, there is room again elsewhere."""
    target, inputs = shallow_target("qwen3"), prompts([4, 11, 7], 0)

    def never(ids: Tensor, scores: Any) -> Tensor:
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    settings: dict[str, Any] = {**inputs, **GREEDY, "stopping_criteria": [never]}
    ref = target.generate(**settings)
    use_tapes(monkeypatch)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 6)
    draft.generation_config.verify_width = width
    assert torch.equal(target.generate(**settings, assistant_model=draft), ref)
    assert grown


def in_full(target: Any, lengths: list[int]) -> list[Asked]:
    """Returns requests of these lengths for 20 tokens, and notes what each is answered alone."""
    requests = asked(lengths, 1, num_new=(20, 20))
    for one in requests:
        one.settings["eos_token_id"] = []
    answer_alone(target, requests)
    return requests


def begun(batch: RunningBatch, one: Asked) -> list[NewTokens]:
    """Adds a request to a batch and runs a step."""
    batch.add(one.ids, **one.settings)
    return batch.step()


def caches_of(batch: RunningBatch) -> list[RaggedCache]:
    assert batch._run is not None
    return batch._run.buffers.caches()


def rest_of(batch: RunningBatch, new: list[NewTokens]) -> dict[int, list[int]]:
    """Runs a batch to its end; returns all tokens of each request, with those that are already there."""
    texts: dict[int, list[int]] = {}
    while True:
        for id, tokens, _ in new:
            texts.setdefault(id, []).extend(tokens)
        if not batch.ids:
            return texts
        new = batch.step()


def test_a_row_joins_where_there_is_no_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3")
    requests = in_full(target, [60, 5, 7])
    batch = RunningBatch(target, tiny_draft(target))
    new = begun(batch, requests[0])

    def used() -> int:
        return sum(cache.num_bytes() for cache in caches_of(batch))

    # The old buffers of three rows, and a copy for a fourth one beside them, would not have room.
    machine = 4.5 * used()
    monkeypatch.setattr("dflash_hf.cache.size.free_memory", lambda device: machine - used())
    new += begun(batch, requests[1]) + begun(batch, requests[2])
    assert rest_of(batch, new) == dict(enumerate(one.truth for one in requests))


def test_kept_texts_make_room_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3")
    requests = in_full(target, [60, 5])
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    new = begun(batch, requests[0])
    of_row = sum(cache.num_bytes() for cache in caches_of(batch))

    def free(device: torch.device) -> int:
        return 0 if batch._kept.kept else 3 * of_row

    monkeypatch.setattr("dflash_hf.cache.size.free_memory", free)
    new += begun(batch, requests[1])
    assert rest_of(batch, new) == {0: requests[0].truth, 1: requests[1].truth}


def test_the_caches_of_a_row_have_to_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3")
    requests = in_full(target, [60, 5])
    batch = RunningBatch(target, tiny_draft(target), max_rows=2)
    new = begun(batch, requests[0])
    bytes_of_row = [cache.num_bytes() for cache in caches_of(batch)]
    # The memory of the one row becomes free.
    free = sum(bytes_of_row) - 1
    assert free > max(bytes_of_row)
    monkeypatch.setattr("dflash_hf.cache.size.free_memory", lambda device: free)
    new += begun(batch, requests[1])
    assert [one.finished for one in new if one.id == 1] == ["error"]
    assert rest_of(batch, new)[0] == requests[0].truth


def test_max_tokens_limits_the_rows_that_are_allocated() -> None:
    target = shallow_target("qwen3")
    requests = in_full(target, [5, 5])
    batch = RunningBatch(target, tiny_draft(target), max_tokens=100)
    new = begun(batch, requests[0]) + begun(batch, requests[1])
    # Both rows have 25 tokens.
    for cache in caches_of(batch):
        for layer in cache.attention.values():
            assert len(layer._allocated[0]) == 4
    assert rest_of(batch, new) == {0: requests[0].truth, 1: requests[1].truth}


def test_rows_count_for_max_tokens_as_long_as_they_may_become(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "FIRST_ROOM", 2)
    target = shallow_target("qwen3")
    requests = in_full(target, [30, 5])
    # Two rows of 50 tokens have no room, though the buffers begin shorter.
    batch = RunningBatch(target, tiny_draft(target), max_tokens=90)
    new = begun(batch, requests[0])
    assert batch._run is not None
    assert 2 * batch._run.room <= 90
    new += begun(batch, requests[1])
    assert len(batch._running) == 1
    assert rest_of(batch, new) == dict(enumerate(one.truth for one in requests))


def test_buffers_that_stay_long_count_for_max_tokens() -> None:
    target = shallow_target("qwen3")
    requests = in_full(target, [80, 5, 5, 5, 5])
    batch = RunningBatch(target, tiny_draft(target), max_tokens=250)
    new = begun(batch, requests[0]) + begun(batch, requests[1])
    for one in requests[2:]:
        batch.add(one.ids, **one.settings)
    most = 0
    while batch.ids:
        new += batch.step()
        if batch._run is not None:
            most = max(most, len(batch._running) * batch._run.room)
    assert most <= 250
    assert rest_of(batch, new) == dict(enumerate(one.truth for one in requests))


def test_rows_of_layers_that_grew_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3")
    requests = in_full(target, [30, 5, 100])
    batch = RunningBatch(target, tiny_draft(target))
    new = begun(batch, requests[0]) + begun(batch, requests[1])
    draft_cache, cache = caches_of(batch)
    shapes = [layer.shape for layer in cache.attention.values()]
    # Eight of the longest rows have room in the target's cache, but not in both caches.
    # The memory of two rows becomes free.
    free = sum(shape.num_bytes(6, 109, 8) for shape in shapes)
    monkeypatch.setattr("dflash_hf.cache.size.free_memory", lambda device: free)
    new += begun(batch, requests[2])
    # Only the layer without a window has grown.
    windowed, full = draft_cache.attention.values()
    assert cache.max_length == 109
    assert len(windowed._allocated[0]) == 8
    assert len(full._allocated[0]) == 3
    assert rest_of(batch, new) == {id: one.truth for id, one in enumerate(requests)}
