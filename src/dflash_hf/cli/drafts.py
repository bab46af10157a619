"""This module is `dflash-hf drafts`, which lists published drafts from a file of the package, without a network."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

PUBLISHED = Path(__file__).with_name("published.json")
# Explains the columns of the table.
NOTES = (
    "block: number of slots in a block. thinking: the thinking mode in which the authors train or measure the draft. "
    "-: not known. config checked: the draft's published config loads, with random weights. layout checked: a config "
    "of the same project loads. refused: this variant is not supported. If none of the three is said, nothing was "
    "checked. No published weights have been run here."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDraft:
    """One published draft.

    Args:
        target, draft (`str`): Hub ids.
        format (`str`): Format of the checkpoint, by the names of [`~dflash_hf.save_draft`].
        block_size (`int`, *optional*): Slots of a block, the anchor included.
        thinking (`str`, *optional*): `"on"` or `"off"`: the mode of the target's chat template in which the authors
            train or measure the draft.
        checked (`str`): What was checked here. `"config"`: its published config loads, with random weights.
            `"layout"`: the config of another draft of its project loads. `"refused"`: the variant is not supported.
            `"no"`: nothing.
    """

    target: str
    draft: str
    format: str
    block_size: int | None
    thinking: str | None
    checked: str


def published_drafts(target: str = "") -> list[PublishedDraft]:
    """Returns the published drafts whose target has this text in its name. Upper and lower case do not matter."""
    rows: list[dict[str, Any]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    every = [PublishedDraft(**row) for row in rows]
    return [one for one in every if target.lower() in one.target.lower()]


def words_for(checked: str) -> str:
    """Returns in words what was checked; an empty text if nothing was."""
    if checked == "no":
        return ""
    if checked == "refused":
        return "refused: a variant that is not supported"
    return f"{checked} checked"


def drafts(
    target: Annotated[
        str, typer.Option(help="List only drafts for targets with this text in their names.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON list and nothing else.")
    ] = False,
) -> None:
    """List published drafts with their targets. The list is a file in the package, so the command needs no network."""
    found = published_drafts(target)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found]))
        return
    console = Console()
    if not found:
        others = "dflash-hf drafts lists all known drafts; dflash-hf train makes a draft"
        console.print(
            f"no published draft for {target!r} is known here: {others}",
            markup=False,
            highlight=False,
        )
        return
    # The table has 60 columns. The name of a draft is long, so it has its own line.
    console.print(
        f"{'target':<33} {'format':<11} {'block':>5} {'thinking':>8}", style="bold", highlight=False
    )
    for one in found:
        cells = (
            f"{one.target:<33} {one.format:<11} {one.block_size or '-':>5} {one.thinking or '-':>8}"
        )
        console.print(cells, highlight=False)
        checked = words_for(one.checked)
        console.print(f"  {one.draft}", style="cyan", highlight=False)
        if checked:
            console.print(f"    {checked}", style="dim", highlight=False)
    console.print(NOTES, style="dim", highlight=False)
