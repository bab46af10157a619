"""Laid-out weights: the product of torch's own operation, and never that of weights as they were before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_hf import packed_weights
from dflash_hf.packed_weights import PACKED_AT, PackedWeights, linear, packing

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight of another test is laid out, and small ones are, too."""
    packed_weights.forget_packed()
    monkeypatch.setattr(packed_weights, "MIN_SIZES", dict.fromkeys(packed_weights.MIN_SIZES, 2**14))


def layer_of(
    dtype: torch.dtype = torch.float32, inputs: int = 192, outputs: int = 160, bias: bool = False
) -> nn.Linear:
    """Returns a layer whose weights are large enough to be laid out."""
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def states_for(layer: nn.Linear, *shape: int) -> Tensor:
    """Returns states for a layer."""
    return torch.randn(*shape, layer.in_features).to(layer.weight.dtype)


def warmed(layer: nn.Linear) -> PackedWeights:
    """Returns the weights of a run that has laid out those of a layer."""
    packed = PackedWeights([])
    with torch.no_grad():
        for _ in range(PACKED_AT):
            packed.linear(states_for(layer, 2), layer.weight, layer.bias)
    assert layer.weight in packed_weights._kept
    return packed


def is_plain_product(packed: PackedWeights, layer: nn.Linear) -> bool:
    """Returns True if a run's product is that of the layer as it is now."""
    states = states_for(layer, 3)
    with torch.no_grad():
        found = packed.linear(states, layer.weight, layer.bias)
        return torch.allclose(found, layer(states), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 8), (70,), (1, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_half_precision_has_the_same_bits(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    if not packed_weights._computes_alike(dtype):
        pytest.skip(f"this machine multiplies no laid-out weights in {dtype}")
    layer = layer_of(dtype, bias=bias)
    packed = warmed(layer)
    states = states_for(layer, *shape)
    with torch.no_grad():
        assert torch.equal(packed.linear(states, layer.weight, layer.bias), layer(states))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 8), (70,)])
def test_float32_is_rounded_alike(shape: tuple[int, ...]) -> None:
    layer = layer_of(bias=True)
    packed = warmed(layer)
    states = states_for(layer, *shape)
    with torch.no_grad():
        found = packed.linear(states, layer.weight, layer.bias)
        torch.testing.assert_close(found, layer(states), rtol=1e-5, atol=1e-5)


def test_a_weight_is_laid_out_at_its_third_use() -> None:
    layer = layer_of()
    packed = PackedWeights([])
    states = states_for(layer, 2)
    with torch.no_grad():
        for use in range(1, PACKED_AT + 1):
            packed.linear(states, layer.weight, layer.bias)
            assert (layer.weight in packed_weights._kept) == (use == PACKED_AT)


def test_the_next_run_has_it_from_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    warmed(layer)
    products: list[Tensor] = []
    monkeypatch.setattr(packed_weights, "_product", lambda states, *rest: products.append(states))
    with torch.no_grad():
        PackedWeights([]).linear(states_for(layer, 2), layer.weight, layer.bias)
    assert len(products) == 1


def added_by_data(layer: nn.Linear) -> None:
    # As libraries merge adapters: no version counts this.
    layer.weight.data += 1.0


def one_row_by_data(layer: nn.Linear) -> None:
    layer.weight.data[7] *= 2.0


def rows_swapped(layer: nn.Linear) -> None:
    layer.weight.data[[2, 5]] = layer.weight.data[[5, 2]].clone()


def one_number(layer: nn.Linear) -> None:
    layer.weight.data[3, 4] += 0.5


def added_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.add_(1.0)


def another_tensor(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def another_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)


def loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.randn_like(layer.weight)})


