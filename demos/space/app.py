"""The chat page as a Hugging Face Space: SmolLM2 from the Hub, and the draft that is uploaded beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_hf.cli.main import app

HERE = Path(__file__).resolve().parent
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"


def draft_folder() -> Path:
    """Returns the draft's folder: beside this file in a Space, among the demos in a clone."""
    uploaded = HERE / "draft"
    if uploaded.is_dir():
        return uploaded
    return HERE.parent / "smollm2" / "draft"


if __name__ == "__main__":
    # A Space is reached from outside its container. Of an option that is given twice the last one counts.
    options = ["--target", TARGET, "--draft", str(draft_folder()), "--host", "0.0.0.0"]
    app(["chat", "--web", *options, *sys.argv[1:]])
