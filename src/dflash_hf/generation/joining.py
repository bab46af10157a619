"""This module adds rows to a running batch between two eager steps. For captured steps, `places.py` does this.

A request is prefilled as a run of one row. This row is then added to the running batch: the keys and values of both
caches, the recurrent states, the newest context and the state. After that it is a row like the others.

The rows of a running batch have no prompt columns in common. So every text begins in the first column of `ids`, and
counts as new text: `host.columns` is 0, and limit and room count whole texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_hf.cache.size import OutOfRoomError
from dflash_hf.errors import require
from dflash_hf.generation.buffers import else_freed
from dflash_hf.generation.candidate_generator import DFlashCandidateGenerator
from dflash_hf.generation.options import choose_widths, width_of_rows
from dflash_hf.generation.row_rules import RowBlockRule, RowPositionRule
from dflash_hf.generation.run import Rows, Run, drop_finished, grow
from dflash_hf.generation.sampling import BlockProcessors, RowProcessors
from dflash_hf.generation.state import BufferShape, HostNumbers, Reported
from dflash_hf.generation.widths import FixedWidth, WidthChooser


class RowSettings(NamedTuple):
    """Holds the settings of one row."""

    processors: BlockProcessors
    end_ids: list[int]  # tokens that end the row
    seed: Tensor | None  # [], int64: the seed of the row's sampling noise; `None` for a greedy row
    length: int  # the largest number of tokens of prompt and answer


class TableWidths(FixedWidth):
    """Chooses the width from a table, by the number of running rows.

    Args:
        table (mapping): The table `{most rows: tokens}`, see [`width_of_rows`].
        widest (`int`): The largest width for which the buffers have room.
    """

    def __init__(self, table: Mapping[int, int], widest: int) -> None:
        super().__init__(widest)
        self.table = table
        self.widest = widest
        self.use_rows(1)

    def use_rows(self, rows: int) -> None:
        """Sets the width for this number of running rows."""
        self.widths = [min(width_of_rows(self.table, rows), self.widest)]


def _by_table(
    generator: DFlashCandidateGenerator, chooser: WidthChooser | FixedWidth
) -> WidthChooser | FixedWidth:
    """Returns the chooser of widths in a running batch: one for the table if a table is asked for, else `chooser`."""
    options = generator.draft.generation_config
    table = options.asked_width
    # A number of nodes holds for any number of rows. Under "auto", the table limits the length of a path instead.
    is_of_nodes = options.num_tree_nodes not in (None, 0)
    if not isinstance(table, Mapping) or is_of_nodes:
        return chooser
    return TableWidths(table, generator.verify_width)


def begin_batch(run: Run, row: RowSettings) -> None:
    """Makes the run of one prompt a running batch with one row."""
    # The text already begins in the first column, because a single prompt has no padding. Room now counts whole texts.
    run.room += run.state.host.columns
    # Each row has its own end tokens, which the run's rule checks.
    run.state.padded_eos_ids.fill_(-1)
    use_settings(run, [row])
    # The widths are chosen last, because this takes the chooser that an earlier run has left. An error would lose it.
    chooser = choose_widths(run.generator, run.state, run.keeps_buffers)
    run.chooser = _by_table(run.generator, chooser)
    run.watch.lap("rest")  # this does not count as time of a step


def join(
    run: Run, other: Run, rows: Sequence[RowSettings], max_rows: int, max_tokens: int | None
) -> None:
    """Adds the row of another run, which has finished its prefill, to a running batch.

    Args:
        run (`Run`): The batch, between two steps. It is changed in place.
        other (`Run`): The run of the row. It cannot be used afterwards.
        rows (sequence of `RowSettings`): The settings of all rows, the new one last.
        max_rows (`int`): The number of rows to allocate at once if the buffers have no place for one more. If there
            is no memory for them, only the new row is allocated.
        max_tokens (`int`, *optional*): The number of tokens that all allocated rows may have together.

    Raises:
        ValueError: If the two runs draft or verify with different sizes.
        OutOfRoomError: If there is no memory for the row. The rows of the batch are then unchanged.
    """
    check_alike(run, other)
    num_tokens = other.num_new + other.state.host.columns
    longest = max(row.length for row in rows)
    if num_tokens > run.room:
        # The room doubles, so that rows are copied only a few times and not for every longer prompt.
        wanted = min(longest, max(2 * run.room, num_tokens))
        else_freed(run.generator.draft, partial(grow, run), wanted, num_tokens)
    # Tapped states of tokens that were decoded without a draft gather in the same columns of all rows. They are
    # written now, because the new row has none.
    run.generator.flush()
    if max_tokens is not None:
        # The buffers stay as long as they are if the longest row leaves.
        num_fitting = max_tokens // max(longest, run.room)
        max_rows = max(len(rows), min(max_rows, num_fitting))
    add_row = partial(run.buffers.add_row, other.buffers, other.longest)
    try:
        add_row(max_rows)
    except OutOfRoomError:
        # The rows that may join later are not needed, but this row is.
        else_freed(run.generator.draft, add_row, len(rows), len(rows))
    # The rows of a batch belong to several requests, so they are numbered by their places.
    run.rows = Rows(
        numbers=list(range(len(rows))),
        reach=run.rows.reach + other.rows.reach,
        reported=Reported(*map(list.__add__, run.rows.reported, other.rows.reported)),
    )
    # Copies of weights are used only if no request runs user code.
    if run.packed.is_on:
        run.packed = other.packed
    # Weights may have changed since the new request's prefill began.
    run.packed.look_again()
    # A step over more rows costs more, so that another width may be the best.
    run.chooser.use_rows(len(rows))
    use_settings(run, rows)


def is_alike(mine: BufferShape, theirs: BufferShape) -> bool:
    """Returns True if the rows of two runs can be in one batch."""
    # The numbers of rows and of end tokens may differ.
    alike = replace(theirs, batch=mine.batch, num_eos=mine.num_eos)
    alike = replace(alike, position_delta=mine.position_delta)
    return alike == mine


def check_alike(run: Run, other: Run) -> None:
    """Raises `ValueError` if a row of another run cannot join a running batch."""
    require(
        is_alike(run.buffers.shape, other.buffers.shape),
        "draft.generation_config as it was when the batch began",
        "another one",
        "set it while nothing is running",
    )


def leave(run: Run, rows: Sequence[RowSettings]) -> list[int]:
    """Drops the rows that have ended. At least one row must still run.

    Returns:
        `list[int]`: The earlier place of each remaining row.
    """
    drop_finished(run)
    places = run.rows.numbers
    run.rows = replace(run.rows, numbers=list(range(len(places))), ended={})
    use_settings(run, [rows[place] for place in places])
    return places


def use_settings(run: Run, rows: Sequence[RowSettings]) -> None:
    """Gives each row of a running batch its own processors, end tokens and noise."""
    state = run.state
    device = state.ids.device
    # One tensor holds the end tokens of all rows. Shorter lists are padded with an id that no token has.
    num_ends = max([1, *(len(row.end_ids) for row in rows)])
    ends = [row.end_ids + [-1] * (num_ends - len(row.end_ids)) for row in rows]
    # The noise of a greedy row is never used.
    nothing = torch.zeros((), dtype=torch.long, device=device)
    seeds = [nothing if row.seed is None else row.seed.to(device) for row in rows]
    state.seed = torch.stack(seeds)[:, None]
    go_by(run, rows, torch.tensor(ends, device=device))


def go_by(run: Run, rows: Sequence[RowSettings], end_ids: Tensor) -> None:
    """Gives each row of a running batch its own processors, and its own end tokens `end_ids` `[B, N]`, int64."""
    is_sampled = [row.seed is not None for row in rows]
    processors = RowProcessors([row.processors for row in rows], is_sampled)
    if processors.is_stateless:
        run.rule = RowBlockRule(processors, end_ids)
    else:
        run.rule = RowPositionRule(processors, end_ids)
    run.generator.request = replace(run.request, processors=processors)
    # Each row ends at its own number of remaining tokens. This limit is the length that the buffers may get.
    limit = max(row.length for row in rows)
    run.state.host = HostNumbers(columns=0, limit=limit, has_eos=False, is_sampled=any(is_sampled))


def failed_of(run: Run) -> dict[int, Exception]:
    """Returns the errors that processors of rows have raised in the last step of a run, by the places of the rows."""
    processors = run.request.processors
    assert isinstance(processors, RowProcessors)
    return processors.failed
