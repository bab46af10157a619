"""What `accept_and_prepare` does, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_and_prepare_reference(
    block_BW: Tensor,
    tokens_BW: Tensor,
    accepted_B: Tensor | None,
    eos_ids_N: Tensor | None,
    lengths_B: Tensor,
    cursor_B: Tensor,
    remaining_B: Tensor,
    done_B: Tensor,
    ids_BT: Tensor,
    draft_ids_BK: Tensor,
    positions_BP: Tensor,
    record_SCB: Tensor,
    step_B: Tensor | None,
    mask_token_id: int,
) -> None:
    """See [`accept_and_prepare`]; nothing is read on the host."""
    batch, width = tokens_BW.shape
    device = tokens_BW.device
    index = torch.arange(width, device=device)
    if accepted_B is None:
        accepted_B = (block_BW[:, 1:] == tokens_BW[:, :-1]).cumprod(dim=1).sum(dim=1)
    ends = torch.zeros_like(tokens_BW, dtype=torch.bool)
    if eos_ids_N is not None:
        # Not `torch.isin`, which may read on the host.
        ends = (tokens_BW[..., None] == eos_ids_N).any(dim=-1)
    up_to_end = torch.where(ends, index + 1, width + 1).amin(dim=1)
    committed = torch.minimum(torch.minimum(accepted_B + 1, remaining_B), up_to_end)
    finished = done_B | (committed == up_to_end) | (committed >= remaining_B)
    committed = committed.masked_fill(done_B, 0)

    column = cursor_B[:, None] + index
    size = ids_BT.shape[1]
    # What is not kept goes into columns behind the buffer, which are dropped.
    column = torch.where((index < committed[:, None]) & (column < size), column, size + index)
    padded = torch.cat([ids_BT, torch.zeros_like(tokens_BW, dtype=ids_BT.dtype)], dim=1)
    ids_BT.copy_(padded.scatter_(1, column, tokens_BW.to(ids_BT.dtype))[:, :size])
    last = committed.clamp_min(1)[:, None] - 1
    anchor = torch.where(committed[:, None] > 0, tokens_BW.gather(1, last), block_BW[:, :1])

    lengths_B += committed
    cursor_B += committed
    remaining_B -= committed
    done_B.copy_(finished)
    block_BW[:, :1] = anchor
    draft_ids_BK.fill_(mask_token_id)
    draft_ids_BK[:, :1] = anchor
    positions_BP.copy_(lengths_B[:, None] + torch.arange(positions_BP.shape[1], device=device))
    figures = torch.stack([committed, accepted_B, lengths_B, finished, cursor_B])
    now = torch.cat([figures, tokens_BW.T])
    if step_B is None:
        record_SCB[0] = now
        return
    record_SCB[step_B % record_SCB.shape[0], :, torch.arange(batch, device=device)] = now.T
    step_B += 1


__all__ = ["accept_and_prepare_reference"]
