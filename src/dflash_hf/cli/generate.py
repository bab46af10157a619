"""This module is `dflash-hf generate`, which answers one prompt with the draft, and on request without it too."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from dflash_hf.cli.options import (
    MAX_SEED,
    MAX_TOKENS,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    NoThinkingOption,
    PairOption,
    TargetOption,
    TemplateKwargsOption,
    template_options,
    width_of,
)
from dflash_hf.cli.pair import about, check_one_pair, given_or_bundled
from dflash_hf.cli.table import prompt_line, show_comparisons
from dflash_hf.data.prompt_files import (
    MAX_BYTES,
    Prompt,
    as_messages,
    image_names,
    with_images,
)
from dflash_hf.data.sampling import NO_FILTERS
from dflash_hf.errors import require
from dflash_hf.pair.loading import load_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TextStreamer

    from dflash_hf.modeling_dflash import DFlashDraftModel
    from dflash_hf.pair.answers import Answer, Processor


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The prompt. Without a prompt, or with -, the command reads stdin.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image file, placed before the prompt. Repeat the option for several images."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt without the chat template.")
    ] = False,
    no_thinking: NoThinkingOption = False,
    chat_template_kwargs: TemplateKwargsOption = "{}",
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer, in tokens.", min=1, max=MAX_TOKENS)
    ] = 256,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the answer; 0 is greedy.", min=0.0)
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.", min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Top-k sampling; 0 is off.", min=0, max=MAX_TOKENS)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.", min=0, max=MAX_SEED)] = 0,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens per block, at most the block size that the draft was trained with."
        ),
    ] = None,
    verify_width: Annotated[
        str | None, typer.Option(help="Number of tokens of a block that are verified, or auto.")
    ] = None,
    num_tree_nodes: Annotated[
        str | None,
        typer.Option(
            help="Number of tokens in the tree of guesses, or auto. A tree has several guesses for one position."
        ),
    ] = None,
    proposal: Annotated[
        str | None,
        typer.Option(
            help="How the draft guesses tokens when sampling. argmax: its most likely token. shared_noise: a token "
            "drawn with the target's random numbers. sample: a token drawn with other random numbers."
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="How a GPU runs a step: eager, cuda_graph or auto.")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    is_compared: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Answer again without the draft. If a token differs, the exit status is 1.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt with a target and its draft. The text is streamed to stdout, and everything else goes to stderr.

    --compare answers the prompt again without the draft.
    If a token differs, the exit status is 1.
    In half precision the scores of two tokens may be equal up to rounding errors (a tie).
    A difference at a tie does not count.
    """
    # A range without an upper end lets infinity pass.
    is_finite = math.isfinite(temperature)
    require(is_finite, "a finite number as --temperature", temperature, "0 is greedy")
    asked = conversation(read_prompt(prompt, file), image or [], system)
    encoding: dict[str, Any] = template_options(chat_template_kwargs, no_thinking)
    if raw and (encoding or not isinstance(asked, str)):
        raise ValueError(
            "expected --raw alone, got an image, --system or options of the chat template; leave one out"
        )
    encoding["template"] = not raw
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings |= {**NO_FILTERS, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    options = draft_options(block_size, verify_width, num_tree_nodes, proposal, engine)
    check_one_pair(pair, target, draft)
    usual = "vision" if image else "text"
    target, draft = given_or_bundled(target, draft, pair or usual, dtype)
    import torch

    from dflash_hf.generation_config import over_stored
    from dflash_hf.pair.answers import Comparison

    console = Console(stderr=True)
    with console.status("loading the pair"):
        loaded = load_pair(target, draft, dtype, device)
    note = about(target, draft)
    if note and not as_json:
        console.print(note, style="dim", highlight=False)
    stored = loaded[1].generation_config
    for name, value in over_stored(stored, options).items():
        setattr(stored, name, value)
    torch.manual_seed(seed)
    row = show_answer(
        console, loaded, asked, encoding, settings, is_compared=is_compared, as_json=as_json
    )
    if isinstance(row, Comparison) and not row.agreement.holds:
        raise typer.Exit(1)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Returns the prompt from the argument, a file or stdin. One line break at the end of a file or stdin is removed.

    Raises `ValueError` if there is no prompt or there are two, or if the prompt is empty, too long, or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise ValueError("expected one prompt, got an argument and --file; leave one out")
    if prompt is not None and prompt != "-":
        return checked_text(prompt, "the prompt")
    # `Path.is_file` of Python 3.11 raises an error for a text that is too long for a path.
    if file is not None and not os.path.isfile(file):
        raise ValueError(
            f"expected a file with the prompt as --file, got {str(file)!r}, which is not a file; correct the path"
        )
    if file is None and prompt is None and sys.stdin.isatty():
        raise ValueError(
            "expected a prompt, got none; give it as an argument, by --file, or on stdin"
        )
    if file is None:
        where = "stdin"
        content = typer.get_binary_stream("stdin").read(MAX_BYTES + 1)
    else:
        where = str(file)
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(
            f"expected a prompt of at most {MAX_BYTES / 2**20:.0f} MB in {where}, got more; shorten it"
        )
    # "-sig", because some editors and shells begin a text with a byte order mark.
    text = content.decode("utf-8-sig", errors="surrogateescape")
    text = text.removesuffix("\n").removesuffix("\r")
    return checked_text(text, f"the prompt in {where}")


def checked_text(text: str, what: str) -> str:
    """Returns a text. Raises `ValueError` if it is empty or was not UTF-8, because a shell passes on any bytes."""
    if not text.strip():
        raise ValueError(f"expected a text as {what}, got an empty one; write something")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"expected UTF-8 as {what}, got other bytes; save or type it as UTF-8")
    return text


