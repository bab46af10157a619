"""This module defines the state of one decoding run: tensors that steps change in place, at fixed addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_hf import ops
from dflash_hf.block.tree import DraftTree, along, new_nodes
from dflash_hf.cache.rows import kept_rows
from dflash_hf.cache.size import LayerShape
from dflash_hf.devices import plain_tensors
from dflash_hf.generation.sampling import NoiseKey
from dflash_hf.modeling_dflash import DFlashDraftModel

NUM_REPORTED = ops.NUM_FIGURES  # rows of `DecodeState.outcome` before the tokens
# End-of-sequence ids are padded to a multiple of this.
EOS_IDS = 8
# The dimension of `B` in those tensors of `DecodeState` whose first dimension is not `B`.
ROW_DIMS = {"outcome": -1, "nodes": 1, "position_delta": -1}
# Tensors that are the same for all rows.
OF_ALL_ROWS = ("padded_eos_ids", "seed")
# Tensors that are replaced during a run. All others are written in place.
REPLACED = ("draft_probs",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """The sizes that two runs must have in common to use the same buffers. The lengths of their rows may differ."""

    batch: int  # rows
    block_size: int  # tokens of the draft's block
    width: int  # tokens of the widest verify
    is_tree: bool  # whether trees are verified
    path: int  # tokens of the longest path that can be accepted, the anchor included
    num_eos: int  # end-of-sequence ids, rounded up
    mask_token_id: int  # the draft's mask token
    position_delta: tuple[int, ...]  # shape of the target's position deltas
    device: torch.device  # the target's device
    draft_layers: tuple[LayerShape, ...]  # layers of the draft's cache

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
        """Returns the shape for a run with these position deltas `[..., B]` and end-of-sequence ids `[N]`."""
        path = width
        if is_tree:
            # A path has at most one proposal for each slot that proposes, even if the tree has more nodes.
            path = min(width, draft.config.num_proposals(block_size) + 1)
        num_eos = max(eos_ids.shape[0], 1)
        return cls(
            batch=position_delta.shape[-1],
            block_size=block_size,
            width=width,
            is_tree=is_tree,
            path=path,
            num_eos=math.ceil(num_eos / EOS_IDS) * EOS_IDS,
            mask_token_id=draft.config.mask_token_id,
            position_delta=tuple(position_delta.shape),
            device=position_delta.device,
            draft_layers=tuple(draft.cache_shapes()),
        )

    @property
    def block(self) -> int:
        """Number of tokens of the longest block that is written at once, the draft's or the target's."""
        return max(self.block_size, self.width)


class TreeReport(NamedTuple):
    """The host's view of a verified tree: views `[B, W]`, int64, of an `outcome`."""

    path: Tensor  # the node at each depth of the accepted path; 0 after the end of the path
    node_ids: Tensor  # tokens of the nodes; the block holds them only until tokens are chosen
    parents: Tensor  # the node that each node follows, as `dflash_kernels.build_tree` defines it
    # 1 for a node that repeats a token from earlier in the text, 0 for a proposal of the draft
    sources: Tensor


class Reported(NamedTuple):
    """The last step in numbers, one per row: the first rows of an `outcome`, on the host."""

    committed: list[int]  # number of committed tokens
    accepted: list[int]  # number of accepted proposals
    lengths: list[int]  # number of tokens in the caches
    done: list[int]  # 1 if the row has finished, else 0
    filled: list[int]  # number of filled columns of `ids`

    @classmethod
    def before(cls, lengths: list[int], num_columns: int) -> Reported:
        """Returns the numbers before the first step of a run whose prompts have these lengths."""
        nothing = [0] * len(lengths)
        return cls(nothing, nothing, lengths, nothing, [num_columns] * len(lengths))


class ReportedTree(NamedTuple):
    """The tree of the last step on the host, one list per row: the fields of a [`TreeReport`]."""

    path: list[list[int]]
    node_ids: list[list[int]]
    parents: list[list[int]]
    sources: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNumbers:
    """Numbers of a run that the host's decisions depend on. In a running batch, `joining.go_by` replaces them."""

    columns: int  # number of columns of the prompts in `ids`
    limit: int  # number of tokens that a row may generate
    has_eos: bool  # whether there are end-of-sequence ids
    is_sampled: bool  # whether tokens are sampled, with noise that `seed` determines


