"""This module is `dflash-hf`, the console script."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash_hf import __version__
from dflash_hf.cli.bench import app as bench_app
from dflash_hf.cli.chat import chat
from dflash_hf.cli.convert import convert
from dflash_hf.cli.demo import demo
from dflash_hf.cli.doctor import doctor
from dflash_hf.cli.drafts import drafts
from dflash_hf.cli.generate import generate
from dflash_hf.cli.inspect import inspect
from dflash_hf.cli.push import push
from dflash_hf.cli.serve import serve
from dflash_hf.cli.train import CONTEXT, train
from dflash_hf.cli.tune import tune
from dflash_hf.errors import REFUSED, one_line

# Exit statuses beside `REFUSED`. 0 is success. 1 is the result of a command: answers differ, or the doctor has
# findings.
UNEXPECTED = 3
INTERRUPTED = 130
NO_READER = 141


class SentenceGroup(TyperGroup):
    """Reports errors as a sentence on stderr with their own status: without a stack trace, and never with status 1."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the subcommand.

        Bad input gives status 2: `ValueError`, `OSError` (for example a missing folder) and `ImportError` (for example
        Pillow, which images need). Any other error gives status 3, with the place where it happened.
        """
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt as error:
            typer.secho("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from error
        # A reader such as `head` has read enough, so the rest of the output is dropped.
        except BrokenPipeError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(NO_READER) from error
        except Exception as error:
            if hasattr(error, "exit_code"):  # an error of Typer's parser about the command line
                raise
            if ctx.params.get("show_traceback"):
                typer.echo(traceback.format_exc(), err=True)
            if isinstance(error, ValueError | OSError | ImportError):
                sentence = one_line(error)
                status = REFUSED
            else:
                sentence = unexpected(error)
                status = UNEXPECTED
            typer.secho(f"Error: {sentence}", err=True, fg="red")
            raise typer.Exit(status) from error


def unexpected(error: Exception) -> str:
    """Returns a sentence about an unexpected error: what it is, where it happened, and how to see more."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).resolve().parents[1]
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    last = (own or frames)[-1]
    where = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
    told = one_line(error) or "no message"
    return f"{told} ({where}); dflash-hf --traceback COMMAND shows where the error comes from"


def show_version(asked: bool) -> None:
    """Prints the version and exits, if asked for."""
    if asked:
        typer.echo(f"dflash-hf {__version__}")
        raise typer.Exit


app = typer.Typer(name="dflash-hf", cls=SentenceGroup, no_args_is_help=True)


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    show_traceback: Annotated[
        bool,
        typer.Option(
            "--traceback",
            help="Show where an error comes from. Write this option before the command.",
        ),
    ] = False,
) -> None:
    """DFlash speculative decoding inside Transformers' generate."""


for command in (generate, demo, chat, serve, convert, doctor, inspect, drafts, push, tune):
    app.command()(command)
app.command(context_settings=CONTEXT)(train)
app.add_typer(bench_app)
