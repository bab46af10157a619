"""Scripts of benchmarks/, run in this process."""

from __future__ import annotations

import json
from typing import Any

import typer
from typer.testing import CliRunner, Result


def run_script(main: Any, *arguments: str) -> Result:
    """Runs a script's command with some arguments; what it raises is raised."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def record_of(result: Result) -> dict[str, Any]:
    """The record on the last line of what a script printed."""
    return json.loads(result.stdout.splitlines()[-1])
