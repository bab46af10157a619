"""The state of one decoding run: preallocated tensors that the steps change in place, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class DecodeState:
    """Everything a step reads and writes. `B` rows, `W` verified tokens per step, all on the target's device.

    Args:
        ids (`torch.Tensor` of shape `[B, columns + max_new + W]`, int64): The prompts, left-padded, then what has been
            committed; anything behind a row's last committed token is scratch.
        columns (`int`): Columns of the prompts in `ids`.
        num_new (`torch.Tensor` of shape `[B]`, int64): Tokens generated so far.
        limit (`int`): Tokens a row may generate.
        lengths (`torch.Tensor` of shape `[B]`, int64): Tokens in the caches: all of the row but the anchor.
        block (`torch.Tensor` of shape `[B, W]`, int64): What is verified next: the anchor, which is the last committed
            token, then the proposals. `anchor` `[B]` and `proposals` `[B, W - 1]` are views of it.
        done (`torch.Tensor` of shape `[B]`, bool): Rows that have finished; they commit nothing more.
        position_delta (`torch.Tensor` of shape `[B]` or `[rows, B]`, int64): Target position of a token minus its
            index in the row; several of them per token under M-RoPE.
        eos_ids (`torch.Tensor` of shape `[N]`, int64, *optional*): End-of-sequence ids.
        key (`torch.Tensor` of shape `[]`, int64, *optional*): Seed of the sampling noise; `None` is greedy.
        draft_probs (`torch.Tensor` of shape `[B, W - 1, V]`, *optional*): Law of the proposals, for rejection.
        tokens (`torch.Tensor` of shape `[B, W]`, int64): Written by the accept step: what may be committed.
        num_accepted (`torch.Tensor` of shape `[B]`, int64): Written by the accept step: proposals that matched.
        num_committed (`torch.Tensor` of shape `[B]`, int64): Written by the accept step: tokens kept.
    """

    ids: Tensor
    columns: int
    num_new: Tensor
    limit: int
    lengths: Tensor
    block: Tensor
    done: Tensor
    position_delta: Tensor
    eos_ids: Tensor | None
    key: Tensor | None
    draft_probs: Tensor | None
    tokens: Tensor
    num_accepted: Tensor
    num_committed: Tensor

    @property
    def anchor(self) -> Tensor:
        """Last committed token of each row `[B]`."""
        return self.block[:, 0]

    @property
    def proposals(self) -> Tensor:
        """What the draft proposes to follow it `[B, W - 1]`."""
        return self.block[:, 1:]

    @classmethod
    def start(
        cls,
        input_ids: Tensor,
        *,
        lengths: Tensor,
        limit: int,
        width: int,
        position_delta: Tensor,
        eos_ids: Tensor | None,
        key: Tensor | None,
    ) -> DecodeState:
        """Allocates the state of a run over prompts `[B, columns]`; nothing has been generated yet."""
        batch, columns = input_ids.shape
        device = input_ids.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        return cls(
            ids=torch.cat([input_ids, zeros(batch, limit + width)], dim=1),
            columns=columns,
            num_new=zeros(batch),
            limit=limit,
            lengths=lengths,
            block=zeros(batch, width),
            done=torch.zeros(batch, dtype=torch.bool, device=device),
            position_delta=position_delta,
            eos_ids=eos_ids,
            key=key,
            draft_probs=None,
            tokens=zeros(batch, width),
            num_accepted=zeros(batch),
            num_committed=zeros(batch),
        )


__all__ = ["DecodeState"]
