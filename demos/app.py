"""The chat on a web page: `python demos/app.py`, the same as `dflash-hf chat --web`, with the same options."""

from __future__ import annotations

import sys

from dflash_hf.cli.main import app

if __name__ == "__main__":
    app(["chat", "--web", *sys.argv[1:]])
