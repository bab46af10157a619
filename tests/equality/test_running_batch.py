"""Requests that join and leave a running batch have the text that each has alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from dflash_hf import RunningBatch, generate_batch
from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.generation import running_batch
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.options import width_of_rows
from helpers.half import half
from helpers.running import END, answer_alone, asked, batch_oracle, drive, make_infinite
from helpers.whole_blocks import use_whole_blocks
from tiny import VOCAB, shallow_target, tiny_draft

LONG: dict[str, Any] = {"max_position_embeddings": 2048}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
HOT: dict[str, Any] = {"do_sample": True, "temperature": 1.7, "top_k": 0}
PENALISED: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3}


def lengths_of(num: int, seed: int, longest: int = 300) -> list[int]:
    chance = random.Random(seed)
    return [chance.choice([1, 2, 7, 30, chance.randint(1, longest)]) for _ in range(num)]


ATTENTION = ["qwen3", "qwen3-sliding", "mistral", "gemma2", "gemma3", "gpt-oss", "qwen3-moe"]
RECURRENT = ["qwen3.5", "qwen3-next", "lfm2", "bamba"]


@pytest.mark.parametrize("family", ATTENTION + RECURRENT)
def test_texts_are_those_of_each_prompt_alone(family: str) -> None:
    target = shallow_target(family, **LONG)
    requests = asked(lengths_of(7, 8), 8, num_new=(6, 24))
    answer_alone(target, requests)
    draft = batch_oracle(target)
    use_whole_blocks(draft)
    batch = RunningBatch(target, draft, prefill_chunk_size=100)
    found = drive(batch, requests, 8)
    assert found["answered"] == 7
    assert found["most"] > 2


@pytest.mark.same_on_every_release
@pytest.mark.parametrize(("seed", "family"), half([0, 2, 3], ["qwen3-sliding", "qwen3.5"]))
def test_rows_that_are_broken_off_change_no_other(seed: int, family: str) -> None:
    target = shallow_target(family, **LONG)
    requests = asked(lengths_of(14, seed), seed, num_new=(16, 36))
    answer_alone(target, requests)
    batch = RunningBatch(target, batch_oracle(target), max_rows=4, prefill_chunk_size=64)
    found = drive(batch, requests, seed, cancelled=0.3)
    assert found["broken"] > 1
    assert found["most"] == 4


@pytest.mark.parametrize(
    ("proposal", "knows"), half(["argmax", "shared_noise"], {"oracle": True, "random": False})
)
def test_each_row_has_settings_and_a_seed_of_its_own(proposal: Any, knows: bool) -> None:
    target = shallow_target("qwen3", **LONG)
    kinds = (GREEDY, SAMPLED, HOT, PENALISED, SAMPLED | {"repetition_penalty": 1.2})
    requests = asked(lengths_of(10, 3, 200), 3, num_new=(4, 24), kinds=kinds)
    own = tiny_draft(target)
    own.generation_config.proposal = proposal
    answer_alone(target, requests, own)
    draft = batch_oracle(target) if knows else own
    draft.generation_config.proposal = proposal
    found = drive(RunningBatch(target, draft), requests, 3, cancelled=0.1)
    assert found["most"] > 3


@pytest.mark.same_on_every_release
@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("nodes", [0, 12])
def test_chains_and_trees(nodes: int) -> None:
    target = shallow_target("qwen3-sliding", **LONG)
    requests = asked(lengths_of(8, 4, 60), 4, num_new=(6, 24))
    answer_alone(target, requests)
    draft = batch_oracle(target)
    draft.generation_config.num_tree_nodes = nodes
    batch = RunningBatch(target, draft)
    drive(batch, requests, 4)


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("nodes", [0, 12])
def test_log_probabilities_are_the_targets_own(nodes: int) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([4, 90, 30], 26, num_new=(12, 12), kinds=(GREEDY, PENALISED))
    answer_alone(target, requests)
    draft = batch_oracle(target)
    draft.generation_config.num_tree_nodes = nodes
    batch = RunningBatch(target, draft, prefill_chunk_size=40)
    stats: list[Any] = []
    add = batch.add

    def added(*given: Any, **settings: Any) -> int:
        id = add(*given, num_logprobs=2, **settings)
        stats.append(batch.stats_of(id))
        return id

    batch.add = added
    drive(batch, requests, 26)
    for one, noted in zip(requests, stats, strict=True):
        text = torch.cat([one.ids, torch.tensor([one.truth])], dim=1)
        with torch.no_grad():
            logits = target(text).logits[0, one.ids.shape[1] - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        assert len(noted.logprobs) == len(one.truth)
        for place, found in enumerate(noted.logprobs):
            own = float(logprobs[place, one.truth[place]])
            assert found.logprob == pytest.approx(own, abs=1e-4)
            best = logprobs[place].topk(2).values.tolist()
            assert [value for _, value in found.top] == pytest.approx(best, abs=1e-4)
    with pytest.raises(ValueError, match="num_logprobs from -1 to"):
        add([5], max_new_tokens=1, num_logprobs=VOCAB + 1)


@pytest.mark.same_on_every_release
def test_widths_that_change_between_joins() -> None:
    """Tokens that were decoded without a draft gather in columns that a new row does not have."""
    target = shallow_target("qwen3")
    requests = asked(lengths_of(12, 5, 40), 5, num_new=(5, 40))
    answer_alone(target, requests)
    draft = batch_oracle(target, 6)
    chance = random.Random(0)
    batch = RunningBatch(target, draft, max_rows=5)

    class Widths:
        def next_choice(self) -> tuple[int, bool]:
            return chance.choice([1, 1, 1, 2, 6]), False

        def use_rows(self, rows: int) -> None: ...

        def observe(self, *args: Any) -> None: ...

        def verdict(self) -> str:
            return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_hf.generation.joining.choose_widths", lambda *given: Widths())
        drive(batch, requests, 5, cancelled=0.2)


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("table", [{1: 8, 4: 2}, {1: 2, 2: 1, 3: 6}])
@pytest.mark.parametrize(("family", "nodes"), [("qwen3", None), ("qwen3", 0), ("qwen3.5", 0)])
def test_a_table_gives_the_width_by_the_rows(
    family: str, nodes: int | None, table: dict[int, int]
) -> None:
    target = shallow_target(family)
    requests = asked([12] * 6, 6, num_new=(10, 30))
    answer_alone(target, requests)
    draft = tiny_draft(target)
    draft.generation_config.verify_width = table
    draft.generation_config.num_tree_nodes = nodes
    batch = RunningBatch(target, draft, max_rows=4)
    texts: list[list[int]] = [[] for _ in requests]
    seen: set[tuple[int, int]] = set()
    step = running_batch.step

    def noted(run: Any) -> Any:
        found = step(run)
        seen.add((len(run.rows.numbers), run.state.width))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_batch, "step", noted)
        for one in requests:
            batch.add(one.ids, **one.settings)
        while batch.ids:
            for new in batch.step():
                texts[new.id] += new.token_ids
    assert texts == [one.truth for one in requests]
    assert seen == {(rows, width_of_rows(table, rows)) for rows, _ in seen}
    assert {rows for rows, _ in seen} >= {1, 4}


def test_a_long_prompt_stops_the_others_for_a_chunk_only() -> None:
    target = shallow_target("qwen3", **LONG)
    batch = RunningBatch(target, tiny_draft(target), prefill_chunk_size=50)
    settings: dict[str, Any] = {**GREEDY, "eos_token_id": None}
    short = batch.add([5, 6, 7], max_new_tokens=400, **settings)
    batch.step()
    long = batch.add([8] * 730, max_new_tokens=3, **settings)
    last = batch.add([5], max_new_tokens=3, **settings)
    order: list[int] = []
    for _ in range(15):
        new = batch.step()
        assert short in [one.id for one in new], "it has tokens in every step"
        order += [one.id for one in new if one.id != short]
    # 730 tokens are 15 chunks, and who came later waits.
    assert order[0] == long
    assert last in order
    assert order.index(long) < order.index(last)


def test_first_come_first_served() -> None:
    target = shallow_target("qwen3", **LONG)
    batch = RunningBatch(target, tiny_draft(target), max_rows=2, prefill_chunk_size=10)
    ids = [batch.add([5] * length, max_new_tokens=9, **GREEDY) for length in (40, 3, 25, 1, 1)]
    order: list[int] = []
    while batch.ids:
        for new in batch.step():
            if new.id not in order:
                order.append(new.id)
        assert batch.num_running <= 2
    assert order == ids


def test_a_request_waits_for_room_for_its_tokens() -> None:
    target = shallow_target("qwen3", **LONG)
    batch = RunningBatch(target, tiny_draft(target), max_tokens=100)
    with pytest.raises(ValueError, match="together at most 100 tokens, got 101"):
        batch.add([5] * 91, max_new_tokens=10)
    for _ in range(5):
        batch.add([5] * 10, max_new_tokens=15, **GREEDY)
    most = 0
    while batch.ids:
        batch.step()
        most = max(most, batch.num_running)
    # Four rows of 25 tokens are 100.
    assert most in (3, 4)


def test_the_first_token_may_be_the_last() -> None:
    target: Any = shallow_target("qwen3")
    ids = torch.tensor([[5, 6, 7]])
    first = int(target.generate(ids, do_sample=False, max_new_tokens=1)[0, -1])
    batch = RunningBatch(target, tiny_draft(target))
    limited = batch.add(ids, max_new_tokens=1, **GREEDY)
    stopped = batch.add(ids, max_new_tokens=1, stop_token_ids=[first], **GREEDY)
    assert batch.step() == [(limited, [first], "length"), (stopped, [first], "stop")]
    assert batch.step() == []
    assert batch.ended == {}


def test_statistics_and_callbacks_of_a_request() -> None:
    target = shallow_target("qwen3")
    requests = asked([4, 9], 7, num_new=(20, 30))
    answer_alone(target, requests)
    draft = batch_oracle(target)
    use_whole_blocks(draft)
    batch = draft.batch = RunningBatch(target, draft)
    draft.arm([[*one.ids[0].tolist(), *one.truth] for one in requests], 0)
    seen: list[Any] = []
    for one in requests:
        batch.add(one.ids, on_tokens=seen.append, **one.settings)
    ended: dict[int, Any] = {}
    steps: list[Any] = []
    while batch.ids:
        steps += batch.step()
        ended |= batch.ended
    assert seen == steps
    for id, one in enumerate(requests):
        stats = ended[id]
        assert stats.num_prompt_tokens == one.ids.shape[1]
        assert stats.num_new_tokens == len(one.truth)
        assert stats.num_verifies + 1 <= stats.num_new_tokens
        assert 0 < stats.num_accepted <= stats.num_proposed
        assert 0 < stats.first_token_seconds <= stats.seconds
        assert stats.acceptance_length > 1.2


def test_a_first_token_does_not_wait_for_a_step() -> None:
    target = shallow_target("qwen3")
    batch = RunningBatch(target, tiny_draft(target))
    num_verifies: list[int] = []
    for prompt in ([5, 6, 7], [8]):
        batch.add(
            prompt,
            on_tokens=lambda new: num_verifies.append(batch.stats_of(new.id).num_verifies),
            max_new_tokens=20,
            eos_token_id=None,
        )
        batch.step()
        assert num_verifies[-1] == 1
    assert num_verifies == [0, 1, 0, 2, 1]


def test_a_first_token_can_cancel_its_request_and_add_another() -> None:
    target = shallow_target("qwen3")
    requests = asked([4, 6, 9], 7, num_new=(10, 10))
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target))
    told: dict[int, list[int]] = {}

    def cancels(new: Any) -> None:
        told.setdefault(new.id, []).extend(new.token_ids)
        assert batch.cancel(new.id)
        batch.add(requests[2].ids, on_tokens=listens, **requests[2].settings)

    def listens(new: Any) -> None:
        told.setdefault(new.id, []).extend(new.token_ids)

    batch.add(requests[0].ids, on_tokens=cancels, **requests[0].settings)
    batch.add(requests[1].ids, on_tokens=listens, **requests[1].settings)
    while batch.ids:
        batch.step()
    assert told == {0: requests[0].truth[:1], 1: requests[1].truth, 2: requests[2].truth}


def test_an_interrupt_in_a_callback_tells_no_token_twice() -> None:
    target = shallow_target("qwen3")
    [request] = asked([4], 7, num_new=(10, 10))
    answer_alone(target, [request])
    batch = RunningBatch(target, tiny_draft(target))
    told: list[int] = []

    def interrupted(new: Any) -> None:
        told.extend(new.token_ids)
        if len(told) == 1:
            raise KeyboardInterrupt

    batch.add(request.ids, on_tokens=interrupted, **request.settings)
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    while batch.ids:
        batch.step()
    assert told == request.truth


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_what_an_error_left_the_next_step_returns(num_calls: int) -> None:
    target = shallow_target("qwen3")
    requests = asked([4, 6, 9], 7, num_new=(1, 12))
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target))
    left = num_calls

    def fails(new: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError("the client has gone")

    for one in requests:
        batch.add(one.ids, on_tokens=fails, **one.settings)
    texts: list[list[int]] = [[] for _ in requests]
    ended: list[int] = []
    num_raised = 0
    is_over = False
    while not is_over:
        # One step more: the last one may have raised.
        is_over = not batch.ids
        try:
            found = batch.step()
        except OSError:
            num_raised += 1
            continue
        for new in found:
            texts[new.id] += new.token_ids
        ended += [new.id for new in found if new.finished is not None]
        assert batch.ended.keys() == {new.id for new in found if new.finished is not None}
    assert num_raised == 1
    assert texts == [one.truth for one in requests]
    assert sorted(ended) == [0, 1, 2]


def test_a_last_step_that_raised_is_returned_too() -> None:
    target = shallow_target("qwen3")
    (one,) = asked([4], 7, num_new=(1, 1))
    answer_alone(target, [one])
    batch = RunningBatch(target, tiny_draft(target))

    def fails(new: Any) -> None:
        assert batch.ids == []
        raise OSError("the client has gone")

    id = batch.add(one.ids, on_tokens=fails, **one.settings)
    with pytest.raises(OSError, match="has gone"):
        batch.step()
    assert batch.ids == []
    assert not batch.cancel(id)
    assert [new.token_ids for new in batch.step()] == [one.truth]
    assert batch.ended.keys() == {id}
    assert batch.step() == []


def test_a_prefill_that_fails_takes_no_tokens_of_others() -> None:
    target: Any = shallow_target("qwen3")
    requests = asked([4, 9], 7, num_new=(10, 10))
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target))

    def fails(module: Any, given: Any) -> None:
        if given[0].shape[1] == 20:
            raise RuntimeError("a hook of the user's")

    batch.add(requests[0].ids, **requests[0].settings)
    batch.add([5] * 20, max_new_tokens=5)
    handle = target.model.embed_tokens.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="a hook of the user's"):
        batch.step()
    handle.remove()
    text: list[int] = []
    while batch.ids:
        for new in batch.step():
            assert new.id == 0
            text += new.token_ids
    assert text == requests[0].truth


def test_a_cancelled_request_has_no_more_tokens() -> None:
    target = shallow_target("qwen3")
    batch = RunningBatch(target, tiny_draft(target))

    def fails(new: Any) -> None:
        raise OSError("the client has gone")

    settings: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None}
    one = batch.add([1, 2], on_tokens=fails, **settings)
    other = batch.add([3], **settings)
    with pytest.raises(OSError, match="has gone"):
        batch.step()
    assert batch.cancel(one)
    num_tokens = 0
    while batch.ids:
        for new in batch.step():
            assert new.id == other
            num_tokens += len(new.token_ids)
    assert num_tokens == 9


def test_a_step_within_a_step_is_refused() -> None:
    target = shallow_target("qwen3")
    requests = asked([4, 6], 7, num_new=(10, 10))
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target))
    told: dict[int, list[int]] = {0: [], 1: []}

    def steps(new: Any) -> None:
        told[new.id] += new.token_ids
        if new.id == 0:
            with pytest.raises(ValueError, match="one step after the other"):
                batch.step()

    for one in requests:
        batch.add(one.ids, on_tokens=steps, **one.settings)
    texts: dict[int, list[int]] = {0: [], 1: []}
    while batch.ids:
        for new in batch.step():
            texts[new.id] += new.token_ids
    assert told == texts == {0: requests[0].truth, 1: requests[1].truth}


def test_a_prompt_without_room_ends_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([3, 5], 8, num_new=(12, 12))
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target))
    batch.add(requests[0].ids, **requests[0].settings)
    texts = {id: list[int]() for id in range(3)}
    for new in batch.step():
        texts[0] += new.token_ids

    def full(*given: Any) -> None:
        raise OutOfRoomError("expected room, got none")

    with monkeypatch.context() as patch:
        patch.setattr(running_batch, "join", full)
        lost = batch.add([5] * 20, max_new_tokens=5)
        found = batch.step()
        assert (lost, [], "error") in found
        assert batch.ended[lost].error == "expected room, got none"
        for new in found:
            texts[new.id] += new.token_ids
    batch.add(requests[1].ids, **requests[1].settings)
    while batch.ids:
        for new in batch.step():
            texts[new.id] += new.token_ids
    assert texts[0] == requests[0].truth
    assert texts[2] == requests[1].truth


def test_a_step_that_fails_ends_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3")
    requests = asked([3, 5], 9, num_new=(12, 12))
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_rows=1)
    for one in requests:
        batch.add(one.ids, **one.settings)
    batch.step()

    def broken(*given: Any) -> None:
        raise RuntimeError("the target fails")

    with monkeypatch.context() as patch:
        patch.setattr(running_batch, "step", broken)
        with pytest.raises(RuntimeError, match="the target fails"):
            batch.step()
    assert batch.ids == [1]
    text: list[int] = []
    while batch.ids:
        for new in batch.step():
            text += new.token_ids
    assert text == requests[1].truth


def test_memory_that_ends_while_buffers_grow_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3")
    (request,) = asked([3], 9, num_new=(12, 12))
    answer_alone(target, [request])
    batch = RunningBatch(target, tiny_draft(target))
    for _ in range(2):
        batch.add(request.ids, **request.settings)
    batch.step()

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(running_batch, "make_room", full)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            batch.step()
    assert batch.ids == []
    assert answered(batch, request.ids, **request.settings)[0] == request.truth


def test_kept_texts_go_before_a_row_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3", **LONG)
    draft = tiny_draft(target)
    (request,) = asked([30], 9, num_new=(12, 12))
    answer_alone(target, [request])
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    answered(batch, [5] * 40, max_new_tokens=5)
    room = running_batch.make_room

    def full(run: Any) -> None:
        if batch._kept.kept:
            raise OutOfRoomError("expected room, got none")
        room(run)

    monkeypatch.setattr(running_batch, "make_room", full)
    assert answered(batch, request.ids, **request.settings)[0] == request.truth


def test_a_kept_text_without_room_is_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3", **LONG)
    (request,) = asked([70], 9, num_new=(12, 12))
    answer_alone(target, [request])
    batch = RunningBatch(target, tiny_draft(target), max_kept_bytes=2**30)
    answered(batch, request.ids, **request.settings)

    def full(generator: Any, context: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    # The target's keys are there by then.
    with monkeypatch.context() as patch:
        patch.setattr(DFlashCandidateGenerator, "take_context", full)
        assert answered(batch, request.ids, **request.settings) == (request.truth, 0)


def test_requests_that_are_refused() -> None:
    target = shallow_target("qwen3", **LONG)
    draft = tiny_draft(target)
    batch = RunningBatch(target, draft)
    limit: dict[str, Any] = {"max_new_tokens": 5}
    # A config of the caller's; the model's own may say so, and is not followed.
    with_scores = GenerationConfig(return_dict_in_generate=True, output_scores=True)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], limit, "n of at least 1"),
        ([[1, 2], [3, 4]], limit, "one prompt"),
        ([0.5], limit, "whole numbers"),
        ([1, VOCAB], limit, f"token ids from 0 to {VOCAB - 1}"),
        ([-1], limit, "token ids from 0"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens of at least 1"),
        ([1], {"max_new_tokens": True}, "max_new_tokens of at least 1"),
        ([1], limit | {"seed": 0.5}, "a seed that"),
        ([1], limit | {"num_beams": 2}, "num_beams=1"),
        ([1], limit | {"do_sample": True, "num_return_sequences": 2}, "one row"),
        ([1], limit | {"max_time": 1.0}, "no stopping criteria"),
        ([1], limit | {"streamer": object()}, "settings of one row"),
        ([1], limit | {"attention_mask": torch.ones(1, 1)}, "settings of one row"),
        ([1], limit | {"logits_processor": [lambda ids, scores: scores]}, "logits processors"),
        ("text", limit, "input_ids of one prompt, .* got 'text'; pass the ids"),
        (None, limit, "input_ids of one prompt"),
        ([[1, 2], [3]], limit, "input_ids of one prompt"),
        ([2**70], limit, "input_ids of one prompt"),
        ({"input_ids": [1]}, limit, "input_ids of one prompt"),
        ([1], limit | {"seed": "1"}, "a seed that"),
        ([1], limit | {"stop_token_ids": [0.5]}, "stop_token_ids as whole numbers"),
        ([1], limit | {"stop_token_ids": "a"}, "stop_token_ids as whole numbers"),
        ([1], limit | {"on_tokens": 5}, "on_tokens that can be called"),
        ([1], limit | {"output_scores": True}, "an answer of tokens alone"),
        ([1], limit | {"output_hidden_states": True}, "an answer of tokens alone"),
        ([1], limit | {"generation_config": with_scores}, "an answer of tokens alone"),
        ([1], limit | {"token_type_ids": torch.zeros(1, 1)}, "a text without token_type_ids"),
    ]
    for ids, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            batch.add(ids, **settings)
    draft.generation_config.proposal = "sample"
    with pytest.raises(ValueError, match="proposal 'argmax' or 'shared_noise'"):
        batch.add([1], do_sample=True, **limit)
    assert batch.ids == []
    with pytest.raises(ValueError, match="a request that has not ended, got 0"):
        batch.stats_of(0)
    for name in ("max_rows", "max_tokens", "prefill_chunk_size"):
        with pytest.raises(ValueError, match=f"{name} of at least 1"):
            RunningBatch(target, draft, **{name: 0})
    with pytest.raises(ValueError, match="DFlashDraftModel"):
        RunningBatch(target, target)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "name", ["output_scores", "output_logits", "output_hidden_states", "output_attentions"]
)
def test_outputs_that_the_model_asks_for_are_left_out(name: str) -> None:
    target = shallow_target("qwen3")
    ref = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    setattr(target.generation_config, name, True)
    draft = tiny_draft(target)
    answers = list(generate_batch(target, draft, [[5, 6, 7]], max_new_tokens=4, do_sample=False))
    assert answers[0].token_ids == ref[0, 3:].tolist()


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "RoPE does not follow",
        ),
    ],
)
def test_targets_that_are_refused(family: str, overrides: Any, message: str) -> None:
    target = shallow_target(family, **overrides)
    batch = RunningBatch(target, tiny_draft(target))
    with pytest.raises(ValueError, match=message):
        batch.add([5, 6], max_new_tokens=5)


@pytest.mark.same_on_every_release
@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3.5", "lfm2"])
def test_a_row_that_has_left_leaves_nothing_behind(family: str) -> None:
    """Where a row with infinite keys, values and states has been, the next one has its own text."""
    target = shallow_target(family, **LONG)
    requests = asked([60, 4, 6], 11, num_new=(14, 14))
    for one in requests:
        del one.settings["eos_token_id"]
    answer_alone(target, requests)
    batch = RunningBatch(target, tiny_draft(target), max_rows=2)
    batch.add(requests[0].ids, **requests[0].settings)
    spoiled = batch.add(requests[1].ids, **requests[1].settings)
    texts = {id: list[int]() for id in range(3)}

    def step() -> None:
        for new in batch.step():
            texts[new.id] += new.token_ids

    step()
    run = batch._run
    assert run is not None
    make_infinite(run, 1)
    batch.cancel(spoiled)
    batch.add(requests[2].ids, **requests[2].settings)
    while batch.ids:
        step()
    assert texts[0] == requests[0].truth
    assert texts[2] == requests[2].truth


# ---- kept prefixes


def test_an_error_in_a_callback_takes_no_tokens_of_others() -> None:
    target = shallow_target("qwen3")
    batch = RunningBatch(target, tiny_draft(target))
    settings: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None}

    def fails(new: Any) -> None:
        raise RuntimeError("nobody listens")

    told: list[int] = []
    one = batch.add([1, 2], on_tokens=fails, **settings)
    batch.add([3], on_tokens=lambda new: told.extend(new.token_ids), **settings)
    while one in batch.ids:
        with pytest.raises(RuntimeError, match="nobody listens"):
            batch.step()
    while batch.ids:
        batch.step()
    assert len(told) == 9


def answered(batch: RunningBatch, ids: list[int], **settings: Any) -> tuple[list[int], int]:
    """Returns the answer to one request, and how many tokens of its prompt were taken from an earlier text."""
    id = batch.add(ids, **settings)
    text: list[int] = []
    while id in batch.ids:
        for new in batch.step():
            if new.id == id:
                text += new.token_ids
    return text, batch.ended[id].num_kept_tokens


@pytest.mark.parametrize(
    ("family", "settings"),
    half(
        ["qwen3", "qwen3-sliding", "gemma3", "gpt-oss", *RECURRENT],
        {"greedy": GREEDY, "sampled": SAMPLED | {"seed": 3}},
    ),
)
def test_a_next_turn_goes_on_from_the_last_one(family: str, settings: dict[str, Any]) -> None:
    target = shallow_target(family, **LONG)
    draft = tiny_draft(target)
    plain = RunningBatch(target, draft)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30, prefill_chunk_size=30)
    conversation = asked([40], 21)[0].ids[0].tolist()
    num_cached = 0
    # The third turn goes on from a text that itself went on from a kept one.
    for turn in range(3):
        text, num_kept = answered(batch, conversation, max_new_tokens=8, **settings)
        assert num_kept == num_cached
        # The last token of a text is in no cache.
        num_cached = len(conversation) + len(text) - 1
        assert answered(plain, conversation, max_new_tokens=8, **settings) == (text, 0)
        conversation += text + asked([5 + 30 * turn], 22 + turn)[0].ids[0].tolist()


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_a_hybrid_goes_on_from_whole_texts_alone(family: str) -> None:
    target = shallow_target(family, **LONG)
    draft = tiny_draft(target)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30, prefill_chunk_size=30)
    requests = asked([70, 9], 25, num_new=(10, 10))
    first, more = (one.ids[0].tolist() for one in requests)
    text, num_kept = answered(batch, first, **requests[0].settings)
    assert num_kept == 0
    # The state behind the prompt has become that behind the answer.
    assert [len(kept.ids) for kept in batch._kept.kept] == [70 + len(text) - 1]
    for prompt, num in (
        (first, 0),
        # From what the two before it share, and not from the middle of either.
        (first + text[:4] + more, 70 - 1),
        (first + text, 70 + len(text) - 1),
    ):
        alone = asked([1], 0)
        alone[0].ids = torch.tensor([prompt])
        alone[0].settings = requests[0].settings
        answer_alone(target, alone)
        assert answered(batch, prompt, **requests[0].settings) == (alone[0].truth, num)


def test_rows_of_a_hybrid_go_on_where_another_is_kept() -> None:
    target = shallow_target("qwen3.5", **LONG)
    requests = asked([60, 30, 40, 50], 34, num_new=(8, 20))
    answer_alone(target, requests)
    turns = asked([5, 20, 1, 9], 35, num_new=(8, 20))
    for one, before in zip(turns, requests, strict=True):
        said = torch.tensor([before.truth])
        one.ids = torch.cat([before.ids, said, one.ids], dim=1)
    answer_alone(target, turns)
    batch = RunningBatch(target, batch_oracle(target), max_kept_bytes=2**30)
    found = drive(batch, requests + turns, 34)
    assert found["most"] > 2


def test_a_system_prompt_is_prefilled_once() -> None:
    target = shallow_target("qwen3", **LONG)
    system = asked([110], 23)[0].ids[0]
    requests = asked([3, 9, 1, 30, 12], 24)
    for one in requests:
        one.ids = torch.cat([system, one.ids[0]])[None]
    answer_alone(target, requests)
    # No layer of the draft has a window, so that it can go on from the middle of a text.
    draft = tiny_draft(target, layer_types=["full_attention"] * 2)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30, prefill_chunk_size=90)
    kept: dict[int, int] = {}
    step = batch.step

    def noted() -> Any:
        new = step()
        kept.update({id: stats.num_kept_tokens for id, stats in batch.ended.items()})
        return new

    batch.step = noted
    drive(batch, requests, 0)
    assert kept[0] == 0
    assert min(kept[id] for id in range(1, 5)) >= 110


def test_kept_texts_stay_within_their_budget() -> None:
    target = shallow_target("qwen3-sliding", **LONG)
    draft = tiny_draft(target)
    batch = RunningBatch(target, draft, max_kept_bytes=2**30)
    prompts = [one.ids[0].tolist() for one in asked([60, 60, 60, 60], 25)]
    answered(batch, prompts[0], max_new_tokens=8, **GREEDY)
    size = batch._kept.num_bytes
    batch = RunningBatch(target, draft, max_kept_bytes=int(2.5 * size))
    for prompt in prompts:
        answered(batch, prompt, max_new_tokens=8, **GREEDY)
        assert 0 < batch._kept.num_bytes <= 2.5 * size
    # The least recently used one has gone.
    assert [one.ids[:60].tolist() for one in batch._kept.kept] == prompts[2:]
    assert answered(batch, [*prompts[0], 5, 6], max_new_tokens=8, **GREEDY)[1] == 0
    none = RunningBatch(target, draft, max_kept_bytes=size // 4)
    answered(none, prompts[0], max_new_tokens=8, **GREEDY)
    assert none._kept.kept == []


# ---- generate_batch


@pytest.mark.same_on_every_release
def test_answers_come_as_they_end_and_are_those_alone() -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked(lengths_of(9, 12, 100), 12, num_new=(1, 24))
    answer_alone(target, requests)
    limits = [one.settings["max_new_tokens"] for one in requests]
    inputs = [
        {"input_ids": one.ids, "max_new_tokens": limit, "attention_mask": torch.ones_like(one.ids)}
        for one, limit in zip(requests, limits, strict=True)
    ]
    draft = tiny_draft(target)
    settings: dict[str, Any] = {"max_new_tokens": 1, "eos_token_id": [END, END + 1], **GREEDY}
    for given in (inputs, iter(inputs)):
        answers = list(generate_batch(target, draft, given, max_rows=3, **settings))
        assert sorted(answer.index for answer in answers) == list(range(9))
        assert [answer.index for answer in answers] != list(range(9))
        for answer in answers:
            assert answer.token_ids == requests[answer.index].truth


def test_seeds_count_up_from_prompt_to_prompt() -> None:
    target: Any = shallow_target("qwen3")
    draft = tiny_draft(target)
    prompts = [[5, 6], [7], [8, 9, 10]]
    answers = list(generate_batch(target, draft, prompts, max_new_tokens=12, seed=40, **SAMPLED))
    for answer in answers:
        torch.manual_seed(40 + answer.index)
        ids = torch.tensor([prompts[answer.index]])
        text = target.generate(ids, max_new_tokens=12, assistant_model=draft, **SAMPLED)
        assert answer.token_ids == text[0, ids.shape[1] :].tolist()
    found: list[dict[int, list[int]]] = []
    for _ in range(2):
        torch.manual_seed(3)
        answers = generate_batch(target, draft, prompts, max_new_tokens=5, **HOT)
        # By their index: which answer ends first also depends on what the draft has learnt of its widths.
        found.append({answer.index: answer.token_ids for answer in answers})
    assert found[0] == found[1]


def test_a_bad_prompt_of_a_list_is_refused_before_anything_runs() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    with pytest.raises(ValueError, match="prompt 1: expected token ids"):
        generate_batch(target, draft, [[5], [VOCAB]], max_new_tokens=3)
    answers = generate_batch(target, draft, iter([[5], [VOCAB]]), max_rows=1, max_new_tokens=3)
    with pytest.raises(ValueError, match="prompt 1: expected token ids"):
        list(answers)
    with pytest.raises(ValueError, match="without padding"):
        generate_batch(
            target, draft, [{"input_ids": [0, 5], "attention_mask": [0, 1]}], max_new_tokens=3
        )
    no_lists: list[Any] = [{"input_ids": [5]}, "text", None, 5]
    for one in no_lists:
        with pytest.raises(ValueError, match="a list of prompts"):
            generate_batch(target, draft, one, max_new_tokens=3)
    bad: list[Any] = ["text", None, [[1, 2], [3]], 5.5]
    for one in bad:
        with pytest.raises(ValueError, match="prompt 1: expected input_ids of one prompt"):
            generate_batch(target, draft, [[5], one], max_new_tokens=3)
    seed: Any = "1"
    with pytest.raises(ValueError, match="prompt 0: expected a seed"):
        generate_batch(target, draft, [[5]], max_new_tokens=3, seed=seed)


def test_end_tokens_may_be_a_tensor() -> None:
    target: Any = shallow_target("qwen3")
    ids = torch.tensor([[5, 6, 7]])
    text = target.generate(ids, do_sample=False, max_new_tokens=9)[0, 3:].tolist()
    batch = RunningBatch(target, tiny_draft(target))
    stops: list[Any] = [torch.tensor([text[2], 60]), [text[2]], text[2], torch.tensor(text[2])]
    for stop in stops:
        found = answered(batch, [5, 6, 7], max_new_tokens=9, stop_token_ids=stop, **GREEDY)
        assert found[0] == text[: text.index(text[2]) + 1]


def test_a_draft_that_changes_meanwhile_is_refused() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    batch = RunningBatch(target, draft)
    batch.add([5, 6], max_new_tokens=40, **GREEDY)
    batch.step()
    draft.generation_config.block_size = 4
    other = batch.add([5, 6], max_new_tokens=40, **GREEDY)
    assert (other, [], "error") in batch.step()
    assert "as it was when the batch began" in batch.ended[other].error


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [0.0, 0.5])
def test_200_prompts_of_5_to_800_tokens(cancelled: float) -> None:
    target: Any = shallow_target("qwen3-sliding", **LONG)
    target.to(torch.float32)
    chance = random.Random(0)
    requests = asked([chance.randint(5, 800) for _ in range(200)], 20, num_new=(1, 120))
    answer_alone(target, requests)
    batch = RunningBatch(target, batch_oracle(target), max_rows=8, prefill_chunk_size=1000)
    found = drive(batch, requests, 20, cancelled)
    assert found["most"] == 8
    assert found["answered"] + found["broken"] == 200
    # Some of those to be broken off have ended before.
    assert (found["broken"] >= 60) is (cancelled > 0)


@pytest.mark.parametrize("others", [{}, {"do_sample": True, "temperature": 0.8}])
def test_each_row_has_a_least_length_of_its_own(others: dict[str, Any]) -> None:
    target: Any = shallow_target("qwen3")
    prompt = [5, 6, 7, 8]
    ids = torch.tensor([prompt])
    free = target.generate(ids, do_sample=False, max_new_tokens=20)[0, len(prompt) :].tolist()
    ends = free[2:4]
    wanted: list[list[int]] = []
    found: dict[int, list[int]] = {}
    draft = tiny_draft(target)
    batch = RunningBatch(target, draft)
    for least in (None, 6, 14, 0):
        settings = {"min_new_tokens": least, "do_sample": False, "eos_token_id": ends}
        if least == 0:
            settings |= others
        torch.manual_seed(3)
        alone = target.generate(
            ids, max_new_tokens=20, pad_token_id=0, assistant_model=draft, **settings
        )
        wanted.append(alone[0, len(prompt) :].tolist())
        number = batch.add(prompt, max_new_tokens=20, seed=3, **settings)
        found[number] = []
    while batch.num_running + batch.num_waiting:
        for new in batch.step():
            found[new.id] += new.token_ids
    assert list(found.values()) == wanted
    lengths = [len(tokens) for tokens in wanted]
    assert lengths[0] < 6 <= lengths[1], "a least length has to tell"
    assert lengths[2] >= 14
