"""This module is `dflash-hf demo`, which answers held-out prompts with and without the draft of the bundled pairs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from dflash_hf.cli.options import MAX_TOKENS, DtypeOption, JsonOption
from dflash_hf.cli.pair import BUNDLED
from dflash_hf.cli.table import prompt_line, show_comparisons
from dflash_hf.data.image_files import has_pillow
from dflash_hf.data.prompt_files import image_names, read_rows
from dflash_hf.pair.loading import load_pair

if TYPE_CHECKING:
    from dflash_hf.pair.answers import Comparison

logger = logging.getLogger(__name__)


def demo(
    pair: Annotated[
        Path,
        typer.Option(
            help="Folder with target/, draft/ and held_out.jsonl. The folder may also have vision/, with a pair "
            "for images."
        ),
    ] = BUNDLED,
    per_kind: Annotated[
        int, typer.Option(help="Number of prompts of each kind in held_out.jsonl.", min=1)
    ] = 4,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer, in tokens.", min=1, max=MAX_TOKENS)
    ] = 320,
    threads: Annotated[
        int,
        typer.Option(
            help="Number of CPU threads; one thread is best for such small models.", min=1, max=1024
        ),
    ] = 1,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer prompts with and without the bundled draft. With the draft, the target needs fewer forward passes.

    In an editable install the bundled pair for images runs too.
    If a token differs, the exit status is 1.
    In half precision the scores of two tokens may be equal up to rounding errors (a tie).
    A difference at a tie does not count.
    """
    import torch

    from dflash_hf.pair.answers import pool

    torch.set_num_threads(threads)
    console = Console(stderr=as_json)
    folders = [pair]
    has_vision = (pair / "vision" / "target").is_dir()
    if has_vision and has_pillow():
        folders.append(pair / "vision")
    elif has_vision:
        logger.warning(
            "The pair for images is left out, because there is no Pillow; "
            "pip install 'dflash-hf[vlm]'"
        )
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
    # All prompts are read before any model is loaded.
    prompts = [read_prompts(folder / "held_out.jsonl", per_kind) for folder in folders]
    rows: list[Comparison] = []
    for folder, asked in zip(folders, prompts, strict=True):
        rows += _answer(folder, dtype, asked, settings, console, as_json)
    if as_json:
        typer.echo(json.dumps({"rows": [row.to_dict() for row in rows], "all": pool(rows)}))
    else:
        show_comparisons(console, rows)
    if not all(row.agreement.holds for row in rows):
        raise typer.Exit(1)


def _answer(
    folder: Path,
    dtype: str,
    prompts: list[dict[str, Any]],
    settings: dict[str, Any],
    console: Console,
    as_json: bool,
) -> list[Comparison]:
    """Loads a pair, streams one answer (to a prompt with an image, if there is one), and compares all answers."""
    from transformers import TextStreamer

    from dflash_hf.pair.answers import answer, compare_with_plain, tokenizer_of, warm_up

    with Console(stderr=True).status(f"loading {escape(str(folder))}"):
        target, draft, processor = load_pair(str(folder / "target"), str(folder / "draft"), dtype)
    seen = [prompt for prompt in prompts if image_names(prompt["messages"])]
    shown = (seen or prompts)[0]["messages"]
    warm_up(target, draft, processor, shown)
    if not as_json:
        console.print(prompt_line(shown), highlight=False)
        streamer = TextStreamer(tokenizer_of(processor), skip_prompt=True, skip_special_tokens=True)
        answer(target, draft, processor, shown, streamer=streamer, **settings)
        console.print()
    rows: list[Comparison] = []
    for prompt in track(
        prompts,
        f"answering twice: {escape(str(folder))}",
        console=console,
        transient=True,
        disable=as_json,
    ):
        answered = answer(target, draft, processor, prompt["messages"], **settings)
        rows.append(compare_with_plain(target, draft, answered, kind=prompt["kind"], **settings))
    return rows


def read_prompts(path: Path, per_kind: int) -> list[dict[str, Any]]:
    """Reads the first `per_kind` held-out prompts of each kind. The kinds are in the file's order.

    Paths of images are relative to the file. Raises `ValueError` if there is no file, no prompt, or a row asks
    nothing.
    """
    if not path.exists():
        advice = "give as --pair a folder with target/, draft/ and held_out.jsonl"
        raise ValueError(f"expected held-out prompts in {path}, got no file; {advice}")
    rows: list[dict[str, Any]] = [
        {**row, "kind": str(row.get("kind")), "messages": prompt} for row, prompt in read_rows(path)
    ]
    if not rows:
        raise ValueError(f"expected held-out prompts in {path}, got none; write one per line")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    return [row for found in by_kind.values() for row in found[:per_kind]]
