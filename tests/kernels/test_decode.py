"""Decoding with the kernels gives plain `generate`'s text: in the interpreter on a CPU, compiled on a GPU."""

import importlib
from typing import Any

import pytest
import torch

from dflash_hf import ops
from helpers.kernel_checks import CUDA, DEVICES
from tiny import oracle_draft, prompts, tiny_target, truth_of

NEW = 10
# A draft with every kind of layer: full and sliding, causal and not, window from the anchor.
FULL: dict[str, Any] = {}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry per launch of the attention kernel: whether it was causal."""
    from dflash_kernels.block_attention import kernel

    seen: list[bool] = []
    launch = kernel.block_attention_triton

    def counting(*args: Any) -> torch.Tensor:
        seen.append(args[5])
        return launch(*args)

    monkeypatch.setattr(kernel, "block_attention_triton", counting)
    return seen


def check(family: str, device: str, engine: Any, draft_options: dict[str, Any], launches: list[bool]) -> None:
    """A batch of two rows, of which the oracle draft knows a part, in float32."""
    target = tiny_target(family).to(device, torch.float32)
    inputs = {name: t.to(device) for name, t in prompts([4, 9], 1).items()}
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, wanted), 1, 4, **draft_options).to(device)
    draft.generation_config.engine = engine
    with ops.kernels(True):
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    stats = draft.last_stats
    assert 1 < stats.acceptance_length < 4, "the oracle has to be partly right"
    assert stats.engine == engine
    verifies, drafts = stats.num_target_forwards - 1, stats.num_draft_forwards
    # A captured step launches without us; capturing it does not.
    wanted_launches = verifies * 4 + drafts * draft.config.num_hidden_layers
    assert len(launches) == wanted_launches or (engine == "cuda_graph" and launches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "engine", "draft_options"),
    [("qwen3-sliding", "static", FULL), ("gemma2", "static", SLIDING), ("gpt-oss", "eager", FULL)],
    ids=["qwen3-sliding", "gemma2", "gpt-oss"],
)
def test_kernels_give_the_plain_text(
    family: str, engine: str, draft_options: dict[str, Any], device: str, launches: list[bool]
) -> None:
    check(family, device, engine, draft_options, launches)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "phi3"])
def test_kernels_give_the_plain_text_of_more_families(
    family: str, engine: str, device: str, launches: list[bool]
) -> None:
    check(family, device, engine, SLIDING, launches)


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_wired_path_gives_the_plain_text_by_the_references(family: str, engine: Any) -> None:
    """In float64, for which there are no kernels: the same path, computed by the operations' references."""
    target = tiny_target(family)
    inputs = prompts([4, 11, 7], 2)
    wanted = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    draft = oracle_draft(target, truth_of(inputs, wanted), 2, 6, **SLIDING)
    draft.generation_config.engine = engine
    calls: list[int] = []
    # Not as an attribute of dflash_kernels: there the name is the function's.
    package = importlib.import_module("dflash_kernels.block_attention")
    original = package.block_attention_reference

    def counting(*args: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch, ops.kernels(True):
        patch.setattr(package, "block_attention_reference", counting)
        out = target.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert len(calls) > 4


def test_kernels_are_used_where_they_are_said_to_be() -> None:
    query, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 3, 4)
    assert not ops.attends(query, key, key), "a CPU takes torch"
    with ops.kernels(True):
        assert ops.attends(query, key, key)
        assert not ops.attends(query, key.double(), key), "one dtype"
        assert not ops.attends(query.requires_grad_(), key, key), "kernels have no gradient"
        with torch.no_grad():
            assert ops.attends(query, key, key)
        with ops.kernels(False), torch.no_grad():
            assert not ops.attends(query, key, key)
    with torch.no_grad():
        assert not ops.attends(query, key, key), "the setting ends with its block"
