"""Products in one launch: used where they were measured to be faster and nowhere else; texts stay."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dflash_kernels
from dflash_hf import joint_products, ops
from dflash_hf.devices import Inventory
from dflash_hf.generation import cuda_graph, product_times
from dflash_hf.generation.product_times import measure_products
from dflash_hf.joint_products import Products
from dflash_hf.target_model.parts import find_target
from helpers.kernel_checks import DEVICES, OPERATIONS, POINTWISE, PRODUCTS, Calls, check_raises
from helpers.static import tensor_oracle
from tiny import prompts, shallow_target, tiny_target, truth_of

NEW = 12
SECONDS = product_times._seconds
# What a layer makes jointly: queries with keys and values, the output of attention, that of the MLP; and the gate.
PER_LAYER = {"linears": 3, "gated_linear": 1}
SMALL: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
TAPS: dict[str, Any] = {"target_layer_ids": [0, 1]}


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves a choice behind, and one launch is the faster way if anybody measures."""
    monkeypatch.setattr(joint_products, "_chosen", set[Products]())
    seconds = itertools.cycle((2.0, 1.0))
    monkeypatch.setattr(product_times, "_seconds", lambda *args: next(seconds))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, PRODUCTS)


def decode(
    target: Any,
    draft_of: Any,
    device: str = "cpu",
    lengths: tuple[int, ...] = (4, 11, 7),
    is_measured: bool = True,
) -> Any:
    """Text with a draft, behind a measurement of both, is plain `generate`'s; returns the draft."""
    inputs = {name: t.to(device) for name, t in prompts(list(lengths), 2).items()}
    wanted = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    draft = draft_of(target, truth_of(inputs, wanted)).to(device)
    with ops.kernels(True):
        if is_measured:
            measure_products(target, draft)
        out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(out, wanted)
    assert draft.last_stats.acceptance_length > 1
    return draft


def oracle(target: Any, truth: Any, **options: Any) -> Any:
    """A draft that knows a part of the text; its blocks and three rows are 18 tokens."""
    return tensor_oracle(target, truth, 2, 6, **options)


