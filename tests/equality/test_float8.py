"""Drafting in FP8, its rounding emulated: the text is plain `generate`'s, and neither model is changed by it."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel, free_buffers
from dflash_hf.generation import float8
from dflash_hf.generation.float8 import (
    Float8Linear,
    drafting_copy,
    round_rows,
    scaled_linear_in_float32,
)
from dflash_hf.target_model.parts import find_target
from helpers.float8 import use_emulation
from helpers.static import TapeStep, set_engine, tensor_oracle, use_tapes
from tiny import DFLASH2, DSPARK, VOCAB, prompts, shallow_target, tiny_draft, truth_of

pytestmark = pytest.mark.same_on_every_release

TOY = Path(__file__).resolve().parents[2] / "demos" / "toy"
GREEDY: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False}
# Sizes that can all be multiplied in FP8.
SIZES: dict[str, Any] = {"intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "the target's head": {},
    "own head": {"own_lm_head": True},
    "biases": {"attention_bias": True},
    "DFlash 2": DFLASH2,
    "DSpark": DSPARK,
}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulation(monkeypatch)


def asked(draft: DFlashDraftModel, dtype: Any = "float8_e4m3fn") -> DFlashDraftModel:
    """The draft, with FP8 asked for."""
    draft.generation_config.draft_dtype = dtype
    return draft


def state_of(*models: nn.Module) -> list[Tensor]:
    """Copies of all weights and buffers."""
    return [tensor.clone() for model in models for tensor in model.state_dict().values()]


def layers_of(drafter: nn.Module) -> dict[str, Float8Linear]:
    return {
        name: module for name, module in drafter.named_modules() if isinstance(module, Float8Linear)
    }


# ---- the numbers


def test_rows_are_rounded_to_three_bits_by_their_largest_number() -> None:
    torch.manual_seed(0)
    states = torch.randn(64, 256) * torch.logspace(-6, 6, 64)[:, None]
    numbers, scales = round_rows(states)
    assert numbers.dtype == torch.float8_e4m3fn
    assert scales.shape == (64, 1)
    assert scales.dtype == torch.float32
    assert torch.equal(numbers.float().abs().amax(dim=1), torch.full((64,), 448.0))
    error = (numbers.float() * scales - states).abs()
    # Half of the last of three bits, or of the smallest step near zero.
    assert bool((error <= (states.abs() / 16).maximum(scales * 2**-10) * 1.0001).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_zeros_and_large_numbers_stay_finite(dtype: torch.dtype) -> None:
    states = torch.zeros(3, 16, dtype=dtype)
    states[1, 0] = torch.finfo(torch.float16).max / 2
    states[2] = torch.finfo(torch.float16).tiny
    weight = round_rows(torch.eye(16))
    product = scaled_linear_in_float32(states, *weight)
    assert product.dtype == dtype
    torch.testing.assert_close(product, states, rtol=0.07, atol=1e-9)


def test_a_product_is_close_to_that_of_the_weights() -> None:
    torch.manual_seed(0)
    states, layer = torch.randn(2, 5, 64), nn.Linear(64, 48)
    rounded = Float8Linear(float8._rounded(layer), layer.bias)
    product = scaled_linear_in_float32(states, rounded.weight, rounded.scales) + layer.bias
    exact = layer(states)
    assert product.shape == exact.shape
    assert bool((product - exact).norm() < 0.05 * exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(1, (48, 32)), (16, (576, 1536)), (17, (1536, 576))]
)
def test_torchs_own_product_is_the_definition(
    num_rows: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Torch has that product on a CPU too; sums of another order may be rounded to another number of bfloat16."""
    torch.manual_seed(0)
    states, weight = torch.randn(1, num_rows, sizes[1]).to(dtype), round_rows(torch.randn(sizes))
    product, wanted = (
        float8.scaled_linear(states, *weight),
        scaled_linear_in_float32(states, *weight),
    )
    assert product.dtype == dtype
    assert product.shape == (1, num_rows, sizes[0])
    assert bool((product - wanted).norm() < 1e-3 * wanted.norm())


