"""This module holds context that is not in the draft's cache yet, and the stacked weights that write it into all
layers.

If kernels run, one product with the key and value projections of all layers and one kernel launch after it write the
context. The weights are copied for this product once per run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_hf import ops
from dflash_hf.block.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedCache
from dflash_hf.devices import plain_tensors
from dflash_hf.joint_products import is_a_product


class ContextWeights(NamedTuple):
    """An instance holds copies of the weights that turn context into keys and values, of all `L` layers."""

    projection: Tensor  # [L * 2 * G * E, D]: keys, then values, layer after layer
    norm: Tensor  # [L, E]: weights of the key norms


class NewContext(NamedTuple):
    """An instance holds the context that the draft's next forward writes."""

    states: Tensor  # [B, W, taps * D]: tapped states of the block that was verified last
    block: RaggedBlock  # this block, on the draft's device
    weights: ContextWeights | None = None  # stacked weights if a kernel may write the context

    def write_all_layers(
        self, features: Tensor, cos_sin: tuple[Tensor, Tensor], cache: RaggedCache, eps: float
    ) -> bool:
        """Writes the keys and values of all layers by one product and one kernel, if this kernel runs.

        Args:
            features (`torch.Tensor` of shape `[B, W, D]`): The projected states.
            cos_sin (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of the block's positions, `[B, W, 1, E]`
                each.
            cache (`RaggedCache`): The draft's cache.
            eps (`float`): Epsilon of the key norms.

        Returns:
            `bool`: True if the context has been written. If False, the draft's layers write it one by one.
        """
        if self.weights is None:
            return False
        buffers = cache.buffers()
        floats = (features, *self.weights, *cos_sin)
        if not ops.use_kernel(ops.context_kv, *floats, buffers=buffers):
            return False
        projection, norm = self.weights
        num_layers, head_dim = norm.shape
        projected = nn.functional.linear(features, projection)
        # The kernel expects [B, W, L, 2, G, E], in the order in which the weights were stacked.
        projected = projected.unflatten(-1, (num_layers, 2, -1, head_dim))
        cos, sin = cos_sin
        # The cache lists its buffers as the keys and values of one layer after the other.
        keys = buffers[::2]
        values = buffers[1::2]
        ops.context_kv(
            projected,
            norm,
            cos.squeeze(2),
            sin.squeeze(2),
            self.block.lengths,
            keys,
            values,
            float(eps),
        )
        return True


def stack_weights(
    projections: Sequence[Any],
    norms: Sequence[Tensor],
    buffers: Sequence[Tensor],
    into: ContextWeights | None = None,
) -> ContextWeights | None:
    """Returns the projections and norms of all layers stacked, or `None` if the layers write their own context.

    The layers write their own context if `ops.use_kernel` decides against the kernel, or if a projection computes more
    than a product with its weight. Examples are a bias, hooks, adapters, a forward of its own, torch.compile, or a
    weight that is not a plain tensor.

    Args:
        projections (sequence of `nn.Module`): Key and value projections, layer after layer.
        norms (sequence of `torch.Tensor` of shape `[E]`): Weights of the key norms.
        buffers (sequence of `torch.Tensor`): Buffers of the cache to be written.
        into (`ContextWeights`, *optional*): Earlier copies. They are overwritten if their shapes, dtypes and devices
            are the same.
    """
    weights = [
        module.weight for module in projections if is_a_product(module) and module.bias is None
    ]
    if not weights or len(weights) < len(projections):
        return None
    if not ops.use_kernel(ops.context_kv, *weights, *norms, buffers=buffers):
        return None
    norms = list(norms)
    # The next call may be outside inference mode, and it writes into the copies that this call makes.
    with plain_tensors(), torch.no_grad():
        if into is None or not _fits(into, weights, norms):
            return ContextWeights(torch.cat(weights), torch.stack(norms))
        # A captured graph continues to read the same addresses.
        torch.cat(weights, out=into.projection)
        torch.stack(norms, out=into.norm)
    return into


def _fits(stacked: ContextWeights, weights: Sequence[Tensor], norms: Sequence[Tensor]) -> bool:
    """Returns True if earlier copies have the shapes, dtype and device of these weights."""
    first = weights[0]
    num_outputs = sum(weight.shape[0] for weight in weights)
    projection_shape = torch.Size((num_outputs, first.shape[1]))
    norm_shape = torch.Size((len(norms), *norms[0].shape))
    if stacked.projection.shape != projection_shape or stacked.norm.shape != norm_shape:
        return False
    return all(copy.dtype == first.dtype and copy.device == first.device for copy in stacked)
