"""Decoding with the kernels gives plain `generate`'s text: in the interpreter on a CPU, compiled on a GPU.

By the operations' references the same path is tested in float64 more widely, in `test_step.py`.
"""

from typing import Any

import pytest
import torch

from dflash_hf import ops
from dflash_hf.generation import buffers
from dflash_hf.generation.buffers import kept_buffers
from helpers.kernel_checks import CUDA, DEVICES, OPERATIONS, TREES, Calls, calls_of, find_out
from helpers.static import Tape, set_engine, tensor_oracle, use_tapes
from tiny import DFLASH2, prompts, tiny_draft, tiny_target, truth_of

NEW = 7
# Few heads, for the interpreter: it runs one program per token, layer and head.
SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
# Few layers too: those of Gemma 2 and gpt-oss are of two kinds in turn.
SHALLOW: dict[str, Any] = {**SMALL, "num_hidden_layers": 2}
BOTH_KINDS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
SIZES = {"llama": SHALLOW, "gemma2": SHALLOW, "gpt-oss": SHALLOW | BOTH_KINDS}
TAPS: dict[str, Any] = {"target_layer_ids": [0, 1]}
# A draft with every kind of layer: full and sliding, causal and not, window from the anchor.
SLIDING: dict[str, Any] = {**SMALL, "sliding_window": 5, "window_from_anchor": True}

# Families whose attention is fused.
FUSED = ("qwen3", "llama", "mistral")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def check(
    family: str,
    device: str,
    engine: Any,
    lengths: list[int],
    draft_options: Any,
    calls: Calls,
    new: int = NEW,
) -> None:
    """Left-padded rows, of which the oracle draft knows a part, in float32."""
    small = SIZES.get(family, SMALL) if device == "cpu" else {}
    target = tiny_target(family, **small).to(device, torch.float32)
    inputs = {name: t.to(device) for name, t in prompts(lengths, 1).items()}
    wanted = target.generate(**inputs, max_new_tokens=new, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 1, 4, **draft_options, **TAPS).to(
        device
    )
    set_engine(draft, engine)
    find_out(target)
    calls.clear()
    with ops.kernels(True):
        out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    stats = draft.last_stats
    assert 1 < stats.acceptance_length < 4, "the oracle has to be partly right"
    assert stats.engine == engine
    assert not calls.references
    if engine == "cuda_graph":
        # A captured step launches without us; capturing it does not.
        assert calls.kernels.keys() == calls_of(draft).keys()
    else:
        depth = target.config.num_hidden_layers
        assert calls.kernels == calls_of(draft, depth if family.startswith(FUSED) else 0, depth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "engine", "lengths", "draft_options"),
    [
        pytest.param("qwen3-sliding", "static", [4, 9, 6], SMALL, marks=pytest.mark.slow),
        ("gemma2", "static", [9], SLIDING),
        ("gpt-oss", "eager", [3, 7], SMALL),
        ("llama", "eager", [9], SLIDING),
    ],
)
def test_kernels_give_the_plain_text(
    family: str, engine: str, lengths: list[int], draft_options: Any, device: str, calls: Calls
) -> None:
    check(family, device, engine, lengths, draft_options, calls)


@pytest.mark.parametrize("device", DEVICES[:1])
def test_kernels_replayed_from_a_tape_give_the_plain_text(
    device: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch, smallest_bucket=32)
    check("llama", device, "cuda_graph", [3, 5], SMALL, calls, new=5)
    assert Tape.num_replays > 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_call_reads_nothing_that_the_first_has_left(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Buffers of two of the interpreter's tiles: one that is read in part, and one that is not.
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 64)
    target = tiny_target("llama", **SHALLOW).to(device, torch.float32)
    inputs = {name: t.to(device) for name, t in prompts([3, 5], 1).items()}
    wanted = target.generate(**inputs, max_new_tokens=3, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 1, 4, **SMALL, **TAPS).to(device)
    set_engine(draft, "static")
    for _ in range(2):
        with ops.kernels(True):
            assert torch.equal(
                target.generate(**inputs, max_new_tokens=3, do_sample=False, assistant_model=draft),
                wanted,
            )
        (kept,) = kept_buffers(draft)
        for buffer in (*kept.cache.buffers(), *kept.draft_cache.buffers()):
            buffer.fill_(torch.nan)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
