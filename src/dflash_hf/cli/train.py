"""`dflash-hf train`: from a target and prompts to a draft that pays, by one command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from dflash_hf.cli.train_settings import (
    FORMATS,
    OURS,
    STAGES,
    SWITCHES,
    Stage,
    TrainSettings,
    as_words,
    check_upload,
    read_arguments,
    read_options,
    read_yaml,
)
from dflash_hf.cli.train_state import SETTINGS_FILE
from dflash_hf.errors import require


def _panel(name: str) -> Callable[[str], Any]:
    """Options under a heading of their own in the help."""
    return lambda text: typer.Option(help=text, rich_help_panel=name)


_data, _answers, _draft, _after, _machine = map(_panel, ("Data", "Answers", "Draft", "Bench and export", "Machine"))


class TrainCommand(TyperCommand):
    """Takes the words of a YAML file before those of the command line, and `_` in the name of an option for `-`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the settings of `--config`, or those that the run in `--output-dir` was begun with, in front."""
        known = {flag for parameter in self.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        words = [_dashed(word, known) for word in args]
        path = _value_of(words, "--config")
        folder = _value_of(words, "--output-dir")
        begun = None if folder is None else Path(folder) / SETTINGS_FILE
        if path is not None:
            given = read_yaml(Path(path))
        else:
            given = read_yaml(begun) if begun is not None and begun.is_file() else {}
        ours = {name: value for name, value in given.items() if name in OURS}
        # Lists of ours have commas, as the other commands take them.
        ours = {name: _with_commas(value) for name, value in ours.items()}
        theirs = {name: value for name, value in given.items() if name not in OURS}
        switched = {name: ours.pop(name) for name in SWITCHES if isinstance(ours.get(name), bool)}
        switches = [f"--{name}" if is_on else f"--no-{name}" for name, is_on in switched.items()]
        front = [_dashed(word, known) for word in (*switches, *as_words(ours), *as_words(theirs))]
        return super().parse_args(ctx, [*front, *words])


def train(
    ctx: typer.Context,
    output_dir: Annotated[str | None, typer.Option(help="Folder of the run; one that was begun goes on.")] = None,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id of the target.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML of any of these options; flags win.")] = None,
    stages: Annotated[str, typer.Option(help="Which of the stages, with commas.")] = ",".join(STAGES),
    plan: Annotated[bool, typer.Option("--plan", help="Print steps and peak memory, load nothing, and stop.")] = False,
    dataset: Annotated[str, _data("Conversations: files, or Hub sets as ORG/NAME:CONFIG:SPLIT, with commas.")] = "",
    num_prompts: Annotated[int | None, _data("Most conversations that are used; default all.")] = None,
    self_prompts: Annotated[int, _data("Prompts that the target writes itself, beside the data.")] = 0,
    num_eval: Annotated[int, _data("Conversations that are held out.")] = 64,
    max_length: Annotated[int, _data("Longest example, prompt and answer, in tokens.")] = 3072,
    turns: Annotated[str, _data("Train on the last answer of a conversation, or all.")] = "last",
    chat_template_kwargs: Annotated[
        str, _data("What else the chat template reads, everywhere, as JSON: {'enable_thinking': false}.")
    ] = "{}",
    template: Annotated[str | None, _data("What the user says, of rows of other columns: '{question}'.")] = None,
    skip_bad_rows: Annotated[bool, _data("Leave malformed rows out instead of refusing the first.")] = False,
    streaming: Annotated[bool, _data("Fetch sets of the Hub row by row, and keep none.")] = False,
    answers: Annotated[
        str, _answers("target: it answers anew. data: those in the data are its own already.")
    ] = "target",
    max_new_tokens: Annotated[int, _answers("Where an answer is cut, in tokens.")] = 1024,
    temperature: Annotated[float, _answers("0 is greedy.")] = 0.0,
    top_p: Annotated[float, _answers("Nucleus sampling.")] = 1.0,
    answer_batch: Annotated[int, _answers("Prompts answered at once.")] = 32,
    server: Annotated[str | None, _answers("URL of an OpenAI-style server that answers instead.")] = None,
    server_model: Annotated[str | None, _answers("Its model; default the first that it names.")] = None,
    draft: Annotated[str | None, _draft("Draft to train further; default a fresh one.")] = None,
    num_hidden_layers: Annotated[int, _draft("Of a fresh draft.")] = 5,
    block_size: Annotated[int, _draft("Slots per block of a fresh draft, the anchor included.")] = 16,
    draft_options: Annotated[str, _draft("Others of DFlashDraftModel.from_target, as JSON: {'num_taps': 4}.")] = "{}",
    bench_data: Annotated[str, _after("Sets for bench, with commas; default what is held out.")] = "",
    bench_data_dir: Annotated[str | None, _after("Folder of the sets' files; default the Hub.")] = None,
    bench_prompts: Annotated[int, _after("Questions of each set.")] = 32,
    formats: Annotated[str, _after("What export writes, with commas.")] = ",".join(FORMATS),
    license: Annotated[str | None, _after("Of the draft, for its card.")] = None,
    dtype: Annotated[str, _machine("Of the target: torch dtype, or auto.")] = "auto",
    device: Annotated[str, _machine("Device map of the target, or auto.")] = "auto",
    threads: Annotated[int | None, _machine("CPU threads.")] = None,
) -> None:
    """Train a draft for any target: prepare the data, let the target answer, train, measure, export.

    Every field of DFlashTrainingArguments (all of Transformers' TrainingArguments) is an option too: --learning-rate
    6e-4 --num-train-epochs 6 --bf16 --report-to trackio. Given the folder of a run that was begun it goes on.
    """
    settings = read_settings(ctx.params, ctx.args)
    wanted = _stages(stages)
    if plan:
        from dflash_hf.cli.train_plan import print_plan

        print_plan(settings, Console())
        return
    from dflash_hf.cli.train_stages import run_stages

    try:
        run_stages(settings, wanted, typer.echo)
    except KeyboardInterrupt as error:
        typer.secho(f"Ended. dflash-hf train --output-dir {output_dir} goes on.", err=True)
        raise typer.Exit(130) from error


def read_settings(given: Mapping[str, Any], words: list[str]) -> TrainSettings:
    """Returns the settings of a run, checked.

    Args:
        given (mapping): The options of [`train`], as the command line has them.
        words (`list[str]`): What it does not know: training arguments.

    Raises:
        ValueError: If one cannot be read, or one that is needed is not there.
    """
    for name, action in (("target", "give its folder or Hub id"), ("output_dir", "name a new folder")):
        require(given[name] is not None, f"--{name.replace('_', '-')}", None, action)
    lists: dict[str, Any] = {name: _values(given[name]) for name in ("dataset", "bench_data", "formats")}
    objects: dict[str, Any] = {
        name: read_options(given[name], f"--{name.replace('_', '-')}")
        for name in ("draft_options", "chat_template_kwargs")
    }
    others: dict[str, Any] = {name: given[name] for name in OURS - lists.keys() - objects.keys() - {"output_dir"}}
    settings = TrainSettings(
        **others,
        **lists,
        **objects,
        output_dir=Path(given["output_dir"]),
    )
    settings.check()
    settings = replace(settings, arguments=read_arguments(words))
    check_upload(settings.arguments)
    return settings


def _stages(text: str) -> list[Stage]:
    """The stages that are wanted, in their order."""
    wanted = _values(text)
    for name in wanted:
        require(name in STAGES, f"--stages among {', '.join(STAGES)}", name, "name some of them")
    require(bool(wanted), f"--stages among {', '.join(STAGES)}", text, "name some of them")
    return [stage for stage in STAGES if stage in wanted]


def _values(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _with_commas(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _dashed(word: str, known: set[str]) -> str:
    """The word, in the spelling of an option of ours where it is one."""
    flag, equals, value = word.partition("=")
    ours = flag.replace("_", "-")
    return f"{ours}{equals}{value}" if word.startswith("--") and ours in known else word


def _value_of(words: list[str], option: str) -> str | None:
    """The last value of an option among the words of a command line."""
    found = None
    for at, word in enumerate(words):
        if word.startswith(f"{option}="):
            found = word.partition("=")[2]
        elif word == option and at + 1 < len(words):
            found = words[at + 1]
    return found


__all__ = ["TrainCommand", "read_settings", "train"]
