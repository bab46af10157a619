"""This module multiplies one input by the weights of several linear layers.

On GPUs, one launch makes all of these products if this was measured to be faster.

cuBLAS multiplies by one weight after the other. For few tokens it splits a product into parts and adds them in another
launch. The kernels `linears` and `gated_linear` read the weights of queries, keys and values, or of both projections
of a gated MLP, in one launch. They add in another order than cuBLAS. So a text may differ from plain `generate`'s text
where two tokens tie within rounding. Therefore these kernels are used for a layer only after `measure_products`
(`generation/product_times.py`) has found them faster for its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_hf import ops
from dflash_hf.packed_weights import LINEAR_CLASSES, LINEAR_PARAMETERS
from dflash_hf.target_model.user_code import runs_its_class

# The numbers of rows that are measured. A launch uses the result of the next larger number.
ROWS = (16, ops.MAX_ROWS)


class Products(NamedTuple):
    """An instance describes products of one input by the values on which their time depends."""

    shapes: tuple[tuple[int, ...], ...]  # shapes of the weights, `[N, K]` each
    is_gated: bool  # whether two of them are gated by SiLU
    rows: int  # number of rows of the states, at most
    dtype: torch.dtype
    device: torch.device


# The products that one launch makes, in this process.
_chosen: set[Products] = set()


def chosen() -> frozenset[Products]:
    """Returns the products that are made in one launch. If they change, another step has to be captured."""
    return frozenset(_chosen)


def choose(products: Products, is_faster: bool) -> None:
    """Sets whether one launch makes these products from now on, or each layer makes its own."""
    _chosen.discard(products)
    if is_faster:
        _chosen.add(products)


def forget_products() -> None:
    """Makes each layer compute its own product again, as before a measurement."""
    _chosen.clear()


def linears(states: Tensor, *layers: Any) -> list[Tensor]:
    """Returns the products of up to three linear layers with states `[..., K]`, as `[..., N]` each.

    One launch makes them if this was measured to be faster.
    """
    if _is_joint(states, layers, is_gated=False):
        weights = [layer.weight for layer in layers]
        return ops.linears(states, weights, biases_of(layers), None)
    return [layer(states) for layer in layers]


def is_gated_jointly(states: Tensor, gate_proj: Any, up_proj: Any) -> bool:
    """Returns True if `ops.gated_linear` should compute `silu(gate_proj(states)) * up_proj(states)`."""
    return _is_joint(states, (gate_proj, up_proj), is_gated=True)


def _is_joint(states: Tensor, layers: Sequence[Any], is_gated: bool) -> bool:
    # This check comes first, so that a step has no other cost as long as nothing was measured.
    if not _chosen:
        return False
    num_rows = states.numel() // states.shape[-1]
    if num_rows > ROWS[-1] or not can_be_joint(states, layers, is_gated):
        return False
    rows = min(each for each in ROWS if each >= num_rows)
    return products_of(layers, is_gated, rows) in _chosen


def can_be_joint(states: Tensor, layers: Sequence[Any], is_gated: bool) -> bool:
    """Returns True if calls of these layers with states `[..., K]` are products that a kernel can make.

    The weights must be plain matrices `[N, K]` with the same `K`.
    """
    if not all(map(is_a_product, layers)):
        return False
    biases = biases_of(layers)
    # The kernel of a gated MLP has no biases. The other kernel needs biases for all products or for none.
    can_have_biases = not is_gated and len(biases) == len(layers)
    if biases and not can_have_biases:
        return False
    weights = [layer.weight for layer in layers]
    # The layers of a cross attention have different inputs.
    input_sizes = {weight.shape[1] for weight in weights}
    if len(input_sizes) > 1:
        return False
    operation = operation_of(is_gated)
    # If a kernel has failed, calling the layers is faster than calling the kernel's definition.
    has_failed = states.device in operation.failures
    return not has_failed and ops.use_kernel(operation, states, *weights, *biases)


def is_a_product(layer: Any) -> bool:
    """Returns True if a call of a layer is a product with its weight and nothing else."""
    if type(layer) not in LINEAR_CLASSES or layer._parameters.keys() != LINEAR_PARAMETERS:
        return False
    # A product with a sharded weight is another computation.
    if not all(map(_is_plain, layer._parameters.values())):
        return False
    has_hooks = bool(layer._forward_hooks)
    is_compiled = layer._compiled_call_impl is not None
    return runs_its_class(layer) and not has_hooks and not is_compiled


def _is_plain(weight: Tensor | None) -> bool:
    """Returns True if a weight is a plain parameter. A missing bias counts as plain too."""
    return weight is None or type(weight) is nn.Parameter


def biases_of(layers: Sequence[Any]) -> list[Tensor]:
    """Returns the biases `[N]` of those layers that have one, in the order of the layers."""
    return [layer.bias for layer in layers if layer.bias is not None]


def operation_of(is_gated: bool) -> Any:
    """Returns the operation that makes the products, gated by SiLU or not."""
    if is_gated:
        return ops.gated_linear
    return ops.linears


def products_of(layers: Sequence[Any], is_gated: bool, rows: int) -> Products:
    """Returns the values on which the time of these layers' products depends."""
    weights = [layer.weight for layer in layers]
    shapes = tuple(tuple(weight.shape) for weight in weights)
    return Products(shapes, is_gated, rows, weights[0].dtype, weights[0].device)
