"""This module prints what `generate` and `demo` show: the prompt, a table, and the places where answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from dflash_hf.data.prompt_files import Prompt, as_messages, image_names, text_of
from dflash_hf.tables import make_table

PAYS = 1.05  # a smaller ratio is often only noise
MAY_HELP = (
    "Texts like the draft's training data may be faster. On a CPU with instructions for bfloat16, --dtype bfloat16 "
    "may be faster. dflash-hf doctor checks the settings."
)

if TYPE_CHECKING:
    from dflash_hf.pair.answers import Comparison


def show_comparisons(console: Console, rows: Sequence[Comparison]) -> None:
    """Prints a table with a line per kind of prompt (and one for all kinds), and where answers differ."""
    compared = "plain"
    if are_sampled(rows):
        compared = "no\ndraft"
    headings = (
        "same",
        "tokens",
        "target\nforwards",
        "accept.\nlength",
        f"{compared}\nsec.",
        "draft\nsec.",
        "ratio",
    )
    table = make_table("answers with and without the draft", ["prompts"], headings)
    # The table fits into 60 columns.
    table.box = None
    table.pad_edge = False
    table.padding = (0, 1, 0, 0)
    by_kind: dict[str, list[Comparison]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    for kind, group in by_kind.items():
        # Kinds come from a file, and their brackets are not markup.
        table.add_row(escape(f"{kind} ({len(group)})"), *_cells(group))
    if len(by_kind) > 1:
        table.add_row(f"all ({len(rows)})", *_cells(rows), style="bold")
    console.print(table)
    console.print(speed_line(rows), highlight=False)
    different = [(number, row) for number, row in enumerate(rows, 1) if not row.identical]
    for number, row in different:
        which = "the answer" if len(rows) == 1 else f"answer {number} ({row.kind})"
        style = "yellow" if row.agreement.holds else "bold red"
        console.print(
            f"{which} {row.agreement.sentence}", style=style, markup=False, highlight=False
        )
    if any(row.agreement.holds for _, row in different):
        console.print("ties are very rare with --dtype float32", style="dim", highlight=False)


def speed_line(rows: Sequence[Comparison]) -> str:
    """Returns a sentence about the speed, relative to plain `generate` and to this package without the draft.

    For sampled answers, plain `generate` is left out, because it does not run. If the draft does not pay, the sentence
    says so, and what may help.
    """
    from dflash_hf.pair.answers import pool

    total = pool(rows)
    compared = f"{total['draft_ratio']:.2f}x the speed of this package without the draft."
    if not are_sampled(rows):
        compared = f"{total['ratio']:.2f}x the speed of plain generate, {compared}"
    if min(total["ratio"], total["draft_ratio"]) >= PAYS:
        return compared
    return f"{compared} The draft does not pay here. {MAY_HELP}"


def are_sampled(rows: Sequence[Comparison]) -> bool:
    """Returns True if an answer is sampled. Such an answer is compared with this package's own loop."""
    return any(row.is_sampled for row in rows)


def _cells(rows: Sequence[Comparison]) -> list[str]:
    """Returns the numbers of a group of comparisons as text."""
    from dflash_hf.pair.answers import pool

    total = pool(rows)
    return [
        _same(rows),
        str(total["num_tokens"]),
        str(total["num_target_forwards"]),
        f"{total['acceptance_length']:.2f}",
        f"{total['plain_seconds']:.2f}",
        f"{total['seconds']:.2f}",
        f"{total['ratio']:.2f}x",
    ]


def _same(rows: Sequence[Comparison]) -> str:
    """Returns in words whether the answers of a group are the same, and how many of them differ only at a tie."""
    ties = sum(not row.identical for row in rows)
    if not all(row.agreement.holds for row in rows):
        return "[bold red]NO"
    if not ties:
        return "[green]yes"
    return "[yellow]1 tie" if ties == 1 else f"[yellow]{ties} ties"


def prompt_line(prompt: Prompt) -> Text:
    """Returns the prompt as a line: the names of all images, and the text of the last message."""
    line = Text()
    for name in image_names(prompt):
        line.append(f"[{name}] ", style="cyan")
    return line.append(text_of(as_messages(prompt)[-1:]), style="bold")
