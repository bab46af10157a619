"""Graphs and the buffers under them: kept for the next call of the same shape, and let go when of no use."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dflash_hf import free_buffers, ops
from dflash_hf.generation import buffers, cuda_graph, prefill
from dflash_hf.generation.buffers import kept_buffers, round_up
from dflash_hf.generation.host_reads import NoHostReads
from dflash_hf.target_model.parts import find_target
from helpers.engine import GREEDY, NEW, pair
from helpers.static import TapeStep, set_engine, use_tapes
from tiny import FAMILIES, prompts, shallow_target, tiny_draft


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch)


def test_graphs_are_kept_for_equal_shapes_and_can_be_freed() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    captured = list(TapeStep.captured)
    assert captured == sorted(captured, reverse=True)
    assert len(captured) > 1
    for new in (NEW, 9, 17):
        out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref[:, : 11 + new])
    assert TapeStep.captured == captured
    watched = [weakref.ref(tensor) for tensor in kept_buffers(draft)[0].owned()]
    free_buffers(draft)
    gc.collect()
    assert not [ref for ref in watched if ref() is not None]
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert TapeStep.captured == captured * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_call_captures_nothing(family: str) -> None:
    target, draft, inputs, ref = pair("cuda_graph", family)
    if family in ("qwen3-moe", "gpt-oss"):
        # Their other implementation counts on the host.
        target.set_experts_implementation("batched_mm")
        ref = target.generate(**inputs, **GREEDY)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "cuda_graph"
        target.generate(**inputs, **GREEDY)
        assert len(TapeStep.captured) == len(set(TapeStep.captured))


def test_an_answer_of_one_token_captures_nothing() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    out = target.generate(**inputs, max_new_tokens=1, do_sample=False, assistant_model=draft)
    assert torch.equal(out, ref[:, :12])
    assert TapeStep.captured == []
    assert draft.last_stats.num_target_forwards == 1


def test_graphs_of_a_few_settings_are_kept() -> None:
    target, draft, inputs, _ = pair("cuda_graph")
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1):
        settings = {"max_new_tokens": 5, "do_sample": True, "temperature": temperature}
        target.generate(**inputs, **settings, assistant_model=draft)
    kept = kept_buffers(draft)[0].graphs.captured
    assert len(kept) == cuda_graph.MAX_SETTINGS
    assert any("1.1" in str(settings) for settings in kept)
    num_captured = len(TapeStep.captured)
    for temperature in (0.7, 1.1):
        settings = {"max_new_tokens": 5, "do_sample": True, "temperature": temperature}
        target.generate(**inputs, **settings, assistant_model=draft)
    assert len(TapeStep.captured) == num_captured


@pytest.mark.parametrize(
    "switch",
    [
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ],
)
def test_products_that_may_round_otherwise_are_captured_anew(switch: str) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    num_captured = len(TapeStep.captured)
    switches = torch.backends.cuda.matmul
    before = getattr(switches, switch)
    setattr(switches, switch, not before)
    try:
        target.generate(**inputs, **GREEDY, assistant_model=draft)
    finally:
        setattr(switches, switch, before)
    assert len(TapeStep.captured) == 2 * num_captured
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(TapeStep.captured) == 2 * num_captured


def test_moved_weights_are_captured_again_changed_ones_seen() -> None:
    target, draft, inputs, _ = pair("cuda_graph")
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    num_captured = len(TapeStep.captured)
    layer: Any = find_target(target).layers[1]
    for change, is_captured_again in (("in place", False), ("replaced", True)):
        with torch.no_grad():
            if change == "in place":
                layer.mlp.gate_proj.weight.mul_(-1.0)
            else:
                layer.mlp.gate_proj.weight = nn.Parameter(
                    layer.mlp.gate_proj.weight.flip(0).clone()
                )
        ref = target.generate(**inputs, **GREEDY)
        out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        assert torch.equal(out, ref), change
        assert (len(TapeStep.captured) > num_captured) == is_captured_again


def test_copies_of_weights_that_were_let_go_are_read_by_no_graph() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    num_captured = list[int]()
    # The second call has no copies of the draft's weights, and the third one makes others.
    for kernels in (True, False, True, True):
        TapeStep.captured.clear()
        with ops.kernels(kernels):
            out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        assert torch.equal(out, ref)
        has_copies = kept_buffers(draft)[0].newest.weights is not None
        assert has_copies == kernels
        num_captured.append(len(TapeStep.captured))
    assert num_captured[2] == num_captured[0] > 0
    assert num_captured[3] == 0


def test_buffers_belong_to_one_draft_and_one_target() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    again = copy.deepcopy(draft)
    assert len(kept_buffers(draft)) == 1
    assert not kept_buffers(again)
    other = shallow_target("qwen3", seed=3)
    other_ref = other.generate(**inputs, **GREEDY)
    assert torch.equal(other.generate(**inputs, **GREEDY, assistant_model=draft), other_ref)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(kept_buffers(draft)) == 2
    del other
    gc.collect()
    assert len(kept_buffers(draft)) == 1, "buffers keep no target alive, and go with it"


@pytest.mark.parametrize("kernels", [None, True])
def test_calls_in_and_out_of_inference_mode_share_buffers(kernels: bool | None) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    for mode in (True, False, True, False):
        # Kernels have copies of weights among the buffers.
        with torch.inference_mode(mode), ops.kernels(kernels):
            out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        assert torch.equal(out, ref)
        assert draft.last_stats.engine == "cuda_graph"
    assert len(TapeStep.captured) == len(set(TapeStep.captured))


def test_calls_in_several_threads_share_no_buffers() -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    set_engine(draft, "static")
    calls = [prompts([4, 11, 7], seed) for seed in range(3)]
    refs = [target.generate(**inputs, **GREEDY) for inputs in calls]
    together, found = threading.Barrier(3), [False] * 3

    def run(index: int) -> None:
        together.wait()
        outs = [target.generate(**calls[index], **GREEDY, assistant_model=draft) for _ in range(2)]
        found[index] = all(torch.equal(out, refs[index]) for out in outs)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3
    kept = kept_buffers(draft)
    assert len({tensor.data_ptr() for one in kept for tensor in one.owned()}) == sum(
        len(one.owned()) for one in kept
    )


def test_only_so_many_buffers_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    set_engine(draft, "static")
    for batch in range(1, 8):
        target.generate(
            **prompts([5] * batch, 0), max_new_tokens=3, do_sample=False, assistant_model=draft
        )
    assert [kept.shape.batch for kept in kept_buffers(draft)] == [4, 5, 6, 7]
    total = 4 * kept_buffers(draft)[-1].num_bytes()
    monkeypatch.setattr(buffers, "total_memory", lambda device: total)
    target.generate(**prompts([5] * 7, 0), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert [kept.shape.batch for kept in kept_buffers(draft)] == [7]
    buffers.logger.warning_once.cache_clear()
    monkeypatch.setattr(buffers, "total_memory", lambda device: total - 1)
    for _ in range(2):
        target.generate(
            **prompts([5] * 7, 0), max_new_tokens=3, do_sample=False, assistant_model=draft
        )
        assert not kept_buffers(draft)
    told = [
        record.getMessage() for record in caplog.records if "are not kept" in record.getMessage()
    ]
    assert len(told) == 1
    assert told[0].startswith(
        "Buffers of a run with a DFlash draft were more than 25% of the memory of cpu"
    )


def test_a_growing_conversation_is_captured_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are too short are replaced by ones of twice the length, as long as those can be kept."""
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    set_engine(draft, "static")
    capacities = list[int]()
    for length in range(5, 120, 5):
        target.generate(
            **prompts([length], 0), max_new_tokens=3, do_sample=False, assistant_model=draft
        )
        capacities.append(kept_buffers(draft)[0].capacity)
    assert sorted(set(capacities)) == [16, 32, 64, 128]
    (kept,) = kept_buffers(draft)
    monkeypatch.setattr(buffers, "total_memory", lambda device: 7 * kept.num_bytes())
    target.generate(**prompts([130], 0), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert kept_buffers(draft)[0].capacity == round_up(130 + 3 + 8), (
        "twice as much would not be kept"
    )


def test_the_guard_looks_once_at_every_setting_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = list[NoHostReads]()

    def noted() -> NoHostReads:
        guarded.append(NoHostReads())
        return guarded[-1]

    monkeypatch.setattr(cuda_graph, "NoHostReads", noted)
    target, draft, inputs, ref = pair("cuda_graph")
    for settings, num_new in (({}, 1), ({}, 0), ({"do_sample": True, "temperature": 0.5}, 1)):
        guarded.clear()
        num_captured = len(TapeStep.captured)
        out = target.generate(**inputs, **{**GREEDY, **settings}, assistant_model=draft)
        assert settings or torch.equal(out, ref)
        assert len(guarded) == num_new
        assert (len(TapeStep.captured) > num_captured + 1) == bool(num_new), "several lengths each"


@pytest.mark.parametrize(
    ("limit", "affordable", "room"),
    [(100, 10, 100), (2000, 2000, 2000), (2000, 1999, 1000), (9999, 9999, 4000)],
)
def test_room_is_what_can_be_kept(
    limit: int, affordable: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "FIXED_ROOM", 4000)
    assert prefill.fixed_room(limit, affordable) == room


def test_a_length_that_is_affordable_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = shallow_target("qwen3"), tiny_draft(shallow_target("qwen3"))
    set_engine(draft, "static")
    monkeypatch.setattr(buffers, "total_memory", lambda device: 2_000_000)
    monkeypatch.setattr(buffers, "free_memory", lambda device: 2_000_000)
    length = buffers.affordable_length(find_target(target), draft, 3)
    assert length > 50
    limit = int(length * 0.9) - 5 - 16
    target.generate(
        **prompts([5] * 3, 0), max_new_tokens=limit, do_sample=False, assistant_model=draft
    )
    assert kept_buffers(draft)
    assert kept_buffers(draft)[0].num_bytes() > 0.75 * buffers.KEPT_SHARE * 2_000_000
