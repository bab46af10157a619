"""This module defines the command `dflash-hf train`, which makes a measured draft from a target and prompts.

Typer reads the options, which are the fields of [`TrainSettings`]. So `--help` has headings and does not import torch,
a YAML file replaces flags that were not given (`default_map`), and errors are sentences, as in the other commands.
`HfArgumentParser` reads the remaining arguments of Transformers. For the help it would import torch and list 140
options.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dflash_hf.cli.options import object_of, values_of
from dflash_hf.cli.train_algorithms import with_algorithm
from dflash_hf.cli.train_reading import (
    as_text,
    as_words,
    check_of_python,
    check_upload,
    read_arguments,
    read_yaml,
)
from dflash_hf.cli.train_settings import (
    OPTIONS,
    OUTPUT,
    STAGES,
    Stage,
    TrainSettings,
    flag,
    process_index,
)
from dflash_hf.cli.train_state import SETTINGS_FILE
from dflash_hf.errors import require

# The parser reads `_` in the name of an option as `-`, and leaves training arguments to the parser of Transformers.
CONTEXT: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
LISTS = ("dataset", "server", "feature_server", "bench_data", "formats")
OBJECTS = ("draft_options", "chat_template_kwargs")
# The types of values that Typer can read. Options of other types are texts for Typer.
KINDS = (str, int, float, bool, Path, int | None, float | None, str | None)


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Takes the options that are not on the command line from a YAML file."""
    if path is not None:
        given = read_yaml(path)
        names = {parameter.name for parameter in ctx.command.params}
        ctx.default_map = {name: as_text(value) for name, value in given.items() if name in names}
        ctx.obj = as_words({name: value for name, value in given.items() if name not in names})
    return path


def _read_begun(ctx: typer.Context, folder: Path | None) -> Path | None:
    """Takes the options with which the run in a folder was started, unless a `--config` is given."""
    if folder is None or ctx.default_map is not None:
        return folder
    settings = folder / SETTINGS_FILE
    if settings.is_file():
        _read_config(ctx, settings)
    return folder


def train(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with any of these options. Options on the command line override the file.",
            callback=_read_config,
            is_eager=True,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    stages: Annotated[
        str, typer.Option(help="Stages to run, separated by commas.", rich_help_panel=OUTPUT)
    ] = ",".join(STAGES),
    redo: Annotated[
        bool,
        typer.Option(
            "--redo",
            help="Repeat the stages whose options have changed. Their answers or checkpoints may be lost.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    **options: Any,
) -> None:
    """Train a draft for any target: prepare the data, let the target answer, train, measure, export.

    Most fields of Transformers' TrainingArguments are options too, such as --bf16. docs/training.md lists the others.
    --optim also takes muon. If --output-dir holds an earlier run, the command continues this run.
    """
    typed = _given(ctx, "COMMANDLINE")
    settings = read_settings(options, [*(ctx.obj or ()), *ctx.args])
    settings = with_algorithm(settings, [*typed, *_given(ctx, "DEFAULT_MAP")])
    # Options on the command line count as given even with their default values. A YAML file may list defaults.
    settings.check_idle({*settings.asked(), *typed})
    wanted = _stages(stages)
    from dflash_hf.cli.train_stages import run_stages

    try:
        run_stages(settings, wanted, redo, typer.echo)
    except KeyboardInterrupt as error:
        if process_index() == 0:
            # This module imports torch, which is loaded by now.
            from dflash_hf.cli.train_errors import interruption

            typer.secho(interruption(settings.output_dir), err=True)
        raise typer.Exit(130) from error


def _given(ctx: typer.Context, place: str) -> list[str]:
    """Returns the names of the options that come from a place: COMMANDLINE, or DEFAULT_MAP for a YAML file."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return [name for name, source in sources.items() if source and source.name == place]


def _parameter(item: Field[Any], kind: Any) -> inspect.Parameter:
    """Returns a field of [`TrainSettings`] as a parameter of the command."""
    more: dict[str, Any] = {}
    if item.name == "output_dir":
        more = {"callback": _read_begun, "is_eager": True}
    if item.name in LISTS:
        default = as_text(item.default)
    elif item.name in OBJECTS:
        default = "{}"
    else:
        default = item.default
    if kind not in KINDS:
        kind = str
    # `read_settings` refuses a missing option, so that the message is a sentence of this package.
    if default is MISSING:
        kind = kind | None
        default = None
    shown = typer.Option(help=item.metadata["help"], rich_help_panel=item.metadata["panel"], **more)
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, shown],
    )


def _with_options(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature of the command. The parameters that the function itself names follow `output_dir`."""
    kinds = get_type_hints(TrainSettings)
    context, *own, _ = signature.parameters.values()
    options = [_parameter(item, kinds[item.name]) for item in OPTIONS]
    at = 1 + [item.name for item in OPTIONS].index("output_dir")
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    return signature.replace(parameters=[context, *options[:at], *named, *options[at:]])


_command: Any = train
_command.__signature__ = _with_options(inspect.signature(train, eval_str=True))


def read_settings(given: Mapping[str, Any], words: list[str]) -> TrainSettings:
    """Returns the settings of a run, after checking them.

    Args:
        given (mapping): The fields of [`TrainSettings`], as Typer has read them from the command line.
        words (`list[str]`): The words that Typer does not know, which are training arguments.

    Raises:
        ValueError: If an option cannot be read or is out of range, or if a required option is missing.
    """
    require(
        given["target"] is not None, "--target", None, "give the folder or Hub id of the target"
    )
    require(given["output_dir"] is not None, "--output-dir", None, "name a new folder")
    values = dict(given)
    for name in LISTS:
        values[name] = values_of(given[name], str, flag(name))
    for name in OBJECTS:
        values[name] = object_of(given[name], flag(name))
    settings = TrainSettings(**values)
    settings.check()
    settings = replace(settings, arguments=read_arguments(words))
    check_of_python(settings.arguments)
    check_upload(settings.arguments)
    return settings


def _stages(text: str) -> list[Stage]:
    """Returns the requested stages, in their order."""
    wanted = values_of(text, str, "--stages")
    for name in wanted or (text,):
        require(name in STAGES, f"--stages among {', '.join(STAGES)}", name, "name some of them")
    return [stage for stage in STAGES if stage in wanted]
