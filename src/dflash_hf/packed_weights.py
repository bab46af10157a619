"""This module keeps weights of linear layers in oneDNN's own layout, for the forwards of a run on a CPU.

`torch.nn.functional.linear` converts the layout of a weight in every call. For few tokens this takes as long as the
product itself. Here it is done once, and the copy is kept as long as the model. In half precision, a product with the
copy has the same bits. In float32 it adds in another order (docs/numerics.md). Prompts use torch's own product: over
their many tokens a copy saves little, and checking its weight costs as much. Layers that multiply the same states,
such as those of queries, keys and values, share one copy and one product, which takes less time than several products.

A copy must not be used after its weight has changed. So the address, version and form of a weight are compared at each
use. The sums of its rows and some of its rows are compared at the first use of a run, because libraries change weights
by `weight.data`, which does not change the version. If the user's code runs within the run, no copies are used.
torch's own `inductor` uses the same two operations.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from transformers.utils import logging

from dflash_hf.devices import Inventory, num_writes, total_memory
from dflash_hf.undo import Current

logger: Any = logging.get_logger(__name__)

# By dtype, the smallest number of elements of a weight for which a product with a copy is faster. oneDNN's own call
# takes some 10 us. In float32, torch's product takes hardly more for a small weight that is in the processor's cache
# (docs/log.md).
MIN_SIZES = {torch.float32: 2**18, torch.bfloat16: 2**14, torch.float16: 2**14}
# The smallest number of vectors that are multiplied by a copy. With fewer vectors, torch's own product adds in another
# order in float16.
MIN_VECTORS = {torch.float32: 1, torch.bfloat16: 1, torch.float16: 2}
# A product with a copy has at least this number of vectors. If there are fewer, zeros are added: oneDNN reads a weight
# fastest with 4 to 6 vectors, and takes 1.2 to 1.5 times as long with 2 (docs/log.md). In half precision this could
# change the bits.
FILLED_UP = {torch.float32: 4}
# At least this number of rows of a weight is compared number by number.
NUM_COMPARED_ROWS = 8
# Copies take at most this share of the machine's memory.
SHARE_OF_MEMORY = 1 / 8

# Address, version, shape, strides and dtype of a weight.
_Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
# The ids of the weights that are copied together.
_Key = tuple[int, ...]
# The parameters of torch's own linear layer, by name.
LINEAR_PARAMETERS = frozenset({"weight", "bias"})
# The weight and bias of a layer by name, as arguments of `torch.nn.functional.linear`.
Parameters = dict[str, Any]


@dataclass(slots=True)
class _Packed:
    """An instance holds a copy of weights in oneDNN's layout, one below the other, and describes the weights at that
    time.
    """

    copy: Tensor  # opaque
    num_bytes: int
    places: list[_Place]
    fingerprints: list[Tensor]
    is_known_equal: bool = True  # whether the weights were found unchanged in this run

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Returns True if this is a copy of the weights in their current state."""
        if self.places != _places_of(weights):
            return False
        if self.is_known_equal:
            return True
        self.is_known_equal = all(map(torch.equal, self.fingerprints, _fingerprints_of(weights)))
        return self.is_known_equal


# The copies of each model. The weights themselves are not held. A weight with the same id, place and fingerprint
# counts as the same weight.
_kept = weakref.WeakKeyDictionary[nn.Module, dict[_Key, _Packed]]()
# Two threads may run models at once. Code under the lock may collect garbage, which may run code that frees copies. So
# the lock is reentrant.
_lock = threading.RLock()