def test_memory_that_has_run_out_is_not_kept_as_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    device = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(float8, "round_rows", lambda weight: (weight, weight))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: torch.ones(sizes))
    monkeypatch.setattr(float8, "scaled_linear", no_memory)
    float8.why_not.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        float8.why_not(device)
    monkeypatch.setattr(float8, "scaled_linear", lambda *_: None)
    assert float8.why_not(device) is None
    float8.why_not.cache_clear()


def test_a_weight_is_rounded_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(32, 48)
    whole = float8._rounded(layer)
    monkeypatch.setattr(float8, "NUM_ROWS", 7)
    parts = float8._rounded(layer)
    assert torch.equal(whole.numbers.float(), parts.numbers.float())
    assert torch.equal(whole.scales, parts.scales)


# ---- the text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_text_is_plain_generates(kind: str, dtype: torch.dtype, emulated: None) -> None:
    target = shallow_target("qwen3")
    inputs = prompts([9, 4], 3)
    ref = target.generate(**inputs, **GREEDY)
    # In half precision the target itself has near ties, and which token wins depends on the CPU.
    draft = asked(tiny_draft(target, **SIZES, **KINDS[kind]).to(dtype))
    before = state_of(target, draft)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.float8_bytes > 0
    assert draft.last_stats.num_draft_forwards > 0
    assert all(
        torch.equal(old, new) for old, new in zip(before, state_of(target, draft), strict=True)
    )
    assert torch.equal(target.generate(**inputs, **GREEDY), ref)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_products_in_fp8_and_a_verify_none(
    kind: str, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES, **KINDS[kind]))
    widths: list[int] = []
    multiply = float8.scaled_linear

    def counted(states: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        widths.append(weight.shape[0])
        return multiply(states, weight, scales)

    monkeypatch.setattr(float8, "scaled_linear", counted)
    target.generate(**prompts([9], 3), **GREEDY, assistant_model=draft)
    num = draft.last_stats.num_draft_forwards
    assert num
    # Seven of each layer, the context's and the head's; none of the prompt's.
    assert len(widths) == num * (2 * 7 + 2)
    assert widths.count(VOCAB) == num
    widths.clear()
    target.generate(**prompts([9], 3), **GREEDY, assistant_model=asked(draft, None))
    assert not widths


@pytest.mark.parametrize("engine", ["eager", "static", "cuda_graph"])
@pytest.mark.parametrize("kind", ["the target's head", "DFlash 2"])
def test_the_text_is_plain_generates_where_much_is_accepted(
    engine: str, kind: str, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch)
    target, inputs = shallow_target("qwen3"), prompts([9], 3)
    ref = target.generate(**inputs, **GREEDY)
    draft = asked(tensor_oracle(target, truth_of(inputs, ref), 5, **SIZES, **KINDS[kind]))
    draft.rows = []  # the copy is made before the draft sees a prompt
    set_engine(draft, engine)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), ref)
    assert draft.last_stats.engine == engine
    assert draft.last_stats.acceptance_length > 1.2


@pytest.mark.parametrize("proposal", ["argmax", "shared_noise"])
def test_a_sampled_text_is_that_of_the_weights_as_they_are(proposal: Any, emulated: None) -> None:
    target = shallow_target("qwen3")
    inputs, draft = prompts([9, 4], 3), tiny_draft(target, **SIZES)
    draft.generation_config.proposal = proposal
    texts = []
    for dtype in (None, "float8_e4m3fn"):
        torch.manual_seed(11)
        settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True}
        texts.append(target.generate(**inputs, **settings, assistant_model=asked(draft, dtype)))
    assert torch.equal(*texts)


@cache
def toy(dtype: torch.dtype) -> tuple[Any, DFlashDraftModel, Any]:
    """The bundled pair for texts."""
    target = AutoModelForCausalLM.from_pretrained(TOY / "target", dtype=dtype).eval()
    draft = DFlashDraftModel.from_pretrained(TOY / "draft", dtype=dtype)
    return target, draft, AutoTokenizer.from_pretrained(TOY / "target")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [0, 16])
