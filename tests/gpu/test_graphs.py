"""CUDA graphs on a GPU: the eager loop's text, no wait for the device, kept and freed, and errors of a capture.

Without a GPU the same tests run on the CPU with tapes in place of graphs, so that a mistake in a test is found there.
What only CUDA's allocator, streams and generator can show runs on the GPU alone. More of what tapes can show is in
tests/unit/test_engine.py and tests/equality/test_static_step.py.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_hf import RunningBatch, free_buffers
from dflash_hf.generation import buffers, choice_costs, cuda_graph, decode
from dflash_hf.generation.buffers import kept_buffers
from dflash_hf.generation.choice_costs import candidate_widths
from dflash_hf.generation.cuda_graph import why_not
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.target_model.parts import find_target
from helpers.host_reads import no_host_reads
from helpers.running import answer_alone, asked, drive, place_oracle
from helpers.static import set_engine, tensor_oracle, use_tapes
from helpers.vision import shallow_vision_target, vision_prompts
from helpers.whole_blocks import use_whole_blocks
from helpers.widths import use_random_widths
from tiny import DFLASH2, FAMILIES, prompts, shallow_target, tiny_draft, truth_of

NEW = 28
LENGTHS = {"one": [9], "three": [4, 11, 7]}
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
gpu_only = pytest.mark.parametrize("device", [CUDA], indirect=True)


def families(*names: str) -> pytest.MarkDecorator:
    """All of these on a GPU. On tapes the first one: the others are in tests/equality/test_static_step.py."""
    cases = [
        ("cpu", names[0]),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names),
    ]
    return pytest.mark.parametrize(("device", "family"), cases, indirect=["device"])


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where steps are captured: as CUDA graphs or, on the CPU, on tapes. A run passes through several of them."""
    name: str = request.param
    if name == "cpu":
        use_tapes(monkeypatch)
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 16)
    return name


