"""This module contains options that several subcommands have, and functions that read their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

import typer

from dflash_hf.data.prompt_files import NO_OPTIONS, check_template_options
from dflash_hf.errors import require

# Options of subcommands that take a pair, or a bundled pair by name.
TargetOption = Annotated[
    str | None,
    typer.Option("--target", help="Folder or Hub id of the target; default: the bundled target."),
]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", help="Folder or Hub id of the draft; default: the bundled draft."),
]
PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair",
        help="Name of a bundled pair: text (default); in an editable install also vision, hybrid or smollm2.",
    ),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="torch dtype of the models, or auto.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Device map of the models, or auto.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="Number of CPU threads; one thread is best for small models.",
        min=1,
        max=1024,
    ),
]
NoThinkingOption = Annotated[
    bool, typer.Option("--no-thinking", help="Pass enable_thinking=False to the chat template.")
]
TemplateKwargsOption = Annotated[
    str,
    typer.Option(
        "--chat-template-kwargs",
        help='Options of the chat template, as JSON: {"reasoning_effort": "low"}.',
    ),
]
HostOption = Annotated[
    str,
    typer.Option(
        "--host", help="Address to listen on. With the default only this machine can connect."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Value = TypeVar("Value")
MAX_TOKENS = 2**31 - 1  # of an answer: the largest number in a tensor of counts
MAX_SEED = 2**32 - 1


def values_of(text: str, kind: Callable[[str], Value], option: str) -> tuple[Value, ...]:
    """Reads the values of an option, which are separated by commas.

    Raises:
        ValueError: If a value is not of its kind.
    """
    found: list[Value] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(kind(part))
        except ValueError as error:
            words: dict[Any, str] = {int: "whole numbers", float: "numbers"}
            what = words.get(kind, "whole numbers or auto")
            raise ValueError(
                f"expected {what}, separated by commas, as {option}, got {part!r}; correct the value"
            ) from error
    return tuple(found)


def width_of(text: str) -> int | Literal["auto"]:
    """Returns a whole number or `"auto"`, which some options take. Raises `ValueError` if the text is neither."""
    if text == "auto":
        return "auto"
    return int(text)


def object_of(text: str, option: str) -> dict[str, Any]:
    """Reads the JSON object in an option.

    Raises:
        ValueError: If the text is not a JSON object.
    """
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    action = "write the whole object between one pair of single quotes: '...'"
    require(isinstance(found, dict), f"a JSON object as {option}", text, action)
    return found


def template_options(
    text: str, no_thinking: bool, reserved: Sequence[str] = NO_OPTIONS
) -> dict[str, Any]:
    """Returns the options of a chat template from `--chat-template-kwargs` and `--no-thinking`.

    Raises `ValueError` if the text is not a JSON object, or has a name that is not an option of a template.
    """
    found = object_of(text, "--chat-template-kwargs")
    check_template_options(found, reserved)
    if no_thinking:
        found["enable_thinking"] = False
    return found
