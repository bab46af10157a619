"""What a captured step needs, proven without a GPU, and what happens where a step cannot be captured or fails."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from dflash_hf import DFlashDraftModel, cache, free_buffers
from dflash_hf.generation import buffers, cuda_graph, static_step
from dflash_hf.generation.buffers import buckets_between, kept_buffers, round_up
from dflash_hf.generation.cuda_graph import why_not
from dflash_hf.generation.host_reads import HostReadError, NoHostReads
from dflash_hf.generation.run import Run
from dflash_hf.generation.static_step import StaticStep
from dflash_hf.taps import Taps
from dflash_hf.target import find_target
from helpers.static import Tape, TapeStep, tensor_oracle, use_tapes
from tiny import DFLASH2, prompts, tiny_draft, tiny_target, truth_of

NEW = 26
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What is logged about running eagerly."""
    cuda_graph.logger.warning_once.cache_clear()
    return lambda: [r.getMessage().partition(": ")[2] for r in caplog.records if "run eagerly" in r.getMessage()]


def pair(
    engine: Any, family: str = "qwen3", **overrides: Any
) -> tuple[PreTrainedModel, DFlashDraftModel, Any, Tensor]:
    """A tiny target, an oracle for it, ragged prompts and plain `generate`'s text."""
    target = tiny_target(family)
    inputs = prompts([4, 11, 7], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8, **overrides)
    draft.generation_config.engine = engine
    return target, draft, inputs, ref


# ---- what capture needs


