"""This module defines the form of every table in a terminal: columns of texts on the left, columns of numbers on the
right.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text


def make_table(
    title: str | Text, texts: Sequence[str], numbers: Sequence[str], *, wraps: bool = False
) -> Table:
    """Returns a table without rows.

    Args:
        title (`str` or `Text`): Title above the table.
        texts (sequence of `str`): Headings of the first columns. Long cells of these columns continue on the next
            line.
        numbers (sequence of `str`): Headings of the other columns, which are right-aligned.
        wraps (`bool`): Whether numbers and their headings may be broken into lines if there are too many columns.
    """
    table = Table(title=title, title_justify="left")
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=not wraps)
    return table
