"""`dflash-hf demo`: held-out prompts of every kind, answered by the bundled pair with and without the draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import TextStreamer

from dflash_hf.cli.pair import BUNDLED, load_pair
from dflash_hf.cli.table import comparison_table
from dflash_hf.evaluation.harness import compare, pool, warm_up


def demo(
    pair: Annotated[Path, typer.Option(help="Folder with target/, draft/ and held_out.jsonl.")] = BUNDLED,
    per_kind: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 320,
    threads: Annotated[int, typer.Option(help="CPU threads; models this small want one.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the bundled pair at work: the same answers in fewer forwards. Fails if a single token differs."""
    torch.set_num_threads(threads)
    console = Console(stderr=as_json)
    prompts = read_prompts(pair / "held_out.jsonl", per_kind)
    target, draft, tokenizer = load_pair(str(pair / "target"), str(pair / "draft"))
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    warm_up(target, draft, tokenizer, prompts[0]["messages"])
    if not as_json:
        console.print(f"[bold]{prompts[0]['messages'][-1]['content']}[/bold]\n", highlight=False)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        compare(target, draft, tokenizer, prompts[0]["messages"], streamer=streamer, **settings)
    rows = [
        compare(target, draft, tokenizer, prompt["messages"], kind=prompt["kind"], **settings)
        for prompt in track(prompts, "answering twice", console=console, transient=True, disable=as_json)
    ]
    if as_json:
        typer.echo(json.dumps({"rows": [row.to_dict() for row in rows], "all": pool(rows)}))
    else:
        console.print(comparison_table(rows))
    if not all(row.identical for row in rows):
        console.print("[bold red]an answer with the draft differs from plain generate")
        raise typer.Exit(1)


def read_prompts(path: Path, per_kind: int) -> list[dict[str, Any]]:
    """Reads the first `per_kind` held-out prompts of each kind, kinds in the file's order.

    Raises:
        ValueError: If the file is not there: an installed wheel has no bundled pair.
    """
    if not path.exists():
        raise ValueError(
            f"expected held-out prompts in {path}, got no file; run the demo from a clone, or pass --pair"
        )
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [row for kind in kinds for row in [r for r in rows if r["kind"] == kind][:per_kind]]


__all__ = ["demo", "read_prompts"]