@pytest.fixture
def captured(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that graphs are captured for."""
    found: list[int] = []
    captures: Any = cuda_graph.GraphStep
    capture = captures.capture_one

    def counted(self: Any, bound: int) -> Any:
        found.append(bound)
        return capture(self, bound)

    monkeypatch.setattr(captures, "capture_one", counted)
    return found


@pytest.fixture
def num_guarded(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes a step of the steady state that waits for the device an error; counts those steps in its one number."""
    found, start = [0], StaticStep._begin

    def guarded(self: StaticStep, num_unread: int) -> Any:
        found[0] += 1
        with no_host_reads(device):
            return start(self, num_unread)

    monkeypatch.setattr(StaticStep, "_begin", guarded)
    return found


def on(device: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same prompts on a device."""
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def target_on(device: str, family: str, dtype: torch.dtype) -> Any:
    """A tiny target whose experts, if it has any, count nothing on the host."""
    target: Any = shallow_target(family).to(device, dtype)
    if family in ("qwen3-moe", "gpt-oss"):
        target.set_experts_implementation("batched_mm")
    return target


@families(*FAMILIES)
@pytest.mark.parametrize("batch", LENGTHS)
def test_a_graph_gives_the_plain_text(device: str, batch: str, family: str) -> None:
    target = target_on(device, family, torch.float32)
    for seed, (block_size, width) in enumerate([(8, 8), (8, 3), (16, 9)]):
        inputs = on(device, prompts(LENGTHS[batch], seed))
        ref = target.generate(**inputs, **GREEDY)
        draft = tensor_oracle(target, truth_of(inputs, ref), seed, block_size).to(device)
        draft.generation_config.verify_width = width
        for _ in range(2):
            out = target.generate(**inputs, **GREEDY, assistant_model=draft)
            assert torch.equal(out, ref)
            assert draft.last_stats.engine == "cuda_graph"
        assert 1.0 < draft.last_stats.acceptance_length < width


@families("qwen3-sliding", "gemma3", "llama")
@pytest.mark.parametrize("batch", LENGTHS)
def test_widths_that_change_give_the_plain_text(
    device: str, batch: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is compute-bound at this size: without this all widths but the widest would be dropped.
    monkeypatch.setattr(choice_costs, "MIN_SAVING", -1.0)
    target = target_on(device, family, torch.float32)
    for seed, block_size in enumerate((5, 8, 16)):
        use_random_widths(monkeypatch, seed)
        inputs = on(device, prompts(LENGTHS[batch], seed))
        ref = target.generate(**inputs, **GREEDY)
        draft = tensor_oracle(target, truth_of(inputs, ref), seed, block_size).to(device)
        draft.generation_config.verify_width = "auto"
        for _ in range(2):
            assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
            assert draft.last_stats.engine == "cuda_graph"
        assert len(set(draft.last_stats.verify_widths)) >= 2


def test_widths_are_measured_once_and_later_steps_wait_for_none(
    device: str, captured: list[int], num_guarded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_costs, "MIN_SAVING", -1.0)
    measured: list[float] = []
    captures: Any = cuda_graph.GraphStep
    measure = captures.measure

    def noted(self: Any, graph: Any) -> float:
        measured.append(measure(self, graph))
        return measured[-1]

    monkeypatch.setattr(captures, "measure", noted)
    target = target_on(device, "qwen3", torch.float32)
    inputs = on(device, prompts([4, 11, 7], 2))
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 2, 16).to(device)
    draft.generation_config.verify_width = "auto"
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "cuda_graph"
    num_widths = len(candidate_widths(16))
    assert len(measured) == num_widths, "once, not at every call"
    assert 0 < min(measured) <= max(measured) < 1.0
    assert captured == sorted(captured, reverse=True)
    assert len(captured) == num_widths * len(set(captured))
    assert num_guarded[0] > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@families("qwen3", "qwen3-sliding", "gemma3")
def test_a_replay_is_the_same_step_uncaptured_bit_by_bit(
    device: str, family: str, dtype: torch.dtype
) -> None:
    target = target_on(device, family, dtype)
    inputs = on(device, prompts([4, 11, 7], 1))
    draft = tiny_draft(target, 8).to(device)
    texts: list[Tensor] = []
    committed: list[Any] = []
    for engine in ("static", "cuda_graph"):
        set_engine(draft, engine)
        texts.append(target.generate(**inputs, **GREEDY, assistant_model=draft))
        committed.append(draft.last_stats.num_committed)
        assert draft.last_stats.engine == engine
    assert torch.equal(texts[0], texts[1])
    assert committed[0] == committed[1]


@pytest.mark.parametrize("kind", [{}, DFLASH2], ids=["dflash", "dflash 2"])
@pytest.mark.parametrize("proposal", ["shared_noise", "argmax", "sample"])
def test_a_sampled_text_is_the_eager_one(device: str, proposal: Any, kind: dict[str, Any]) -> None:
    target = target_on(device, "qwen3", torch.float64)
    inputs = on(device, prompts([4, 11, 7], 4))
    draft = tiny_draft(target, 6, **kind).to(device)
    draft.generation_config.proposal = proposal
    if proposal == "sample":
        # Rejection draws another text from a tree, which captured steps do not verify
        use_whole_blocks(draft)
    texts: list[Tensor] = []
    for engine in ("eager", "cuda_graph", "cuda_graph"):
        set_engine(draft, engine)
        torch.manual_seed(5)
        settings = {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 20,
            "top_p": 0.9,
            "eos_token_id": [9],
        }
        texts.append(
            target.generate(**inputs, max_new_tokens=NEW, **settings, assistant_model=draft)
        )
        assert draft.last_stats.engine == engine
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@families("qwen3-vl", "gemma3", "qwen2.5-vl")
def test_images_give_the_plain_text(device: str, family: str) -> None:
    target = shallow_vision_target(family).float().to(device)
    inputs = on(device, vision_prompts(target.cpu(), family, [[(4, 4)], [], [(2, 8), (6, 4)]], 0))
    inputs = {name: t.float() if t.is_floating_point() else t for name, t in inputs.items()}
    target = target.to(device)
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8).to(device)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == "cuda_graph"


@pytest.mark.parametrize("batch", LENGTHS)
def test_the_steady_state_never_waits_for_the_device(
    device: str, batch: str, num_guarded: list[int]
) -> None:
    target = target_on(device, "qwen3-sliding", torch.float32)
    inputs = on(device, prompts(LENGTHS[batch], 2))
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 2, 8).to(device)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == "cuda_graph"
    assert num_guarded[0] == draft.last_stats.num_target_forwards - 1 > 3


def test_graphs_are_kept_between_calls(device: str, captured: list[int]) -> None:
    target = target_on(device, "qwen3", torch.float32)
    inputs = on(device, prompts([4, 11, 7], 0))
    ref = target.generate(**inputs, **GREEDY)
    draft = tiny_draft(target, 8).to(device)
    for new in (NEW, 9, NEW):
        out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
        assert torch.equal(out, ref[:, : 11 + new])
    assert captured == sorted(set(captured), reverse=True)
    assert len(captured) > 1


@families("qwen3", "qwen3-sliding", "qwen3.5", "gpt-oss")
def test_rows_of_a_running_batch_share_captured_steps(
    device: str, family: str, captured: list[int]
) -> None:
    target = target_on(device, family, torch.float32)
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
    kinds: tuple[dict[str, Any], ...] = ({"do_sample": False}, sampled)
    lengths = [3, 70, 9, 2, 30, 12, 50, 5]
    requests = asked(lengths, 1, num_new=(20, 40), kinds=kinds)
    for one in requests:
        one.ids = one.ids.to(device)
    own = tiny_draft(target, 8).to(device)
    own.generation_config.engine = "eager"
    answer_alone(target, requests, own)
    draft = place_oracle(target).to(device)
    draft.generation_config.engine = "cuda_graph"
    found = drive(RunningBatch(target, draft, max_rows=4), requests, 1, cancelled=0.2)
    assert found["most"] > 2
    assert captured


@gpu_only
def test_graphs_are_freed_on_request(device: str) -> None:
    target = target_on(device, "qwen3", torch.float32)
    inputs = on(device, prompts([4, 11, 7], 0))
    ref = target.generate(**inputs, **GREEDY)
    draft = tiny_draft(target, 8).to(device)
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    gc.collect()
    held, kept = torch.cuda.memory_allocated(), sum(one.num_bytes() for one in kept_buffers(draft))
    free_buffers(draft)
    gc.collect()
    assert torch.cuda.memory_allocated() <= held - kept < held
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)


@pytest.mark.parametrize("what", ["prefix", "scores"])
def test_what_the_host_decides_is_decided_between_two_replays(device: str, what: str) -> None:
    target = target_on(device, "qwen3", torch.float64)
    inputs = on(device, prompts([4, 11, 7], 3))
    settings: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True}
    settings |= {"repetition_penalty": 1.3} if what == "prefix" else {"output_scores": True}
    ref = target.generate(**inputs, **settings).sequences
    draft = tensor_oracle(target, truth_of(inputs, ref), 3, 8).to(device)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft).sequences, ref)
    assert draft.last_stats.engine == "cuda_graph"


@gpu_only
def test_a_capture_that_cuda_refuses_ends_in_the_eager_loop(
    device: str, captured: list[int]
) -> None:
    """A read on the host that hides from the check: only while a stream is being captured."""
    target = target_on(device, "qwen3", torch.float32)
    inputs = on(device, prompts([4, 11, 7], 0))
    ref = target.generate(**inputs, **GREEDY)
    draft = tiny_draft(target, 8).to(device)
    norm: Any = target.model.norm
    forward = norm.forward

    def hiding(states: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            states.sum().item()
        return forward(states)

    norm.forward = hiding
    sampled: dict[str, Any] = {"max_new_tokens": 9, "do_sample": True, "temperature": 0.8}
    torch.manual_seed(3)
    number, text = torch.rand(1, device=device), target.generate(**inputs, **sampled)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "eager"
        # Generator and allocator know of no capture any more.
        torch.manual_seed(3)
        assert torch.equal(torch.rand(1, device=device), number)
        assert torch.equal(target.generate(**inputs, **sampled), text)
    assert len(captured) == 1
    assert kept_buffers(draft)[0].graphs.reason.startswith("CUDA could not capture it")
    norm.forward = forward
    free_buffers(draft)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == "cuda_graph"
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1, device=device), number)


@gpu_only
def test_others_capture_outside_inference_mode_beside_us(device: str) -> None:
    """Torch makes the generator's tensors at the first capture: they must not be those of inference mode."""
    target = target_on(device, "qwen3", torch.float32)
    inputs = on(device, prompts([4, 11, 7], 0))
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8).to(device)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == "cuda_graph"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand(4, device=device)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(drawn, first)
    assert torch.equal(target.generate(**inputs, **GREEDY, cache_implementation="static"), ref)


@gpu_only
def test_a_refused_capture_keeps_no_memory(device: str) -> None:
    """Its pool is let go: what was allocated in it can be given back to the driver."""
    target = target_on(device, "qwen3", torch.float32)
    inputs = on(device, prompts([4, 11, 7], 0))
    draft = tiny_draft(target, 8).to(device)
    norm: Any = target.model.norm
    forward = norm.forward

    def hiding(states: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**28, dtype=torch.uint8, device=device)
            states.sum().item()
        return forward(states)

    target.generate(**inputs, **GREEDY, assistant_model=draft)
    free_buffers(draft)
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    norm.forward = hiding
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert draft.last_stats.engine == "eager"
    free_buffers(draft)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved + 2**27


@gpu_only
def test_a_replay_writes_into_no_memory_of_others(device: str) -> None:
    """Inductor lets go of cuBLAS's workspaces before captures of its own; ours are in the graphs' pools."""
    target = target_on(device, "qwen3", torch.float32)
    inputs = on(device, prompts([4, 11, 7], 0))
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8).to(device)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # All sizes that a workspace may have had, so that one of these would be in its place.
    others = [
        torch.full((size,), 7, dtype=torch.uint8, device=device)
        for size in [2**22, 2**23, 2**25] * 4
    ]
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == "cuda_graph"
    assert all(bool((other == 7).all()) for other in others)


