"""The state of one decoding run: preallocated tensors that the steps change in place, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class DecodeState:
    """Everything a step reads and writes. `B` rows, at most `W` verified tokens per step, all on the target's device.

    Args:
        ids (`torch.Tensor` of shape `[B, at least columns + room + W]`, int64): The prompts, left-padded, then what
            has been committed; anything behind a row's last committed token is scratch.
        columns (`int`): Columns of the prompts in `ids`.
        limit (`int`): Tokens a row may generate.
        cursor (`torch.Tensor` of shape `[B]`, int64): Column of `ids` that a row's next token goes to.
        remaining (`torch.Tensor` of shape `[B]`, int64): Tokens a row may still generate.
        lengths (`torch.Tensor` of shape `[B]`, int64): Tokens in the caches: all of the row but the anchor.
        whole_block (`torch.Tensor` of shape `[B, W]`, int64): What is verified next: the anchor, which is the last
            committed token, then the proposals. `anchor` `[B]`, `block` `[B, width]` and `proposals` `[B, width - 1]`
            are views of it.
        done (`torch.Tensor` of shape `[B]`, bool): Rows that have finished; they commit nothing more, and a step over
            them changes nothing but scratch.
        position_delta (`torch.Tensor` of shape `[B]` or `[rows, B]`, int64): Target position of a token minus its
            index in the row; several of them per token under M-RoPE.
        eos_ids (`torch.Tensor` of shape `[N]`, int64, *optional*): End-of-sequence ids; negative ones are none.
        key (`torch.Tensor` of shape `[]`, int64, *optional*): Seed of the sampling noise; `None` is greedy.
        draft_probs (`torch.Tensor` of shape `[B, width - 1, V]`, *optional*): Law of the proposals, for rejection.
        whole_tokens (`torch.Tensor` of shape `[B, W]`, int64): Written by the accept step: what may be committed.
            `tokens` `[B, width]` is a view of it.
        num_accepted (`torch.Tensor` of shape `[B]`, int64): Written by the accept step: proposals that matched.
        num_committed (`torch.Tensor` of shape `[B]`, int64): Written by the accept step: tokens kept.
        width (`int`): Tokens that the step verifies, at most `W`; each step may have its own.

    What a step reads of a run is in tensors, never in `columns` and `limit`, so that a captured step serves any run
    of its width.
    """

    ids: Tensor
    columns: int
    limit: int
    cursor: Tensor
    remaining: Tensor
    lengths: Tensor
    whole_block: Tensor
    done: Tensor
    position_delta: Tensor
    eos_ids: Tensor | None
    key: Tensor | None
    draft_probs: Tensor | None
    whole_tokens: Tensor
    num_accepted: Tensor
    num_committed: Tensor
    width: int

    @property
    def block(self) -> Tensor:
        """What this step verifies `[B, width]`."""
        return self.whole_block[:, : self.width]

    @property
    def anchor(self) -> Tensor:
        """Last committed token of each row `[B]`."""
        return self.whole_block[:, 0]

    @property
    def proposals(self) -> Tensor:
        """What the draft proposes to follow it `[B, width - 1]`."""
        return self.whole_block[:, 1 : self.width]

    @property
    def tokens(self) -> Tensor:
        """The target's token after each verified one `[B, width]`."""
        return self.whole_tokens[:, : self.width]

    @property
    def num_new(self) -> Tensor:
        """Tokens that each row has generated so far `[B]`."""
        return self.cursor - self.columns

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
        room: int | None = None,
    ) -> DecodeState:
        """Allocates the state of a run over prompts `[B, columns]`; nothing has been generated yet.

        There are columns for `room` new tokens, by default as many as the limit.
        """
        batch, columns = input_ids.shape
        num_columns = columns + (limit if room is None else room) + width
        state = cls.allocate(batch, num_columns, width, input_ids.device)
        state.restart(input_ids, lengths=lengths, limit=limit, position_delta=position_delta, eos_ids=eos_ids, key=key)
        return state

    @classmethod
    def allocate(cls, batch: int, num_columns: int, width: int, device: torch.device) -> DecodeState:
        """Allocates tensors for runs of up to `num_columns` columns, scratch included; call [`restart`] before use."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        return cls(
            ids=zeros(batch, num_columns),
            columns=0,
            limit=0,
            cursor=zeros(batch),
            remaining=zeros(batch),
            lengths=zeros(batch),
            whole_block=zeros(batch, width),
            done=torch.zeros(batch, dtype=torch.bool, device=device),
            position_delta=zeros(batch),
            eos_ids=None,
            key=None,
            draft_probs=None,
            whole_tokens=zeros(batch, width),
            num_accepted=zeros(batch),
            num_committed=zeros(batch),
            width=width,
        )

    def restart(
        self,
        input_ids: Tensor,
        *,
        lengths: Tensor,
        limit: int,
        position_delta: Tensor,
        eos_ids: Tensor | None,
        key: Tensor | None,
    ) -> None:
        """Begins a run over prompts `[B, columns]` in the same tensors; the last three are taken as they are."""
        self.columns, self.limit = input_ids.shape[1], limit
        self.ids.zero_()[:, : self.columns] = input_ids
        self.cursor.fill_(self.columns)
        self.remaining.fill_(limit)
        self.lengths.copy_(lengths)
        self.width = self.whole_block.shape[1]
        for scratch in (self.whole_block, self.done, self.whole_tokens, self.num_accepted, self.num_committed):
            scratch.zero_()
        self.position_delta, self.eos_ids, self.key, self.draft_probs = position_delta, eos_ids, key, None


__all__ = ["DecodeState"]
