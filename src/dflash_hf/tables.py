"""The form of every table in a terminal: columns of texts at the left, and of numbers at the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text


def make_table(
    title: str | Text, texts: Sequence[str], numbers: Sequence[str], *, wraps: bool = False
) -> Table:
    """Returns a table without rows.

    Args:
        title (`str` or `Text`): Above the table.
        texts (sequence of `str`): Headings of the first columns; long cells go on in the next line.
        numbers (sequence of `str`): Headings of the other columns, which are aligned at the right.
        wraps (`bool`): Whether numbers and their headings may be broken where there are too many columns.
    """
    table = Table(title=title, title_justify="left")
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=not wraps)
    return table