def test_a_trained_draft_is_about_as_often_right(
    dtype: torch.dtype, nodes: int, emulated: None
) -> None:
    target, draft, tokenizer = toy(dtype)
    options = draft.generation_config
    options.num_tree_nodes = nodes
    message = [{"role": "user", "content": "Compute 41 + 80 - 99 + 14."}]
    inputs = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    settings: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False}
    found: list[tuple[Tensor, float]] = []
    for options.draft_dtype in (None, "float8_e4m3fn"):
        out = target.generate(**inputs, **settings, assistant_model=draft)
        found.append((out, draft.last_stats.acceptance_length))
    (text, length), (other_text, other_length) = found
    assert torch.equal(text, other_text)
    assert other_length > 0.8 * length
    assert length > 2


# ---- what is copied


def test_the_copy_rounds_products_and_head_and_shares_the_rest(emulated: None) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES))
    drafter = drafting_copy(draft, find_target(target))
    per_layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    per_layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    wanted = {
        "fc",
        "lm_head",
        *(f"layers.{index}.{name}" for index in range(2) for name in per_layer),
    }
    assert set(layers_of(drafter)) == wanted
    assert not layers_of(draft)
    assert not layers_of(target)
    assert draft.lm_head is None
    assert isinstance(drafter.lm_head, Float8Linear)
    assert drafter.norm is draft.norm
    own = {id(parameter) for parameter in draft.parameters()}
    assert {id(parameter) for parameter in drafter.parameters()} <= own
    numbers = sum(
        layer.weight.numel() + 4 * layer.weight.shape[0] for layer in layers_of(drafter).values()
    )
    assert float8.float8_bytes(drafter) == numbers
    assert float8.float8_bytes(draft) == 0


def test_what_cannot_be_multiplied_or_was_changed_stays_as_it_is(emulated: None) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, intermediate_size=40))
    calls: list[int] = []
    layers: Any = draft.layers
    attention = layers[1].self_attn
    attention.q_proj.register_forward_hook(lambda *args: calls.append(1))
    layers[0].self_attn.o_proj = nn.Sequential(layers[0].self_attn.o_proj)
    drafter = drafting_copy(draft, find_target(target))
    assert not [
        name for name in layers_of(drafter) if "mlp" in name or name.endswith("0.self_attn.o_proj")
    ]
    copied: Any = drafter.layers
    assert copied[1].self_attn.q_proj is attention.q_proj
    assert copied[0].self_attn.o_proj is layers[0].self_attn.o_proj
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    assert len(calls) >= draft.last_stats.num_draft_forwards > 0


def test_a_head_with_a_hook_is_called_as_ever(emulated: None) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES))
    head: Any = target.get_output_embeddings()
    head.register_forward_hook(lambda *args: None)
    drafter = drafting_copy(draft, find_target(target))
    assert drafter.lm_head is draft.lm_head is None
    assert "fc" in layers_of(drafter)


def rounded_of(draft: DFlashDraftModel, target: Any) -> dict[str, tuple[int, Tensor]]:
    """Where the copy's weights are, and what they are."""
    found = layers_of(drafting_copy(draft, find_target(target)))
    return {
        name: (layer.weight.data_ptr(), layer.weight.float() * layer.scales)
        for name, layer in found.items()
    }


