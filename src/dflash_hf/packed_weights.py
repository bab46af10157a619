"""Weights of linear layers in oneDNN's own layout, for the forwards of a run on a CPU.

`torch.nn.functional.linear` lays a weight out anew in every call, which takes as long as the product itself where
there are few tokens. Here this is done once. A product over the laid-out weight has the same bits in half precision;
in float32 it adds in another order (docs/numerics.md).

Laid-out weights are copies. They are kept as long as the weight is, for the next call, and looked at before they are
used again: the address and version of a weight at each use, and the sums of its rows once per run, because libraries
change weights in ways that no version counts. torch's own `inductor` uses the same two operations.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.utils import logging

from dflash_hf.devices import total_memory
from dflash_hf.undo import MARK, Current, undoing

logger: Any = logging.get_logger(__name__)

# A weight is laid out at this use of a run: the first is the prefill, and an answer may end soon.
PACKED_AT = 3
# Numbers in a weight, by dtype, from which on a product is faster: oneDNN's own call takes some 10 us, and torch's
# product in float32 hardly more for a small weight that is in the processor's cache (docs/log.md).
MIN_SIZES = {torch.float32: 2**18, torch.bfloat16: 2**14, torch.float16: 2**14}
# Laid-out weights take at most this share of the machine's memory.
SHARE_OF_MEMORY = 1 / 8


@dataclass(frozen=True, slots=True)
class _Packed:
    """A weight in oneDNN's layout, and what the weight was when it was laid out."""

    tensor: Tensor  # opaque
    num_bytes: int
    place: tuple[int, int]  # address and version
    row_sums: Tensor


# Of all models. A weight that is gone takes its copy along.
_kept: Any = WeakIdKeyDictionary()


@dataclass(slots=True)
class _Use:
    """A weight in a run."""

    weight: Tensor  # held, so that no other one gets its id
    packed: _Packed | None
    num_uses: int = 0


class PackedWeights:
    """The laid-out weights of a run; of a running batch, until the next request joins.

    Args:
        modules (iterable of `nn.Module`): The modules of the target and the draft. Those of torch's own class for
            linear layers compute by laid-out weights within [`packing`].
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [
            module
            for module in modules
            if type(module) is nn.Linear and _is_large(module.weight) and module.weight.is_cpu
        ]
        self._uses = dict[int, _Use]()

    def linear(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `states @ weight.T + bias`, as `torch.nn.functional.linear` does."""
        if not _is_large(weight):
            return nn.functional.linear(states, weight, bias)
        # Autocast casts, and gradients need torch's own operation.
        is_tried = states.dtype == weight.dtype and not torch.is_grad_enabled()
        num_vectors = states.numel() // weight.shape[-1]
        # With one vector in float32 torch's own product is as fast.
        is_one_of_float32 = num_vectors == 1 and weight.dtype == torch.float32
        if not is_tried or num_vectors == 0 or is_one_of_float32:
            return nn.functional.linear(states, weight, bias)
        use = self._uses.get(id(weight))
        if use is None:
            use = _Use(weight, _kept_for(weight))
            self._uses[id(weight)] = use
        use.num_uses += 1
        if use.packed is not None and use.packed.place != _place_of(weight):
            use.packed = None
        if use.packed is None and use.num_uses == PACKED_AT:
            use.packed = _pack(weight)
        if use.packed is None:
            return nn.functional.linear(states, weight, bias)
        return _product(states, use.packed.tensor, bias)


_current = Current()


def linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns what `torch.nn.functional.linear` does; within [`packing`] by laid-out weights."""
    scope = _current.scope
    if scope is None:
        return nn.functional.linear(states, weight, bias)
    packed: PackedWeights = scope[0]
    return packed.linear(states, weight, bias)


@contextmanager
def packing(packed: PackedWeights) -> Generator[None]:
    """Has this thread compute the linear layers of a run by laid-out weights.

    The layers have a forward of this file for as long as it is open. Where it is open already, nothing is done.
    """
    is_open = _current.scope is not None and _current.scope[0] is packed
    if is_open or not packed.layers:
        yield
        return

    def detach() -> None:
        for layer in packed.layers:
            # A forward that a user has put there meanwhile stays.
            if hasattr(layer.__dict__.get("forward"), MARK):
                del layer.forward

    with undoing(detach), _current.doing(packed):
        for layer in packed.layers:
            # Bound, so that a copy of the module has its own.
            if "forward" not in layer.__dict__:
                layer.__dict__["forward"] = MethodType(_forward, layer)
        yield


def forget_packed() -> None:
    """Frees the laid-out weights of all models."""
    _kept.clear()


def _forward(self: nn.Linear, states: Tensor) -> Tensor:
    """A forward for a linear layer, to be bound; in another thread it is the class's own."""
    if _current.scope is None:
        return nn.Linear.forward(self, states)
    return linear(states, self.weight, self.bias)


setattr(_forward, MARK, True)


def _kept_for(weight: Tensor) -> _Packed | None:
    """Returns the laid-out weight of an earlier run, if it is still that weight."""
    kept: _Packed | None = _kept.get(weight)
    if kept is None:
        return None
    is_same = kept.place == _place_of(weight) and torch.equal(kept.row_sums, _row_sums(weight))
    if is_same:
        return kept
    del _kept[weight]
    return None


def _place_of(weight: Tensor) -> tuple[int, int]:
    """Returns where a weight is, and how often it was changed in place as far as torch counts it."""
    return weight.data_ptr(), weight._version


def _row_sums(weight: Tensor) -> Tensor:
    """Returns the sums of a weight's rows `[out_features]`, read as whole numbers of 64 bits.

    A change of a weight that leaves all of them as they were is no change that anybody makes.
    """
    return weight.detach().view(torch.int64).sum(dim=1)


def _pack(weight: Tensor) -> _Packed | None:
    """Lays a weight out and keeps it; `None` where it stays as it is."""
    if not _is_packable(weight):
        return None
    num_bytes = weight.numel() * weight.element_size()
    memory = total_memory(weight.device)
    num_kept = sum(kept.num_bytes for kept in _kept.values())
    if memory is None or num_kept + num_bytes > SHARE_OF_MEMORY * memory:
        logger.warning_once(
            "some weights are not copied into the layout in which this CPU multiplies faster, because copies may take "
            f"an eighth of the memory at most; {num_kept / 1e9:.1f} GB are copied"
        )
        return None
    packed = _Packed(
        torch.ops.mkldnn._reorder_linear_weight(weight.detach()),
        num_bytes,
        _place_of(weight),
        _row_sums(weight),
    )
    _kept[weight] = packed
    return packed


def _is_large(weight: Tensor) -> bool:
    """Returns True for a weight that is large enough, in a dtype in which oneDNN multiplies."""
    least = MIN_SIZES.get(weight.dtype)
    return least is not None and weight.numel() >= least


def _is_packable(weight: Tensor) -> bool:
    """Returns True for a large plain weight whose product is as torch's own."""
    is_plain = type(weight) is nn.Parameter and weight.is_cpu and not weight.is_inference()
    if not is_plain or not _is_large(weight):
        return False
    # Rows are read as numbers of 64 bits.
    has_whole_rows = weight.shape[-1] * weight.element_size() % 8 == 0
    is_matrix = weight.dim() == 2 and weight.is_contiguous()
    return is_matrix and has_whole_rows and _computes_alike(weight.dtype)


@functools.cache
def _computes_alike(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies in a dtype on this machine, and as torch's own operation does.

    In half precision bit for bit; in float32 sums are rounded, and the order of adding is another one.
    """
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = torch.randn(160, 192, generator=source, device="cpu").to(dtype)
        states = torch.randn(2, 3, 192, generator=source, device="cpu").to(dtype)
        expected = nn.functional.linear(states, weight)
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            found = _product(states, packed, None)
        # Builds without oneDNN have no such operation, and some CPUs no such dtype.
        except (RuntimeError, AttributeError) as error:
            logger.info(f"weights in {dtype} stay in torch's layout: {error}")
            return False
    if dtype == torch.float32:
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    return torch.equal(found, expected)


def _product(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product with a laid-out weight."""
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
