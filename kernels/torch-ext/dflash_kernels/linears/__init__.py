"""This operation multiplies one input by up to three weights in one launch, for few rows."""

# No `from __future__ import annotations`: torch.library reads the annotations.

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear

from .._dispatch import runs_kernel
from ..operation import Given, Sizes, check_dtype, operation

# The largest number of rows, because a program of the kernel holds the products of all rows.
MAX_ROWS = 32
MAX_WEIGHTS = 3


def covers(states: Tensor, weights: Sequence[Tensor]) -> bool:
    """Returns True if the kernels support these arguments: up to `MAX_ROWS` rows, and contiguous weights."""
    num_rows = states.numel() // states.shape[-1] if states.shape[-1] else 0
    are_few = 0 < num_rows <= MAX_ROWS
    return are_few and runs_kernel(states) and all(map(_is_whole, weights))


def _is_whole(weight: Tensor) -> bool:
    return weight.is_contiguous() and weight.numel() > 0


def _covers(
    states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> bool:
    others = list(biases)
    if residual is not None:
        others.append(residual)
    are_whole = all(other.is_contiguous() for other in others)
    return are_whole and covers(states, weights)


def check_weights(states: Tensor, weights: Sequence[Tensor]) -> None:
    """Raises a `ValueError` unless all weights are `[N, K]` with any `N`, and have the dtype of states `[..., K]`."""
    size = states.shape[-1] if states.dim() else 0
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != size:
            raise ValueError(
                f"expected weights of shape [N, {size}] beside states, got {list(weight.shape)}; pass ones that fit"
            )
        check_dtype({"weights": weight}, [states.dtype], "weights")


def _check(given: Given, size: Sizes) -> None:
    states = given["states"]
    weights = given["weights"]
    biases = given["biases"]
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(
            f"expected 1 to {MAX_WEIGHTS} weights, got {len(weights)}; multiply the others in a call of their own"
        )
    check_weights(states, weights)
    sizes = [[weight.shape[0]] for weight in weights]
    if biases and [list(bias.shape) for bias in biases] != sizes:
        raise ValueError(
            f"expected no biases or biases of shapes {sizes}, got {[list(bias.shape) for bias in biases]}; "
            "pass one for each weight"
        )
    for bias in biases:
        check_dtype({"biases": bias}, [states.dtype], "biases")
    residual = given["residual"]
    if residual is None:
        return
    shape = [*states.shape[:-1], *sizes[0]]
    if len(weights) > 1 or list(residual.shape) != shape:
        raise ValueError(
            f"expected a residual of shape {shape} beside one weight, got {list(residual.shape)} beside "
            f"{len(weights)}; add it to one product"
        )
    check_dtype(given, [states.dtype], "residual")


def _fake(
    states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> list[Tensor]:
    return [states.new_empty((*states.shape[:-1], weight.shape[0])) for weight in weights]


@operation(check=_check, fake=_fake, covers=_covers)
def linears(
    states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> list[Tensor]:
    """Returns `out_i = states @ weights_i^T + biases_i`. With a residual, the result is `residual + out_0`.

    Products are summed in float32 and rounded once. The kernel supports up to 32 rows and contiguous weights, and
    reads each weight in place. It sums in another order than cuBLAS.

    Args:
        states (`torch.Tensor` of shape `[..., K]`): The input of all products, with any strides.
        weights (sequence of `torch.Tensor` of shape `[N_i, K]`): One to three weights, of the same dtype.
        biases (sequence of `torch.Tensor` of shape `[N_i]`): One bias for each weight, or no biases.
        residual (`torch.Tensor` of shape `[..., N_0]`, *optional*): Added to the rounded product, and rounded again.
            It is allowed only with one weight.

    Returns:
        `list[torch.Tensor]` of shapes `[..., N_i]`, contiguous and of the same dtype.

    Raises:
        ValueError: If shapes or dtypes are not as described.
    """
    found: list[Tensor] = []
    for index, weight in enumerate(weights):
        bias = biases[index] if biases else None
        found.append(linear(states, weight, bias))
    if residual is not None:
        return [residual + found[0]]
    return found


__all__ = ["MAX_ROWS", "check_weights", "covers", "linears"]