class PackedWeights:
    """An instance gives a run its copies of weights. The copies of each model are kept as long as the model.

    Args:
        models (`Inventory`): The models and their weights.
        is_on (`bool`): Whether copies are used.
    """

    def __init__(self, *models: Inventory, is_on: bool) -> None:
        self.is_on = is_on and torch.backends.mkldnn.is_available()
        self._is_full = False
        # These weights are not copied together, because some of them have another copy that this run uses.
        self._kept_apart = set[_Key]()
        # The copies of each model. Then, by the id of a weight, the copies of the model that has this weight.
        self._copies = list[dict[_Key, _Packed]]()
        self._copies_with = dict[int, dict[_Key, _Packed]]()
        for parts in models:
            weights = {id(weight): weight for weight in parts.weights if weight is not None}
            with _lock:
                copies = _kept.setdefault(parts.modules[0], {})
                _forget_replaced(copies, weights)
            self._copies.append(copies)
            # A copy of a weight that two models share belongs to the first model.
            self._copies_with = dict.fromkeys(weights, copies) | self._copies_with
        self.look_again()

    def look_again(self) -> None:
        """Makes the fingerprint of each weight be compared at its next use, because a user may have
        changed weights.
        """
        self._kept_apart.clear()
        for copies in self._copies:
            for packed in list(copies.values()):
                packed.is_known_equal = False

    def linear(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `states @ weight.T + bias` `[..., N]`, as torch's `linear` does.

        It uses the copy of a large weight.
        """
        weights = (weight,)
        product = None
        if are_large(weights):
            product = self._by_copy(states, weights, (bias,))
        if product is None:
            return nn.functional.linear(states, weight, bias)
        return product

    def linears(self, states: Tensor, layers: Sequence[Parameters]) -> Sequence[Tensor]:
        """Returns [`linear`] of the same states for each layer.

        One product computes all if it gives the same numbers.
        """
        weights = [layer["weight"] for layer in layers]
        biases = [layer["bias"] for layer in layers]
        if not are_large(weights):
            return _each_by_torch(states, layers)
        product = self._by_copy(states, weights, biases)
        if product is None:
            return [self.linear(states, **layer) for layer in layers]
        sizes = [len(weight) for weight in weights]
        return product.split(sizes, dim=-1)

    def _by_copy(
        self, states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Returns the product with large weights, one below the other, or `None` if torch's own
        product must be used.
        """
        if not _takes(states, weights, biases):
            return None
        key = tuple(map(id, weights))
        copies = self._copies_with.get(key[0])
        if copies is None:
            # The weights of models outside the run may change within the run.
            return None
        packed = copies.get(key)
        if packed is None or not packed.is_of(weights):
            packed = self._pack(key, weights, copies)
        if packed is None:
            return None
        return _product(states.contiguous(), packed.copy, _joined(biases))

    def _pack(
        self, key: _Key, weights: Sequence[Tensor], copies: dict[_Key, _Packed]
    ) -> _Packed | None:
        """Copies weights and keeps the copy with the other copies of their model.

        Returns `None` if they are not copied.
        """
        copies.pop(key, None)
        if self._is_full or key in self._kept_apart or not all(map(_is_packable, weights)):
            return None
        others = [other for other in list(copies.items()) if not set(other[0]).isdisjoint(key)]
        # Otherwise layers of two models, or two layers of one model, would replace each other's copies at every step.
        if any(packed.is_known_equal for _, packed in others):
            self._kept_apart.add(key)
            return None
        first, *_ = weights
        num_bytes = first.element_size() * sum(weight.numel() for weight in weights)
        memory = total_memory(first.device)
        with _lock:
            every = [each for kept in list(_kept.values()) for each in list(kept.values())]
        num_kept = sum(each.num_bytes for each in every)
        if memory is None or num_kept + num_bytes > SHARE_OF_MEMORY * memory:
            # This is checked only once in a run, because later weights would find as little room.
            self._is_full = True
            logger.warning_once(
                "some weights are not copied into the layout in which this CPU multiplies faster, because copies may "
                "take an eighth of the memory at most"
            )
            return None
        # A weight is copied alone or together with other weights, as the first product of a run needs it.
        for other, _ in others:
            copies.pop(other, None)
        joint = _joined([weight.detach() for weight in weights])
        copy = torch.ops.mkldnn._reorder_linear_weight(joint)
        packed = _Packed(copy, num_bytes, _places_of(weights), _fingerprints_of(weights))
        copies[key] = packed
        return packed


def _forget_replaced(copies: dict[_Key, _Packed], weights: dict[int, Tensor]) -> None:
    """Frees copies of weights that their model no longer has, or whose form has changed."""
    for key, packed in list(copies.items()):
        found = [weights[number] for number in key if number in weights]
        if _places_of(found) != packed.places:
            copies.pop(key, None)


_current = Current()


def linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the result of `torch.nn.functional.linear`. Within [`packing`], copies of weights are used."""
    scope = _current.scope
    if scope is None:
        return nn.functional.linear(states, weight, bias)
    packed: PackedWeights = scope[0]
    return packed.linear(states, weight, bias)


class DFlashLinear(nn.Linear):
    """This is a linear layer of a draft. Within [`packing`], it multiplies by the copy of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns `input @ weight.T + bias`, which is `[..., N]`. `input` is `[..., K]`."""
        return linear(input, self.weight, self.bias)


# A call of a layer of these classes is a product and nothing else. The types are compared exactly, because adapters
# and quantised layers compute something else.
LINEAR_CLASSES = (nn.Linear, DFlashLinear)


def linears(states: Tensor, layers: Sequence[Parameters]) -> Sequence[Tensor]:
    """Returns [`linear`] of the same states for each layer. Within [`packing`], one product computes them."""
    scope = _current.scope
    if scope is None:
        return _each_by_torch(states, layers)
    packed: PackedWeights = scope[0]
    return packed.linears(states, layers)


def _each_by_torch(states: Tensor, layers: Sequence[Parameters]) -> list[Tensor]:
    return [nn.functional.linear(states, **layer) for layer in layers]


@contextmanager
def packing(packed: PackedWeights) -> Generator[None]:
    """Makes [`linear`] multiply by copies of weights, in this thread."""
    # A function mode of the user must see torch's own operation. A switch of the user may turn oneDNN off.
    modes = set(map(type, _get_current_function_mode_stack()))
    # A default device is a mode of torch that affects only how tensors are made.
    is_watched = not modes <= {DeviceContext}
    if not packed.is_on or is_watched or not torch.backends.mkldnn.enabled:
        yield
        return
    with _current.doing(packed):
        yield


def forget_packed() -> None:
    """Frees the copies of all models' weights."""
    with _lock:
        for copies in list(_kept.values()):
            copies.clear()


def _takes(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Returns True for operands for which the two products were compared, and for which the product with a copy is
    faster.
    """
    # Gradients need torch's own operation.
    if torch.is_grad_enabled():
        return False
    width = states.shape[-1]
    num_biases = 0
    for weight, bias in zip(weights, biases, strict=True):
        if weight.dtype != states.dtype or weight.shape[-1] != width:
            return False
        if bias is None:
            continue
        num_biases += 1
        if bias.shape != weight.shape[:1] or not bias.is_contiguous():
            return False
    # One product adds a bias to all outputs or to none. For other strides, torch adds a bias in another order.
    is_one_product = num_biases == 0 or (num_biases == len(weights) and states.is_contiguous())
    num_vectors = states.numel() // width
    return is_one_product and num_vectors >= MIN_VECTORS[states.dtype]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Returns tensors one below the other. A single tensor is returned as it is, and `None` if there is no tensor."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors)


def _place_of(weight: Tensor) -> _Place:
    """Returns the address of a weight, how many writes to it torch has counted, and its layout."""
    return weight.data_ptr(), num_writes(weight), weight.shape, weight.stride(), weight.dtype


def _places_of(weights: Sequence[Tensor]) -> list[_Place]:
    """Returns the place of each weight."""
    return list(map(_place_of, weights))


def _fingerprints_of(weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the sums of the rows of each weight and a copy of some rows, both read as integers of 64 bits.

    If a row changes or moves, the sums change. If columns change places, the copied rows change.
    """
    found: list[Tensor] = []
    for weight in weights:
        words = weight.detach().view(torch.int64)
        distance = max(1, len(words) // NUM_COMPARED_ROWS)
        found += [words.sum(dim=1), words[::distance].clone()]
    return found


def are_large(weights: Sequence[Tensor]) -> bool:
    """Returns True if the weights have `MIN_SIZES` numbers together, in a dtype in which oneDNN multiplies."""
    first, *others = weights
    least = MIN_SIZES.get(first.dtype)
    if least is None:
        return False
    size = first.numel()
    for weight in others:
        size += weight.numel()
    return size >= least


def _is_packable(weight: Tensor) -> bool:
    """Returns True for a plain matrix of a model for which oneDNN's product gives the same result as torch's own."""
    is_plain = type(weight) is nn.Parameter and weight.is_cpu and not weight.is_inference()
    if not is_plain or weight.dim() != 2 or not weight.is_contiguous():
        return False
    # Rows are read as numbers of 64 bits, so they must fill whole numbers.
    has_whole_rows = weight.shape[-1] * weight.element_size() % 8 == 0
    return has_whole_rows and _computes_alike(weight.dtype)


@functools.cache
def _computes_alike(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies in a dtype on this machine with the same result as torch's own operation.

    In half precision, the results must be the same bit for bit. In float32 they may differ by rounding, because the
    sums are added in another order.
    """
    source = torch.Generator().manual_seed(0)
    try:
        for num_vectors, width in ((MIN_VECTORS[dtype], 192), (6, 192), (37, 76)):
            weight = torch.randn(165, width, generator=source, device="cpu").to(dtype)
            states = torch.randn(num_vectors, width, generator=source, device="cpu").to(dtype)
            bias = torch.randn(165, generator=source, device="cpu").to(dtype)
            # The products with 101 and with 64 rows must equal one product with 165 rows.
            upper, lower = weight.split([101, 64])
            copy = torch.ops.mkldnn._reorder_linear_weight(weight)
            found = torch.cat([_product(states, copy, each) for each in (bias, None)], dim=1)
            expected = torch.cat(
                [
                    nn.functional.linear(states, weight, bias),
                    nn.functional.linear(states, upper),
                    nn.functional.linear(states, lower),
                ],
                dim=1,
            )
            is_alike = torch.equal(found, expected)
            if dtype == torch.float32:
                is_alike = torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
            if not is_alike:
                logger.info(f"oneDNN's product in {dtype} is not torch's own, so weights stay")
                return False
    # Builds without oneDNN do not have this operation, and some CPUs do not have the dtype.
    except (RuntimeError, AttributeError) as error:
        logger.info(f"weights in {dtype} stay in torch's layout: {error}")
        return False
    return True


def _product(states: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product with a copy. The `states` `[..., H]` are contiguous."""
    num_vectors = states.numel() // states.shape[-1]
    num_missing = FILLED_UP.get(states.dtype, 0) - num_vectors
    if num_missing <= 0:
        return torch.ops.mkldnn._linear_pointwise(states, copy, bias, "none", [], "")
    vectors = states.view(num_vectors, -1)
    filled_up = nn.functional.pad(vectors, (0, 0, 0, num_missing))
    product = torch.ops.mkldnn._linear_pointwise(filled_up, copy, bias, "none", [], "")
    return product[:num_vectors].view(*states.shape[:-1], -1)
