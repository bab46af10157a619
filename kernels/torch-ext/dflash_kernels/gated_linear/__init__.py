"""This operation computes the two products of a gated MLP with one input, and the activation, in one launch, for few
rows.
"""

# No `from __future__ import annotations`: torch.library reads the annotations.

from torch import Tensor
from torch.nn.functional import linear

from ..linears import check_weights, covers
from ..operation import Given, Sizes, operation
from ..silu_mul import silu_mul


def _check(given: Given, size: Sizes) -> None:
    check_weights(given["states"], [given["gate_weight_NK"], given["up_weight_NK"]])


@operation(
    check=_check,
    fake=lambda states, gate_weight, _: states.new_empty((*states.shape[:-1], len(gate_weight))),
    covers=lambda states, *weights: covers(states, weights),
)
def gated_linear(states: Tensor, gate_weight_NK: Tensor, up_weight_NK: Tensor) -> Tensor:
    """Returns `silu(states @ gate_weight^T) * (states @ up_weight^T)`. Both products are rounded before `silu_mul`.

    The kernel covers the same arguments as the kernel of `linears`.

    Args:
        states (`torch.Tensor` of shape `[..., K]`): The input of both products, with any strides.
        gate_weight_NK, up_weight_NK (`torch.Tensor` of shape `[N, K]`): The two weights, of the same dtype.

    Returns:
        `torch.Tensor` of shape `[..., N]`, contiguous, of the same dtype.

    Raises:
        ValueError: If shapes or dtypes are not as described.
    """
    return silu_mul.reference(linear(states, gate_weight_NK), linear(states, up_weight_NK))


__all__ = ["gated_linear"]
