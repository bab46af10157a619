"""The chat with room for three uploads, whose clock for them is sixteen minutes ahead while a file is there."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

from gradio import route_utils

from dflash_hf.chat import app, page

LATER = Path(sys.argv[1])


class Clock(datetime):
    """What Gradio asks for the age of a file."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        """The time, or what it will be in sixteen minutes."""
        return datetime.now(tz) + timedelta(minutes=16 * LATER.exists())


if __name__ == "__main__":
    from dflash_hf.cli.main import app as command

    route_utils.datetime = Clock  # type: ignore[misc]
    page.SWEPT_EVERY = 0.2  # type: ignore[assignment]
    app.Uploads.__init__.__defaults__ = (3, app.MAX_BYTES)
    command(["chat", "--web", *sys.argv[2:]])
