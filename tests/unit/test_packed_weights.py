"""Copies of weights for a CPU: the product of torch's own operation, and never that of weights as they were before."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from dflash_hf import packed_weights
from dflash_hf.devices import Inventory
from dflash_hf.packed_weights import PackedWeights, linear, packing

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight of another test is copied, and small ones are, too."""
    packed_weights.forget_packed()
    monkeypatch.setattr(packed_weights, "MIN_SIZES", dict.fromkeys(packed_weights.MIN_SIZES, 2**14))


class Model(nn.Module):
    """One layer whose weights are large enough to be copied."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(192, 160, bias=bias).to(dtype).requires_grad_(False)

    def states(self, *shape: int) -> Tensor:
        """Returns states for the layer."""
        return torch.randn(*shape, self.layer.in_features).to(self.layer.weight.dtype)

    def packed(self) -> PackedWeights:
        """Returns the copies of a run."""
        return PackedWeights(Inventory.of(self), is_on=True)

    def warmed(self) -> PackedWeights:
        """Returns the copies of a run that has used the layer."""
        packed = self.packed()
        with torch.no_grad():
            packed.linear(self.states(4), self.layer.weight, self.layer.bias)
        assert self.num_copies == 1
        return packed

    @property
    def num_copies(self) -> int:
        """Copies that are kept of the model's weights."""
        return len(packed_weights._kept.get(self, {}))

    def is_product(self, packed: PackedWeights) -> bool:
        """Returns True if a run's product is that of the layer as it is now."""
        states = self.states(5)
        with torch.no_grad():
            found = packed.linear(states, self.layer.weight, self.layer.bias)
            return torch.allclose(found, self.layer(states), rtol=1e-4, atol=1e-4)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The states that were multiplied with a copy."""
    seen: list[Tensor] = []
    product = packed_weights._product

    def spying(states: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(states)
        return product(states, copy, bias)

    # The machine is tried before, by the same function.
    for dtype in packed_weights.MIN_SIZES:
        packed_weights._computes_alike(dtype)
    monkeypatch.setattr(packed_weights, "_product", spying)
    return seen


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 8), (70,), (1, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_half_precision_has_the_same_bits(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    if not packed_weights._computes_alike(dtype):
        pytest.skip(f"this machine multiplies no copies in {dtype}")
    model = Model(dtype, bias)
    packed = model.warmed()
    layer = model.layer
    # Where the order of adding is another one, one number in a thousand differs.
    for _ in range(20):
        states = model.states(*shape)
        with torch.no_grad():
            found = packed.linear(states, layer.weight, layer.bias)
            assert torch.equal(found, layer(states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_strides_without_a_bias_have_the_same_numbers(
    dtype: torch.dtype, products: list[Tensor]
) -> None:
    """Those of a block's proposals, which the head multiplies: its anchor stands before them in every row."""
    model = Model(dtype)
    packed = model.packed()
    wide = model.states(4, 9)
    layer = model.layer
    with torch.no_grad():
        for states in (wide[:, 1:], wide.transpose(0, 1)):
            found = packed.linear(states, layer.weight, None)
            torch.testing.assert_close(found, layer(states), rtol=1e-5, atol=1e-5)
            assert dtype == torch.float32 or torch.equal(found, layer(states))
    assert len(products) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_strides_go_by_torchs_own_product(dtype: torch.dtype, products: list[Tensor]) -> None:
    model = Model(dtype, bias=True)
    packed = model.packed()
    wide = model.states(4, 6)
    layer = model.layer
    with torch.no_grad():
        for states in (wide[:, :3], wide.transpose(0, 1), wide[:, -1:]):
            found = packed.linear(states, layer.weight, layer.bias)
            assert torch.equal(found, layer(states))
    assert not products


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 3), (4,), (2, 8), (70,)])
def test_float32_is_rounded_alike(shape: tuple[int, ...], bias: bool) -> None:
    model = Model(bias=bias)
    packed = model.warmed()
    states = model.states(*shape)
    layer = model.layer
    with torch.no_grad():
        found = packed.linear(states, layer.weight, layer.bias)
        torch.testing.assert_close(found, layer(states), rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()


@pytest.mark.parametrize(("num_vectors", "multiplied"), [(1, 4), (3, 4), (4, 4), (5, 5)])
def test_few_vectors_of_float32_are_filled_up(
    num_vectors: int, multiplied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight is read fastest with four to six vectors."""
    model = Model()
    packed = model.warmed()
    shapes: list[torch.Size] = []
    multiply = torch.ops.mkldnn._linear_pointwise

    def watched(states: Tensor, *args: Any) -> Tensor:
        shapes.append(states.shape)
        return multiply(states, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    with torch.no_grad():
        packed.linear(model.states(num_vectors), model.layer.weight, None)
    assert shapes == [(multiplied, 192)]


def test_one_vector_of_float16_goes_by_torchs_own_product(products: list[Tensor]) -> None:
    if not packed_weights._computes_alike(torch.float16):
        pytest.skip("this machine multiplies no copies in torch.float16")
    model = Model(torch.float16)
    packed = model.packed()
    with torch.no_grad():
        for shape in ((1,), (1, 1)):
            packed.linear(model.states(*shape), model.layer.weight, None)
        assert not products
        packed.linear(model.states(2), model.layer.weight, None)
    assert len(products) == 1


def test_a_bias_of_another_form_goes_by_torchs_own_product(products: list[Tensor]) -> None:
    model = Model()
    packed = model.packed()
    states = model.states(5)
    weight = model.layer.weight
    with torch.no_grad():
        for bias in (torch.ones(1), torch.ones(1).expand(160), torch.arange(320.0)[::2]):
            found = packed.linear(states, weight, bias)
            assert torch.equal(found, nn.functional.linear(states, weight, bias))
    assert not products


class Siblings(nn.Module):
    """Three layers that multiply the same states, as those of queries, keys and values."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers: Any = nn.ModuleList(nn.Linear(192, size, bias=bias) for size in (160, 64, 64))
        self.to(dtype).requires_grad_(False)

    def states(self, *shape: int) -> Tensor:
        """Returns states for the layers."""
        return torch.randn(*shape, 192).to(self.first.weight.dtype)

    @property
    def first(self) -> Any:
        """The first layer."""
        return self.layers[0]

    def packed(self) -> PackedWeights:
        """Returns the copies of a run."""
        return PackedWeights(Inventory.of(self), is_on=True)

    @property
    def num_copies(self) -> int:
        """Copies that are kept of the model's weights."""
        return len(packed_weights._kept.get(self, {}))

    def are_products(self, packed: PackedWeights) -> bool:
        """Returns True if a run's products are those of the layers as they are now."""
        states = self.states(5)
        with torch.no_grad():
            expected = [layer(states) for layer in self.layers]
            found = packed.linears(states, [layer._parameters for layer in self.layers])
        return all(
            torch.allclose(each, other, rtol=1e-4, atol=1e-4)
            for each, other in zip(found, expected, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 8), (70,)])
@pytest.mark.parametrize("bias", [False, True])
def test_one_product_has_the_numbers_of_several(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    model = Siblings(dtype, bias)
    packed = model.packed()
    for _ in range(5):
        states = model.states(*shape)
        with torch.no_grad():
            found = packed.linears(states, [layer._parameters for layer in model.layers])
            expected = [layer(states) for layer in model.layers]
        for each, other in zip(found, expected, strict=True):
            if dtype == torch.float32:
                torch.testing.assert_close(each, other, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(each, other)


def test_layers_of_the_same_states_have_one_copy(products: list[Tensor]) -> None:
    model = Siblings()
    assert model.are_products(model.packed())
    assert model.num_copies == 1
    assert len(products) == 1


def test_layers_with_and_without_a_bias_are_multiplied_one_by_one(products: list[Tensor]) -> None:
    model = Siblings()
    model.first.bias = nn.Parameter(torch.randn(160), requires_grad=False)
    assert model.are_products(model.packed())
    # The two others are too small to be copied alone.
    assert model.num_copies == 1
    assert len(products) == 1


def test_a_weight_has_one_copy_alone_or_with_others() -> None:
    model = Siblings()
    packed = model.packed()
    first = model.first
    states = model.states(5)
    with torch.no_grad():
        packed.linear(states, first.weight, None)
        assert len(packed_weights._kept[model]) == 1
        assert model.are_products(packed)
        assert model.num_copies == 1
        packed.linear(states, first.weight, None)
        assert model.num_copies == 1


def test_a_change_of_any_layer_is_seen_in_the_next_run() -> None:
    model = Siblings()
    for layer in model.layers:
        assert model.are_products(model.packed())
        layer.weight.data += 1.0
        assert model.are_products(model.packed())
        another_parameter(layer)
        packed = model.packed()
        assert model.num_copies == 0
        assert model.are_products(packed)


def test_a_counted_change_of_any_layer_is_seen_within_a_run() -> None:
    model = Siblings()
    packed = model.packed()
    for layer in model.layers:
        assert model.are_products(packed)
        added_in_place(layer)
        assert model.are_products(packed)


def test_without_room_for_all_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Siblings()
    room = int(1.1 * model.first.weight.nbytes / packed_weights.SHARE_OF_MEMORY)
    monkeypatch.setattr(packed_weights, "total_memory", lambda device: room)
    assert model.are_products(model.packed())
    assert model.num_copies == 0


def test_the_next_run_has_the_copies_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.warmed()
    monkeypatch.setattr(packed_weights, "_is_packable", lambda weight: pytest.fail("copied again"))
    assert model.is_product(model.packed())


def added_by_data(layer: nn.Linear) -> None:
    # As libraries merge adapters: no version counts this.
    layer.weight.data += 1.0


def one_row_by_data(layer: nn.Linear) -> None:
    layer.weight.data[7] *= 2.0


def rows_swapped(layer: nn.Linear) -> None:
    layer.weight.data[[2, 5]] = layer.weight.data[[5, 2]].clone()


def columns_swapped(layer: nn.Linear) -> None:
    # Whole words of 64 bits, which leave the sums of the rows as they were.
    columns = torch.arange(192).view(12, 16).flip(0).flatten()
    layer.weight.data.copy_(layer.weight.data[:, columns].clone())


def one_number(layer: nn.Linear) -> None:
    layer.weight.data[3, 4] += 0.5


def fewer_columns(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data[:, :-2]
    layer.in_features = 190


def of_another_tensor(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def added_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.add_(1.0)


def another_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)


def loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.randn_like(layer.weight)})


UNCOUNTED: list[Callable[[nn.Linear], None]] = [
    added_by_data,
    one_row_by_data,
    rows_swapped,
    columns_swapped,
    one_number,
]
COUNTED: list[Callable[[nn.Linear], None]] = [
    fewer_columns,
    of_another_tensor,
    added_in_place,
    another_parameter,
    loaded,
]


@pytest.mark.parametrize("change", [*UNCOUNTED, *COUNTED])
def test_the_next_run_sees_changed_weights(change: Callable[[nn.Linear], None]) -> None:
    model = Model()
    model.warmed()
    change(model.layer)
    packed = model.packed()
    assert model.is_product(packed)
    assert model.is_product(packed)


@pytest.mark.parametrize("change", COUNTED)
def test_a_counted_change_is_seen_within_a_run(change: Callable[[nn.Linear], None]) -> None:
    model = Model()
    packed = model.warmed()
    change(model.layer)
    assert model.is_product(packed)
    assert model.is_product(packed)


@pytest.mark.parametrize("change", UNCOUNTED)
def test_a_run_that_looks_again_sees_every_change(change: Callable[[nn.Linear], None]) -> None:
    model = Model()
    packed = model.warmed()
    change(model.layer)
    packed.look_again()
    assert model.is_product(packed)


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


def of_odd_rows(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(160, 191), requires_grad=False)
    layer.in_features = 191


def of_inference_mode(layer: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight = nn.Parameter(torch.randn(160, 192), requires_grad=False)


def pruned(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize(
    "change",
    [transposed, of_own_class, in_float64, small, of_odd_rows, of_inference_mode, pruned],
)
def test_other_weights_stay_as_they_are(change: Callable[[nn.Linear], None]) -> None:
    model = Model()
    change(model.layer)
    packed = model.packed()
    assert model.is_product(packed)
    assert model.num_copies == 0


def test_weights_that_changed_their_form_free_their_copies() -> None:
    model = Model()
    model.warmed()
    model.double()
    model.packed()
    assert model.num_copies == 0


def test_parameters_that_were_replaced_free_their_copies() -> None:
    model = Model()
    model.warmed()
    another_parameter(model.layer)
    model.packed()
    assert model.num_copies == 0


def test_an_inference_weight_may_have_the_id_of_a_copied_one() -> None:
    model = Model()
    model.warmed()
    copies = packed_weights._kept[model]
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(160, 192), requires_grad=False)
    # As Python gives the id of a freed object to a new one.
    copies[id(weight),] = copies.pop((id(model.layer.weight),))
    model.layer.weight = weight
    assert model.is_product(model.packed())
    assert model.num_copies == 0


def test_tensors_may_be_swapped_behind_a_run() -> None:
    model = Model()
    model.warmed()
    other = nn.Parameter(torch.randn(160, 192), requires_grad=False)
    torch.utils.swap_tensors(model.layer.weight, other)
    assert model.is_product(model.packed())


def test_copies_take_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences: list[str] = []
    monkeypatch.setattr(packed_weights.logger, "warning_once", sentences.append)
    models = [Model(), Model()]
    # Room for one copy and a half.
    room = int(1.5 * models[0].layer.weight.nbytes / packed_weights.SHARE_OF_MEMORY)
    monkeypatch.setattr(packed_weights, "total_memory", lambda device: room)
    for model in models:
        assert model.is_product(model.packed())
    assert [model.num_copies for model in models] == [1, 0]
    assert len(sentences) == 1
    assert "an eighth of the memory" in sentences[0]


@pytest.mark.parametrize("error", [AttributeError("no operation"), RuntimeError("no such dtype")])
def test_a_machine_without_the_operation_computes_as_ever(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any) -> Tensor:
        raise error

    packed_weights._computes_alike.cache_clear()
    try:
        monkeypatch.setattr(packed_weights, "_product", missing)
        model = Model()
        assert model.is_product(model.packed())
        assert model.num_copies == 0
    finally:
        packed_weights._computes_alike.cache_clear()


def test_a_machine_that_rounds_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_weights._computes_alike.cache_clear()
    try:
        monkeypatch.setattr(
            packed_weights, "_product", lambda states, copy, bias: states.new_ones(len(states), 165)
        )
        assert not packed_weights._computes_alike(torch.bfloat16)
        assert not packed_weights._computes_alike(torch.float32)
    finally:
        packed_weights._computes_alike.cache_clear()


def test_gradients_go_by_torchs_own_operation(products: list[Tensor]) -> None:
    model = Model().requires_grad_(True)
    packed = model.warmed()
    products.clear()
    packed.linear(model.states(5), model.layer.weight, None).sum().backward()
    assert model.layer.weight.grad is not None
    assert not products


def test_weights_of_another_model_are_not_copied(products: list[Tensor]) -> None:
    model = Model()
    packed = PackedWeights(Inventory.of(Model()), is_on=True)
    states = model.states(5)
    with torch.no_grad():
        found = packed.linear(states, model.layer.weight, None)
        assert torch.equal(found, model.layer(states))
    assert not products


def test_each_of_two_models_has_its_own_copies(products: list[Tensor]) -> None:
    first = Model()
    second = Model()
    parts = [Inventory.of(first), Inventory.of(second)]
    both = PackedWeights(*parts, is_on=True)
    with torch.no_grad():
        for model in (first, second):
            both.linear(model.states(5), model.layer.weight, None)
        copies = [packed_weights._kept[model] for model in (first, second)]
        assert [list(each) for each in copies] == [
            [(id(model.layer.weight),)] for model in (first, second)
        ]
        # A run of the first one alone leaves those of the second one, which are compared in its next run.
        PackedWeights(parts[0], is_on=True)
        second.layer.weight.data += 1.0
        found = PackedWeights(*parts, is_on=True).linear(
            states := second.states(5), second.layer.weight, None
        )
        torch.testing.assert_close(found, second.layer(states), rtol=1e-5, atol=1e-5)


def test_a_model_takes_its_copies_along() -> None:
    model = Model()
    packed = model.warmed()
    weight = weakref.ref(model.layer.weight)
    del model, packed
    gc.collect()
    assert weight() is None


class Doubling(TorchFunctionMode):
    """Changes what torch's own operation returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is nn.functional.linear else found


@pytest.mark.parametrize(
    "around",
    [Doubling, lambda: torch.backends.mkldnn.flags(enabled=False)],
    ids=["a function mode", "oneDNN is off"],
)
def test_switches_of_the_users_hold(
    around: Callable[[], AbstractContextManager[Any]], products: list[Tensor]
) -> None:
    model = Model()
    states = model.states(5)
    with torch.no_grad(), around(), packing(model.packed()):
        found = linear(states, model.layer.weight, None)
        assert torch.equal(found, model.layer(states))
    assert not products


def test_another_thread_computes_as_ever(products: list[Tensor]) -> None:
    model = Model()

    def use() -> None:
        with torch.no_grad():
            linear(model.states(4), model.layer.weight, None)

    with packing(model.packed()):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert not products
        use()
    assert len(products) == 1


def test_threads_copy_and_free_at_once() -> None:
    models = [Model() for _ in range(3)]
    errors: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for _ in range(60):
                model = models[number % len(models)]
                model.layer.weight.data += 0.01
                assert model.is_product(model.packed())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        packed_weights.forget_packed()
    for thread in threads:
        thread.join()
    assert not errors


def test_nothing_is_copied_where_it_is_off(products: list[Tensor]) -> None:
    model = Model()
    with torch.no_grad(), packing(PackedWeights(Inventory.of(model), is_on=False)):
        linear(model.states(4), model.layer.weight, None)
    assert not products
    assert model.num_copies == 0
