"""Captured steps over the places of a running batch: rows that join and leave have the text that each has alone."""

from __future__ import annotations

import functools
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_hf import DFlashDraftModel, RunningBatch
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.generation import places as places_module
from dflash_hf.generation import prefill, running_batch
from dflash_hf.generation.buffers import FixedBuffers
from dflash_hf.generation.cuda_graph import why_not
from helpers.float8 import use_emulation
from helpers.half import half
from helpers.running import END, Asked, answer_alone, asked, drive, make_infinite, place_oracle
from helpers.static import Tape, TapeStep, set_engine, use_tapes
from tiny import DFLASH2, DSPARK, VOCAB, shallow_target, tiny_draft, tiny_target

pytestmark = pytest.mark.same_on_every_release

LONG: dict[str, Any] = {"max_position_embeddings": 2048}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
HOT: dict[str, Any] = {"do_sample": True, "temperature": 1.7, "top_k": 0}
PENALISED: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3}
AT_LEAST: dict[str, Any] = {"do_sample": False, "min_new_tokens": 5}
ENGINES = ["static", "cuda_graph"]


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch, smallest_bucket=64)


@pytest.fixture
def eager_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the rows of every eager step of a batch."""
    rows = list[int]()
    step = running_batch.step

    def noted(run: Any) -> Any:
        rows.append(len(run.state.ids))
        return step(run)

    monkeypatch.setattr(running_batch, "step", noted)
    return rows


def lengths_of(num: int, seed: int, longest: int = 200) -> list[int]:
    chance = random.Random(seed)
    return [chance.choice([1, 2, 7, 30, chance.randint(1, longest)]) for _ in range(num)]


def batch_of(target: Any, draft: DFlashDraftModel, engine: str, **settings: Any) -> RunningBatch:
    set_engine(draft, engine)
    settings = {"max_rows": 4, "prefill_chunk_size": 64, **settings}
    return RunningBatch(target, draft, **settings)


def eager_draft(target: Any) -> DFlashDraftModel:
    """Returns a draft whose steps are not captured, until another engine is set."""
    draft = tiny_draft(target)
    set_engine(draft, "eager")
    return draft


def target_of(family: str) -> Any:
    """A target of two layers; of two, qwen3.5 would end its texts early, so that few rows would run together."""
    make = tiny_target if family == "qwen3.5" else shallow_target
    target: Any = make(family, **LONG)
    if family == "gpt-oss":
        target.float().set_experts_implementation("batched_mm")
    return target


@functools.cache
def answered_alone(
    family: str, lengths: tuple[int, ...], seed: int, num_new: tuple[int, int]
) -> list[Asked]:
    """Returns greedy requests with what a family's target answers each alone, whatever engine a batch has."""
    requests = asked(list(lengths), seed, num_new=num_new)
    answer_alone(target_of(family), requests)
    return requests


@pytest.mark.parametrize(
    ("family", "engine"),
    half(["qwen3", "qwen3-sliding", "gemma2", "gpt-oss", "qwen3.5", "lfm2", "bamba"], ENGINES),
)
def test_texts_are_those_of_each_prompt_alone(
    family: str, engine: str, eager_steps: list[int]
) -> None:
    target = target_of(family)
    requests = answered_alone(family, tuple(lengths_of(9, 8)), 8, (8, 24))
    batch = batch_of(target, place_oracle(target), engine)
    found = drive(batch, requests, 8, cancelled=0.2)
    assert found["most"] >= 3
    assert found["broken"] > 0
    assert not eager_steps
    assert (Tape.num_replays > 0) == (engine == "cuda_graph")


@functools.cache
def settings_answered_alone(proposal: Any) -> list[Asked]:
    """Returns requests of several kinds with what each is answered alone, whatever engine a batch has."""
    target = target_of("qwen3")
    requests = asked(lengths_of(8, 3), 3, num_new=(6, 20), kinds=(GREEDY, SAMPLED, HOT))
    draft = eager_draft(target)
    draft.generation_config.proposal = proposal
    answer_alone(target, requests, draft)
    return requests


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("proposal", ["argmax", "shared_noise"])
def test_each_row_has_settings_and_a_seed_of_its_own(proposal: Any, engine: str) -> None:
    target = target_of("qwen3")
    requests = settings_answered_alone(proposal)
    draft = tiny_draft(target)
    draft.generation_config.proposal = proposal
    found = drive(batch_of(target, draft, engine), requests, 3, cancelled=0.1)
    assert found["most"] == 4


