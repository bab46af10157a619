"""Keys and values of new context, for all layers of the draft, from one product into the cache in one launch."""

# No `from __future__ import annotations`: torch.library reads the annotations.

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch import on_device_of, runs_kernel
from .._ops import add_op_namespace_prefix
from .reference import context_kv_reference


def context_kv(
    projected_BWLAGE: Tensor,
    weight_LE: Tensor,
    cos_BWE: Tensor,
    sin_BWE: Tensor,
    lengths_B: Tensor,
    key_buffers: Sequence[Tensor],
    value_buffers: Sequence[Tensor],
    eps: float,
) -> None:
    """Norms, rotates and scatters the context's keys, scatters its values, in place; no host sync.

    `projected` is what one product with the stacked key and value weights of all layers gives. With
    `p = lengths[b] + i`, `norm(x) = weight[l] * x / sqrt(mean(x^2) + eps)` and, for halves `[x1, x2]`,
    `rope(x) = x * cos[b, i] + [-x2, x1] * sin[b, i]`, for every layer `l` with a ring of `R_l` slots:

        key_buffers[l][b, p mod R_l]   = rope(norm(projected[b, i, l, 0]))
        value_buffers[l][b, p mod R_l] = projected[b, i, l, 1]

    A token at a negative `p` is written nowhere. Rounding is that of the draft's modules: the norm in float32, then
    each product and sum in the dtype of `projected`.

    Args:
        projected_BWLAGE (`torch.Tensor` of shape `[B, W, L, 2, G, E]`): Any strides; `E` even.
        weight_LE (`torch.Tensor` of shape `[L, E]`): Of the key norms, in the same dtype.
        cos_BWE, sin_BWE (`torch.Tensor` of shape `[B, W, E]`): Of the tokens' positions, in the same dtype.
        lengths_B (`torch.Tensor` of shape `[B]`, integer): Index of each row's first token.
        key_buffers, value_buffers (`L` of `torch.Tensor` of shape `[B, R_l, G, E]`): The cache, `R_l >= W`, contiguous
            and of one dtype each. Written in place.
        eps (`float`): Of the norms.

    Raises:
        ValueError: If shapes, dtypes or strides are not as said.
    """
    batch, width, num_layers, _, groups, size = projected_BWLAGE.shape
    per_token = (batch, width, size)
    for name, tensor, shape in (
        ("projected_BWLAGE", projected_BWLAGE, (batch, width, num_layers, 2, groups, size)),
        ("weight_LE", weight_LE, (num_layers, size)),
        ("cos_BWE", cos_BWE, per_token),
        ("sin_BWE", sin_BWE, per_token),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != projected_BWLAGE.dtype:
            raise ValueError(
                f"expected {name} of shape {shape} and dtype {projected_BWLAGE.dtype}, got {tuple(tensor.shape)} and "
                f"{tensor.dtype}; pass one that fits"
            )
    if tuple(lengths_B.shape) != (batch,):
        raise ValueError(f"expected lengths_B of shape {(batch,)}, got {tuple(lengths_B.shape)}; pass one per row")
    if len(key_buffers) != num_layers or len(value_buffers) != num_layers:
        raise ValueError(
            f"expected buffers of {num_layers} layers, got {len(key_buffers)} and {len(value_buffers)}; pass all"
        )
    for buffers in (key_buffers, value_buffers):
        for buffer, keys in zip(buffers, key_buffers, strict=True):
            ring = keys.shape[1]
            fits = tuple(buffer.shape) == (batch, ring, groups, size) and ring >= width
            if not fits or not buffer.is_contiguous() or buffer.dtype != buffers[0].dtype:
                raise ValueError(
                    f"expected contiguous buffers of shape {(batch, 'R', groups, size)} with R >= {width} and of "
                    f"dtype {buffers[0].dtype}, got {tuple(buffer.shape)}, strides {buffer.stride()} and "
                    f"{buffer.dtype}; pass whole layers of the cache"
                )
    if size % 2:
        raise ValueError(f"expected an even head size, got {size}; RoPE rotates halves")
    _context_kv(projected_BWLAGE, weight_LE, cos_BWE, sin_BWE, lengths_B, list(key_buffers), list(value_buffers), eps)


@torch.library.custom_op(add_op_namespace_prefix("context_kv"), mutates_args=("key_buffers", "value_buffers"))
def _context_kv(
    projected: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    key_buffers: Sequence[Tensor],
    value_buffers: Sequence[Tensor],
    eps: float,
) -> None:
    arguments = (projected, weight, cos, sin, lengths, key_buffers, value_buffers, eps)
    if runs_kernel(projected):
        from .kernel import context_kv_triton

        with on_device_of(projected):
            context_kv_triton(*arguments)
    else:
        context_kv_reference(*arguments)


@_context_kv.register_fake
def _(
    projected: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    key_buffers: Sequence[Tensor],
    value_buffers: Sequence[Tensor],
    eps: float,
) -> None:
    return None


__all__ = ["context_kv", "context_kv_reference"]
