"""`python -m dflash_hf.cli`: the console script, where it is not on the path."""

from dflash_hf.cli.main import app

app()
