"""What `generate` and `demo` show: the prompt, and at the end the table and where answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_hf.data.prompt_files import Prompt, as_messages, image_names, text_of

if TYPE_CHECKING:
    from dflash_hf.pair.answers import Comparison


def show_comparisons(console: Console, rows: Sequence[Comparison]) -> None:
    """Prints a table, of a line per kind of prompt and one over several kinds, and where answers differ."""
    from dflash_hf.pair.answers import pool

    # Narrow enough for 60 columns.
    table = Table(
        title="answers with and without the draft", box=None, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("prompts", overflow="fold")
    headings = (
        "same",
        "tokens",
        "target\nforwards",
        "accept.\nlength",
        "plain\nsec.",
        "draft\nsec.",
        "ratio",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    kinds = list(dict.fromkeys(row.kind for row in rows))
    groups = [
        (f"{kind} ({sum(r.kind == kind for r in rows)})", [r for r in rows if r.kind == kind])
        for kind in kinds
    ]
    if len(kinds) > 1:
        groups.append((f"all ({len(rows)})", list(rows)))
    for name, group in groups:
        total = pool(group)
        table.add_row(
            name,
            _same(group),
            str(total["num_tokens"]),
            str(total["num_target_forwards"]),
            f"{total['acceptance_length']:.2f}",
            f"{total['plain_seconds']:.2f}",
            f"{total['seconds']:.2f}",
            f"{total['ratio']:.2f}x",
            style="bold" if len(kinds) > 1 and name == groups[-1][0] else None,
        )
    console.print(table)
    different = [(number, row) for number, row in enumerate(rows, 1) if not row.identical]
    for number, row in different:
        which = "the answer" if len(rows) == 1 else f"answer {number} ({row.kind})"
        style = "yellow" if row.agreement.holds else "bold red"
        console.print(
            f"{which} {row.agreement.sentence}", style=style, markup=False, highlight=False
        )
    if any(row.agreement.holds for _, row in different):
        console.print(
            "--dtype float32 compares where hardly anything ties", style="dim", highlight=False
        )


def _same(rows: Sequence[Comparison]) -> str:
    """Says of a group whether its answers are the same, and if so how many part at a tie."""
    ties = sum(not row.identical for row in rows)
    if not all(row.agreement.holds for row in rows):
        return "[bold red]NO"
    if not ties:
        return "[green]yes"
    return "[yellow]1 tie" if ties == 1 else f"[yellow]{ties} ties"


def prompt_line(prompt: Prompt) -> Text:
    """Returns what is asked: the names of all images so far, and the text of the last message."""
    line = Text()
    for name in image_names(prompt):
        line.append(f"[{name}] ", style="cyan")
    return line.append(text_of(as_messages(prompt)[-1:]), style="bold")