def by_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels by their definitions, in the interpreter too: it takes long."""
    for name in (*OPERATIONS, *POINTWISE, *PRODUCTS):
        monkeypatch.setattr(getattr(dflash_kernels, name), "_covers", lambda *args: False)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_texts_stay_and_every_layer_is_multiplied_jointly(
    family: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_definitions(monkeypatch)
    target = shallow_target(family).float()
    draft = decode(target, oracle)
    stats = draft.last_stats
    num_verifies = stats.num_target_forwards - 1
    layers = num_verifies * target.config.num_hidden_layers
    layers += stats.num_draft_forwards * draft.config.num_hidden_layers
    assert calls.all() == {name: num * layers for name, num in PER_LAYER.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_give_the_plain_text(device: str, calls: Calls) -> None:
    target: Any = tiny_target("llama", **SMALL)
    target.to(device, torch.float32)

    def draft_of(target: Any, truth: Any) -> Any:
        return tensor_oracle(
            target, truth, 1, 4, num_attention_heads=2, num_key_value_heads=1, **TAPS
        )

    decode(target, draft_of, device, lengths=(5,))
    assert calls.kernels.keys() == set(PRODUCTS)
    assert not calls.references


def test_nothing_is_multiplied_jointly_before_a_measurement(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_definitions(monkeypatch)
    decode(shallow_target("qwen3").float(), oracle, is_measured=False)
    assert not calls.all()


def test_the_slower_way_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3").float()
    with ops.kernels(True):
        faster = measure_products(target)
        assert joint_products.chosen() == {each.products for each in faster}
        # Four groups of a layer, for two numbers of rows; layers of one shape are measured together.
        assert len(faster) == 4 * 2
        monkeypatch.setattr(product_times, "_seconds", lambda *args: 1.0)
        measure_products(target)
        assert not joint_products.chosen(), "another measurement takes a choice back"


def test_a_kernel_that_cannot_be_built_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3").float()
    failures = {torch.device("cpu"): "no compiler"}
    monkeypatch.setattr(ops.linears, "failures", failures)
    with ops.kernels(True):
        measure_products(target)
    assert {each.is_gated for each in joint_products.chosen()} == {True}


def test_a_model_without_kernels_is_refused() -> None:
    check_raises(lambda: measure_products(tiny_target("qwen3")), "linear layers", "GPU")


class OwnLinear(nn.Linear):
    """Stands for an adapter or a quantised layer."""


class OwnParameter(nn.Parameter):
    """Stands for a weight of a class of its own."""


def is_joint(*layers: nn.Linear, rows: int = 4) -> bool:
    """Whether one launch makes the products of layers, which were measured as they are now."""
    states = torch.ones(rows, layers[0].in_features)
    with torch.no_grad(), ops.kernels(True):
        for num_rows in joint_products.ROWS:
            joint_products._chosen.add(joint_products.products_of(layers, False, num_rows))
        return joint_products._is_joint(states, layers, is_gated=False)


def test_layers_that_are_more_than_a_product_run_as_they_are() -> None:
    layer, biased = nn.Linear(6, 5, bias=False), nn.Linear(6, 5)
    assert is_joint(layer)
    assert is_joint(biased, biased)
    assert not is_joint(layer, biased), "biases for all or none"
    assert not is_joint(layer, rows=33)
    assert not is_joint(layer, nn.Linear(7, 5, bias=False)), "an input for all"
    assert not is_joint(OwnLinear(6, 5))
    assert not is_joint(nn.Linear(6, 5).double(), layer)
    handle = layer.register_forward_hook(lambda *args: None)
    assert not is_joint(layer), "a hook"
    handle.remove()
    handle = layer.register_forward_pre_hook(lambda module, args: None)
    assert not is_joint(layer), "a hook before it"
    handle.remove()
    assert is_joint(layer)
    vars(layer)["forward"] = lambda states: states
    assert not is_joint(layer), "a forward of its own"
    del vars(layer)["forward"]
    layer.weight = OwnParameter(layer.weight.detach())
    assert not is_joint(layer), "a weight of a class of its own"


def test_hooks_and_other_layers_of_a_model_stay_in_force(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_definitions(monkeypatch)
    target: Any = tiny_target("qwen3").float()
    layers = target.model.layers
    seen = list[Tensor]()

    def shift(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen.append(out)
        return out + 0.5

    layers[1].self_attn.k_proj.register_forward_hook(shift)
    layers[2].mlp.down_proj.register_forward_hook(shift)
    layers[3].mlp.up_proj.__class__ = OwnLinear
    layers[3].self_attn.o_proj.__class__ = OwnLinear
    draft = decode(target, oracle)
    num_verifies = draft.last_stats.num_target_forwards - 1
    drafts = draft.last_stats.num_draft_forwards * draft.config.num_hidden_layers
    depth = len(layers)
    assert len(seen) > 2 * num_verifies
    assert calls.all() == {
        "linears": 3 * (drafts + num_verifies * depth) - 3 * num_verifies,
        "gated_linear": drafts + num_verifies * (depth - 1),
    }


def test_a_captured_step_is_captured_again_behind_a_measurement() -> None:
    target = tiny_target("qwen3").float()
    found = find_target(target)
    parts = [Inventory.of(target)]
    before = cuda_graph.fingerprint_of(found, parts)
    assert cuda_graph.fingerprint_of(found, parts) == before
    with ops.kernels(True):
        measure_products(target)
    assert cuda_graph.fingerprint_of(found, parts) != before


@pytest.mark.gpu
def test_both_ways_are_timed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_times, "_seconds", SECONDS)
    target: Any = tiny_target("qwen3")
    target.to("cuda", torch.bfloat16)
    measured = measure_products(target)
    assert len(measured) == 4 * 2
    assert all(0 < each.by_layers < 1 and 0 < each.by_launch < 1 for each in measured)
