"""What a captured step needs, proven without a GPU, and what happens where a step cannot be captured or fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import DynamicCache

from dflash_hf import DFlashGenerationConfig, free_buffers
from dflash_hf.block.cache_name import CACHE_NAME
from dflash_hf.cache import ragged, size
from dflash_hf.generation import buffers, cuda_graph, static_step
from dflash_hf.generation.buffers import buckets_between, kept_buffers, round_up
from dflash_hf.generation.cuda_graph import why_not
from dflash_hf.generation.host_reads import HostReadError, NoHostReads
from dflash_hf.target_model.hidden_states import Taps
from dflash_hf.target_model.parts import find_target
from dflash_hf.undo import held
from helpers.engine import GREEDY, NEW, Watched, freeze_each_step_first, pair
from helpers.pretended_gpu import pretended_gpu
from helpers.static import Tape, TapeStep, uncaptured, use_tapes
from tiny import DFLASH2, prompts, shallow_target, tiny_draft


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tapes(monkeypatch)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What is logged about running eagerly."""
    cuda_graph.logger.warning_once.cache_clear()
    return lambda: [
        r.getMessage().partition(": ")[2] for r in caplog.records if "run eagerly" in r.getMessage()
    ]


# ---- what capture needs


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3-sliding", {}),
        ("gemma3", {}),
        ("mistral", DFLASH2),
        ("qwen3", {"sample_from_anchor": True}),
    ],
)
@pytest.mark.parametrize("sampling", [False, True])
def test_no_tensor_moves_and_steps_do_not_follow_acceptance(
    sampling: bool, family: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 128)
    target, draft, inputs, _ = pair("static", family, **overrides)
    draft.generation_config.proposal = "sample" if sampling else "auto"
    watched = Watched(monkeypatch)
    settings = (
        {"do_sample": True, "temperature": 0.02, "top_k": 9} if sampling else {"do_sample": False}
    )
    settings |= {"max_new_tokens": 18, "eos_token_id": [9], "pad_token_id": 0}
    target.generate(**inputs, **settings, assistant_model=draft)
    accepted = {count for row in draft.last_stats.num_accepted for count in row}
    assert len(accepted) > 2, "blocks of which different numbers are right"
    assert len(watched.steps[0]) > 300
    watched.check()


def test_a_step_over_finished_rows_changes_only_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs, ref = pair("static")
    frozen = freeze_each_step_first(monkeypatch)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(frozen) > 3


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
    "inverse": lambda x: torch.linalg.inv(x.diag()),
    "singular values": lambda x: torch.linalg.svd(x.diag()),
    "in many": lambda x: torch.isin(x, torch.arange(20.0)),
    "histogram between extremes": lambda x: x.histc(4),
    "pseudoinverse": lambda x: torch.linalg.pinv(x.diag()),
    "eigenvalues": lambda x: torch.linalg.eigvals(x.diag()),
    "eigenvalues of symmetry": lambda x: torch.linalg.eigh(x.diag()),
    "least squares": lambda x: torch.linalg.lstsq(x.diag(), x.diag()),
    "inverse checked": lambda x: torch.linalg.inv_ex(x.diag(), check_errors=True),
    "drawn": lambda x: torch.multinomial(x, 1),
    "drawn around": lambda x: torch.normal(x, x),
    "norms of embeddings": lambda x: nn.functional.embedding(
        torch.tensor([1]), x.diag(), max_norm=1.0
    ),
    "groups in float32": lambda x: torch._grouped_mm(x, x, offs=x),
    "groups of scaled numbers": lambda x: torch._scaled_grouped_mm(x, x, x, x, offs=x),
}


@torch.library.custom_op("dflash_tests::looking", mutates_args=())
def looking(x: Tensor) -> Tensor:
    """An operation of someone's whose body decides on the host."""
    return x + 1 if x.sum() > 0 else x.clone()


@torch.library.custom_op("dflash_tests::quiet", mutates_args={"x"})
def quiet(x: Tensor, times: float) -> None:
    """One that does not."""
    x.mul_(times)


@torch.library.custom_op("dflash_tests::outer", mutates_args=())
def outer(x: Tensor) -> Tensor:
    """One that makes use of another."""
    return looking(x.clone())


