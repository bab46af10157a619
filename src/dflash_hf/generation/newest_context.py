"""The draft's newest context: tapped states that its cache does not hold yet, in fixed tensors.

Shapes: `B` rows, `C` columns, `N` nodes of a tree, `L` taps, `D` hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_hf.block.attention import RaggedBlock, TreeBlock
from dflash_hf.block.tree import along
from dflash_hf.cache.context import ContextWeights, NewContext
from dflash_hf.cache.rows import kept_rows
from dflash_hf.devices import plain_tensors
from dflash_hf.generation.state import BufferShape


class NewestContext:
    """Tapped states of tokens that the draft's next forward writes, some columns of each row.

    A verify of more than one token takes all columns, rejected tokens included: the host does not know how many were
    right. Tokens that were decoded without a draft gather, one behind the other, until a forward of the draft writes
    them or the columns are full. Before the first verify the states are zeros, whose keys and values go where the
    block's own go right after.

    Args:
        shape (`BufferShape`): What the buffers are for. There are as many columns as a path can be long.
        width (`int`): `L * D`.
        dtype (`torch.dtype`): Of the states, which is the draft's.
    """

    def __init__(self, shape: BufferShape, width: int, dtype: torch.dtype) -> None:
        device = shape.draft_layers[0].device
        num_nodes = 0
        if shape.is_tree:
            num_nodes = shape.width
        # [B, C, L * D]; behind a verify of fewer tokens, states of earlier ones, which count as rejected.
        self.columns = torch.zeros(shape.batch, shape.path, width, dtype=dtype, device=device)
        self.num_columns = shape.path  # `C`
        # [B, N, L * D]: states of all nodes of a tree, before it is known which of them stand; else [B, 0, L * D].
        self.nodes = torch.zeros(shape.batch, num_nodes, width, dtype=dtype, device=device)
        # [B], int64: index in its row of the token of the first column, as the draft counts.
        self.starts = torch.zeros(shape.batch, dtype=torch.long, device=device)
        # [B], int64, on the target's device: first index in its row that there is context for; the draft counts from
        # it.
        self.offset = torch.zeros(shape.batch, dtype=torch.long, device=shape.device)
        # Whether one of these indices is above 0, which the host would have to read.
        self.has_offset = False
        # Copies for the kernel that writes context of all layers at once; none where no kernel is to write it.
        self.weights: ContextWeights | None = None
        # Whether single tokens gather. Not in captured steps, each of which writes its own.
        self.gathers = True
        self._num_taken = 0
        # The columns of the last verify.
        self._newest = slice(0, 0)

    @property
    def is_full(self) -> bool:
        """Whether there is no column for a further token."""
        return self._num_taken == self.num_columns

    @property
    def states(self) -> Tensor:
        """Tapped states `[B, W, L * D]` of the block that was verified last, rejected rows included."""
        return self.columns[:, self._newest]

    def clear(self) -> None:
        """Forgets the context of another run."""
        self.columns.zero_()
        self.offset.zero_()
        self.has_offset = False

    def set_offset(self, offset: Tensor) -> None:
        """Has the draft count from these indices `[B]`, of which one at least is above 0."""
        self.offset.copy_(offset)
        self.has_offset = True

    def begin(self, lengths: Tensor) -> None:
        """Begins a run whose prompts have these lengths `[B]` as the draft counts; the states are zeros by now."""
        self.starts.copy_(lengths)
        self.gathers = True
        self._num_taken = 0
        self._newest = slice(0, 0)

    def counted(self, block: RaggedBlock) -> RaggedBlock:
        """Returns the same block as the draft counts: on its device, and from where its context begins."""
        if self.has_offset:
            # Rows are shorter here than the bound says, and it still holds; a tree's depths are not needed.
            positions = block.positions - self.offset[:, None]
            block = RaggedBlock(positions, block.bound)
        return block.on(self.columns.device)

    def add(self, states: Tensor, block: RaggedBlock) -> None:
        """Adds the tapped states of a verify, rejected rows included; the next draft forward writes them.

        Args:
            states (`torch.Tensor` of shape `[B, W, L * D]`): Of the verified tokens.
            block (`RaggedBlock`): Where these stand, on the target's device. Of the nodes of a [`TreeBlock`],
                [`add_path`] takes the accepted ones.
        """
        width = states.shape[1]
        is_single = width == 1
        start = 0
        if is_single:
            # Behind a block of several tokens all columns are taken: the draft has written them, and these begin anew.
            start = self._num_taken % self.num_columns
        end = start + min(width, self.num_columns)
        self._newest = slice(start, end)
        if isinstance(block, TreeBlock):
            # Which nodes stand is known after the target's tokens are: `add_path` takes them from here.
            self.nodes[:, :width].copy_(states)
        else:
            self.states.copy_(states)
        self._num_taken = self.num_columns
        if is_single and self.gathers:
            self._num_taken = start + 1
        # Tokens that gather behind others stand where the first of them does, and so many further on.
        if start == 0:
            self.starts.copy_(self.counted(block).lengths)

    def add_path(self, path_BN: Tensor, is_in_place: bool) -> None:
        """Takes the states of a tree's accepted path `[B, n]`; states behind the path's end count as rejected.

        `is_in_place` says that the path's nodes stand as a chain would.
        """
        num = path_BN.shape[1]
        taken = self.columns[:, :num]
        if is_in_place:
            taken.copy_(self.nodes[:, :num])
        else:
            path = path_BN.to(self.nodes.device)
            along(path, self.nodes, out=taken)

    def to_write(self) -> NewContext:
        """Returns what the draft's next forward writes: the states of all columns, and where they stand."""
        block = RaggedBlock.at(self.starts, self.num_columns)
        return NewContext(self.columns, block, self.weights)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows alone; see [`kept_rows`]."""
        self.columns = kept_rows(self.columns, rows)
        self.nodes = kept_rows(self.nodes, rows)
        self.starts = kept_rows(self.starts, rows)
        self.offset = kept_rows(self.offset, rows)

    def add_row(self, source: NewestContext) -> None:
        """Adds the one row of another run, behind its prefill, behind the last row.

        What has gathered here must be in the draft's cache: the next tokens begin at the first column again.
        """
        # Steps write into them, and the next one may be outside inference mode.
        with plain_tensors():
            self.columns = torch.cat([self.columns, source.columns])
            self.nodes = torch.cat([self.nodes, source.nodes])
            self.starts = torch.cat([self.starts, source.starts])
            self.offset = torch.cat([self.offset, source.offset])
        self.end_gathering()

    def put_row(self, place: int, source: NewestContext) -> None:
        """Puts the one row of another run to a place, over the row that is there; otherwise as [`add_row`]."""
        pairs = (
            (self.columns, source.columns),
            (self.nodes, source.nodes),
            (self.starts, source.starts),
            (self.offset, source.offset),
        )
        for mine, theirs in pairs:
            mine[place] = theirs[0]
        self.end_gathering()

    def end_gathering(self) -> None:
        """Has the next token begin at the first column again.

        What has gathered must be in the draft's cache, or be written by the next step, as static steps do.
        """
        self._num_taken = self.num_columns

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that must stay where it is."""
        found = [self.columns, self.nodes, self.starts, self.offset]
        # Weights are baked into a captured step by their addresses.
        found.extend(self.weights or ())
        return found
