"""`python -m dflash_hf`: the console script, as `accelerate launch -m` starts it."""

from dflash_hf.cli.main import app

app()
