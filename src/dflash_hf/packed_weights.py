"""Weights of linear layers in oneDNN's own layout, for the forwards of a run on a CPU.

`torch.nn.functional.linear` lays a weight out anew in every call, which takes as long as the product itself where
there are few tokens. Here this is done once, and the copy is kept as long as the model is. A product over it has the
same bits in half precision; in float32 it adds in another order (docs/numerics.md). Prompts go by torch's own product:
over their many tokens a copy saves little, and the look at its weight costs as much.

A copy must not outlive its weight. The address, version and form of a weight are compared at each use. The sums of its
rows and some of the rows are compared at the first use of a run, because libraries change weights by `weight.data`,
which no version counts. Where code of the user's runs within the run there are no copies. torch's own `inductor` has
the same two operations.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from transformers.utils import logging

from dflash_hf.devices import Inventory, total_memory
from dflash_hf.undo import Current

logger: Any = logging.get_logger(__name__)

# Numbers in a weight, by dtype, from which on a product is faster: oneDNN's own call takes some 10 us, and torch's
# product in float32 hardly more for a small weight that is in the processor's cache (docs/log.md).
MIN_SIZES = {torch.float32: 2**19, torch.bfloat16: 2**14, torch.float16: 2**14}
# Vectors from which on a product is by a copy. With fewer, torch's own product is faster in float32, and adds in
# another order in float16.
MIN_VECTORS = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 2}
# At least so many rows of a weight are compared number by number.
NUM_COMPARED_ROWS = 8
# Copies take at most this share of the machine's memory.
SHARE_OF_MEMORY = 1 / 8

# Address, version, shape, strides and dtype of a weight.
_Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class _Packed:
    """A copy of a weight in oneDNN's layout, and what the weight was when it was made."""

    copy: Tensor  # opaque
    num_bytes: int
    place: _Place
    fingerprint: tuple[Tensor, Tensor]
    is_looked_at: bool = True  # whether the fingerprint has been compared in this run

    def is_of(self, weight: Tensor) -> bool:
        """Returns True if this is a copy of a weight as it is now."""
        if self.place != _place_of(weight):
            return False
        if self.is_looked_at:
            return True
        self.is_looked_at = all(map(torch.equal, self.fingerprint, _fingerprint_of(weight)))
        return self.is_looked_at


# The copies of each model, by the ids of the weights. Weights are not held: another one of the same id, place and
# fingerprint is the same.
_kept = weakref.WeakKeyDictionary[nn.Module, dict[int, _Packed]]()
# Two threads may run models at once. What runs here may collect garbage, and with it what frees copies.
_lock = threading.RLock()