class Operations(TorchDispatchMode):
    """Writes down the operations that run, with the shapes and types of all they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.seen.append((str(func), *((tuple(t.shape), t.stride(), t.dtype) for t in tensors)))
        return out


def places(run: Run) -> list[tuple[object, ...]]:
    """Where everything is that a step leaves for the next one, and how it is laid out."""
    state, generator = run.state, run.generator
    held = generator._held
    assert held is not None
    named = {name: getattr(state, name) for name in type(state).__slots__}
    named |= {"block_ids": generator.block_ids, "offset": generator.offset, "states": held[0], "lengths of": held[1]}
    named |= {f"target {i}": t for i, t in enumerate(run.cache.buffers())}
    named |= {f"draft {i}": t for i, t in enumerate(generator.cache.buffers())}
    # Written and read in one step.
    named.pop("draft_probs")
    return [(n, t.data_ptr(), t.shape, t.stride()) for n, t in named.items() if isinstance(t, Tensor)]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3-sliding", {}), ("gemma3", {}), ("mistral", DFLASH2), ("qwen3", {"sample_from_anchor": True})],
)
@pytest.mark.parametrize("sampling", [False, True])
def test_nothing_moves_and_every_step_is_the_same_whatever_is_accepted(
    sampling: bool, family: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 128)
    target, draft, inputs, _ = pair("static", family, **overrides)
    draft.generation_config.proposal = "sample" if sampling else "auto"
    steps: list[tuple[object, ...]] = []
    where: list[tuple[object, ...]] = []
    launch = StaticStep.launch

    def watched(self: StaticStep, bound: int) -> Any:
        where.append(tuple(places(self.run)))
        with Operations() as operations, NoHostReads():
            out = launch(self, bound)
        where.append(tuple(places(self.run)))
        steps.append(tuple(operations.seen))
        return out

    monkeypatch.setattr(StaticStep, "launch", watched)
    settings = {"do_sample": True, "temperature": 0.02, "top_k": 9} if sampling else {"do_sample": False}
    target.generate(**inputs, max_new_tokens=NEW, eos_token_id=[9], pad_token_id=0, **settings, assistant_model=draft)
    accepted = {count for row in draft.last_stats.num_accepted for count in row}
    assert len(accepted) > 2, "blocks of which different numbers are right"
    assert len(steps) > 4
    assert len(steps[0]) > 300
    assert len(set(where)) == 1
    # The first one makes views of the buffers that are kept; it would be the one before the capture.
    assert len(set(steps[1:])) == 1


def test_a_step_over_finished_rows_changes_only_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs, ref = pair("static")
    launch, num_frozen = StaticStep.launch, 0

    def twice(self: StaticStep, bound: int) -> Any:
        nonlocal num_frozen
        state = self.run.state
        done = state.done.clone()
        before = [t.clone() for t in (state.lengths, state.cursor, state.remaining, state.anchor)]
        ids = [row[: int(end)].clone() for row, end in zip(state.ids, state.cursor, strict=True)]
        state.done.fill_(True)
        launch(self, bound)
        assert all(map(torch.equal, before, (state.lengths, state.cursor, state.remaining, state.anchor)))
        assert all(torch.equal(old, row[: len(old)]) for old, row in zip(ids, state.ids, strict=True))
        state.done.copy_(done)
        num_frozen += 1
        return launch(self, bound)

    monkeypatch.setattr(StaticStep, "launch", twice)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert num_frozen > 3


READING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x.any()),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "nonzero": lambda x: x.nonzero(),
    "index by mask": lambda x: x[x > 0],
    "put under a mask": lambda x: x.index_put_((x > 0,), torch.arange(1.0, 4.0)),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "masked select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
    "slice by tensor": lambda x: x[: x.argmax()],
}
QUIET: dict[str, Callable[[Tensor], object]] = {
    "fill under a mask": lambda x: x.masked_fill(x > 1, 0.0),
    "put a number under a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "gather": lambda x: x.gather(0, x.argsort()),
    "index": lambda x: x[torch.tensor([0, 2])],
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "repeats of known size": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3]), output_size=6),
}


@pytest.mark.parametrize("name", READING)
def test_a_read_on_the_host_is_found(name: str) -> None:
    with pytest.raises(HostReadError, match="on the host"), NoHostReads():
        READING[name](torch.tensor([1.0, 2.0, 3.0]))
    with torch.inference_mode(), pytest.raises(HostReadError, match="on the host"), NoHostReads():
        READING[name](torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("name", QUIET)
def test_what_reads_nothing_passes(name: str) -> None:
    with NoHostReads():
        QUIET[name](torch.tensor([1.0, 2.0, 3.0]))
    with torch.inference_mode(), NoHostReads():
        QUIET[name](torch.tensor([1.0, 2.0, 3.0]))


def test_buckets_hold_every_length_and_grow_by_no_more_than_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 4)
    for length in range(1, 3000):
        bucket = round_up(length)
        assert length <= bucket < max(length + 4, length * 1.25 + 1)
    sizes = buckets_between(30, 100, 97)
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[-1], sizes[0]) == (round_up(30), 97)
    for length in range(30, 98):
        assert min(round_up(length), 97) in sizes


# ---- graphs that are kept


def test_graphs_are_kept_for_calls_of_the_same_shape_and_freed_on_request() -> None:
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
    kept = {str(settings) for settings, _ in kept_buffers(draft)[0].graphs.captured}
    assert len(kept) == cuda_graph.MAX_SETTINGS
    assert any("1.1" in settings for settings in kept)
    num_captured = len(TapeStep.captured)
    for temperature in (0.7, 1.1):
        settings = {"max_new_tokens": 5, "do_sample": True, "temperature": temperature}
        target.generate(**inputs, **settings, assistant_model=draft)
    assert len(TapeStep.captured) == num_captured


def test_weights_that_moved_are_captured_again_and_changed_ones_are_seen() -> None:
    target, draft, inputs, _ = pair("cuda_graph")
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    num_captured = len(TapeStep.captured)
    layer: Any = find_target(target).layers[1]
    for change, is_captured_again in (("in place", False), ("replaced", True)):
        with torch.no_grad():
            if change == "in place":
                layer.mlp.gate_proj.weight.mul_(-1.0)
            else:
                layer.mlp.gate_proj.weight = nn.Parameter(layer.mlp.gate_proj.weight.flip(0).clone())
        ref = target.generate(**inputs, **GREEDY)
        out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        assert torch.equal(out, ref), change
        assert (len(TapeStep.captured) > num_captured) == is_captured_again


def test_buffers_belong_to_one_draft_and_one_target() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    again = copy.deepcopy(draft)
    assert len(kept_buffers(draft)) == 1
    assert not kept_buffers(again)
    other = tiny_target("qwen3", seed=3)
    other_ref = other.generate(**inputs, **GREEDY)
    assert torch.equal(other.generate(**inputs, **GREEDY, assistant_model=draft), other_ref)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(kept_buffers(draft)) == 2
    del other
    gc.collect()
    assert len(kept_buffers(draft)) == 1, "buffers keep no target alive, and go with it"


def test_calls_in_and_out_of_inference_mode_share_buffers() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            out = target.generate(**inputs, **GREEDY, assistant_model=draft)
        assert torch.equal(out, ref)
        assert draft.last_stats.engine == "cuda_graph"
    assert len(TapeStep.captured) == len(set(TapeStep.captured))


def test_calls_in_several_threads_share_no_buffers() -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    draft.generation_config.engine = "static"
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
    assert len({tensor.data_ptr() for one in kept for tensor in one.owned()}) == sum(len(one.owned()) for one in kept)


def test_only_so_many_buffers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    draft.generation_config.engine = "static"
    for batch in range(1, 8):
        target.generate(**prompts([5] * batch, 0), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert [kept.shape.batch for kept in kept_buffers(draft)] == [4, 5, 6, 7]
    total = 4 * kept_buffers(draft)[-1].num_bytes()
    monkeypatch.setattr(buffers, "total_memory", lambda device: total)
    target.generate(**prompts([5] * 7, 0), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert [kept.shape.batch for kept in kept_buffers(draft)] == [7]


# ---- what cannot be captured, and faults


def test_graphs_without_cuda_are_refused_before_any_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target = tiny_target("qwen3")
    draft = tiny_draft(target)
    draft.generation_config.engine = "cuda_graph"
    with pytest.raises(ValueError, match="expected a target on CUDA under engine='cuda_graph'"):
        target.generate(**prompts([4], 0), **GREEDY, assistant_model=draft)
    draft.generation_config.engine = "auto"
    target.generate(**prompts([4], 0), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert draft.last_stats.engine == "eager"


def test_reasons_are_found_before_a_step_runs() -> None:
    target, draft, inputs, _ = pair("cuda_graph")
    found = find_target(target)
    assert why_not(found, draft) is None
    handle = target.model.layers[2].mlp.register_forward_hook(lambda module, args, out: None)
    assert why_not(found, draft) == "a forward hook on model.layers.2.mlp, which a replay would not call"
    handle.remove()
    target.generate(**inputs, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    assert why_not(found, draft) is None, "Transformers' own hooks stay, and do nothing"
    with Taps(found.layers, [-1, 2]):
        assert why_not(found, draft) is None, "another thread's run"
    with torch.autocast("cpu"):
        assert "autocast" in str(why_not(found, draft))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    dynamic = tiny_target("llama", rope_parameters=rope)
    assert "dynamic" in str(why_not(find_target(dynamic), tiny_draft(dynamic)))


def test_a_target_that_reads_on_the_host_runs_eagerly(told: Any) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    norm: Any = target.model.norm
    forward = norm.forward

    def looking(states: Tensor) -> Tensor:
        return forward(states) if float(states.abs().sum()) >= 0 else states

    norm.forward = looking
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "eager"
    assert TapeStep.captured == []
    del norm.forward
    assert len(told()) == 1
    assert "a step of Qwen3ForCausalLM needs the host (aten._local_scalar_dense" in told()[0]


def test_inputs_of_the_users_own_are_part_of_a_graph_or_run_eagerly() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft, output_hidden_states=False), ref)
    assert draft.last_stats.engine == "cuda_graph"


def test_no_memory_for_a_graph_runs_eagerly_and_releases_what_was_captured(
    monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    capture, num_tried = TapeStep.capture_one, 0

    def failing(self: TapeStep, bound: int) -> Any:
        nonlocal num_tried
        num_tried += 1
        if num_tried == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return capture(self, bound)

    monkeypatch.setattr(TapeStep, "capture_one", failing)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "eager"
    assert num_tried == 2, "one call tries"
    assert len(told()) == 1
    assert "no memory left to capture it (OutOfMemoryError: CUDA out of memory" in told()[0]
    assert not kept_buffers(draft)[0].graphs.captured
    free_buffers(draft)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == "cuda_graph"


def test_a_device_that_fails_leaves_a_message_and_nothing_half_written(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    given = DynamicCache(config=target.config)
    target.generate(**inputs, **GREEDY, assistant_model=draft, past_key_values=given)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in given.layers]
    replay, num_replays = Tape.replay, 0

    def failing(self: Tape) -> None:
        nonlocal num_replays
        num_replays += 1
        if num_replays == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        replay(self)

    monkeypatch.setattr(Tape, "replay", failing)
    more = prompts([42, 42, 42], 1) | {"attention_mask": torch.ones(3, 42, dtype=torch.long)}
    more["input_ids"][:, :37] = ref
    with pytest.raises(RuntimeError, match="expected the steps to run on CUDA, got RuntimeError: CUDA error: an"):
        target.generate(**more, **GREEDY, assistant_model=draft, past_key_values=given)
    assert num_replays == 3
    assert not [kept for kept in kept_buffers(draft) if kept.capacity >= 42 + NEW]
    for layer, (keys, values) in zip(given.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    monkeypatch.setattr(Tape, "replay", replay)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_a_length_beyond_memory_is_refused_with_what_would_fit(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target, draft, inputs, ref = pair(engine)
    with pytest.raises(ValueError, match=r"expected K/V buffers of at most [\d,]+ bytes .* got [\d,]+ for 3 rows"):
        target.generate(**inputs, max_new_tokens=10**12, do_sample=False, assistant_model=draft)
    if engine == "static":
        return
    # What is said to fit does, one token more does not.
    monkeypatch.setattr(cache, "free_memory", lambda device: 300_000)
    with pytest.raises(cache.OutOfRoomError) as refused:
        target.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=draft)
    fits = int(str(refused.value).partition("rows can have at most ")[2].partition(" ")[0].replace(",", ""))
    new = fits - 11 - 8  # the longest prompt and a block
    out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
    assert torch.equal(out[:, :37], ref[:, : out.shape[1]])
    with pytest.raises(cache.OutOfRoomError):
        target.generate(**inputs, max_new_tokens=new + 1, do_sample=False, assistant_model=draft)


def test_other_shapes_make_room_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs, ref = pair("static")
    target.generate(**prompts([7], 0), **GREEDY, assistant_model=draft)
    (kept,) = kept_buffers(draft)
    monkeypatch.setattr(cache, "free_memory", lambda device: 0 if kept in kept_buffers(draft) else 10**9)
    monkeypatch.setattr(buffers, "check_memory", lambda *args, **kwargs: None)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert kept not in kept_buffers(draft)


CANARY = 7.0
GUARD = 64


@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-sliding"])
def test_nothing_is_written_beyond_the_buffers(family: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs, ref = pair(engine, family)
    guarded: list[Tensor] = []

    def fenced(tensor: Tensor) -> Tensor:
        """The same tensor between two fences."""
        whole = torch.full((tensor.numel() + 2 * GUARD,), CANARY, dtype=tensor.dtype)
        guarded.append(whole)
        inner = whole[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        return inner.zero_()

    init = cache.RaggedLayer.__init__

    def fenced_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.key_buffer, self.value_buffer = fenced(self.key_buffer), fenced(self.value_buffer)
        self._rows = (self.key_buffer.flatten(0, 1), self.value_buffer.flatten(0, 1))
        self._all = (self.key_buffer.transpose(1, 2), self.value_buffer.transpose(1, 2))

    allocate = buffers.DecodeState.allocate

    def fenced_state(*args: Any) -> Any:
        state = allocate(*args)
        state.ids = fenced(state.ids)
        return state

    monkeypatch.setattr(cache.RaggedLayer, "__init__", fenced_init)
    monkeypatch.setattr(buffers.DecodeState, "allocate", fenced_state)
    for module in (buffers, static_step):
        monkeypatch.setattr(module, "round_up", lambda length: length)  # not a slot to spare
    out = target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert torch.equal(out, ref)
    assert draft.last_stats.engine == engine
    assert len(guarded) == 2 * (4 + 2) + 1
    for whole in guarded:
        assert bool((whole[:GUARD] == CANARY).all())
        assert bool((whole[-GUARD:] == CANARY).all())
