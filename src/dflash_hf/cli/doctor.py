"""This module is `dflash-hf doctor`, which finds settings that lower a draft's acceptance without changing texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dflash_hf.cli.options import (
    MAX_TOKENS,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    TargetOption,
)
from dflash_hf.cli.pair import check_one_pair, given_or_bundled
from dflash_hf.data.prompt_files import read_prompts
from dflash_hf.pair.loading import load_pair
from dflash_hf.tables import make_table

if TYPE_CHECKING:
    from dflash_hf.doctor.diagnosis import Diagnosis

EXPLAINED = (
    "For the figures in the table a block begins at every token of the answers. In generate only some tokens begin a "
    "block. So compare these figures only with each other. They cannot be compared with the acceptance length."
)
COLOURS = {"ok": "green", "finding": "bold red", "skipped": "dim"}


def doctor(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: one text per line, or a .jsonl file with the field prompt or messages."
        ),
    ] = None,
    num_prompts: Annotated[
        int,
        typer.Option(
            help="Number of prompts to use, from --prompts or from the built-in prompts.", min=1
        ),
    ] = 8,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer, in tokens.", min=2, max=MAX_TOKENS)
    ] = 96,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Find settings that lower a draft's acceptance.

    The exit status is 0 if nothing was found, 1 if there are findings, and 2 if the pair cannot be examined."""
    check_one_pair(None, target, draft)
    target, draft = given_or_bundled(target, draft, "text")
    given = None if prompts is None else read_prompts(prompts)
    from dflash_hf.doctor.diagnosis import diagnose

    with Console(stderr=True).status("loading the pair") as status:
        model, assistant, processor = load_pair(target, draft, dtype, device)
        diagnosis = diagnose(
            model,
            assistant,
            processor,
            given,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            on_progress=lambda what: status.update(escape(what)),  # lists have brackets
        )
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict()))
    else:
        _show(Console(), diagnosis)
    if diagnosis.findings:
        raise typer.Exit(1)


def _show(console: Console, diagnosis: Diagnosis) -> None:
    """Prints the table, and one line under it."""
    table = make_table("settings and acceptance", ["check", "result", "meaning"], [])
    for short in table.columns[:2]:
        short.no_wrap = True
    for check in diagnosis.checks:
        # Sentences may quote lists, whose brackets are not markup.
        meaning = escape(check.sentence)
        if check.advice:
            meaning += f"\n[bold]{escape(check.advice)}"
        table.add_row(check.name, f"[{COLOURS[check.status]}]{check.status}", meaning)
    console.print(table)
    found = _counted(len(diagnosis.findings), "finding")
    prompts = _counted(diagnosis.num_prompts, "prompt")
    length = f"acceptance length {diagnosis.acceptance_length:.2f} as configured"
    tree = diagnosis.tree_acceptance_length
    if tree is not None:
        length += f", {tree:.2f} with a tree of the same size"
    measured = f"in generate, on {prompts} and {diagnosis.num_tokens} tokens of answers"
    console.print(f"{length} ({measured}). {found}.", highlight=False)
    if diagnosis.num_tokens:
        console.print(EXPLAINED, style="dim", highlight=False)


def _counted(number: int, what: str) -> str:
    if number == 1:
        return f"1 {what}"
    return f"{number} {what}s"
