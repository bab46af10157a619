"""What `norm_rope_write` does, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rotary import norm_and_rotate, write_slots


def norm_rope_write_reference(
    query_BWHE: Tensor,
    key_BWGE: Tensor,
    value_BWGE: Tensor,
    query_weight_E: Tensor,
    key_weight_E: Tensor,
    cos_BWE: Tensor,
    sin_BWE: Tensor,
    lengths_B: Tensor,
    key_buffer_BRGE: Tensor,
    value_buffer_BRGE: Tensor,
    eps: float,
) -> Tensor:
    """See [`norm_rope_write`]; nothing is read on the host."""
    cos, sin = cos_BWE[:, :, None], sin_BWE[:, :, None]
    positions = lengths_B[:, None] + torch.arange(query_BWHE.shape[1], device=lengths_B.device)
    write_slots(key_buffer_BRGE, norm_and_rotate(key_BWGE, key_weight_E, cos, sin, eps), positions)
    write_slots(value_buffer_BRGE, value_BWGE, positions)
    return norm_and_rotate(query_BWHE, query_weight_E, cos, sin, eps).contiguous()


__all__ = ["norm_rope_write_reference"]
