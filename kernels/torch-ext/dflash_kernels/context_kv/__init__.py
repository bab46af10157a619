"""This operation writes keys and values of new context for all layers of the draft, from one
product, in one launch.
"""

# No `from __future__ import annotations`: torch.library reads the annotations.

from collections.abc import Sequence

import torch
from torch import Tensor

from ..operation import Given, Sizes, check_dtype, operation
from ..rotary import norm_and_rotate, write_slots


def _check(given: Given, size: Sizes) -> None:
    check_dtype(given, [given["projected_BWLAGE"].dtype], "weight_LE", "cos_BWE", "sin_BWE")
    batch, width, num_layers, groups, head_size = (size[dim] for dim in "BWLGE")
    if size["A"] != 2 or head_size % 2:
        raise ValueError(
            f"expected projected_BWLAGE with A 2 and an even E, got A {size['A']} and E {head_size}; project keys and "
            "values of whole heads: RoPE rotates halves"
        )
    sides = given["key_buffers"], given["value_buffers"]
    if any(len(buffers) != num_layers for buffers in sides):
        raise ValueError(
            f"expected buffers of {num_layers} layers, got {[len(side) for side in sides]}; pass all"
        )
    for buffers in sides:
        for buffer, keys in zip(buffers, sides[0], strict=True):
            ring = keys.shape[1]
            fits = tuple(buffer.shape) == (batch, ring, groups, head_size) and ring >= width
            if not fits or not buffer.is_contiguous() or buffer.dtype != buffers[0].dtype:
                raise ValueError(
                    f"expected contiguous buffers of shape {(batch, 'R', groups, head_size)} with R >= {width} and of "
                    f"dtype {buffers[0].dtype}, got {tuple(buffer.shape)}, strides {buffer.stride()} and "
                    f"{buffer.dtype}; pass whole layers of the cache"
                )


@operation(check=_check, mutates=("key_buffers", "value_buffers"))
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
    """Norms, rotates and scatters the context's keys, and scatters its values, in place; no host sync.

    `projected` is the product of the features with the stacked key and value weights of all layers. With
    `p = lengths[b] + i`, `norm(x) = weight[l] * x / sqrt(mean(x^2) + eps)` and, for halves `[x1, x2]`,
    `rope(x) = x * cos[b, i] + [-x2, x1] * sin[b, i]`, for every layer `l` with a ring of `R_l` slots:

        key_buffers[l][b, p mod R_l]   = rope(norm(projected[b, i, l, 0]))
        value_buffers[l][b, p mod R_l] = projected[b, i, l, 1]

    A token at a negative `p` is not written. The rounding is the same as in the draft's modules: the norm is computed
    in float32, then each product and sum in the dtype of `projected`.

    Args:
        projected_BWLAGE (`torch.Tensor` of shape `[B, W, L, 2, G, E]`): The projected states, with any strides. `E` is
            even.
        weight_LE (`torch.Tensor` of shape `[L, E]`): Weights of the key norms, in the same dtype.
        cos_BWE, sin_BWE (`torch.Tensor` of shape `[B, W, E]`): Cosines and sines of the tokens' positions, in the same
            dtype.
        lengths_B (`torch.Tensor` of shape `[B]`, integer): Index of each row's first token.
        key_buffers, value_buffers (`L` of `torch.Tensor` of shape `[B, R_l, G, E]`): The buffers of the cache, with
            `R_l >= W`. They are contiguous, all keys have one dtype, and all values have one dtype. Written in place.
        eps (`float`): Epsilon of the norms.

    Raises:
        ValueError: If shapes, dtypes or strides are not as described.
    """
    cos, sin = cos_BWE[:, :, None], sin_BWE[:, :, None]
    positions = lengths_B[:, None] + torch.arange(
        projected_BWLAGE.shape[1], device=lengths_B.device
    )
    for index, (keys, values) in enumerate(zip(key_buffers, value_buffers, strict=True)):
        key, value = projected_BWLAGE[:, :, index].unbind(2)
        write_slots(keys, norm_and_rotate(key, weight_LE[index], cos, sin, eps), positions)
        write_slots(values, value, positions)


__all__ = ["context_kv"]