def conversation(text: str, images: list[Path], system: str | None) -> Prompt:
    """Returns the prompt with images and a system prompt; the text alone if there are none."""
    asked = with_images(text, images)
    if system is None:
        return asked
    content = checked_text(system, "--system")
    said: dict[str, Any] = {"role": "system", "content": content}
    if images:  # templates that place images need the texts of all turns as parts
        said["content"] = [{"type": "text", "text": content}]
    return [said, *as_messages(asked)]


def draft_options(*values: Any) -> dict[str, Any]:
    """Returns the given options of the draft by name. Raises `ValueError` for values that no draft takes."""
    from dflash_hf.generation_config import DFlashGenerationConfig

    names = ("block_size", "verify_width", "num_tree_nodes", "proposal", "engine")
    options = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    for name in options.keys() & {"verify_width", "num_tree_nodes"}:
        try:
            options[name] = width_of(options[name])
        except ValueError:
            what = f"a whole number or auto as --{name.replace('_', '-')}"
            raise ValueError(f"expected {what}, got {options[name]!r}; correct it") from None
    DFlashGenerationConfig(**options)
    return options


def show_answer(
    console: Console,
    pair: tuple[PreTrainedModel, DFlashDraftModel, Processor],
    asked: Prompt,
    encoding: dict[str, Any],
    settings: dict[str, Any],
    *,
    is_compared: bool,
    as_json: bool,
) -> Answer:
    """Answers a prompt, as a stream on stdout or as JSON. Compares with the answer without the draft if asked to."""
    from dflash_hf.pair.answers import answer, check_comparable, compare_with_plain, warm_up

    model, assistant, processor = pair
    if is_compared:
        check_comparable(assistant, settings)
        warm_up(model, assistant, processor, "Hello.")
    is_asked = encoding.get("enable_thinking") is False
    if is_asked and "enable_thinking" not in str(processor.chat_template):
        console.print(
            "the chat template has no enable_thinking, so --no-thinking changes nothing",
            style="yellow",
        )
    if image_names(asked) and not as_json:
        console.print(prompt_line(asked), highlight=False)
    with console.status("reading the prompt") as status:
        streamer = None if as_json else text_streamer(processor, status)
        with logs_held_back():
            row = answer(
                model, assistant, processor, asked, streamer=streamer, encoding=encoding, **settings
            )
    if not as_json:
        console.print(
            f"{row.num_tokens} tokens in {row.seconds:.2f} s ({row.num_tokens / row.seconds:.1f}/s), "
            f"{row.stats.num_target_forwards} forwards, acceptance length {row.stats.acceptance_length:.2f}",
            style="dim",
            highlight=False,
        )
    if is_compared:
        with console.status("answering again without the draft"):
            row = compare_with_plain(model, assistant, row, **settings)
        if not as_json:
            show_comparisons(console, [row])
    if as_json:
        typer.echo(json.dumps(row.to_dict()))
    return row


@contextmanager
def logs_held_back() -> Generator[None]:
    """Holds back the package's log lines until the block is left, so that none is within a streamed answer."""
    package = logging.getLogger("dflash_hf")
    held = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1)
    before = package.propagate
    package.addHandler(held)
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(held)
        package.propagate = before
        for record in held.buffer:
            package.handle(record)


def text_streamer(processor: Processor, status: Status) -> TextStreamer:
    """Returns a streamer that writes an answer to stdout. The first text ends the status line on stderr."""
    from transformers import TextStreamer

    from dflash_hf.pair.answers import tokenizer_of

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text or stream_end:
                status.stop()
            typer.echo(text, nl=stream_end)

    return Streamer(tokenizer_of(processor), skip_prompt=True, skip_special_tokens=True)
