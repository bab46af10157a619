"""Context that a draft's cache does not hold yet, and the weights with which all layers take it in at once.

On the kernel path one product with the key and value projections of all layers, stacked, and one launch behind it
write the context. The weights are copied for it once per run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dflash_hf import ops
from dflash_hf.attention import RaggedBlock
from dflash_hf.cache.ragged import RaggedCache


class ContextWeights(NamedTuple):
    """Copies of what turns context into keys and values, of all `L` layers.

    Args:
        projection (`torch.Tensor` of shape `[L * 2 * G * E, D]`): Keys, then values, layer after layer.
        norm (`torch.Tensor` of shape `[L, E]`): Weights of the key norms.
    """

    projection: Tensor
    norm: Tensor


class NewContext(NamedTuple):
    """Context for the draft's next forward to write.

    Args:
        states (`torch.Tensor` of shape `[B, W, taps * D]`): Tapped states of the block that was verified last.
        block (`RaggedBlock`): That block, on the draft's device.
        weights (`ContextWeights`, *optional*): With them a kernel may write it, all layers at once.
    """

    states: Tensor
    block: RaggedBlock
    weights: ContextWeights | None = None

    def written_at_once(
        self, features: Tensor, cos_sin: tuple[Tensor, Tensor], cache: RaggedCache, eps: float
    ) -> bool:
        """Writes the keys and values of all layers by one product and one kernel; says whether it could.

        Elsewhere the draft's layers write their own, `DFlashDraftModel.write_context`. `features` `[B, W, D]` are the
        states, projected, `cos_sin` `[B, W, 1, E]` are of the block's positions, and `eps` is that of the key norms.
        """
        buffers = cache.buffers()
        if self.weights is None or not ops.writes([features, *self.weights, *cos_sin], buffers):
            return False
        projection, norm = self.weights
        projected = nn.functional.linear(features, projection).unflatten(-1, (norm.shape[0], 2, -1, norm.shape[1]))
        cos, sin = (part.squeeze(2) for part in cos_sin)
        ops.context_kv(projected, norm, cos, sin, self.block.lengths, buffers[::2], buffers[1::2], float(eps))
        return True


@torch.no_grad()
def stack_weights(
    projections: Sequence[nn.Module],
    norms: Sequence[Tensor],
    buffers: Sequence[Tensor],
    into: ContextWeights | None = None,
) -> ContextWeights | None:
    """Copies projections and norms of all layers together; `None` where no kernel is to write context.

    That is where `ops.writes` says so, and where a projection is more than its weight: with a bias, hooks, adapters,
    or a weight that is no plain tensor.

    Args:
        projections (sequence of `nn.Module`): Of keys and values, layer after layer.
        norms (sequence of `torch.Tensor` of shape `[E]`): Weights of the key norms.
        buffers (sequence of `torch.Tensor`): The cache that will be written.
        into (`ContextWeights`, *optional*): Earlier copies, written again where they fit: their addresses stay.
    """
    weights = [module.weight for module in projections if isinstance(module, nn.Linear) and _is_its_weight(module)]
    if not weights or len(weights) < len(projections) or not ops.writes([*weights, *norms], buffers):
        return None
    if into is None or not _fits(into, weights, norms):
        return ContextWeights(torch.cat(weights), torch.stack(list(norms)))
    torch.cat(weights, out=into.projection)
    torch.stack(list(norms), out=into.norm)
    return into


def _fits(stacked: ContextWeights, weights: Sequence[Tensor], norms: Sequence[Tensor]) -> bool:
    """Returns True if earlier copies have the shapes, dtype and device of these weights, which are all alike."""
    shapes = ((sum(w.shape[0] for w in weights), weights[0].shape[1]), (len(norms), norms[0].shape[0]))
    return all(
        (tuple(t.shape), t.dtype, t.device) == (shape, weights[0].dtype, weights[0].device)
        for t, shape in zip(stacked, shapes, strict=True)
    )


def _is_its_weight(module: nn.Linear) -> bool:
    """Returns True if a call of the module is a product with its weight and nothing else."""
    is_plain = type(module) is nn.Linear and type(module.weight) is nn.Parameter and module._parameters["bias"] is None
    return is_plain and not module._forward_hooks and not module._forward_pre_hooks
