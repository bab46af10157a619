"""Rows that join a run between two eager steps: the counterpart of `run.drop_finished`; captured: `places.py`.

A request is prefilled as a run of one row. Its row then goes into the running one: keys and values of both caches,
recurrent states, the newest context and the state. From then on it is a row like the others.

Rows of a running batch have no columns of prompts in common. So every text begins in the first column of `ids`, and to
the run all of it is new: `host.columns` is 0, and limit and room count whole texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

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
    """What is said of one row alone."""

    processors: BlockProcessors
    end_ids: list[int]  # tokens that end the row
    seed: Tensor | None  # [], int64: of the row's sampling noise; greedy rows have none
    length: int  # tokens of prompt and answer, at most


class TableWidths(FixedWidth):
    """Looks the width up by the rows that are running.

    Args:
        table (mapping): `{most rows: tokens}`, see [`width_of_rows`].
        widest (`int`): Tokens that the buffers have room for.
    """

    def __init__(self, table: Mapping[int, int], widest: int) -> None:
        super().__init__(widest)
        self.table = table
        self.widest = widest
        self.use_rows(1)

    def use_rows(self, rows: int) -> None:
        """Goes on with so many rows."""
        self.widths = [min(width_of_rows(self.table, rows), self.widest)]


def _by_table(
    generator: DFlashCandidateGenerator, chooser: WidthChooser | FixedWidth
) -> WidthChooser | FixedWidth:
    """Returns what chooses the width in a running batch: a table where one is asked for, else the chooser."""
    options = generator.draft.generation_config
    table = options.asked_width
    # A number of nodes holds for any number of rows; under "auto" the table says how long a path may be.
    is_of_nodes = options.num_tree_nodes not in (None, 0)
    if not isinstance(table, Mapping) or is_of_nodes:
        return chooser
    return TableWidths(table, generator.verify_width)


def begin_batch(run: Run, row: RowSettings) -> None:
    """Makes the run of one prompt the first row of a running batch."""
    # Its text already begins in the first column: a single prompt has no padding.
    run.room += run.state.host.columns
    # Ends are the rows' own.
    run.state.padded_eos_ids.fill_(-1)
    use_settings(run, [row])
    # At the end: an error before it leaves the widths that an earlier run has kept.
    chooser = choose_widths(run.generator, run.state, run.keeps_buffers)
    run.chooser = _by_table(run.generator, chooser)
    run.watch.lap("rest")  # no step's time


def join(run: Run, other: Run, rows: Sequence[RowSettings], max_rows: int) -> None:
    """Adds the one row of another run, behind its prefill, to a running batch.

    Args:
        run (`Run`): The batch, between two steps; changed in place.
        other (`Run`): The row's run, which is of no use afterwards.
        rows (sequence of `RowSettings`): Of all rows, the new one last.
        max_rows (`int`): Rows to allocate at once, where there is no memory for one more.

    Raises:
        ValueError: If the two runs draft or verify in other sizes.
        OutOfRoomError: If there is no memory for the row. The batch is as it was then.
    """
    check_alike(run, other)
    num_tokens = other.num_new + other.state.host.columns
    if num_tokens > run.room:
        longest = max(row.length for row in rows)
        # Twice the room, so that rows are copied a few times and not for every longer prompt.
        wanted = min(longest, max(2 * run.room, num_tokens))
        else_freed(run.generator.draft, partial(grow, run), wanted, num_tokens)
    # Tokens that were decoded without a draft gather from one column on in all rows: the new one has none.
    run.generator.flush()
    length = other.longest
    run.buffers.add_row(other.buffers, length, max_rows)
    # The batch has no request whose rows could be numbered: they are numbered by their places.
    run.rows = Rows(
        numbers=list(range(len(rows))),
        reach=run.rows.reach + other.rows.reach,
        reported=Reported(*map(list.__add__, run.rows.reported, other.rows.reported)),
    )
    # One request with code of the user's is enough for none of them to have copies.
    if run.packed.is_on:
        run.packed = other.packed
    # Weights may have been changed since the new request's prefill began.
    run.packed.look_again()
    # A step over more rows costs more, which may make another width the best.
    run.chooser.use_rows(len(rows))
    use_settings(run, rows)


def is_alike(mine: BufferShape, theirs: BufferShape) -> bool:
    """Returns True if rows of two runs can stand side by side."""
    # Rows and end tokens are no part of what has to be alike.
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
    """Goes on without the rows that have ended, of which there is one at least that has not.

    Returns:
        `list[int]`: The place that each row that is left had before.
    """
    drop_finished(run)
    places = run.rows.numbers
    run.rows = replace(run.rows, numbers=list(range(len(places))), ended={})
    use_settings(run, [rows[place] for place in places])
    return places


def use_settings(run: Run, rows: Sequence[RowSettings]) -> None:
    """Has each row of a running batch go by its own processors, end tokens and noise."""
    state = run.state
    device = state.ids.device
    # One tensor for all rows: shorter lists are filled up with ids that no token has.
    num_ends = max([1, *(len(row.end_ids) for row in rows)])
    ends = [row.end_ids + [-1] * (num_ends - len(row.end_ids)) for row in rows]
    # A greedy row's noise is never looked at.
    nothing = torch.zeros((), dtype=torch.long, device=device)
    seeds = [nothing if row.seed is None else row.seed.to(device) for row in rows]
    state.seed = torch.stack(seeds)[:, None]
    go_by(run, rows, torch.tensor(ends, device=device))


def go_by(run: Run, rows: Sequence[RowSettings], end_ids: Tensor) -> None:
    """Has each row of a running batch go by its own processors, and by its own end tokens `[B, N]`, int64."""
    is_sampled = [row.seed is not None for row in rows]
    processors = RowProcessors([row.processors for row in rows], is_sampled)
    if processors.is_stateless:
        run.rule = RowBlockRule(processors, end_ids)
    else:
        run.rule = RowPositionRule(processors, end_ids)
    run.generator.request = replace(run.request, processors=processors)
    # Rows end by what they may still generate; this one says how long the buffers may get.
    limit = max(row.length for row in rows)
    run.state.host = HostNumbers(columns=0, limit=limit, has_eos=False, is_sampled=any(is_sampled))


def failed_of(run: Run) -> dict[int, Exception]:
    """Returns what processors of single rows have raised in the last step of a run, by the rows' places."""
    processors = run.request.processors
    assert isinstance(processors, RowProcessors)
    return processors.failed