@gpu_only
def test_auto_says_why_it_runs_eagerly(device: str) -> None:
    target = target_on(device, "qwen3", torch.float32)
    draft = tiny_draft(target, 8)  # stays on the CPU
    assert why_not(find_target(target), draft) == "parts on several devices"


def test_two_threads_each_have_their_graphs(device: str) -> None:
    target = target_on(device, "qwen3", torch.float32)
    draft = tiny_draft(target, 8).to(device)
    calls = [on(device, prompts([4, 11, 7], seed)) for seed in range(2)]
    refs = [target.generate(**inputs, **GREEDY) for inputs in calls]
    found: list[bool] = []

    def run(index: int) -> None:
        for _ in range(3):
            out = target.generate(**calls[index], **GREEDY, assistant_model=draft)
            found.append(torch.equal(out, refs[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6
    assert 1 <= len(kept_buffers(draft)) <= 2


def test_a_graph_replays_in_another_mode(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's hooks may take inference mode from a call whose graphs were captured in it."""
    target = target_on(device, "qwen3", torch.float32)
    draft = tiny_draft(target, 8).to(device)
    inputs = on(device, prompts([4, 11, 7], 0))
    plain = target.generate(**inputs, **GREEDY)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        monkeypatch.setattr(decode, "no_gradients", lambda *_, mode=mode: mode())
        out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        assert torch.equal(out, plain)
        assert draft.last_stats.engine == "cuda_graph"
