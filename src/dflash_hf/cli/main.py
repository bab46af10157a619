"""`dflash-hf`: the console script."""

from __future__ import annotations

import typer

from dflash_hf.cli.demo import demo
from dflash_hf.cli.generate import generate

app = typer.Typer(
    name="dflash-hf", help="DFlash speculative decoding inside Transformers' generate.", no_args_is_help=True
)
app.command()(generate)
app.command()(demo)

__all__ = ["app"]
