"""What a script leaves behind: tables for the reader, one line of JSON for programs, a file for the record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_hf.data.row_files import write_whole
from dflash_hf.tables import make_table

from .machine import RESULTS

Column = tuple[str, str]


def show(title: str, rows: list[dict[str, Any]], columns: list[Column]) -> None:
    """Prints rows as a table.

    Args:
        title (`str`): Above the table.
        rows: The rows.
        columns: Heading, and the key of its values; `a.b` looks into nested dictionaries.
    """
    first, *others = [heading for heading, _ in columns]
    table = make_table(title, [first], others, wraps=True)
    for row in rows:
        table.add_row(*(_cell(_look_up(row, key)) for _, key in columns))
    # A pipe has no width of its own, and a table folded to 80 columns cannot be read.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _look_up(row: dict[str, Any], key: str) -> Any:
    """The value of a key such as `a.b`; a key that has a dot of its own, as `at_4.5`, is found too."""
    if key in row:
        return row[key]
    first, _, rest = key.partition(".")
    inner = row.get(first)
    if isinstance(inner, dict) and rest:
        return _look_up(inner, rest)
    return None


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:.0f}"


def is_record(path: Path) -> bool:
    """Returns True if a file would stand among the recorded results."""
    return path.resolve().is_relative_to(RESULTS)


def may_write(out: Path, quiet: bool) -> bool:
    """Returns True if a record may be written there: among the results only what was measured on a quiet machine."""
    return quiet or not is_record(out)


def write(record: dict[str, Any], out: Path) -> None:
    """Writes a record, whole or not at all; `out` is replaced if it is there."""
    write_whole(out, json.dumps(record, indent=1) + "\n")


def finish(record: dict[str, Any], out: Path, quiet: bool) -> None:
    """Writes the record where it may be written, says where, and prints it as the last line.

    Args:
        record: What was measured.
        out (`Path`): The file asked for.
        quiet (`bool`): Whether the machine was shown to be quiet; if not, nothing is written among the results.
    """
    if may_write(out, quiet):
        write(record, out)
        print(f"written to {out}")
    else:
        print(f"not written to {out}: the machine was not shown to be quiet")
    print(json.dumps(record), flush=True)