@pytest.mark.parametrize(
    ("family", "lengths"),
    [("llama", [9]), ("mistral", [4, 9, 6]), ("gemma3", [4, 9, 6]), ("phi3", [9])],
)
def test_kernels_give_the_plain_text_of_more_families(
    family: str, lengths: list[int], engine: str, device: str, calls: Calls
) -> None:
    check(family, device, engine, lengths, SLIDING, calls)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "proposal",
    [
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("argmax", "sample")),
        "shared_noise",
    ],
)
def test_a_sampled_text_is_that_without_kernels(
    proposal: Any, device: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SMALLEST_BUCKET", 32)
    target = tiny_target("qwen3", **SHALLOW).to(device, torch.float32)
    inputs = {name: t.to(device) for name, t in prompts([5], 4).items()}
    draft = tiny_draft(target, 3, **SMALL, **TAPS).to(device)
    draft.generation_config.proposal = proposal
    texts: list[torch.Tensor] = []
    find_out(target)
    calls.clear()
    for engine, enabled in (("eager", False), ("static", True)):
        set_engine(draft, engine)
        torch.manual_seed(5)
        settings = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.3, "top_k": 9}
        with ops.kernels(enabled):
            texts.append(target.generate(**inputs, **settings, assistant_model=draft))
        assert not calls.references
        assert calls.kernels == (calls_of(draft, num_fused=2, num_layers=2) if enabled else {})
    assert torch.equal(texts[0], texts[1])


def test_kernels_are_used_where_they_are_said_to_be() -> None:
    query, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 3, 4)
    assert not ops.use_kernel(ops.block_attention, query, key, key), "a CPU takes torch"
    with ops.kernels(True):
        assert ops.use_kernel(ops.block_attention, query, key, key)
        assert not ops.use_kernel(ops.block_attention, query, key.double(), key), "one dtype"
        assert not ops.use_kernel(ops.block_attention, query.requires_grad_(), key, key), (
            "kernels have no gradient"
        )
        with torch.no_grad():
            assert ops.use_kernel(ops.block_attention, query, key, key)
        with ops.kernels(False), torch.no_grad():
            assert not ops.use_kernel(ops.block_attention, query, key, key)
    with torch.no_grad():
        assert not ops.use_kernel(ops.block_attention, query, key, key), (
            "the setting ends with its block"
        )


def test_caches_are_written_by_kernels_where_all_is_of_one_kind() -> None:
    states, weight, buffer = (
        torch.zeros(1, 2, 3, 4),
        torch.nn.Parameter(torch.ones(4)),
        torch.zeros(1, 9, 3, 4),
    )
    counts = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        assert not ops.use_kernel(ops.norm_rope_write, states, weight, buffers=[buffer]), (
            "a CPU takes torch"
        )
        assert not ops.use_kernel(ops.argmax, states)
        assert not ops.use_kernel(ops.accept_and_prepare, counts)
        with ops.kernels(True):
            assert ops.use_kernel(ops.norm_rope_write, states, weight, buffers=[buffer])
            assert ops.use_kernel(ops.norm_rope_write, states, weight, buffers=[buffer.half()]), (
                "a cache is written in its own dtype"
            )
            assert not ops.use_kernel(
                ops.norm_rope_write, states, weight.bfloat16(), buffers=[buffer]
            )
            assert not ops.use_kernel(
                ops.norm_rope_write, states, weight.to("meta"), buffers=[buffer]
            ), "weights that are offloaded"
            assert not ops.use_kernel(
                ops.norm_rope_write, states, weight, buffers=[buffer.to("meta")]
            )
            with torch.autocast("cpu"):
                assert not ops.use_kernel(ops.norm_rope_write, states, weight, buffers=[buffer])
            assert ops.use_kernel(ops.argmax, states)
            assert ops.use_kernel(ops.accept_and_prepare, counts)
    with ops.kernels(True):
        assert not ops.use_kernel(ops.norm_rope_write, states, weight, buffers=[buffer]), (
            "kernels have no gradient"
        )
        with ops.kernels(False), torch.no_grad():
            assert not ops.use_kernel(ops.norm_rope_write, states, weight, buffers=[buffer])
            assert not ops.use_kernel(ops.argmax, states)
            assert not ops.use_kernel(ops.accept_and_prepare, counts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "nodes", "new"),
    [
        pytest.param({}, 6, NEW, id="tokens"),
        pytest.param({}, 66, 3, id="tokens, two words of ancestors"),
        pytest.param(DFLASH2, 6, NEW, id="candidates", marks=pytest.mark.slow),
    ],
)
def test_a_tree_is_built_followed_and_moved_by_kernels(
    kind: dict[str, Any], nodes: int, new: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("qwen3", **SHALLOW).to(device, torch.float32)
    inputs = {name: t.to(device) for name, t in prompts([4], 1).items()}
    wanted = target.generate(**inputs, max_new_tokens=new, do_sample=False)
    draft = tensor_oracle(target, truth_of(inputs, wanted), 1, 4, **SMALL, **TAPS, **kind).to(
        device
    )
    draft.generation_config.num_tree_nodes, draft.strength = nodes, 4.0
    set_engine(draft, "static")
    find_out(target)
    calls = Calls(monkeypatch, (*OPERATIONS, *TREES))
    with ops.kernels(True):
        out = target.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert not calls.references
    assert [calls.kernels[name] for name in TREES] == [
        draft.last_stats.num_target_forwards - 1
    ] * len(TREES)
    assert draft.last_stats.acceptance_length > 1
