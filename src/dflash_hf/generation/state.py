"""The state of one decoding run: tensors that steps change in place, always in the same places."""

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
# The dimension of `DecodeState`'s tensors that is `B`, where it is not the first one.
ROW_DIMS = {"outcome": -1, "nodes": 1, "position_delta": -1}
# Tensors that are the same for all rows.
OF_ALL_ROWS = ("padded_eos_ids", "seed")
# Tensors that are replaced during a run, where the others are written in place.
REPLACED = ("draft_probs",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferShape:
    """The sizes that two runs must have in common to use the same buffers, whatever the lengths of their rows."""

    batch: int  # rows
    block_size: int  # tokens of the draft's block
    width: int  # tokens of the widest verify
    is_tree: bool  # whether trees are verified
    path: int  # tokens of the longest path that can be accepted, the anchor included
    num_eos: int  # end-of-sequence ids, rounded up
    mask_token_id: int  # of the draft
    position_delta: tuple[int, ...]  # shape of the target's position deltas
    device: torch.device  # of the target
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
            # A path goes one proposal deep for each slot that proposes, however many nodes the tree has.
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
        """Tokens of the longest block that is written at once, the draft's or the target's."""
        return max(self.block_size, self.width)


class TreeReport(NamedTuple):
    """What the host has to know of a verified tree, `[B, W]` int64 each; views of an `outcome`."""

    path: Tensor  # the node at each depth of the accepted path; 0 behind its end
    node_ids: Tensor  # tokens of the nodes; the block holds them only until tokens are chosen
    parents: Tensor  # the node that each one follows, as `dflash_kernels.build_tree` defines it
    # 1 for a node that repeats what followed in the text before, 0 for one of the draft
    sources: Tensor


class Reported(NamedTuple):
    """What the host knows of the last step, per row: the first rows of an `outcome`."""

    committed: list[int]  # tokens
    accepted: list[int]  # proposals
    lengths: list[int]  # tokens in the caches
    done: list[int]  # whether the row has finished
    filled: list[int]  # columns of `ids`

    @classmethod
    def before(cls, lengths: list[int], num_columns: int) -> Reported:
        """Returns what is known before the first step of a run, of prompts of these lengths."""
        nothing = [0] * len(lengths)
        return cls(nothing, nothing, lengths, nothing, [num_columns] * len(lengths))


class ReportedTree(NamedTuple):
    """What the host knows of the last step's tree, one list per row: the fields of a [`TreeReport`]."""

    path: list[list[int]]
    node_ids: list[list[int]]
    parents: list[list[int]]
    sources: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNumbers:
    """The numbers of a run that the host decides by; in a running batch `joining.go_by` replaces them."""

    columns: int  # of the prompts in `ids`
    limit: int  # tokens a row may generate
    has_eos: bool  # whether there are end-of-sequence ids
    is_sampled: bool  # whether tokens are sampled, with noise of `seed`


@dataclass(slots=True, kw_only=True)
class DecodeState:
    """Everything a step reads and writes. `B` rows, at most `W` verified tokens per step, all on the target's device.

    All tensors are int64 but `done`, bool, and `draft_probs`, float32. A step reads a run's numbers from these tensors
    and never columns and limit of `host`, so that a captured step serves any run of its width.
    """

    # [B, at least columns + room + W]: the prompts, left-padded, then committed tokens, then scratch.
    ids: Tensor
    cursor: Tensor  # [B]: column of `ids` that a row's next token goes to
    remaining: Tensor  # [B]: tokens a row may still generate
    # [B]: rows that have finished; a step over them commits nothing and changes scratch only
    done: Tensor
    # [B, W]: the tokens to be verified next. The anchor, which is the last committed token, then the proposals.
    # `anchor` [B], `block` [B, width] and `proposals` [B, width - 1] are views of it.
    whole_block: Tensor
    draft_ids: Tensor  # [B, K]: the draft's input, the anchor, then mask tokens
    # [B, max(K, W)]: index in its row of each token of the block. `lengths` [B], tokens in the caches (all of the row
    # but the anchor), is a view of it.
    next_positions: Tensor
    # [B, W]: the target's token after each verified one; `tokens` [B, width] is a view of it
    whole_tokens: Tensor
    # [5 + W, B] or [5 + 5 W, B]: the last step in numbers, one tensor so that the host copies it once. Tokens
    # committed, proposals accepted, lengths, finished rows, filled columns of `ids`, then `tokens`; and, where trees
    # are verified, the four parts of a `TreeReport`, `W` rows each.
    outcome: Tensor
    # [B] or, under M-RoPE, [rows, B]: target position of a token minus its index in the row.
    position_delta: Tensor
    padded_eos_ids: Tensor  # [N]: end-of-sequence ids; negative ones are none
    # []: of the sampling noise; in a running batch [B, 1], each row's own
    seed: Tensor
    # [3 + A, B, W]: parents, sources, depths and the words of the ancestors of the widest tree, of which `tree` is a
    # view; [3, B, 0] in a run that verifies chains.
    nodes: Tensor
    # [B]: the number of each row in the request, which noise is keyed by: rows move where others have ended.
    row_ids: Tensor
    # [B, width - 1, V]: distribution that the proposals were drawn from; empty where they were not drawn.
    draft_probs: Tensor
    host: HostNumbers  # the same from step to step; no step writes it
    width: int = 1  # tokens that the step verifies, at most W; each step may have its own
    is_chain: bool = False  # whether the step verifies a chain although the run has trees

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, shape: BufferShape, num_columns: int) -> DecodeState:
        """Allocates tensors for runs of up to `num_columns` columns, scratch included; call [`begin`] before use.

        Outside inference mode, like all that a call leaves behind.
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
        """Returns the state of one row that has ended, a text of one token, for the rows of a shape."""
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
        """Begins a run over prompts `[B, columns]` of `lengths` tokens: as if their last token were to be verified.

        The first commit, of the token that follows from the prefill, makes that token the anchor. `seed` is the
        sampling noise's; greedy runs have none.
        """
        columns = input_ids.shape[1]
        num_eos = eos_ids.shape[0]
        self.host = HostNumbers(
            columns=columns, limit=limit, has_eos=num_eos > 0, is_sampled=seed is not None
        )
        # As if one token had been verified: the prompts' last ones, whose logits the prefill gives.
        self.width = 1
        self.is_chain = False
        self.draft_probs = torch.empty(0, device=self.ids.device)
        self.ids.zero_()[:, :columns] = input_ids
        self.cursor.fill_(columns)
        self.remaining.fill_(limit)
        for scratch in (self.done, self.whole_tokens, self.outcome):
            scratch.zero_()
        self.whole_block.zero_()
        # Prompts that were given as embeddings have no columns.
        if columns:
            self.whole_block[:, 0] = input_ids[:, -1]
        # The last token of the prompt is the anchor, so the caches lack it.
        ahead = torch.arange(-1, self.next_positions.shape[1] - 1, device=lengths.device)
        torch.add(lengths[:, None], ahead, out=self.next_positions)
        self.position_delta.copy_(position_delta)
        # Padded by ids that no token has, so that a captured step serves runs with other ids.
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
        """Tokens in the caches of each row `[B]`."""
        return self.next_positions[:, 0]

    @property
    def proposals(self) -> Tensor:
        """Tokens that the draft proposes to follow the anchor `[B, width - 1]`."""
        return self.whole_block[:, 1 : self.width]

    @property
    def tokens(self) -> Tensor:
        """The target's token after each verified one `[B, width]`."""
        return self.whole_tokens[:, : self.width]

    @property
    def num_new(self) -> Tensor:
        """Tokens that each row has generated so far `[B]`."""
        return self.cursor - self.host.columns

    # ---- noise

    @property
    def noise_key(self) -> NoiseKey:
        """The key of the noise that tokens are sampled with."""
        return NoiseKey(self.seed, self.row_ids)

    @property
    def key(self) -> NoiseKey | None:
        """[`noise_key`], or `None` where tokens are chosen greedily."""
        if not self.host.is_sampled:
            return None
        return self.noise_key

    @property
    def decided_positions(self) -> Tensor:
        """Index in its row of each of `tokens` `[B, width]`, in the order of a chain: noise is keyed by it."""
        return self.next_positions[:, : self.width] + 1

    @property
    def positions_behind_block(self) -> Tensor:
        """Index in its row of the token behind each verified one `[B, width]`: noise is keyed by it.

        A chain's are [`decided_positions`]; nodes of a tree that stand equally deep share theirs.
        """
        tree = self.tree
        if tree is None:
            return self.decided_positions
        return self.next_positions[:, :1] + tree.depths + 1

    # ---- columns

    @property
    def decided_columns(self) -> Tensor:
        """Columns of the text in front of each of `tokens` `[B, width]`, in the order of a chain."""
        return self.cursor[:, None] + torch.arange(self.width, device=self.cursor.device)

    @property
    def columns_behind_block(self) -> Tensor:
        """Columns of the text in front of the token behind each verified one `[B, width]`; see the positions above."""
        tree = self.tree
        if tree is None:
            return self.decided_columns
        return self.cursor[:, None] + tree.depths

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows alone; see [`kept_rows`]. Their `row_ids` move with them."""
        for name, tensor in self.tensors().items():
            if name not in OF_ALL_ROWS:
                setattr(self, name, kept_rows(tensor, rows, ROW_DIMS.get(name, 0)))

    def add_row(self, source: DecodeState) -> None:
        """Adds the one row of another run behind the last row; both have their texts from the first column on."""
        for name, tensor in self.tensors().items():
            if name in OF_ALL_ROWS:
                continue
            added = getattr(source, name)
            # Steps write into them, and the next one may be outside inference mode.
            with plain_tensors():
                if name == "ids":
                    # Rows are as long as the longer buffer.
                    num_columns = max(tensor.shape[1], added.shape[1])
                    tensor = _widened(tensor, num_columns)
                    added = _widened(added, num_columns)
                joined = torch.cat([tensor, added], dim=ROW_DIMS.get(name, 0))
            setattr(self, name, joined)

    def put_row(self, place: int, source: DecodeState) -> None:
        """Puts the one row of another run to a place, over the row that is there; texts begin in the first column."""
        for name, tensor in self.tensors().items():
            if name in OF_ALL_ROWS:
                continue
            dim = ROW_DIMS.get(name, 0)
            row = tensor.select(dim, place)
            theirs = getattr(source, name).select(dim, 0)
            if name == "ids":
                # Behind the text there is scratch, of which the two may have more or less.
                row.zero_()
                num_columns = min(row.shape[0], theirs.shape[0])
                row = row[:num_columns]
                theirs = theirs[:num_columns]
            row.copy_(theirs)

    # ---- trees

    @property
    def is_tree(self) -> bool:
        """Whether this step verifies a tree: more than the anchor, and no chain in a tree's place."""
        return self.is_tree_of(self.width)

    @property
    def tree(self) -> DraftTree | None:
        """The tree that this step verifies; `None` where [`is_tree`] is false."""
        if not self.is_tree:
            return None
        return DraftTree.of(self.nodes_of_step)

    @property
    def nodes_of_step(self) -> Tensor:
        """The part of `nodes` that this step's tree has, `[3 + A, B, width]`: fewer nodes may need fewer words."""
        num_parts = ops.NODE_PARTS + ops.num_words(self.width)
        return self.nodes[:num_parts, :, : self.width]

    @property
    def report(self) -> TreeReport:
        """The report on this step's tree, once its tokens are chosen; only where [`is_tree`] is true.

        Block and tokens are then in the order of the accepted path, as if they had been a chain, with -1 in the block
        behind the path's end.
        """
        return TreeReport(*self.tree_parts(self.outcome, self.width))

    def is_tree_of(self, width: int) -> bool:
        """Returns True if a step of this width verifies a tree.

        The step is this one or, where the host is one behind, the one before: runs of that kind verify no chains
        beside trees.
        """
        has_trees = self.nodes.shape[2] > 0
        return has_trees and width > 1 and not self.is_chain

    def tree_parts(self, outcome: Tensor, width: int) -> Tensor:
        """Returns the parts of the [`TreeReport`] that the `outcome` of a step of this width holds.

        Returns:
            `torch.Tensor`: A view `[4, B, width]`, int64; only where [`is_tree_of`] is true.
        """
        widest = self.whole_block.shape[1]
        parts = outcome[NUM_REPORTED + widest :].unflatten(0, (len(TreeReport._fields), widest))
        return parts[:, :width].transpose(1, 2)

    def report_nodes(self) -> None:
        """Reports the nodes of this step's tree, beside what has come of it."""
        # They stand side by side: one copy takes both.
        parents_and_sources = self.nodes[:2, :, : self.width]
        self.tree_parts(self.outcome, self.width)[2:].copy_(parents_and_sources)

    def along_path(self, values: Tensor) -> Tensor:
        """Returns values of the verified tokens `[B, width, ...]` in the order in which tokens were chosen."""
        if not self.is_tree:
            return values
        return along(self.report.path, values)

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor that stays where it is from step to step, by name."""
        found: dict[str, Tensor] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Tensor) and name not in REPLACED:
                found[name] = value
        return found


def _widened(ids: Tensor, num_columns: int) -> Tensor:
    """Returns ids `[B, T]` with so many columns, zeros behind those that there are."""
    num_missing = num_columns - ids.shape[1]
    return torch.nn.functional.pad(ids, (0, num_missing))
