"""This operation applies RoPE and, if there is one, the norm to a block's heads, and writes the
cache, in one launch.
"""

# No `from __future__ import annotations`: torch.library reads the annotations.

import torch
from torch import Tensor

from ..operation import Given, Sizes, check_dtype, operation
from ..rotary import norm_and_rotate, write_slots


def _check(given: Given, size: Sizes) -> None:
    alike = ("key_BWGE", "value_BWGE", "query_weight_E", "key_weight_E", "cos_BWE", "sin_BWE")
    check_dtype(given, [given["query_BWHE"].dtype], *alike)
    has_norm = [given[name] is not None for name in ("query_weight_E", "key_weight_E")]
    if any(has_norm) != all(has_norm):
        raise ValueError(
            "expected norms of queries and keys or of neither, got one weight; pass both or None twice"
        )
    if size["E"] % 2 or size["R"] < size["W"]:
        raise ValueError(
            f"expected an even E and R >= W, got E {size['E']}, R {size['R']}, W {size['W']}; the cache must hold it"
        )


@operation(
    check=_check,
    mutates=("key_buffer_BRGE", "value_buffer_BRGE"),
    fake=lambda query, *_: query.new_empty(query.shape),
)
def norm_rope_write(
    query_BWHE: Tensor,
    key_BWGE: Tensor,
    value_BWGE: Tensor,
    query_weight_E: Tensor | None,
    key_weight_E: Tensor | None,
    cos_BWE: Tensor,
    sin_BWE: Tensor,
    lengths_B: Tensor,
    key_buffer_BRGE: Tensor,
    value_buffer_BRGE: Tensor,
    eps: float,
) -> Tensor:
    """Norms (if weights are given) and rotates queries and keys, and writes keys and values into the cache; no host
    sync.

    With `p = lengths[b] + i`, `norm(x) = weight * x / sqrt(mean(x^2) + eps)` and, for halves `[x1, x2]`,
    `rope(x) = x * cos[b, i] + [-x2, x1] * sin[b, i]`:

        out[b, i]                     = rope(norm(query[b, i]))
        key_buffer[b, p mod R]        = rope(norm(key[b, i]))
        value_buffer[b, p mod R]      = value[b, i]

    Without weights `norm(x) = x`, as in Llama. A token at a negative `p` is not written. The rounding is the same as
    in the draft's modules: the norm is computed in float32, then each product and sum in the dtype of the states.

    Args:
        query_BWHE, key_BWGE, value_BWGE (`torch.Tensor`): Outputs of the projections with any strides (for example
            views of one fused product). They have one dtype. `E` is even.
        query_weight_E, key_weight_E (`torch.Tensor` of shape `[E]`, *optional*): Weights of the norms, of the same
            dtype. Both or neither are given.
        cos_BWE, sin_BWE (`torch.Tensor` of shape `[B, W, E]`): Cosines and sines of the tokens' positions, of the same
            dtype.
        lengths_B (`torch.Tensor` of shape `[B]`, integer): Index of each row's first token.
        key_buffer_BRGE, value_buffer_BRGE (`torch.Tensor` of shape `[B, R, G, E]`): One layer of the cache, `R >= W`.
            Written in place, in its own dtype.
        eps (`float`): Epsilon of the norms. Without norms it is not used.

    Returns:
        `torch.Tensor` of shape `[B, W, H, E]`, contiguous.

    Raises:
        ValueError: If shapes or dtypes are not as described.
    """
    cos, sin = cos_BWE[:, :, None], sin_BWE[:, :, None]
    positions = lengths_B[:, None] + torch.arange(query_BWHE.shape[1], device=lengths_B.device)
    write_slots(key_buffer_BRGE, norm_and_rotate(key_BWGE, key_weight_E, cos, sin, eps), positions)
    write_slots(value_buffer_BRGE, value_BWGE, positions)
    return norm_and_rotate(query_BWHE, query_weight_E, cos, sin, eps).contiguous()


__all__ = ["norm_rope_write"]
