"""Products of linear layers with one input: on GPUs in one launch, where that was measured faster.

cuBLAS multiplies by one weight after the other, and for few tokens it cuts a product into parts that it sums in a
launch of their own. The kernels `linears` and `gated_linear` read the weights of queries, keys and values, or of both
projections of a gated MLP, in one launch. They add in another order than cuBLAS, so that a text may part from plain
`generate`'s at a tie within rounding. So no layer is multiplied by them until `measure_products`
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

# Numbers of rows that are measured. A launch makes room for the next larger one.
ROWS = (16, ops.MAX_ROWS)


class Products(NamedTuple):
    """Products of one input: what their time depends on."""

    shapes: tuple[tuple[int, ...], ...]  # of the weights, `[N, K]` each
    is_gated: bool  # whether two of them are gated by SiLU
    rows: int  # of states, at most
    dtype: torch.dtype
    device: torch.device


# Those that one launch makes, in this process.
_chosen: set[Products] = set()


def chosen() -> frozenset[Products]:
    """Returns the products that are made in one launch; another step has to be captured when they change."""
    return frozenset(_chosen)


def choose(products: Products, is_faster: bool) -> None:
    """Has one launch make these products from now on, or each layer by itself."""
    _chosen.discard(products)
    if is_faster:
        _chosen.add(products)


def forget_products() -> None:
    """Has all layers called by themselves again, as before a measurement."""
    _chosen.clear()


def linears(states: Tensor, *layers: Any) -> list[Tensor]:
    """Returns the products of up to three linear layers with states `[..., K]`, `[..., N]` each.

    One launch makes them if that was measured to be faster.
    """
    if _is_joint(states, layers, is_gated=False):
        weights = [layer.weight for layer in layers]
        return ops.linears(states, weights, biases_of(layers), None)
    return [layer(states) for layer in layers]


def is_gated_jointly(states: Tensor, gate_proj: Any, up_proj: Any) -> bool:
    """Returns True if `ops.gated_linear` is to compute `silu(gate_proj(states)) * up_proj(states)`."""
    return _is_joint(states, (gate_proj, up_proj), is_gated=True)


def _is_joint(states: Tensor, layers: Sequence[Any], is_gated: bool) -> bool:
    # Asked first: as long as nothing was measured, a step pays for nothing else.
    if not _chosen:
        return False
    num_rows = states.numel() // states.shape[-1]
    if num_rows > ROWS[-1] or not can_be_joint(states, layers, is_gated):
        return False
    rows = min(each for each in ROWS if each >= num_rows)
    return products_of(layers, is_gated, rows) in _chosen


def can_be_joint(states: Tensor, layers: Sequence[Any], is_gated: bool) -> bool:
    """Returns True if calls of these layers with states `[..., K]` are products that a kernel can make.

    Their weights are plain matrices `[N, K]` of one `K`.
    """
    if not all(map(is_a_product, layers)):
        return False
    biases = biases_of(layers)
    # The kernel of a gated MLP knows no biases, and the other one has them for all products.
    can_have_biases = not is_gated and len(biases) == len(layers)
    if biases and not can_have_biases:
        return False
    weights = [layer.weight for layer in layers]
    # The layers of a cross attention have inputs of their own.
    input_sizes = {weight.shape[1] for weight in weights}
    if len(input_sizes) > 1:
        return False
    operation = operation_of(is_gated)
    # Where a kernel has failed, the layers are faster than its definition.
    has_failed = states.device in operation.failures
    return not has_failed and ops.use_kernel(operation, states, *weights, *biases)


def is_a_product(layer: Any) -> bool:
    """Returns True if a call of a layer is a product with its weight and nothing else."""
    if type(layer) not in LINEAR_CLASSES or layer._parameters.keys() != LINEAR_PARAMETERS:
        return False
    # A sharded weight computes something else.
    if not all(map(_is_plain, layer._parameters.values())):
        return False
    has_hooks = bool(layer._forward_hooks)
    is_compiled = layer._compiled_call_impl is not None
    return runs_its_class(layer) and not has_hooks and not is_compiled


def _is_plain(weight: Tensor | None) -> bool:
    """Returns True if a weight, or a bias that may be missing, is no tensor of a class of its own."""
    return weight is None or type(weight) is nn.Parameter


def biases_of(layers: Sequence[Any]) -> list[Tensor]:
    """Returns the biases `[N]` of those layers that have one, in the order of the layers."""
    return [layer.bias for layer in layers if layer.bias is not None]


def operation_of(is_gated: bool) -> Any:
    """Returns the operation that makes products, gated by SiLU or not."""
    if is_gated:
        return ops.gated_linear
    return ops.linears


def products_of(layers: Sequence[Any], is_gated: bool, rows: int) -> Products:
    """Returns what the time of these layers' products depends on."""
    weights = [layer.weight for layer in layers]
    shapes = tuple(tuple(weight.shape) for weight in weights)
    return Products(shapes, is_gated, rows, weights[0].dtype, weights[0].device)