READING["custom operation"] = looking
READING["custom operation in another"] = outer
QUIET: dict[str, Callable[[Tensor], object]] = {
    "fill under a mask": lambda x: x.masked_fill(x > 1, 0.0),
    "put a number under a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "gather": lambda x: x.gather(0, x.argsort()),
    "index": lambda x: x[torch.tensor([0, 2])],
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "inverse unchecked": lambda x: torch.linalg.inv_ex(x.diag()),
    "in few": lambda x: torch.isin(x, torch.arange(2.0)),
    "histogram between numbers": lambda x: x.histc(4, min=0, max=4),
    "other dtype": lambda x: x.to(torch.float64),
    "custom operation": lambda x: quiet(x, 2.0),
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


@pytest.mark.parametrize("at", ["__enter__", "__exit__"])
def test_an_interrupt_inside_torch_leaves_no_guard_behind(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come behind all that torch's own enter does, or before all that its exit does."""
    original, calls = getattr(NoHostReads, at), list[str]()

    def interrupted(*args: Any) -> Any:
        calls.append(at)
        if at == "__enter__":
            original(*args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(NoHostReads, at, interrupted)
    with pytest.raises(KeyboardInterrupt), held(NoHostReads()):
        pass
    assert _get_current_dispatch_mode() is None
    assert torch.ones(2).sum().item() == 2


COPYING: dict[str, Callable[[Tensor], object]] = {
    "to": lambda x: torch.ones(3).to(x.device),
    "number": lambda x: torch.tensor(3, device=x.device),
    "put": lambda x: x.copy_(torch.ones(3)),
    "slice": lambda x: x.__setitem__(slice(2), torch.ones(2)),
    "index": lambda x: x[torch.tensor([0, 2])],
    "put at index": lambda x: x.index_put_((torch.tensor([0]),), torch.ones((), device=x.device)),
}


@pytest.mark.parametrize("name", COPYING)
def test_a_copy_from_the_host_is_found(name: str) -> None:
    with pretended_gpu():
        numbers = torch.zeros(3, device="cuda")
        for is_inference in (False, True):
            with (
                torch.inference_mode(is_inference),
                pytest.raises(HostReadError, match="from the host"),
                NoHostReads(),
            ):
                COPYING[name](numbers)


def test_a_number_of_the_hosts_in_arithmetic_passes() -> None:
    with pretended_gpu(), NoHostReads():
        numbers = torch.zeros(3, device="cuda") * torch.tensor(2.0)
        numbers[:2] = 3.0
        assert numbers.is_cuda


def test_buckets_hold_every_length_and_grow_by_a_quarter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 4)
    for length in range(1, 3000):
        bucket = round_up(length)
        assert length <= bucket < max(length + 4, length * 1.25 + 1)
    sizes = buckets_between(30, 100, 97)
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[-1], sizes[0]) == (round_up(30), 97)
    for length in range(30, 98):
        assert min(round_up(length), 97) in sizes


# ---- what cannot be captured, and faults


def test_graphs_without_cuda_are_refused_before_any_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    target = shallow_target("qwen3")
    draft = tiny_draft(target)
    draft.generation_config.engine = "cuda_graph"
    with pytest.raises(ValueError, match="expected a target on CUDA under engine='cuda_graph'"):
        target.generate(**prompts([4], 0), **GREEDY, assistant_model=draft)
    draft.generation_config.engine = "auto"
    target.generate(**prompts([4], 0), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert draft.last_stats.engine == "eager"


def test_experts_on_a_cpu_are_refused_as_any_target_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target: Any = shallow_target("qwen3-moe").float()
    target.set_experts_implementation("grouped_mm")
    draft = tiny_draft(target)
    draft.generation_config.engine = "cuda_graph"
    with pytest.raises(ValueError, match="expected a target on CUDA under engine='cuda_graph'"):
        target.generate(**prompts([4], 0), **GREEDY, assistant_model=draft)


def test_the_uncaptured_step_is_no_engine_of_a_users() -> None:
    target, draft, inputs, _ = pair("auto")
    sentence = (
        r"^expected engine in \('auto', 'eager', 'cuda_graph'\), got 'static'; leave it at 'auto'$"
    )
    with pytest.raises(ValueError, match=sentence):
        DFlashGenerationConfig(engine="static")
    target.register_forward_pre_hook(lambda *args: pytest.fail("a forward ran"))
    draft.generation_config.engine = "static"  # pyright: ignore[reportAttributeAccessIssue]
    for around in (nullcontext(), uncaptured(draft)):
        with around, pytest.raises(ValueError, match=sentence):
            target.generate(**inputs, **GREEDY, assistant_model=draft)


def test_steps_run_uncaptured_for_one_draft_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target, draft, inputs, ref = pair("cuda_graph")
    other = pair("cuda_graph")[1]
    with uncaptured(draft):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "static"
        for chosen in ("eager", "auto"):
            draft.generation_config.engine = chosen
            target.generate(**inputs, max_new_tokens=3, do_sample=False, assistant_model=draft)
            assert draft.last_stats.engine == "eager"
        draft.generation_config.engine = "cuda_graph"
        with pytest.raises(ValueError, match="expected a target on CUDA under engine='cuda_graph'"):
            target.generate(**inputs, **GREEDY, assistant_model=other)
    with pytest.raises(ValueError, match="expected a target on CUDA under engine='cuda_graph'"):
        target.generate(**inputs, **GREEDY, assistant_model=draft)


class Quantised(Tensor):
    """Stands for what torchao and bitsandbytes put in a weight's place."""


def test_reasons_are_found_before_a_step_runs() -> None:
    target, draft, inputs, _ = pair("cuda_graph")
    found = find_target(target)
    assert why_not(found, draft) == ""
    handle = target.model.layers[1].mlp.register_forward_hook(lambda module, args, out: None)
    assert (
        why_not(found, draft)
        == "a forward hook on model.layers.1.mlp, which a replay would not call"
    )
    handle.remove()
    handle = register_module_forward_hook(lambda module, args, out: None)
    assert why_not(found, draft) == "a forward hook on all modules, which a replay would not call"
    handle.remove()
    target.generate(
        **inputs, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True
    )
    assert why_not(found, draft) == "", "Transformers' own hooks stay, and do nothing"
    with Taps(found.layers, [-1, 1]).open():
        assert why_not(found, draft) == "", "another thread's run"
    with torch.autocast("cpu"):
        assert "autocast" in str(why_not(found, draft))
    draft.generation_config.engine = "auto"
    target.model.norm.weight = nn.Parameter(
        target.model.norm.weight.data.as_subclass(Quantised), requires_grad=False
    )
    assert "no plain tensors" in str(why_not(find_target(target), draft))
    draft.generation_config.engine = "cuda_graph"
    assert why_not(find_target(target), draft) == "", "asked for by name"
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    dynamic = shallow_target("llama", rope_parameters=rope)
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


def test_settings_that_need_the_host_keep_no_others_from_graphs(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    # This cutoff makes a distribution, whose arguments are looked at on the host unless a library has turned that off.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    reading = {"do_sample": True, "eta_cutoff": 0.01}
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    num_captured = len(TapeStep.captured)
    for settings, engine in ((reading, "eager"), ({}, "cuda_graph"), (reading, "eager")):
        out = target.generate(**inputs, **{**GREEDY, **settings}, assistant_model=draft)
        assert draft.last_stats.engine == engine
        assert settings or torch.equal(out, ref)
    assert len(TapeStep.captured) == num_captured
    assert len(told()) == 1
    free_buffers(draft)
    for settings, engine in ((reading, "eager"), ({}, "cuda_graph")):
        target.generate(**inputs, **{**GREEDY, **settings}, assistant_model=draft)
        assert draft.last_stats.engine == engine


def test_own_inputs_are_part_of_a_graph_or_run_eagerly() -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    for own, engine in (
        ({"output_hidden_states": False}, "cuda_graph"),
        ({"num_items_in_batch": torch.tensor(4)}, "eager"),
        ({}, "cuda_graph"),  # what one call brings says nothing of the next
    ):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft, **own), ref)
        assert draft.last_stats.engine == engine


def test_no_memory_for_a_graph_runs_eagerly_and_frees_graphs(
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


def test_a_failing_device_leaves_a_message_and_no_half_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft, inputs, ref = pair("cuda_graph")
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    given = DynamicCache(config=target.config)
    target.generate(**inputs, **GREEDY, assistant_model=draft, **{CACHE_NAME: given})
    before = [(layer.keys.clone(), layer.values.clone()) for layer in given.layers]
    replay, num_replays = Tape.replay, 0

    def failing(self: Tape) -> None:
        nonlocal num_replays
        num_replays += 1
        if num_replays == 3:
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCompile with ..."
            )
        replay(self)

    monkeypatch.setattr(Tape, "replay", failing)
    more = prompts([42, 42, 42], 1) | {"attention_mask": torch.ones(3, 42, dtype=torch.long)}
    more["input_ids"][:, :37] = ref
    with pytest.raises(
        RuntimeError, match="expected the steps to run on CUDA, got RuntimeError: CUDA error: an"
    ):
        target.generate(**more, **GREEDY, assistant_model=draft, **{CACHE_NAME: given})
    assert num_replays == 3
    assert not [kept for kept in kept_buffers(draft) if kept.capacity >= 42 + NEW]
    for layer, (keys, values) in zip(given.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    monkeypatch.setattr(Tape, "replay", replay)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_a_length_beyond_memory_is_refused_with_what_would_fit(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    target, draft, inputs, ref = pair(engine)
    monkeypatch.setattr(size, "free_memory", lambda device: 30_000)
    with pytest.raises(
        ValueError, match=r"expected K/V buffers of at most [\d,]+ bytes .* got [\d,]+ for 3 rows"
    ):
        target.generate(**inputs, max_new_tokens=10**12, do_sample=False, assistant_model=draft)
    if engine == "static":
        return
    # What is said to fit does, one token more does not.
    monkeypatch.setattr(size, "free_memory", lambda device: 200_000)
    with pytest.raises(size.OutOfRoomError) as refused:
        target.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=draft)
    fits = int(
        str(refused.value).partition("rows can have at most ")[2].partition(" ")[0].replace(",", "")
    )
    new = fits - 11 - 8  # the longest prompt and a block
    out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
    assert torch.equal(out[:, :37], ref[:, : out.shape[1]])
    with pytest.raises(size.OutOfRoomError):
        target.generate(**inputs, max_new_tokens=new + 1, do_sample=False, assistant_model=draft)


def test_other_shapes_make_room_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs, ref = pair("static")
    target.generate(**prompts([7], 0), **GREEDY, assistant_model=draft)
    (kept,) = kept_buffers(draft)
    monkeypatch.setattr(
        size, "free_memory", lambda device: 0 if kept in kept_buffers(draft) else 10**9
    )
    monkeypatch.setattr(buffers, "check_memory", lambda *args, **kwargs: None)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert kept not in kept_buffers(draft)


CANARY = 7.0
GUARD = 64


@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-sliding"])
def test_nothing_is_written_beyond_the_buffers(
    family: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, inputs, ref = pair(engine, family)
    guarded: list[Tensor] = []

    def fenced(tensor: Tensor) -> Tensor:
        """The same tensor between two fences."""
        whole = torch.full((tensor.numel() + 2 * GUARD,), CANARY, dtype=tensor.dtype)
        guarded.append(whole)
        inner = whole[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        return inner.zero_()

    init = ragged.RaggedLayer.__init__

    def fenced_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.key_buffer, self.value_buffer = fenced(self.key_buffer), fenced(self.value_buffer)

    allocate = buffers.DecodeState.allocate

    def fenced_state(*args: Any) -> Any:
        state = allocate(*args)
        state.ids = fenced(state.ids)
        return state

    # Tries layers once, in caches of its own
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    buffers.free_buffers(draft)
    monkeypatch.setattr(ragged.RaggedLayer, "__init__", fenced_init)
    monkeypatch.setattr(buffers.DecodeState, "allocate", fenced_state)
    for module in (buffers, static_step):
        monkeypatch.setattr(module, "round_up", lambda length: length)  # not a slot to spare
    out = target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert torch.equal(out, ref)
    assert draft.last_stats.engine == engine
    assert len(guarded) == 2 * (2 + 2) + 1
    for whole in guarded:
        assert bool((whole[:GUARD] == CANARY).all())
        assert bool((whole[-GUARD:] == CANARY).all())
