"""`dflash-hf`: the console script."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from dflash_hf.cli.chat import chat
from dflash_hf.cli.convert import convert
from dflash_hf.cli.demo import demo
from dflash_hf.cli.doctor import doctor
from dflash_hf.cli.generate import generate
from dflash_hf.errors import one_line


class SentenceGroup(TyperGroup):
    """Shows what is wrong with the input in a sentence on stderr, with status 2, and not as a stack trace."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the subcommand; errors about its input are printed, with status 2.

        These are `ValueError`, `OSError` (a folder that is not there) and `ImportError` (Pillow, which images need).
        """
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            typer.secho(f"Error: {one_line(error)}", err=True, fg="red")
            raise typer.Exit(2) from error


app = typer.Typer(
    name="dflash-hf",
    cls=SentenceGroup,
    help="DFlash speculative decoding inside Transformers' generate.",
    no_args_is_help=True,
)


for command in (generate, demo, chat, convert, doctor):
    app.command()(command)
