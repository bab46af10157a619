"""`dflash-hf generate`: one prompt, answered with and without the draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dflash_hf.cli.pair import BUNDLED, BUNDLED_VISION, load_pair
from dflash_hf.cli.table import prompt_line, show_comparisons
from dflash_hf.evaluation.prompt_files import with_images


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    image: Annotated[
        list[Path] | None, typer.Option(help="An image's file, before the prompt; once for each image.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the target; by default of the bundled pair.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Folder or Hub id of its draft; by default of the bundled pair.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.", min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Top-k sampling; 0 is off.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling noise.")] = 0,
    block_size: Annotated[int | None, typer.Option(help="Shorter blocks than the draft was trained with.")] = None,
    dtype: Annotated[str, typer.Option(help="torch dtype, or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="Device map, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer a prompt with a draft, stream it, and compare with the same call without the draft.

    Fails if a token differs, unless it does where two tie within rounding: in half precision either may win.
    """
    console = Console(stderr=as_json)
    asked = with_images(prompt, image or [])
    bundled = BUNDLED_VISION if image else BUNDLED
    import torch
    from transformers import TextStreamer

    from dflash_hf.evaluation.harness import compare, tokenizer_of, warm_up

    model, assistant, processor = load_pair(
        target or str(bundled / "target"), draft or str(bundled / "draft"), dtype, device
    )
    if block_size is not None:
        assistant.generation_config.block_size = block_size
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    warm_up(model, assistant, processor, asked)
    torch.manual_seed(seed)
    streamer = None
    if not as_json:
        if image:
            console.print(prompt_line(asked), highlight=False)
        streamer = TextStreamer(tokenizer_of(processor), skip_prompt=True, skip_special_tokens=True)
    row = compare(model, assistant, processor, asked, streamer=streamer, **settings)
    if as_json:
        typer.echo(json.dumps(row.to_dict()))
    else:
        show_comparisons(console, [row])
    if not row.agreement.holds:
        raise typer.Exit(1)


__all__ = ["generate"]