class PackedWeights:
    """The copies of a model's weights in a run.

    Args:
        parts (`Inventory`): The model and its weights.
        is_on (`bool`): Whether there are to be any.
    """

    def __init__(self, parts: Inventory, is_on: bool) -> None:
        self.is_on = is_on and torch.backends.mkldnn.is_available()
        self._is_full = False
        with _lock:
            self._copies = _kept.setdefault(parts.modules[0], {})
            if self._copies:
                self._forget_replaced(parts)
        self.look_again()

    def _forget_replaced(self, parts: Inventory) -> None:
        """Frees copies of weights that the model does not have any more, or that have another form now."""
        weights = {id(weight): weight for weight in parts.weights if weight is not None}
        for number, packed in list(self._copies.items()):
            weight = weights.get(number)
            if weight is None or packed.place != _place_of(weight):
                del self._copies[number]

    def look_again(self) -> None:
        """Has the fingerprint of each weight compared at its next use: a user may have changed weights."""
        for packed in list(self._copies.values()):
            packed.is_looked_at = False

    def linear(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `states @ weight.T + bias`, as `torch.nn.functional.linear` does."""
        if not _is_large(weight) or not _takes(states, weight, bias):
            return nn.functional.linear(states, weight, bias)
        packed = self._copies.get(id(weight))
        if packed is None or not packed.is_of(weight):
            packed = self._pack(weight)
        if packed is None:
            return nn.functional.linear(states, weight, bias)
        return _product(states, packed.copy, bias)

    def _pack(self, weight: Tensor) -> _Packed | None:
        """Copies a weight and keeps the copy; `None` where it stays as it is."""
        self._copies.pop(id(weight), None)
        if self._is_full or not _is_packable(weight):
            return None
        num_bytes = weight.numel() * weight.element_size()
        memory = total_memory(weight.device)
        with _lock:
            every = [each for copies in list(_kept.values()) for each in list(copies.values())]
        num_kept = sum(each.num_bytes for each in every)
        if memory is None or num_kept + num_bytes > SHARE_OF_MEMORY * memory:
            # Asked once in a run: later weights would find as little room.
            self._is_full = True
            logger.warning_once(
                "some weights are not copied into the layout in which this CPU multiplies faster, because copies may "
                "take an eighth of the memory at most"
            )
            return None
        copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        packed = _Packed(copy, num_bytes, _place_of(weight), _fingerprint_of(weight))
        self._copies[id(weight)] = packed
        return packed


_current = Current()


def linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns what `torch.nn.functional.linear` does; within [`packing`] by copies of weights."""
    scope = _current.scope
    if scope is None:
        return nn.functional.linear(states, weight, bias)
    packed: PackedWeights = scope[0]
    return packed.linear(states, weight, bias)


@contextmanager
def packing(packed: PackedWeights) -> Generator[None]:
    """Has [`linear`] multiply by copies of weights, in this thread."""
    # A function mode of the user's sees torch's own operation, and a switch of the user's turns oneDNN off.
    modes = set(map(type, _get_current_function_mode_stack()))
    # A default device is a mode of torch's, which acts where tensors are made.
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


def _takes(states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns True for operands over which both products have been compared, and over which ours is faster."""
    # Gradients need torch's own operation, and other strides another one of torch's.
    is_tried = states.dtype == weight.dtype and states.is_contiguous()
    if not is_tried or torch.is_grad_enabled():
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return False
    num_vectors = states.numel() // weight.shape[-1]
    return num_vectors >= MIN_VECTORS[weight.dtype]


def _place_of(weight: Tensor) -> _Place:
    """Returns where a weight is, how often torch has counted a change of it, and how it is laid out."""
    num_changes = 0
    # Torch counts no changes of inference tensors, which are never copied themselves.
    if not weight.is_inference():
        num_changes = weight._version
    return weight.data_ptr(), num_changes, weight.shape, weight.stride(), weight.dtype


def _fingerprint_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of a weight's rows and a copy of some rows, read as whole numbers of 64 bits.

    A row that changes or moves changes the sums. Columns that change places change the copied rows.
    """
    words = weight.detach().view(torch.int64)
    distance = max(1, len(words) // NUM_COMPARED_ROWS)
    return words.sum(dim=1), words[::distance].clone()


def _is_large(weight: Tensor) -> bool:
    """Returns True for a weight that is large enough, in a dtype in which oneDNN multiplies."""
    least = MIN_SIZES.get(weight.dtype)
    return least is not None and weight.numel() >= least


def _is_packable(weight: Tensor) -> bool:
    """Returns True for a plain matrix of a model, over which the product is as torch's own."""
    is_plain = type(weight) is nn.Parameter and weight.is_cpu and not weight.is_inference()
    if not is_plain or weight.dim() != 2 or not weight.is_contiguous():
        return False
    # Rows are read as numbers of 64 bits.
    has_whole_rows = weight.shape[-1] * weight.element_size() % 8 == 0
    return has_whole_rows and _computes_alike(weight.dtype)


@functools.cache
def _computes_alike(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies in a dtype on this machine, and as torch's own operation does.

    In half precision bit for bit; in float32 sums are rounded, and the order of adding is another one.
    """
    source = torch.Generator().manual_seed(0)
    try:
        for num_vectors, width in ((MIN_VECTORS[dtype], 192), (6, 192), (37, 76)):
            weight = torch.randn(165, width, generator=source, device="cpu").to(dtype)
            states = torch.randn(num_vectors, width, generator=source, device="cpu").to(dtype)
            bias = torch.randn(165, generator=source, device="cpu").to(dtype)
            copy = torch.ops.mkldnn._reorder_linear_weight(weight)
            found = torch.stack([_product(states, copy, each) for each in (None, bias)])
            expected = torch.stack(
                [nn.functional.linear(states, weight, each) for each in (None, bias)]
            )
            is_alike = torch.equal(found, expected)
            if dtype == torch.float32:
                is_alike = torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
            if not is_alike:
                logger.info(f"oneDNN's product in {dtype} is not torch's own, so weights stay")
                return False
    # Builds without oneDNN have no such operation, and some CPUs no such dtype.
    except (RuntimeError, AttributeError) as error:
        logger.info(f"weights in {dtype} stay in torch's layout: {error}")
        return False
    return True


def _product(states: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product with a copy."""
    return torch.ops.mkldnn._linear_pointwise(states, copy, bias, "none", [], "")
