"""`dflash-hf generate`: one prompt, answered with the draft as it comes, and without it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dflash_hf.cli.pair import BUNDLED, BUNDLED_VISION, load_pair
from dflash_hf.cli.table import prompt_line, show_comparisons
from dflash_hf.evaluation.prompt_files import Prompt, image_names, with_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dflash_hf.evaluation.harness import Comparison, Processor
    from dflash_hf.modeling_dflash import DFlashDraftModel


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
    """Answer a prompt with a draft, stream it, and compare with the same call without the draft."""
    asked = with_images(prompt, image or [])
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    bundled = BUNDLED_VISION if image else BUNDLED
    import torch

    console = Console(stderr=True)
    pair = load_pair(target or str(bundled / "target"), draft or str(bundled / "draft"), dtype, device)
    if block_size is not None:
        pair[1].generation_config.block_size = block_size
    torch.manual_seed(seed)
    row = show_answer(console, pair, asked, settings, as_json=as_json)
    if not row.identical:
        raise typer.Exit(1)


def show_answer(
    console: Console,
    pair: tuple[PreTrainedModel, DFlashDraftModel, Processor],
    asked: Prompt,
    settings: dict[str, Any],
    *,
    as_json: bool,
) -> Comparison:
    """Answers a prompt, with the answer on stdout as it comes, or all of it as JSON; compares."""
    from transformers import TextStreamer

    from dflash_hf.evaluation.harness import answer, check_comparable, compare_with_plain, tokenizer_of, warm_up

    model, assistant, processor = pair
    check_comparable(assistant, settings)
    warm_up(model, assistant, processor, "Hello.")
    if image_names(asked) and not as_json:
        console.print(prompt_line(asked), highlight=False)
    streamer = None
    if not as_json:
        streamer = TextStreamer(tokenizer_of(processor), skip_prompt=True, skip_special_tokens=True)
    answered = answer(model, assistant, processor, asked, streamer=streamer, **settings)
    row = compare_with_plain(model, assistant, answered, **settings)
    if not as_json:
        show_comparisons(console, [row])
    if as_json:
        typer.echo(json.dumps(row.to_dict()))
    return row
