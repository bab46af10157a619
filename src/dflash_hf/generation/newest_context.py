"""This module keeps the draft's newest context: tapped states that its cache does not hold yet, in fixed tensors.

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
    """Tapped states of tokens whose context the draft's next forward writes: some columns of each row.

    A verify of more than one token fills all columns, rejected tokens included, because the host does not know the
    number of accepted tokens. Tokens that were decoded without a draft gather one after the other, until a forward of
    the draft writes them or the columns are full. Before the first verify, the states are zeros. Their keys and values
    are written into slots that the block's own keys and values overwrite immediately.

    Args:
        shape (`BufferShape`): The shape of the buffers. There are as many columns as a path can be long.
        width (`int`): `L * D`.
        dtype (`torch.dtype`): Dtype of the states, which is the draft's.
    """

    def __init__(self, shape: BufferShape, width: int, dtype: torch.dtype) -> None:
        device = shape.draft_layers[0].device
        num_nodes = 0
        if shape.is_tree:
            num_nodes = shape.width
        # [B, C, L * D]. After a verify of fewer tokens, the other columns hold older states, which count as rejected.
        self.columns = torch.zeros(shape.batch, shape.path, width, dtype=dtype, device=device)
        self.num_columns = shape.path  # `C`
        # [B, N, L * D]: states of all nodes of a tree, until it is known which are accepted. Without trees, N is 0.
        self.nodes = torch.zeros(shape.batch, num_nodes, width, dtype=dtype, device=device)
        # [B], int64: index in its row of the token of the first column, as the draft counts indices.
        self.starts = torch.zeros(shape.batch, dtype=torch.long, device=device)
        # [B], int64, on the target's device: first index in its row with context. The draft counts indices from there.
        self.offset = torch.zeros(shape.batch, dtype=torch.long, device=shape.device)
        # Whether one of these indices is above 0. The host would have to read them to know it.
        self.has_offset = False
        # Copies for the kernel that writes the context of all layers at once; `None` if no such kernel runs.
        self.weights: ContextWeights | None = None
        # Whether the states of single tokens gather. In captured steps they do not: each step writes its own states.
        self.gathers = True
        self._num_taken = 0
        # The columns of the last verify.
        self._newest = slice(0, 0)

    @property
    def is_full(self) -> bool:
        """Whether there is no free column for another token."""
        return self._num_taken == self.num_columns

    @property
    def states(self) -> Tensor:
        """Tapped states `[B, W, L * D]` of the block that was verified last, rejected tokens included."""
        return self.columns[:, self._newest]

    def clear(self) -> None:
        """Removes the context of another run."""
        self.columns.zero_()
        self.offset.zero_()
        self.has_offset = False

    def set_offset(self, offset: Tensor) -> None:
        """Sets the indices `[B]` from which the draft counts. At least one of them is above 0."""
        self.offset.copy_(offset)
        self.has_offset = True

    def begin(self, lengths: Tensor) -> None:
        """Begins a run whose prompts have these lengths `[B]`, as the draft counts. The states are zeros by now."""
        self.starts.copy_(lengths)
        self.gathers = True
        self._num_taken = 0
        self._newest = slice(0, 0)

    def counted(self, block: RaggedBlock) -> RaggedBlock:
        """Returns the same block on the draft's device, with indices as the draft counts them."""
        if self.has_offset:
            # The rows are shorter here, so the block's bound still holds. The draft does not need a tree's depths.
            positions = block.positions - self.offset[:, None]
            block = RaggedBlock(positions, block.bound)
        return block.on(self.columns.device)

    def add(self, states: Tensor, block: RaggedBlock) -> None:
        """Adds the tapped states of a verify, rejected tokens included. The draft's next forward writes their context.

        Args:
            states (`torch.Tensor` of shape `[B, W, L * D]`): The states of the verified tokens.
            block (`RaggedBlock`): The places of these tokens, on the target's device. If it is a [`TreeBlock`],
                [`add_path`] takes the accepted nodes from these states later.
        """
        width = states.shape[1]
        is_single = width == 1
        start = 0
        if is_single:
            # After a block of several tokens, all columns are taken. The draft has written them, so the start is 0.
            start = self._num_taken % self.num_columns
        end = start + min(width, self.num_columns)
        self._newest = slice(start, end)
        if isinstance(block, TreeBlock):
            # The accepted nodes are known only after the target's tokens. Then `add_path` takes them from here.
            self.nodes[:, :width].copy_(states)
        else:
            self.states.copy_(states)
        self._num_taken = self.num_columns
        if is_single and self.gathers:
            self._num_taken = start + 1
        # Tokens that gather after others need no new start, because they follow the token of the first column.
        if start == 0:
            self.starts.copy_(self.counted(block).lengths)

    def add_path(self, path_BN: Tensor, is_in_place: bool) -> None:
        """Takes the states of a tree's accepted path `[B, n]`. States after the end of the path count as rejected.

        `is_in_place` says that the nodes of the path are at the places of a chain.
        """
        num = path_BN.shape[1]
        taken = self.columns[:, :num]
        if is_in_place:
            taken.copy_(self.nodes[:, :num])
        else:
            path = path_BN.to(self.nodes.device)
            along(path, self.nodes, out=taken)

    def to_write(self) -> NewContext:
        """Returns the input of the draft's next forward: the states of all columns, and their places."""
        block = RaggedBlock.at(self.starts, self.num_columns)
        return NewContext(self.columns, block, self.weights)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps only these rows; see [`kept_rows`]."""
        self.columns = kept_rows(self.columns, rows)
        self.nodes = kept_rows(self.nodes, rows)
        self.starts = kept_rows(self.starts, rows)
        self.offset = kept_rows(self.offset, rows)

    def add_row(self, source: NewestContext) -> None:
        """Appends the single row of another run, after its prefill, as the last row.

        Context that has gathered here must already be in the draft's cache, because the next tokens begin at column 0.
        """
        # Steps write into these tensors, and the next step may be outside inference mode.
        with plain_tensors():
            self.columns = torch.cat([self.columns, source.columns])
            self.nodes = torch.cat([self.nodes, source.nodes])
            self.starts = torch.cat([self.starts, source.starts])
            self.offset = torch.cat([self.offset, source.offset])
        self.end_gathering()

    def put_row(self, place: int, source: NewestContext) -> None:
        """Copies the single row of another run to a place, over the row there; otherwise as [`add_row`]."""
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
        """Lets the next token begin at the first column again.

        Context that has gathered must already be in the draft's cache, or the next step must write it, as a static
        step does.
        """
        self._num_taken = self.num_columns

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that must keep its address."""
        found = [self.columns, self.nodes, self.starts, self.offset]
        # A captured step contains the addresses of these weights.
        found.extend(self.weights or ())
        return found
