"""Compiled layers of the target give the plain text, and leave nothing behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils.deprecation import deprecate_kwarg

from dflash_hf import ops
from dflash_hf.cache_name import CACHE_NAME
from dflash_hf.generation import step
from dflash_hf.target import compiled
from dflash_hf.target.compiled import compiled_layers
from dflash_hf.target.hidden_states import Taps
from dflash_hf.target.parts import find_target
from helpers.static import set_engine, tensor_oracle, use_tapes
from helpers.widths import use_random_widths
from tiny import FAMILIES, prompts, tiny_target, truth_of

NEW = 20
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compiles with a backend that runs the graphs as they are; returns how many operations each of them has."""
    found: list[int] = []
    torch._dynamo.reset()

    def counted(graph: Any, examples: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph.forward

    for cached in (compiled._compiled, compiled._attention_forward):
        cached.cache_clear()
    monkeypatch.setattr(compiled, "backend", counted)
    use_tapes(monkeypatch, 64)
    return found


def pair(family: str, engine: Any = "static", **settings: Any) -> tuple[Any, Any, dict[str, Tensor], Tensor]:
    """A tiny target, a partly right draft with compiled layers, ragged prompts and plain `generate`'s text."""
    target: Any = tiny_target(family)
    if family in ("qwen3-moe", "gpt-oss"):
        target = target.float()
        target.set_experts_implementation("batched_mm")
    inputs = prompts([4, 11, 7], 0)
    ref = target.generate(**inputs, **GREEDY)
    draft = tensor_oracle(target, truth_of(inputs, ref), 0, 8)
    set_engine(draft, engine)
    draft.generation_config.compile_layers = True
    return target, draft, inputs, ref


def own_forwards(target: Any) -> list[str]:
    return [name for name, module in target.named_modules() if "forward" in vars(module)]


OFTEN = ("qwen3", "gemma3", "gpt-oss", "phi3")  # the others, which differ less, are run by `-m slow`


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_gives_the_plain_text_from_a_few_graphs(family: str, graphs: list[int]) -> None:
    target, draft, inputs, ref = pair(family)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.acceptance_length > 1.0
        num_graphs = len(graphs)
        assert not own_forwards(target)
    assert 3 <= num_graphs <= 5, "norm and rest of a layer, RoPE, norms of queries and keys: not one per layer"
    assert len(graphs) == num_graphs, "compiled once"
    assert max(graphs) > 15, "the MLP with what stands around it"


@pytest.mark.parametrize(("family", "is_left"), [("llama", True), ("qwen3-moe", True), ("phi3", False)])
def test_layers_whose_attention_kernels_compute_are_left_to_them(
    family: str, is_left: bool, graphs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """By references, in float32. Of the others nothing is fused inside of what is compiled."""
    target, draft, inputs, _ = pair(family)
    target, draft = target.float(), draft.float()
    ref = target.generate(**inputs, **GREEDY)
    with ops.kernels(True):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert bool(graphs) != is_left
    assert "cannot compile" not in caplog.text
    assert not own_forwards(target)


def test_a_decorated_attention_is_compiled_like_a_plain_one(
    graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers decorates forwards whose arguments it renames."""
    decorated = deprecate_kwarg("former_name", "9.0.0", new_name=CACHE_NAME)(Qwen3Attention.forward)
    monkeypatch.setattr(Qwen3Attention, "forward", decorated)
    target, draft, inputs, ref = pair("qwen3")
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert len(graphs) == 5


def test_taps_hold_what_they_hold_without(graphs: list[int]) -> None:
    target, _, inputs, _ = pair("qwen3")
    found = find_target(target)
    states: list[Tensor] = []
    for is_compiled in (False, True):
        with torch.no_grad(), Taps(found.layers, [-1, 0, 2]).open() as taps:
            if is_compiled:
                with compiled_layers(found, (3, 11)):
                    target(**inputs)
            else:
                target(**inputs)
            states.append(taps.take())
    assert graphs
    torch.testing.assert_close(states[0], states[1], rtol=1e-12, atol=1e-12)


def test_another_threads_calls_and_the_users_own_run_as_they_are(graphs: list[int]) -> None:
    target, _, inputs, ref = pair("qwen3")
    found = find_target(target)
    texts: list[Tensor] = []
    with compiled_layers(found, (3, 11)):
        assert own_forwards(target)
        thread = threading.Thread(target=lambda: texts.append(target.generate(**inputs, **GREEDY)))
        thread.start()
        thread.join()
        with compiled_layers(found, (3, 5)):
            pass
        assert own_forwards(target), "two runs at once: the last one takes it off"
    assert torch.equal(texts[0], ref)
    assert not graphs
    assert not own_forwards(target)


def test_a_compilation_that_fails_is_said_once_and_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft, inputs, ref = pair("qwen3")

    def failing(graph: Any, examples: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "backend", failing)
    step.logger.warning_once.cache_clear()
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    said = [r.getMessage() for r in caplog.records if "torch.compile cannot compile them" in r.getMessage()]
    assert len(said) == 1
    assert "no compiler here" in said[0]
    assert not own_forwards(target)


def test_an_error_in_a_verify_leaves_the_modules_unchanged() -> None:
    target, draft, inputs, ref = pair("qwen3")
    head = target.lm_head.forward
    target.lm_head.forward = lambda states: 1 / 0 if own_forwards(target.model) else head(states)
    with pytest.raises(ZeroDivisionError):
        target.generate(**inputs, **GREEDY, assistant_model=draft)
    del target.lm_head.forward
    assert not own_forwards(target)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)


def test_layers_with_code_of_the_users_run_as_they_are(graphs: list[int]) -> None:
    target, draft, inputs, ref = pair("qwen3")
    norm = target.model.layers[1].input_layernorm
    plain, num_calls = norm.forward, 0

    def own(states: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return plain(states)

    norm.forward = own
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert num_calls == draft.last_stats.num_target_forwards
    assert own_forwards(target) == ["model.layers.1.input_layernorm"]
    assert len(graphs) == 5


def test_widths_and_captured_steps(graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    use_random_widths(monkeypatch, 1)
    target, draft, inputs, ref = pair("qwen3")
    draft.generation_config.verify_width = "auto"
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    # The step that is started behind the end may have had another width.
    num_widths = len(set(draft.last_stats.verify_widths))
    assert num_widths > 1
    assert 5 * num_widths <= len(graphs) <= 5 * (num_widths + 1)
    set_engine(draft, "cuda_graph")
    for is_compiled in (True, False):
        draft.generation_config.compile_layers = is_compiled
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
        assert draft.last_stats.engine == "cuda_graph"


@pytest.mark.slow
@pytest.mark.timeout(1500)  # it calls a C++ compiler for each graph
def test_the_real_compiler_gives_the_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "backend", "inductor")
    target, draft, inputs, ref = pair("llama")
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
