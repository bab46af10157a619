"""The state of one decoding run: tensors that steps change in place, always in the same places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_hf.cache.size import LayerShape
from dflash_hf.modeling_dflash import DFlashDraftModel

NUM_REPORTED = 5  # rows of `DecodeState.outcome` before the tokens
# End-of-sequence ids are padded to a multiple of this.
EOS_IDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """What two runs must have in common to use the same buffers, besides room."""

    batch: int  # rows
    block_size: int  # tokens of the draft's block
    width: int  # tokens of the widest verify
    num_eos: int  # end-of-sequence ids, rounded up
    mask_token_id: int  # the draft's
    position_delta: tuple[int, ...]  # shape of the target's position deltas
    device: torch.device  # the target's
    draft_layers: tuple[LayerShape, ...]  # those of the draft's cache

    @classmethod
    def of(
        cls,
        draft: DFlashDraftModel,
        block_size: int,
        width: int,
        position_delta: Tensor,
        eos_ids: Tensor | None,
    ) -> BufferShape:
        """Returns the shape for a run with these position deltas and end-of-sequence ids."""
        num_eos = 0 if eos_ids is None else eos_ids.shape[0]
        return cls(
            batch=position_delta.shape[-1],
            block_size=block_size,
            width=width,
            num_eos=-(-max(num_eos, 1) // EOS_IDS) * EOS_IDS,
            mask_token_id=draft.config.mask_token_id,
            position_delta=tuple(position_delta.shape),
            device=position_delta.device,
            draft_layers=tuple(draft.cache_shapes()),
        )

    @property
    def block(self) -> int:
        """The longest block that is written at once."""
        return max(self.block_size, self.width)


@dataclass(slots=True, kw_only=True)
class DecodeState:
    """Everything a step reads and writes. `B` rows, at most `W` verified tokens per step, all on the target's device.

    All tensors are int64 but `done`, bool, and `draft_probs`, float32. What a step reads of a run is in them, never in
    `columns` and `limit`, so that a captured step serves any run of its width.
    """

    # [B, at least columns + room + W]: the prompts, left-padded, then what has been committed, then scratch.
    ids: Tensor
    cursor: Tensor  # [B]: column of `ids` that a row's next token goes to
    remaining: Tensor  # [B]: tokens a row may still generate
    done: Tensor  # [B]: rows that have finished; a step over them commits nothing and changes scratch only
    # [B, W]: what is verified next, the anchor, which is the last committed token, then the proposals. `anchor` [B],
    # `block` [B, width] and `proposals` [B, width - 1] are views of it.
    whole_block: Tensor
    draft_ids: Tensor  # [B, K]: what the draft reads, the anchor, then mask tokens
    # [B, max(K, W)]: index in its row of each token of the block. `lengths` [B], tokens in the caches (all of the row
    # but the anchor), is a view of it.
    next_positions: Tensor
    whole_tokens: Tensor  # [B, W]: the target's token after each verified one; `tokens` [B, width] is a view of it
    # [5 + W, B]: what the host has to know of the last step. Tokens committed, proposals accepted, lengths, finished
    # rows, filled columns of `ids`, then `tokens`.
    outcome: Tensor
    # [B] or, under M-RoPE, [rows, B]: target position of a token minus its index in the row.
    position_delta: Tensor
    padded_eos_ids: Tensor  # [N]: end-of-sequence ids; negative ones are none
    seed: Tensor  # []: of the sampling noise
    columns: int = 0  # of the prompts in `ids`
    limit: int = 0  # tokens a row may generate
    width: int = 1  # tokens that the step verifies, at most W; each step may have its own
    eos_ids: Tensor | None = None  # `padded_eos_ids` if there are any
    key: Tensor | None = None  # `seed` if tokens are sampled
    draft_probs: Tensor | None = None  # [B, width - 1, V]: distribution of the proposals, for rejection

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, shape: BufferShape, num_columns: int) -> DecodeState:
        """Allocates tensors for runs of up to `num_columns` columns, scratch included; call [`begin`] before use.

        Outside inference mode, like all that a call leaves behind.
        """
        batch, width, device = shape.batch, shape.width, shape.device

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.long, device=device)

        return cls(
            ids=zeros(batch, num_columns),
            cursor=zeros(batch),
            remaining=zeros(batch),
            done=torch.zeros(batch, dtype=torch.bool, device=device),
            whole_block=zeros(batch, width),
            draft_ids=zeros(batch, shape.block_size) + shape.mask_token_id,
            next_positions=zeros(batch, shape.block),
            whole_tokens=zeros(batch, width),
            outcome=zeros(NUM_REPORTED + width, batch),
            position_delta=zeros(*shape.position_delta),
            padded_eos_ids=zeros(shape.num_eos),
            seed=zeros(),
        )

    def begin(
        self,
        input_ids: Tensor,
        *,
        lengths: Tensor,
        limit: int,
        position_delta: Tensor,
        eos_ids: Tensor | None,
        seed: Tensor | None,
    ) -> None:
        """Begins a run over prompts `[B, columns]` of `lengths` tokens: as if their last token were to be verified.

        The first commit, of the token that the prefill decides, makes that token the anchor.
        """
        self.columns, self.limit, self.width = input_ids.shape[1], limit, 1
        self.ids.zero_()[:, : self.columns] = input_ids
        self.cursor.fill_(self.columns)
        self.remaining.fill_(limit)
        for scratch in (self.done, self.whole_tokens, self.outcome):
            scratch.zero_()
        self.whole_block.zero_()
        if self.columns:  # none where prompts are embeddings
            self.whole_block[:, 0] = input_ids[:, -1]
        ahead = torch.arange(-1, self.next_positions.shape[1] - 1, device=lengths.device)
        torch.add(lengths[:, None], ahead, out=self.next_positions)
        self.position_delta.copy_(position_delta)
        self.padded_eos_ids.fill_(-1)
        self.eos_ids = self.key = self.draft_probs = None
        if eos_ids is not None:
            self.eos_ids = self.padded_eos_ids
            self.eos_ids[: eos_ids.shape[0]] = eos_ids
        if seed is not None:
            self.key = self.seed.copy_(seed)

    @property
    def block(self) -> Tensor:
        """What this step verifies `[B, width]`."""
        return self.whole_block[:, : self.width]

    @property
    def anchor(self) -> Tensor:
        """Last committed token of each row `[B]`."""
        return self.whole_block[:, 0]

    @property
    def lengths(self) -> Tensor:
        """Tokens in the caches of each row `[B]`."""
        return self.next_positions[:, 0]

    @property
    def proposals(self) -> Tensor:
        """What the draft proposes to follow it `[B, width - 1]`."""
        return self.whole_block[:, 1 : self.width]

    @property
    def tokens(self) -> Tensor:
        """The target's token after each verified one `[B, width]`."""
        return self.whole_tokens[:, : self.width]

    @property
    def decided_positions(self) -> Tensor:
        """What noise is keyed by for each of `tokens` `[B, width]`."""
        return self.next_positions[:, : self.width] + 1

    @property
    def num_new(self) -> Tensor:
        """Tokens that each row has generated so far `[B]`."""
        return self.cursor - self.columns

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor that stays where it is from step to step, by name."""
        others = ("eos_ids", "key", "draft_probs")
        values = ((name, getattr(self, name)) for name in self.__slots__ if name not in others)
        return {name: value for name, value in values if isinstance(value, Tensor)}
