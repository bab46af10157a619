"""`dflash-hf`: the console script."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from dflash_hf.cli.bench import app as bench_app
from dflash_hf.cli.chat import chat
from dflash_hf.cli.convert import convert
from dflash_hf.cli.demo import demo
from dflash_hf.cli.doctor import doctor
from dflash_hf.cli.generate import generate
from dflash_hf.cli.train import TrainCommand, train


class SentenceGroup(TyperGroup):
    """Shows what is wrong with the input as one sentence, not as a stack trace."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the subcommand; errors about its input are printed, with status 2.

        These are `ValueError`, `OSError` (a folder that is not there) and `ImportError` (Pillow, which images need).
        """
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            typer.secho(f"Error: {error}", err=True, fg="red")
            raise typer.Exit(2) from error


app = typer.Typer(
    name="dflash-hf",
    cls=SentenceGroup,
    help="DFlash speculative decoding inside Transformers' generate.",
    no_args_is_help=True,
)
app.command()(generate)
app.command()(demo)
app.command()(chat)
app.command()(convert)
app.command()(doctor)
app.command(cls=TrainCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
app.add_typer(bench_app)

__all__ = ["app"]