def test_the_copy_is_made_once_and_anew_where_weights_change(emulated: None) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES))
    first = rounded_of(draft, target)
    again = rounded_of(draft, target)
    assert {name: place for name, (place, _) in first.items()} == {
        name: place for name, (place, _) in again.items()
    }
    other = {name: -weight for name, weight in draft.state_dict().items()}
    draft.load_state_dict(other)
    loaded = rounded_of(draft, target)
    for name, (_, weight) in loaded.items():
        assert torch.equal(weight, first[name][1] if name == "lm_head" else -first[name][1]), name
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(2.0)
        draft.fc.weight.zero_()
    draft.layers[0].mlp.gate_proj.weight = nn.Parameter(torch.ones(48, 32, dtype=draft.dtype))  # pyright: ignore
    changed = rounded_of(draft, target)
    assert torch.equal(changed["lm_head"][1], 2 * loaded["lm_head"][1])
    assert not changed["fc"][1].any()
    assert torch.allclose(changed["layers.0.mlp.gate_proj"][1], torch.ones(48, 32))
    assert torch.equal(changed["layers.1.mlp.up_proj"][1], loaded["layers.1.mlp.up_proj"][1])
    draft.float()
    assert set(rounded_of(draft, target)) == set(first)


def test_the_copy_goes_with_the_draft_or_on_request(emulated: None) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES))
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    held = [
        weakref.ref(layer.weight)
        for layer in layers_of(drafting_copy(draft, find_target(target))).values()
    ]
    gc.collect()
    assert all(one() is not None for one in held)
    free_buffers(draft)
    gc.collect()
    assert all(one() is None for one in held)
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    held = [
        weakref.ref(layer.weight)
        for layer in layers_of(drafting_copy(draft, find_target(target))).values()
    ]
    del draft
    gc.collect()
    assert all(one() is None for one in held)


def test_training_saving_and_copying_know_nothing_of_it(emulated: None, tmp_path: Path) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES))
    names = list(draft.state_dict())
    target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    assert list(draft.state_dict()) == names
    assert list(copy.deepcopy(draft).state_dict()) == names
    block, context = (
        torch.randn(1, 8, 32, dtype=draft.dtype),
        torch.randn(1, 3, 64, dtype=draft.dtype),
    )
    draft(block, context).last_hidden_state.sum().backward()
    assert draft.fc.weight.grad is not None
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.generation_config.draft_dtype == "float8_e4m3fn"
    assert torch.equal(loaded.fc.weight, draft.fc.weight)


def test_graphs_are_captured_again_for_another_copy(
    emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tapes(monkeypatch)
    target, inputs = shallow_target("qwen3"), prompts([9], 3)
    ref = target.generate(**inputs, **GREEDY)
    draft = asked(tiny_draft(target, **SIZES))
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    num = len(TapeStep.captured)
    assert num
    target.generate(**inputs, **GREEDY, assistant_model=draft)
    assert len(TapeStep.captured) == num
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=asked(draft, None)), ref)
    assert len(TapeStep.captured) > num


# ---- what is refused


def test_a_device_without_it_is_refused_before_any_work() -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES))
    before, calls = state_of(target, draft), list[int]()
    for model in (target, draft):
        for module in model.modules():
            module.register_forward_pre_hook(lambda *args: calls.append(1))
    what = (
        r"^expected a draft on CUDA of compute capability 8\.9 or more under draft_dtype='float8_e4m3fn', "
        r"got 'cpu'; leave draft_dtype out$"
    )
    with pytest.raises(ValueError, match=what):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
    assert not calls
    assert all(
        torch.equal(old, new) for old, new in zip(before, state_of(target, draft), strict=True)
    )
    assert draft not in float8._kept


@pytest.mark.parametrize(
    "value", ["float8", "fp8", True, 8, torch.float8_e4m3fn, ["float8_e4m3fn"], ""]
)
def test_other_values_are_refused(value: Any) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target), value)
    with pytest.raises(
        ValueError,
        match=r"^expected draft_dtype left out or 'float8_e4m3fn', got .*; leave it out$",
    ):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)


def test_no_room_for_the_copy_is_refused(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target("qwen3")
    draft = asked(tiny_draft(target, **SIZES))
    monkeypatch.setattr(float8, "free_memory", lambda device: 1000)
    what = r"^expected [\d,]+ bytes free on cpu for the copy of the draft in FP8, got 1000; leave draft_dtype out$"
    with pytest.raises(ValueError, match=what):
        target.generate(**prompts([6], 0), **GREEDY, assistant_model=draft)
