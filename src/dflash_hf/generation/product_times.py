"""This module measures whether one launch of several products is faster than one call per layer.

`measure_products(target, draft)` measures both ways. `joint_products.py` defines which products one launch can
compute. From the measurement on, it uses the faster way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_hf import ops
from dflash_hf.errors import require
from dflash_hf.generation.capture import capture
from dflash_hf.joint_products import (
    ROWS,
    Products,
    biases_of,
    can_be_joint,
    choose,
    is_a_product,
    operation_of,
    products_of,
)

# Names of layers in attention and MLP that share an input, and whether an activation joins their products.
GROUPS = (
    (("q_proj", "k_proj", "v_proj"), False),
    (("o_proj",), False),
    (("gate_proj", "up_proj"), True),
    (("down_proj",), False),
)
# Maximum number of layers of one shape that are timed in turn. It is so large that no weight is still in a cache when
# it is read.
MAX_LAYERS = 64
# The fastest of this many rounds counts.
NUM_TIMES = 5


class Measured(NamedTuple):
    """Seconds of products in both ways, for up to 64 layers of this shape together."""

    products: Products
    by_layers: float  # with one call per layer
    by_launch: float  # with one launch


@torch.no_grad()
def measure_products(*models: nn.Module) -> list[Measured]:
    """Times the products of models on their GPU in both ways, and uses the faster way from now on.

    The choice applies to all models of this process, and to up to 32 tokens at a time. Steps that were captured before
    are captured again. Nothing else should run on the GPU during the measurement.

    Args:
        models (`nn.Module`): Target and draft, in half precision.

    Returns:
        `list[Measured]`: The seconds of each shape.

    Raises:
        ValueError: If the kernels can multiply no layer of the models.
    """
    found: dict[Products, list[Sequence[nn.Linear]]] = {}
    for model in models:
        for layers, is_gated in _groups_of(model):
            for rows in ROWS:
                products = products_of(layers, is_gated, rows)
                found.setdefault(products, []).append(layers)
    require(
        len(found) > 0,
        "linear layers in half precision on a GPU where kernels run",
        "none",
        "products stay as they are elsewhere",
    )
    measured = [_measure(products, groups[:MAX_LAYERS]) for products, groups in found.items()]
    for each in measured:
        choose(each.products, each.by_launch < each.by_layers)
    return measured


def _groups_of(model: nn.Module) -> Iterator[tuple[Sequence[nn.Linear], bool]]:
    """Yields the groups of a model's layers that one launch may compute, and whether each group is gated."""
    for module in model.modules():
        for names, is_gated in GROUPS:
            layers: list[Any] = [module._modules.get(name) for name in names]
            if not all(map(is_a_product, layers)):
                continue
            weight = layers[0].weight
            states = weight.new_empty(1, weight.shape[1])
            if can_be_joint(states, layers, is_gated):
                yield layers, is_gated


def _measure(products: Products, groups: Sequence[Sequence[nn.Linear]]) -> Measured:
    """Returns the seconds of both ways, over layers of one shape."""
    first = products.shapes[0]
    states = torch.ones(products.rows, first[1], dtype=products.dtype, device=products.device)
    by_layers = [_by_layers(states, layers, products.is_gated) for layers in groups]
    by_launch = [_by_launch(states, layers, products.is_gated) for layers in groups]
    found = Measured(
        products, _seconds(by_layers, products.device), _seconds(by_launch, products.device)
    )
    # If the kernel cannot be built, its torch definition was timed. The launch is then not used, however fast it was.
    if products.device in operation_of(products.is_gated).failures:
        found = found._replace(by_launch=float("inf"))
    return found


def _by_layers(states: Tensor, layers: Sequence[nn.Linear], is_gated: bool) -> Callable[[], object]:
    """Returns a function that calls the layers one after the other."""

    def run() -> object:
        products = [layer(states) for layer in layers]
        if is_gated:
            return ops.silu_mul(*products)
        return products

    return run


def _by_launch(states: Tensor, layers: Sequence[nn.Linear], is_gated: bool) -> Callable[[], object]:
    """Returns a function that computes the products of the layers in one launch."""
    weights = [layer.weight for layer in layers]
    if is_gated:
        return lambda: ops.gated_linear(states, *weights)
    return lambda: ops.linears(states, weights, biases_of(layers), None)


def _seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Returns the seconds of a round of calls in one CUDA graph, so that no launch waits for the host."""

    def round_of_calls() -> None:
        for call in calls:
            call()

    pool = torch.cuda.graph_pool_handle()
    graph, _ = capture(round_of_calls, round_of_calls, device, pool)
    found: list[float] = []
    for _ in range(NUM_TIMES):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found)