@dataclass(slots=True, kw_only=True)
class DecodeState:
    """Everything that a step reads and writes. `B` rows, at most `W` verified tokens; all on the target's device.

    All tensors are int64, except `done` (bool) and `draft_probs` (float32). A step reads the numbers of a run from
    these tensors, and never reads `columns` and `limit` of `host`. So a captured step can serve any run of its width.
    """

    # [B, at least columns + room + W]: the prompts, left-padded, then the committed tokens, then scratch memory.
    ids: Tensor
    cursor: Tensor  # [B]: column of `ids` for the next token of each row
    remaining: Tensor  # [B]: number of tokens that a row may still generate
    # [B]: whether each row has finished. A step over such a row commits nothing and changes only scratch memory.
    done: Tensor
    # [B, W]: the tokens to be verified next: the anchor, which is the last committed token, then the proposals.
    # `anchor` [B], `block` [B, width] and `proposals` [B, width - 1] are views of this tensor.
    whole_block: Tensor
    draft_ids: Tensor  # [B, K]: the draft's input: the anchor, then mask tokens
    # [B, max(K, W)]: index in its row of each token of the block. `lengths` [B] is a view of this tensor: the number
    # of tokens in the caches, which is all tokens of the row except the anchor.
    next_positions: Tensor
    # [B, W]: the target's token after each verified token; `tokens` [B, width] is a view of this tensor
    whole_tokens: Tensor
    # [5 + W, B] or [5 + 5 W, B]: the numbers of the last step, in one tensor so that the host copies them at once. The
    # rows are: committed tokens, accepted proposals, lengths, finished rows, filled columns of `ids`, then `tokens`.
    # In a run with trees, the four parts of a `TreeReport` follow, with `W` rows each.
    outcome: Tensor
    # [B] or, under M-RoPE, [rows, B]: target position of a token minus its index in the row.
    position_delta: Tensor
    padded_eos_ids: Tensor  # [N]: end-of-sequence ids; negative ids are padding
    # []: seed of the sampling noise. In a running batch [B, 1], because each row has its own seed.
    seed: Tensor
    # [3 + A, B, W]: parents, sources, depths and the words of the ancestors of the widest tree. `tree` is a view of
    # this tensor. In a run that verifies chains, the shape is [3, B, 0].
    nodes: Tensor
    # [B]: the number of each row in the request. The noise depends on it, because rows move when others have ended.
    row_ids: Tensor
    # [B, width - 1, V]: distribution that the proposals were drawn from; empty if they were not drawn.
    draft_probs: Tensor
    host: HostNumbers  # no step changes it
    width: int = 1  # number of tokens that this step verifies, at most W; it may vary
    is_chain: bool = False  # whether the step verifies a chain although the run has trees

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, shape: BufferShape, num_columns: int) -> DecodeState:
        """Allocates tensors for runs of up to `num_columns` columns, scratch included; call [`begin`] before use.

        The tensors are allocated outside inference mode, like everything that outlives a call.
        """
        batch = shape.batch
        width = shape.width
        device = shape.device
        num_reported = NUM_REPORTED + width
        num_nodes = 0
        if shape.is_tree:
            num_reported += width * len(TreeReport._fields)
            num_nodes = width

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
            outcome=zeros(num_reported, batch),
            position_delta=zeros(*shape.position_delta),
            padded_eos_ids=zeros(shape.num_eos),
            seed=zeros(),
            nodes=new_nodes(batch, num_nodes, device),
            row_ids=torch.arange(batch, device=device),
            draft_probs=torch.empty(0, device=device),
            host=HostNumbers(columns=0, limit=0, has_eos=False, is_sampled=False),
        )

    @classmethod
    def of_nobody(cls, shape: BufferShape) -> DecodeState:
        """Returns the state of one row that has ended, a text of one token, for buffers of this shape."""
        position_delta = (*shape.position_delta[:-1], 1)
        one_row = replace(shape, batch=1, position_delta=position_delta)
        state = cls.allocate(one_row, num_columns=1)
        one = torch.ones(1, dtype=torch.long, device=shape.device)
        state.begin(
            one[:, None] - 1,
            lengths=one,
            limit=1,
            position_delta=torch.zeros_like(state.position_delta),
            eos_ids=one[:0],
            seed=None,
        )
        state.done.fill_(True)
        return state

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
        """Begins a run over prompts `[B, columns]` of `lengths` tokens, as if their last token were to be verified.

        The prefill gives the first new token. The first commit makes that token the anchor. `seed` is the seed of the
        sampling noise; greedy runs have none.
        """
        columns = input_ids.shape[1]
        num_eos = eos_ids.shape[0]
        self.host = HostNumbers(
            columns=columns, limit=limit, has_eos=num_eos > 0, is_sampled=seed is not None
        )
        # The state is as after a verify of one token: the last token of each prompt, whose logits the prefill gives.
        self.width = 1
        self.is_chain = False
        self.draft_probs = torch.empty(0, device=self.ids.device)
        self.ids.zero_()[:, :columns] = input_ids
        self.cursor.fill_(columns)
        self.remaining.fill_(limit)
        for scratch in (self.done, self.whole_tokens, self.outcome):
            scratch.zero_()
        self.whole_block.zero_()
        # Prompts that were passed as embeddings have no columns.
        if columns:
            self.whole_block[:, 0] = input_ids[:, -1]
        # The last token of the prompt is the anchor, so the caches do not count it yet.
        ahead = torch.arange(-1, self.next_positions.shape[1] - 1, device=lengths.device)
        torch.add(lengths[:, None], ahead, out=self.next_positions)
        self.position_delta.copy_(position_delta)
        # The padding is an id that no token has. So a captured step can serve runs with other end-of-sequence ids.
        self.padded_eos_ids.fill_(-1)
        self.padded_eos_ids[:num_eos] = eos_ids
        if seed is not None:
            self.seed.copy_(seed)

    @property
    def block(self) -> Tensor:
        """Tokens that this step verifies `[B, width]`."""
        return self.whole_block[:, : self.width]

    @property
    def anchor(self) -> Tensor:
        """Last committed token of each row `[B]`."""
        return self.whole_block[:, 0]

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each row in the caches `[B]`."""
        return self.next_positions[:, 0]

    @property
    def proposals(self) -> Tensor:
        """Tokens that the draft proposes to follow the anchor `[B, width - 1]`."""
        return self.whole_block[:, 1 : self.width]

    @property
    def tokens(self) -> Tensor:
        """The target's token after each verified token `[B, width]`."""
        return self.whole_tokens[:, : self.width]

    @property
    def num_new(self) -> Tensor:
        """Number of tokens that each row has generated so far `[B]`."""
        return self.cursor - self.host.columns

    # ---- noise

    @property
    def noise_key(self) -> NoiseKey:
        """The key of the noise for sampling tokens."""
        return NoiseKey(self.seed, self.row_ids)

    @property
    def key(self) -> NoiseKey | None:
        """The [`noise_key`], or `None` in greedy decoding."""
        if not self.host.is_sampled:
            return None
        return self.noise_key

    @property
    def decided_positions(self) -> Tensor:
        """Index in its row of each of `tokens` `[B, width]`, in the order of a chain. The noise depends on it."""
        return self.next_positions[:, : self.width] + 1

    @property
    def positions_behind_block(self) -> Tensor:
        """Index in its row of the token that follows each verified token `[B, width]`. The noise depends on it.

        For a chain, these are the [`decided_positions`]. Nodes of a tree at the same depth have the same index.
        """
        tree = self.tree
        if tree is None:
            return self.decided_positions
        return self.next_positions[:, :1] + tree.depths + 1

    # ---- columns

    @property
    def decided_columns(self) -> Tensor:
        """Number of columns of the text before each of `tokens` `[B, width]`, in the order of a chain."""
        return self.cursor[:, None] + torch.arange(self.width, device=self.cursor.device)

    @property
    def columns_behind_block(self) -> Tensor:
        """Number of columns of the text before the token that follows each verified token `[B, width]`."""
        tree = self.tree
        if tree is None:
            return self.decided_columns
        return self.cursor[:, None] + tree.depths

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps only these rows; see [`kept_rows`]. Their `row_ids` move with them."""
        for name, tensor in self.tensors().items():
            if name not in OF_ALL_ROWS:
                setattr(self, name, kept_rows(tensor, rows, ROW_DIMS.get(name, 0)))

    def add_row(self, source: DecodeState) -> None:
        """Appends the single row of another run as the last row. In both states, texts begin in the first column."""
        for name, tensor in self.tensors().items():
            if name in OF_ALL_ROWS:
                continue
            added = getattr(source, name)
            # Steps write into these tensors, and the next step may be outside inference mode.
            with plain_tensors():
                if name == "ids":
                    # Both tensors get as many columns as the wider one.
                    num_columns = max(tensor.shape[1], added.shape[1])
                    tensor = _widened(tensor, num_columns)
                    added = _widened(added, num_columns)
                joined = torch.cat([tensor, added], dim=ROW_DIMS.get(name, 0))
            setattr(self, name, joined)

    def put_row(self, place: int, source: DecodeState) -> None:
        """Copies the single row of another run to a `place`, over the row there. Texts begin in the first column."""
        for name, tensor in self.tensors().items():
            if name in OF_ALL_ROWS:
                continue
            dim = ROW_DIMS.get(name, 0)
            row = tensor.select(dim, place)
            theirs = getattr(source, name).select(dim, 0)
            if name == "ids":
                # The text is followed by scratch memory, whose size may differ between the two states.
                row.zero_()
                num_columns = min(row.shape[0], theirs.shape[0])
                row = row[:num_columns]
                theirs = theirs[:num_columns]
            row.copy_(theirs)

    # ---- trees

    @property
    def is_tree(self) -> bool:
        """Whether this step verifies a tree: more than the anchor, and not a chain instead of a tree."""
        return self.is_tree_of(self.width)

    @property
    def tree(self) -> DraftTree | None:
        """The tree that this step verifies; `None` if [`is_tree`] is false."""
        if not self.is_tree:
            return None
        return DraftTree.of(self.nodes_of_step)

    @property
    def nodes_of_step(self) -> Tensor:
        """The part of `nodes` for this step's tree, `[3 + A, B, width]`. A smaller tree may need fewer words `A`."""
        num_parts = ops.NODE_PARTS + ops.num_words(self.width)
        return self.nodes[:num_parts, :, : self.width]

    @property
    def report(self) -> TreeReport:
        """The report on this step's tree, after its tokens are chosen; only valid if [`is_tree`] is true.

        Block and tokens are then in the order of the accepted path, as if they had been a chain. After the end of the
        path, the block contains -1.
        """
        return TreeReport(*self.tree_parts(self.outcome, self.width))

    def is_tree_of(self, width: int) -> bool:
        """Returns True if a step of this width verifies a tree.

        The host may read the outcome of the step before this one. This is correct because runs in which the host is
        one step behind never verify a chain instead of a tree.
        """
        has_trees = self.nodes.shape[2] > 0
        return has_trees and width > 1 and not self.is_chain

    def tree_parts(self, outcome: Tensor, width: int) -> Tensor:
        """Returns the parts of the [`TreeReport`] that the `outcome` of a step of this width holds.

        Returns:
            `torch.Tensor`: A view `[4, B, width]`, int64; only valid if [`is_tree_of`] is true.
        """
        widest = self.whole_block.shape[1]
        parts = outcome[NUM_REPORTED + widest :].unflatten(0, (len(TreeReport._fields), widest))
        return parts[:, :width].transpose(1, 2)

    def report_nodes(self) -> None:
        """Copies the parents and sources of this step's tree into `outcome`."""
        # They are neighbours in `nodes`, so one copy takes both.
        parents_and_sources = self.nodes[:2, :, : self.width]
        self.tree_parts(self.outcome, self.width)[2:].copy_(parents_and_sources)

    def along_path(self, values: Tensor) -> Tensor:
        """Returns values of the verified tokens `[B, width, ...]` in the order in which the tokens were chosen."""
        if not self.is_tree:
            return values
        return along(self.report.path, values)

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor that keeps its address from step to step, by name."""
        found: dict[str, Tensor] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Tensor) and name not in REPLACED:
                found[name] = value
        return found


def _widened(ids: Tensor, num_columns: int) -> Tensor:
    """Returns ids `[B, T]` with `num_columns` columns; the additional columns on the right are zeros."""
    num_missing = num_columns - ids.shape[1]
    return torch.nn.functional.pad(ids, (0, num_missing))
