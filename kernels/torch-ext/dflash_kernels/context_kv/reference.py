"""What `context_kv` does, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rotary import norm_and_rotate, write_slots


def context_kv_reference(
    projected_BWLAGE: Tensor,
    weight_LE: Tensor,
    cos_BWE: Tensor,
    sin_BWE: Tensor,
    lengths_B: Tensor,
    key_buffers: Sequence[Tensor],
    value_buffers: Sequence[Tensor],
    eps: float,
) -> None:
    """See [`context_kv`]; nothing is read on the host."""
    cos, sin = cos_BWE[:, :, None], sin_BWE[:, :, None]
    positions = lengths_B[:, None] + torch.arange(projected_BWLAGE.shape[1], device=lengths_B.device)
    for index, (keys, values) in enumerate(zip(key_buffers, value_buffers, strict=True)):
        key, value = projected_BWLAGE[:, :, index].unbind(2)
        write_slots(keys, norm_and_rotate(key, weight_LE[index], cos, sin, eps), positions)
        write_slots(values, value, positions)


__all__ = ["context_kv_reference"]
