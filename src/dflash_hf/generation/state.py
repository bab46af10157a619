"""The state of one decoding run: tensors that steps change in place, always in the same places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_hf import ops
from dflash_hf.cache.ragged import kept_rows
from dflash_hf.cache.size import LayerShape
from dflash_hf.modeling_dflash import DFlashDraftModel
from dflash_hf.tree import DraftTree, along

NUM_REPORTED = 5  # rows of `DecodeState.outcome` before the tokens
# End-of-sequence ids are padded to a multiple of this.
EOS_IDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """What two runs must have in common to use the same buffers, besides room."""

    batch: int  # rows
    block_size: int  # tokens of the draft's block
    width: int  # tokens of the widest verify
    is_tree: bool  # whether what is verified is a tree
    path: int  # tokens of the longest path that can be accepted, the anchor included
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
        is_tree: bool,
        position_delta: Tensor,
        eos_ids: Tensor,
    ) -> BufferShape:
        """Returns the shape for a run with these position deltas and end-of-sequence ids."""
        num_eos = max(eos_ids.shape[0], 1)
        return cls(
            batch=position_delta.shape[-1],
            block_size=block_size,
            width=width,
            is_tree=is_tree,
            path=min(width, draft.config.num_proposals(block_size) + 1) if is_tree else width,
            num_eos=-(-num_eos // EOS_IDS) * EOS_IDS,
            mask_token_id=draft.config.mask_token_id,
            position_delta=tuple(position_delta.shape),
            device=position_delta.device,
            draft_layers=tuple(draft.cache_shapes()),
        )

    @property
    def block(self) -> int:
        """The longest block that is written at once."""
        return max(self.block_size, self.width)


class TreeReport(NamedTuple):
    """What the host has to know of a verified tree, `[B, W]` int64 each."""

    path: Tensor  # which node stands at each depth; 0 behind the path's end
    node_ids: Tensor  # the nodes' tokens; the block has them only until it is decided
    parents: Tensor  # this and the next as `dflash_kernels.build_tree` says
    sources: Tensor


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
    # [5 + W, B] or [5 + 5 W, B]: what the host has to know of the last step. Tokens committed, proposals accepted,
    # lengths, finished rows, filled columns of `ids`, then `tokens` and, where trees are verified, a `TreeReport`.
    outcome: Tensor
    # [B] or, under M-RoPE, [rows, B]: target position of a token minus its index in the row.
    position_delta: Tensor
    padded_eos_ids: Tensor  # [N]: end-of-sequence ids; negative ones are none
    seed: Tensor  # []: of the sampling noise
    # [4, B, W]: parents, depths, ancestors and sources of what is verified, if that is a tree; `tree` is a view of it.
    nodes: Tensor | None = None
    # [B]: what makes a position that of the row where it was at first, once rows have moved; noise is keyed by rows.
    moved: Tensor | None = None
    columns: int = 0  # of the prompts in `ids`
    limit: int = 0  # tokens a row may generate
    width: int = 1  # tokens that the step verifies, at most W; each step may have its own
    is_chain: bool = False  # whether the step verifies a chain although the run has trees
    has_eos: bool = False  # whether there are end-of-sequence ids
    key: Tensor | None = None  # `seed` if tokens are sampled
    # [B, width - 1, V]: distribution of the proposals, for rejection.
    draft_probs: Tensor | None = None

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, shape: BufferShape, num_columns: int) -> DecodeState:
        """Allocates tensors for runs of up to `num_columns` columns, scratch included; call [`begin`] before use.

        Outside inference mode, like all that a call leaves behind.
        """
        batch = shape.batch
        width = shape.width
        device = shape.device

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
            outcome=zeros(NUM_REPORTED + width * (1 + len(TreeReport._fields) * shape.is_tree), batch),
            position_delta=zeros(*shape.position_delta),
            padded_eos_ids=zeros(shape.num_eos),
            seed=zeros(),
            nodes=zeros(4, batch, width) if shape.is_tree else None,
        )

    def begin(
        self,
        input_ids: Tensor,
        *,
        lengths: Tensor,
        limit: int,
        position_delta: Tensor,
        eos_ids: Tensor,
        seed: Tensor | None,
    ) -> None:
        """Begins a run over prompts `[B, columns]` of `lengths` tokens: as if their last token were to be verified.

        The first commit, of the token that the prefill decides, makes that token the anchor.
        """
        self.columns = input_ids.shape[1]
        self.limit = limit
        self.width = 1
        self.is_chain = False
        self.moved = None
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
        self.key = None
        self.draft_probs = None
        self.padded_eos_ids[: eos_ids.shape[0]] = eos_ids
        self.has_eos = eos_ids.shape[0] > 0
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
    def tree(self) -> DraftTree | None:
        """The tree that this step verifies, if it is more than the anchor and no chain."""
        if self.nodes is None or self.width == 1 or self.is_chain:
            return None
        return DraftTree(*self.nodes[:3, :, : self.width])

    @property
    def decided_positions(self) -> Tensor:
        """What noise is keyed by for each of `tokens` `[B, width]`, in the order of a chain."""
        return self.keyed(self.next_positions[:, : self.width] + 1)

    def positions_behind(self, tree: DraftTree) -> Tensor:
        """What noise is keyed by for the token behind each node `[B, N]`."""
        return self.keyed(self.next_positions[:, :1] + tree.depths + 1)

    def keyed(self, positions: Tensor) -> Tensor:
        """Returns what noise is keyed by for tokens at these indices in their rows `[B, n]`, which are above 0."""
        if self.moved is None:
            return positions
        return positions ^ self.moved[:, None]

    def report_in(self, outcome: Tensor, width: int) -> TreeReport | None:
        """What the `outcome` of a step says of its tree of `width` tokens, if it verified one; views."""
        # Of this step or, where the host is one behind, of one before: such runs verify no chains beside trees.
        if self.nodes is None or width == 1 or self.is_chain:
            return None
        return TreeReport(*self._parts_of_tree(outcome, width))

    @property
    def report(self) -> TreeReport | None:
        """That of this step, once it is decided.

        Block and tokens are then in the order of its path, as if they had been a chain, with -1 in the block behind
        the path's end.
        """
        return self.report_in(self.outcome, self.width)

    @property
    def path(self) -> Tensor | None:
        """The report's."""
        report = self.report
        return None if report is None else report.path

    def _parts_of_tree(self, outcome: Tensor, width: int) -> Tensor:
        """The parts of a report, one after the other `[4, B, width]`: a view."""
        return outcome[NUM_REPORTED:].unflatten(0, (-1, self.whole_block.shape[1]))[1:, :width].transpose(1, 2)

    def report_nodes(self) -> None:
        """Reports the tree of this step itself, beside what came of it."""
        assert self.nodes is not None
        self._parts_of_tree(self.outcome, self.width)[2:].copy_(self.nodes[::3, :, : self.width])

    def follow(self, tree: DraftTree) -> None:
        """Puts block and tokens into the order of the path that the tokens go through the tree, and reports both."""
        report = self.report
        assert report is not None
        tree.follow(self.block, self.tokens, report.node_ids, report.path)

    def along_path(self, values: Tensor) -> Tensor:
        """Returns values of what was verified `[B, width, ...]` in the order in which it was decided."""
        path = self.path
        if path is None:
            return values
        return along(path, values)

    @property
    def num_new(self) -> Tensor:
        """Tokens that each row has generated so far `[B]`."""
        return self.cursor - self.columns

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows alone; see [`kept_rows`]."""
        if self.key is not None:
            # As `ops.exponential_noise` puts rows and positions together.
            places = (
                torch.tensor([row ^ place for place, row in enumerate(rows)], device=self.ids.device) << ops.ROW_BITS
            )
            self.moved = places if self.moved is None else self.moved[list(rows)] ^ places
        dims = {"outcome": 1, "nodes": 1, "position_delta": self.position_delta.dim() - 1}
        for name, tensor in self.tensors().items():
            if name not in ("padded_eos_ids", "seed"):
                setattr(self, name, kept_rows(tensor, rows, dims.get(name, 0)))

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor that stays where it is from step to step, by name."""
        others = ("key", "moved", "draft_probs")
        values = ((name, getattr(self, name)) for name in self.__slots__ if name not in others)
        return {name: value for name, value in values if isinstance(value, Tensor)}
