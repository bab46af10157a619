"""`dflash-hf train`: from a target and prompts to a draft that pays, by one command."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from dflash_hf.cli.train_settings import (
    STAGES,
    Stage,
    TrainSettings,
    as_text,
    as_words,
    check_upload,
    read_arguments,
    read_options,
    read_yaml,
)
from dflash_hf.cli.train_state import SETTINGS_FILE
from dflash_hf.errors import require

# Of the parser: it takes `_` in the name of an option for `-`, and leaves training arguments to Transformers' own.
CONTEXT: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Takes the options of a YAML file for those that are not on the command line."""
    if path is not None:
        given = read_yaml(path)
        names = {parameter.name for parameter in ctx.command.params}
        ctx.default_map = {name: as_text(value) for name, value in given.items() if name in names}
        ctx.obj = as_words({name: value for name, value in given.items() if name not in names})
    return path


def _read_begun(ctx: typer.Context, folder: Path | None) -> Path | None:
    """Takes what the run in a folder was begun with, where there is one and no `--config`."""
    if ctx.default_map is None and folder is not None and (folder / SETTINGS_FILE).is_file():
        _read_config(ctx, folder / SETTINGS_FILE)
    return folder


def train(
    ctx: typer.Context,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; one that was begun goes on.",
            callback=_read_begun,
            is_eager=True,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML of any of these options; flags win.", callback=_read_config, is_eager=True
        ),
    ] = None,
    stages: Annotated[str, typer.Option(help="Which of the stages, with commas.")] = ",".join(
        STAGES
    ),
    plan: Annotated[
        bool, typer.Option("--plan", help="Print steps and peak memory, load nothing, and stop.")
    ] = False,
    **options: Any,
) -> None:
    """Train a draft for any target: prepare the data, let the target answer, train, measure, export.

    Every field of DFlashTrainingArguments (all of Transformers' TrainingArguments) is an option too: --learning-rate
    6e-4 --num-train-epochs 6 --bf16 --report-to trackio. Given the folder of a run that was begun it goes on.
    """
    settings = read_settings({"output_dir": output_dir, **options}, [*(ctx.obj or ()), *ctx.args])
    wanted = _stages(stages)
    if plan:
        from dflash_hf.cli.train_plan import print_plan

        print_plan(settings, Console())
        return
    from dflash_hf.cli.train_stages import run_stages

    try:
        run_stages(settings, wanted, typer.echo)
    except KeyboardInterrupt as error:
        typer.secho(f"Ended. dflash-hf train --output-dir {settings.output_dir} goes on.", err=True)
        raise typer.Exit(130) from error


def _options() -> list[inspect.Parameter]:
    """The fields of [`TrainSettings`] as options of the command; lists, objects and choices are read from text."""
    found: list[inspect.Parameter] = []
    unset = TrainSettings(target="", output_dir=Path())
    for name, hint in get_type_hints(TrainSettings, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, option = get_args(hint)
            kind = str if get_origin(kind) in (tuple, Mapping, Literal) else kind
            # A target that is missing is told in a sentence of ours.
            kind, default = (
                (str | None, None) if name == "target" else (kind, as_text(getattr(unset, name)))
            )
            annotation = Annotated[kind, option]
            found.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
            )
    return found


_signature = inspect.signature(train, eval_str=True)
_command: Any = train
_command.__signature__ = _signature.replace(
    parameters=[*list(_signature.parameters.values())[:-1], *_options()]
)


def read_settings(given: Mapping[str, Any], words: list[str]) -> TrainSettings:
    """Returns the settings of a run, checked.

    Args:
        given (mapping): The fields of [`TrainSettings`], as the command line has them.
        words (`list[str]`): What it does not know: training arguments.

    Raises:
        ValueError: If one cannot be read, or one that is needed is not there.
    """
    for name, action in (
        ("target", "give its folder or Hub id"),
        ("output_dir", "name a new folder"),
    ):
        require(given[name] is not None, f"--{name.replace('_', '-')}", None, action)
    lists: dict[str, Any] = {
        name: _values(given[name]) for name in ("dataset", "bench_data", "formats")
    }
    objects: dict[str, Any] = {
        name: read_options(given[name], f"--{name.replace('_', '-')}")
        for name in ("draft_options", "chat_template_kwargs")
    }
    settings = TrainSettings(**{**given, **lists, **objects})
    settings.check()
    settings = replace(settings, arguments=read_arguments(words))
    check_upload(settings.arguments)
    return settings


def _stages(text: str) -> list[Stage]:
    """The stages that are wanted, in their order."""
    wanted = _values(text)
    for name in wanted or (text,):
        require(name in STAGES, f"--stages among {', '.join(STAGES)}", name, "name some of them")
    return [stage for stage in STAGES if stage in wanted]


def _values(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
