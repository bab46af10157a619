"""This module runs the console script as `python -m dflash_hf.cli`, for example if the script is not on the path."""

from dflash_hf.cli.main import app

app()
