"""This module runs the console script for `python -m dflash_hf`, as `accelerate launch -m` starts it."""

from dflash_hf.cli.main import app

app()