@pytest.mark.parametrize("kind", [DFLASH2, DSPARK], ids=["dflash 2", "dspark"])
def test_drafts_of_other_kinds(kind: dict[str, Any], eager_steps: list[int]) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked(lengths_of(6, 28, 60), 28, num_new=(6, 20), kinds=(GREEDY, SAMPLED, HOT))
    draft = tiny_draft(target, **kind)
    draft.generation_config.proposal = "shared_noise"
    set_engine(draft, "eager")
    answer_alone(target, requests, draft)
    drive(batch_of(target, draft, "cuda_graph", max_rows=2), requests, 28)
    assert not eager_steps


def test_warpers_that_no_step_needs_the_host_for(eager_steps: list[int]) -> None:
    target = shallow_target("qwen3", **LONG)
    values: dict[str, Any] = {
        "typical_p": 0.5,
        "epsilon_cutoff": 3e-3,
        "min_p": 0.1,
        "renormalize_logits": True,
        "remove_invalid_values": True,
        "top_p": 0.7,
    }
    kinds = tuple({"do_sample": True, "top_k": 0, name: value} for name, value in values.items())
    requests = asked(lengths_of(12, 29, 60), 29, num_new=(5, 10), kinds=kinds)
    answer_alone(target, requests, eager_draft(target))
    drive(batch_of(target, tiny_draft(target), "cuda_graph", max_rows=2), requests, 29)
    assert Tape.num_replays > 0
    assert not eager_steps


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_need_the_host_make_eager_steps(
    engine: str, eager_steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    target = shallow_target("qwen3", **LONG)
    kinds = (GREEDY, SAMPLED, GREEDY, PENALISED, AT_LEAST)
    requests = asked(lengths_of(10, 6), 6, num_new=(6, 20), kinds=kinds)
    draft = place_oracle(target)
    draft.generation_config.proposal = "argmax"
    answer_alone(target, requests, eager_draft(target))
    batch = batch_of(target, draft, engine, max_rows=2)
    running_batch.logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        drive(batch, requests, 6, cancelled=0.1)
    # Over all places, and between them there are captured ones.
    assert set(eager_steps) == {2}
    assert (Tape.num_replays > 0) == (engine == "cuda_graph")
    assert "while there is a row with logits processors that read its text" in caplog.text


HOST: dict[str, dict[str, Any]] = {
    "penalty": PENALISED,
    "least length": AT_LEAST,
    "eta": {"do_sample": True, "eta_cutoff": 1e-3},
    "log-probabilities": {"num_logprobs": 1},
}


@pytest.mark.parametrize("settings", HOST.values(), ids=HOST.keys())
def test_steps_are_captured_again_once_such_a_row_has_left(
    settings: dict[str, Any], eager_steps: list[int]
) -> None:
    target = shallow_target("qwen3", **LONG)
    [one] = asked([9], 20, num_new=(24, 24))
    del one.settings["eos_token_id"]
    answer_alone(target, [one])
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    ids = [batch.add(one.ids, **one.settings)]
    ids.append(batch.add(one.ids, max_new_tokens=6, eos_token_id=VOCAB - 1, **settings))
    text = list[int]()
    num_eager = 0
    while batch.ids:
        for new in batch.step():
            text += new.token_ids if new.id == ids[0] else []
        if ids[1] in batch.ids:
            num_eager = len(eager_steps)
    assert text == one.truth
    # One more of them has ended the row.
    assert len(eager_steps) == num_eager + 1
    assert Tape.num_replays > 10


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probabilities_are_those_of_an_eager_batch(engine: str) -> None:
    target = shallow_target("qwen3", **LONG)
    [one, other] = asked([20, 30], 6, num_new=(12, 12))
    found: list[list[float]] = []
    for name in ("eager", engine):
        batch = batch_of(target, tiny_draft(target), name)
        batch.add(other.ids, **other.settings)
        id = batch.add(one.ids, num_logprobs=1, **one.settings)
        stats = batch.stats_of(id)
        while batch.ids:
            batch.step()
        found.append([token.logprob for token in stats.logprobs])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nodes", [0, 12])
def test_chains_and_trees(nodes: int, engine: str) -> None:
    target = shallow_target("qwen3-sliding", **LONG)
    requests = asked(lengths_of(8, 4, 60), 4, num_new=(6, 20), kinds=(GREEDY, PENALISED))
    answer_alone(target, requests)
    draft = place_oracle(target)
    draft.generation_config.num_tree_nodes = nodes
    drive(batch_of(target, draft, engine), requests, 4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3.5"])
def test_buffers_grow_where_they_are_full(
    family: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list[int]()
    grow = RaggedCache.grow

    def noted(self: RaggedCache, max_length: int) -> None:
        lengths.append(max_length)
        grow(self, max_length)

    monkeypatch.setattr(RaggedCache, "grow", noted)
    monkeypatch.setattr(prefill, "FIRST_ROOM", 2)
    monkeypatch.setattr(places_module, "FIRST_LENGTH", 2)
    target = target_of(family)
    requests = answered_alone(family, (3, 60, 9, 150, 2), 7, (16, 32))
    batch = batch_of(target, place_oracle(target), engine)
    drive(batch, requests, 7)
    # Both caches, a few times and not at every step.
    assert 2 <= len(lengths) // 2 <= 8
    num_growths = len(lengths)
    num_captured = len(TapeStep.captured)
    # The longer buffers stay, and so do the graphs over them.
    ids = [batch.add(one.ids, **one.settings) for one in requests[3:]]
    texts: dict[int, list[int]] = {id: [] for id in ids}
    while batch.ids:
        for new in batch.step():
            texts[new.id] += new.token_ids
    assert list(texts.values()) == [one.truth for one in requests[3:]]
    assert len(lengths) == num_growths
    assert len(TapeStep.captured) <= num_captured + 1


def test_widths_that_change_beside_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens gather in eager steps, and each captured step writes its own."""
    target = shallow_target("qwen3")
    requests = asked(lengths_of(12, 5, 40), 5, num_new=(5, 40), kinds=(GREEDY, PENALISED))
    answer_alone(target, requests)
    chance = random.Random(0)

    class Widths:
        def next_choice(self) -> tuple[int, bool]:
            return chance.choice([1, 1, 1, 2, 6]), False

        def use_rows(self, rows: int) -> None: ...

        def observe(self, *args: Any) -> None: ...

        def verdict(self) -> str:
            return ""

    monkeypatch.setattr(places_module, "choose_widths", lambda *given, **settings: Widths())
    drive(batch_of(target, place_oracle(target, 6), "static"), requests, 5, cancelled=0.2)


def test_widths_follow_the_measured_costs() -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked(lengths_of(8, 8, 60), 8, num_new=(20, 36))
    answer_alone(target, requests)
    draft = place_oracle(target)
    draft.generation_config.verify_width = "auto"
    drive(batch_of(target, draft, "cuda_graph"), requests, 8)
    assert len(set(TapeStep.widths)) > 2


def test_widths_that_other_graphs_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's clock never measures the same twice: each combination of settings has its own useful widths."""
    chance = random.Random(1)

    def measure(self: TapeStep, captured: Any) -> float:
        return chance.choice([0.5, 1.0, 2.0]) * (1 + captured.graph.width)

    monkeypatch.setattr(TapeStep, "measure", measure)
    target = shallow_target("qwen3", **LONG)
    requests = asked(lengths_of(20, 8, 60), 8, num_new=(30, 60), kinds=(GREEDY, SAMPLED, HOT))
    draft = place_oracle(target)
    draft.generation_config.proposal = "argmax"
    answer_alone(target, requests, eager_draft(target))
    draft.generation_config.verify_width = "auto"
    drive(batch_of(target, draft, "cuda_graph"), requests, 8)


# ---- graphs


def answers(batch: RunningBatch, requests: list[Any]) -> None:
    """Answers requests all at once, and checks the texts."""
    texts = {batch.add(one.ids, seed=one.seed, **one.settings): list[int]() for one in requests}
    while batch.ids:
        for new in batch.step():
            texts[new.id] += new.token_ids
    assert list(texts.values()) == [one.truth for one in requests]


@pytest.fixture
def one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has steps read lengths on the device, as the kernel does: the same graph at any length."""
    monkeypatch.setattr(
        "dflash_hf.generation.static_step.reads_lengths_on_device", lambda *caches: True
    )


@pytest.mark.usefixtures("one_bound")
@pytest.mark.parametrize("kind", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_graph_serves_all_rows_of_one_kind(
    kind: dict[str, Any], eager_steps: list[int]
) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked(lengths_of(6, 9), 9, num_new=(8, 20), kinds=(kind,))
    draft = eager_draft(target)
    answer_alone(target, requests, draft)
    batch = batch_of(target, draft, "cuda_graph")
    answers(batch, requests)
    assert len(TapeStep.captured) == 1
    num_replays = Tape.num_replays
    # Also for those that come when none has run for a while.
    answers(batch, requests[:3])
    assert len(TapeStep.captured) == 1
    assert Tape.num_replays > num_replays
    assert not eager_steps


@pytest.mark.usefixtures("one_bound")
def test_rows_go_where_their_warpers_are_baked_in() -> None:
    target = shallow_target("qwen3", **LONG)
    alone = eager_draft(target)
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    for seed in range(3):
        requests = asked([9, 5, 7], seed, num_new=(12, 12), kinds=(GREEDY,))
        # In another order each time.
        requests[seed].settings |= SAMPLED
        answer_alone(target, requests, alone)
        answers(batch, requests)
    # Of the first greedy or sampled rows alone, and of both beside one another.
    assert len(TapeStep.captured) <= 4
    num_captured = len(TapeStep.captured)
    answers(batch, requests)
    assert len(TapeStep.captured) == num_captured


@pytest.mark.usefixtures("one_bound")
def test_more_end_tokens_than_there_is_room_for() -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5, 7], 10, num_new=(12, 12))
    requests[1].settings["eos_token_id"] = [END, END + 1, *range(100, 120)]
    draft = tiny_draft(target)
    answer_alone(target, requests)
    answers(batch_of(target, draft, "cuda_graph"), requests)


def goes_on(batch: RunningBatch, request: Any, change: Callable[[], object]) -> list[int]:
    """Changes the models while a row runs, then answers a request beside it; returns the text."""
    [other] = asked([9], 21, num_new=(60, 60))
    del other.settings["eos_token_id"]
    batch.add(other.ids, **other.settings)
    for _ in range(3):
        batch.step()
    assert Tape.num_replays > 0
    change()
    answer_alone(batch.model, [request])
    id = batch.add(request.ids, **request.settings)
    text = list[int]()
    while id in batch.ids:
        for new in batch.step():
            text += new.token_ids if new.id == id else []
    assert batch.num_running == 1
    return text


def test_a_row_that_comes_goes_by_the_weights_of_now() -> None:
    target = shallow_target("qwen3", **LONG)
    [one] = asked([20], 22, num_new=(12, 12))

    def replace_weights() -> None:
        for layer in target.model.layers:
            weight = layer.mlp.down_proj.weight
            layer.mlp.down_proj.weight = torch.nn.Parameter(-3 * weight.detach())

    draft = tiny_draft(target)
    assert goes_on(batch_of(target, draft, "cuda_graph"), one, replace_weights) == one.truth
    assert len(TapeStep.captured) > 1


def test_a_row_that_comes_goes_by_the_hooks_of_now(
    monkeypatch: pytest.MonkeyPatch, eager_steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def choose(target: Any, draft: Any) -> str:
        return "eager" if why_not(target, draft) else "cuda_graph"

    monkeypatch.setattr(places_module, "choose_engine", choose)
    target = shallow_target("qwen3", **LONG)
    [one] = asked([20], 23, num_new=(12, 12))

    def add_hook() -> None:
        target.model.layers[0].register_forward_hook(lambda layer, args, out: -out)

    draft = tiny_draft(target)
    assert goes_on(batch_of(target, draft, "cuda_graph"), one, add_hook) == one.truth
    assert eager_steps


# ---- places


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3.5"])
def test_steps_leave_a_free_place_as_it_is(family: str, engine: str) -> None:
    target = shallow_target(family, **LONG)
    requests = asked([60, 4, 6], 11, num_new=(16, 16))
    for one in requests:
        del one.settings["eos_token_id"]
    answer_alone(target, requests)
    batch = batch_of(target, tiny_draft(target), engine, max_rows=2)
    batch.add(requests[0].ids, **requests[0].settings)
    left = batch.add(requests[1].ids, **requests[1].settings)
    texts = {id: list[int]() for id in range(3)}

    def step() -> None:
        for new in batch.step():
            texts[new.id] += new.token_ids

    step()
    run = batch._run
    assert run is not None
    # What a row leaves behind may be infinite.
    make_infinite(run, 1)
    batch.cancel(left)
    addresses = [tensor.data_ptr() for tensor in run.buffers.owned()]
    for _ in range(3):
        step()
        assert run.state.lengths[1] == 0
        assert run.state.cursor[1] == 1
        assert run.state.done[1]
        assert run.rows.reported.lengths[1] == 0
    batch.add(requests[2].ids, **requests[2].settings)
    while batch.ids:
        step()
    assert texts[0] == requests[0].truth
    assert texts[2] == requests[2].truth
    assert [tensor.data_ptr() for tensor in run.buffers.owned()] == addresses


@pytest.mark.parametrize("family", ["qwen3-sliding", "qwen3.5"])
def test_a_next_turn_goes_on_from_the_last_one(family: str) -> None:
    target = shallow_target(family, **LONG)
    draft = tiny_draft(target)
    batch = batch_of(target, draft, "cuda_graph", max_kept_bytes=2**30)
    [one] = asked([40], 12, num_new=(12, 12))
    answer_alone(target, [one])
    answers(batch, [one])
    more = torch.cat([one.ids, torch.tensor([one.truth]), torch.tensor([[5, 6, 7]])], dim=1)
    one.ids = more
    answer_alone(target, [one])
    id = batch.add(one.ids, **one.settings)
    stats = batch.stats_of(id)
    text = list[int]()
    while batch.ids:
        for new in batch.step():
            text += new.token_ids
    assert text == one.truth
    assert stats.num_kept_tokens > 40


def test_statistics_of_rows_beside_free_places() -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5], 13, num_new=(12, 12))
    answer_alone(target, requests)
    found: list[Any] = []
    for engine in ("eager", "cuda_graph"):
        batch = batch_of(target, tiny_draft(target), engine)
        batch.draft.generation_config.verify_width = 8
        ids = [batch.add(one.ids, **one.settings) for one in requests]
        stats = [batch.stats_of(id) for id in ids]
        while batch.ids:
            batch.step()
        found.append([(one.proposed, one.accepted, one.num_new_tokens) for one in stats])
    assert found[0] == found[1]


# ---- what fails


def test_a_step_that_fails_leaves_no_half_written_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5], 14, num_new=(12, 12))
    answer_alone(target, requests)
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    batch.add(requests[0].ids, **requests[0].settings)
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(Tape, "replay", lambda tape: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.step()
    assert batch.ids == []
    assert batch._places is None
    answers(batch, requests)


def test_no_memory_for_places_makes_an_eager_batch(
    monkeypatch: pytest.MonkeyPatch, eager_steps: list[int]
) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5, 30], 15, num_new=(12, 12))
    answer_alone(target, requests)

    def full(*given: Any) -> None:
        raise OutOfRoomError("expected less")

    monkeypatch.setattr(FixedBuffers, "of_places", full)
    answers(batch_of(target, tiny_draft(target), "cuda_graph"), requests)
    assert max(eager_steps) == 3


@pytest.mark.parametrize("name", ["allocate", "take_prefill"])
def test_a_request_has_the_memory_of_places_without_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target("qwen3", **LONG)
    [one] = asked([30], 24, num_new=(12, 12))
    answer_alone(target, [one])
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    answers(batch, [one])
    assert batch._places is not None
    buffers = weakref.ref(batch._places.buffers.state.ids)
    kind: Any = FixedBuffers if name == "allocate" else RaggedCache
    make = getattr(kind, name)
    refusals: list[str] = []

    def full(*given: Any, **sizes: Any) -> Any:
        if buffers() is not None:
            refusals.append(name)
            raise OutOfRoomError("expected less")
        return make(*given, **sizes)

    monkeypatch.setattr(kind, name, full)
    answers(batch, [one])
    assert refusals


@pytest.mark.parametrize("has_memory", [True, False], ids=["longer places", "no places"])
def test_a_prompt_that_places_without_rows_cannot_grow_for(
    has_memory: bool, monkeypatch: pytest.MonkeyPatch, eager_steps: list[int]
) -> None:
    target = shallow_target("qwen3", **LONG)
    short, long = asked([9, 150], 25, num_new=(12, 12))
    answer_alone(target, [short, long])
    monkeypatch.setattr(places_module, "FIRST_LENGTH", 64)
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    answers(batch, [short])
    assert batch._places is not None
    buffers = weakref.ref(batch._places.buffers.state.ids)
    allocate = FixedBuffers.of_places

    def full(self: Any, length: int) -> None:
        raise OutOfRoomError("expected less")

    def allocated(*given: Any) -> FixedBuffers:
        # There are never two sets at a time.
        if buffers() is not None or not has_memory:
            raise OutOfRoomError("expected less")
        return allocate(*given)

    monkeypatch.setattr(RaggedCache, "grow", full)
    monkeypatch.setattr(FixedBuffers, "of_places", allocated)
    answers(batch, [long])
    assert set(eager_steps) == (set() if has_memory else {1})


def test_an_interrupt_while_rows_leave_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5], 26, num_new=(12, 12))
    answer_alone(target, requests)
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    ids = [batch.add(one.ids, **one.settings) for one in requests]
    batch.step()

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FixedBuffers, "free_row", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.cancel(ids[0])
    assert batch.ids == []
    answers(batch, requests)


def test_a_row_without_room_to_grow_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 150], 16, num_new=(12, 12))
    answer_alone(target, requests)
    monkeypatch.setattr(prefill, "FIRST_ROOM", 2)
    monkeypatch.setattr(places_module, "FIRST_LENGTH", 64)
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    ids = [batch.add(one.ids, **one.settings) for one in requests]

    def full(self: RaggedCache, max_length: int) -> None:
        raise OutOfRoomError("expected less")

    monkeypatch.setattr(RaggedCache, "grow", full)
    texts: dict[int, list[int]] = {id: [] for id in ids}
    reasons = dict[int, Any]()
    while batch.ids:
        for new in batch.step():
            texts[new.id] += new.token_ids
            reasons[new.id] = new.finished
    assert reasons[ids[1]] == "error"
    assert texts[ids[0]] == requests[0].truth


def test_a_step_that_is_refused_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, eager_steps: list[int]
) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5, 30], 17, num_new=(12, 12))
    answer_alone(target, requests)
    monkeypatch.setattr(places_module, "start_engine", lambda run: None)
    answers(batch_of(target, tiny_draft(target), "cuda_graph"), requests)
    assert set(eager_steps) == {4}


@pytest.mark.parametrize("settings", [{"max_tokens": 400}, {}])
def test_buffers_that_grow_by_rows_are_for_eager_steps(
    settings: dict[str, Any], eager_steps: list[int]
) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5], 18, num_new=(12, 12))
    answer_alone(target, requests)
    engine = "cuda_graph" if settings else "eager"
    batch = batch_of(target, tiny_draft(target), engine, **settings)
    answers(batch, requests)
    assert batch._places is None
    assert max(eager_steps) == 2


@pytest.mark.parametrize("what", ["width", "dtype"])
def test_another_pair_while_nothing_runs_has_other_places(what: str) -> None:
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5], 19, num_new=(12, 12))
    answer_alone(target, requests)
    batch = batch_of(target, tiny_draft(target), "cuda_graph")
    answers(batch, requests)
    before = batch._places
    assert before is not None
    answers(batch, requests)
    assert batch._places is before
    if what == "width":
        batch.draft.generation_config.verify_width = 3
    else:
        target.float()
        answer_alone(target, requests)
    answers(batch, requests)
    assert batch._places is not before


def test_a_draft_in_fp8_keeps_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulation(monkeypatch)
    target = shallow_target("qwen3", **LONG)
    requests = asked([9, 5], 27, num_new=(12, 12))
    answer_alone(target, requests)
    # Sizes that can all be multiplied in FP8.
    draft = tiny_draft(target, intermediate_size=48)
    draft.generation_config.draft_dtype = "float8_e4m3fn"
    batch = batch_of(target, draft, "cuda_graph")
    answers(batch, requests)
    before = batch._places
    num_captured = len(TapeStep.captured)
    # Every call has a copy of the draft of its own, over the same rounded weights.
    answers(batch, requests)
    assert batch._places is before
    assert len(TapeStep.captured) == num_captured