CHANGES: list[Callable[[nn.Linear], None]] = [
    added_by_data,
    one_row_by_data,
    rows_swapped,
    one_number,
    added_in_place,
    another_tensor,
    another_parameter,
    loaded,
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_run_sees_changed_weights(change: Callable[[nn.Linear], None]) -> None:
    layer = layer_of()
    warmed(layer)
    change(layer)
    packed = PackedWeights([])
    for _ in range(PACKED_AT + 1):
        assert is_plain_product(packed, layer)


@pytest.mark.parametrize("change", [added_in_place, another_tensor, another_parameter, loaded])
def test_a_counted_change_is_seen_within_a_run(change: Callable[[nn.Linear], None]) -> None:
    layer = layer_of()
    packed = warmed(layer)
    change(layer)
    for _ in range(PACKED_AT + 1):
        assert is_plain_product(packed, layer)


class OwnParameter(nn.Parameter):
    """A weight of a class of its own, as quantised ones are."""


def transposed(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(192, 160).t(), requires_grad=False)


def of_own_class(layer: nn.Linear) -> None:
    layer.weight = OwnParameter(layer.weight.data, requires_grad=False)


def in_float64(layer: nn.Linear) -> None:
    layer.double()


def small(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(8, 192), requires_grad=False)


@pytest.mark.parametrize("change", [transposed, of_own_class, in_float64, small])
def test_other_weights_stay_as_they_are(change: Callable[[nn.Linear], None]) -> None:
    layer = layer_of()
    change(layer)
    packed = PackedWeights([])
    for _ in range(PACKED_AT + 1):
        assert is_plain_product(packed, layer)
    assert layer.weight not in packed_weights._kept


def test_copies_take_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences: list[str] = []
    monkeypatch.setattr(packed_weights.logger, "warning_once", sentences.append)
    layers = [layer_of(), layer_of()]
    # Room for one copy and a half.
    room = int(1.5 * layers[0].weight.nbytes / packed_weights.SHARE_OF_MEMORY)
    monkeypatch.setattr(packed_weights, "total_memory", lambda device: room)
    packed = PackedWeights([])
    with torch.no_grad():
        for layer in layers:
            for _ in range(PACKED_AT + 1):
                packed.linear(states_for(layer, 2), layer.weight, None)
    assert [layer.weight in packed_weights._kept for layer in layers] == [True, False]
    assert len(sentences) == 1
    assert "an eighth of the memory" in sentences[0]


def test_a_machine_without_the_operation_computes_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    packed_weights._computes_alike.cache_clear()
    try:
        monkeypatch.setattr(packed_weights, "_product", missing)
        layer = layer_of()
        packed = PackedWeights([])
        for _ in range(PACKED_AT + 1):
            assert is_plain_product(packed, layer)
        assert layer.weight not in packed_weights._kept
    finally:
        packed_weights._computes_alike.cache_clear()


def test_a_machine_that_rounds_otherwise_computes_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_weights._computes_alike.cache_clear()
    try:
        monkeypatch.setattr(
            packed_weights, "_product", lambda states, packed, bias: states.new_ones(2, 3, 160)
        )
        assert not packed_weights._computes_alike(torch.bfloat16)
        assert not packed_weights._computes_alike(torch.float32)
    finally:
        packed_weights._computes_alike.cache_clear()


def test_gradients_and_casts_go_by_torchs_own_operation() -> None:
    layer = layer_of().requires_grad_(True)
    packed = warmed(layer)
    states = states_for(layer, 3)
    packed.linear(states, layer.weight, layer.bias).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = packed.linear(states.bfloat16(), layer.weight, layer.bias)
    assert found.dtype == torch.bfloat16


def test_a_weight_takes_its_copy_along() -> None:
    layer = layer_of()
    packed = warmed(layer)
    assert len(packed_weights._kept) == 1
    del layer, packed
    gc.collect()
    assert len(packed_weights._kept) == 0


def test_layers_are_as_they_were_behind_a_run() -> None:
    layer = layer_of()
    other = nn.Conv1d(1, 1, 1)

    def run() -> None:
        with torch.no_grad(), packing(PackedWeights([layer, other])):
            assert "forward" in layer.__dict__
            assert "forward" not in other.__dict__
            for _ in range(PACKED_AT):
                layer(states_for(layer, 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert "forward" not in layer.__dict__
    assert layer.weight in packed_weights._kept


def test_forwards_of_the_users_stay() -> None:
    before = layer_of()
    meanwhile = layer_of()
    own = lambda states: states  # noqa: E731
    before.forward = own  # type: ignore[method-assign]
    with packing(PackedWeights([before, meanwhile])):
        assert before.forward is own
        meanwhile.forward = own  # type: ignore[method-assign]
    assert before.forward is own
    assert meanwhile.forward is own


def test_another_thread_computes_as_ever() -> None:
    layer = layer_of()
    packed = PackedWeights([layer])

    def use() -> None:
        with torch.no_grad():
            for _ in range(PACKED_AT + 1):
                layer(states_for(layer, 2))
                linear(states_for(layer, 2), layer.weight, None)

    with packing(packed):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert layer.weight not in packed_weights._kept
