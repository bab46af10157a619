"""What `step.py` is asked for on its command line, and the tables that it shows."""

from __future__ import annotations

import itertools

import typer

from .report import Column
from .step_rows import LONG, SHORT

Cell = tuple[int, int]
CELLS: list[Cell] = [(1, SHORT), (8, SHORT), (32, SHORT), (1, LONG)]
GRID = list(itertools.product((1, 2, 4, 8, 16, 32), (1024, 2048, 4096, 8192, 16384, 32768)))
METHOD_COLUMNS: list[Column] = [
    ("model", "model"),
    ("method", "method"),
    ("batch", "batch"),
    ("context", "context"),
    ("engine", "engine"),
    ("ms/step p20", "step_ms.p20"),
    ("p50", "step_ms.p50"),
    ("p80", "step_ms.p80"),
    ("prefill ms", "prefill_ms"),
    ("peak MiB", "peak_mib"),
    ("DERIVED tok/s at 1", "derived_tokens_per_second.at_1"),
    ("3", "derived_tokens_per_second.at_3"),
    ("4.5", "derived_tokens_per_second.at_4.5"),
    ("6.5", "derived_tokens_per_second.at_6.5"),
]
STAGE_COLUMNS: list[Column] = [
    ("model", "model"),
    ("batch", "batch"),
    ("context", "context"),
    ("width", "verify_width"),
    ("tree", "is_tree"),
    ("engine", "engine"),
    ("draft ms", "parts_ms.draft"),
    ("verify", "parts_ms.verify"),
    ("accept", "parts_ms.accept"),
    ("step", "step_ms.p50"),
    ("floor ms", "floor_ms"),
    ("step / floor", "step_over_floor"),
    ("capture s", "capture_seconds"),
    ("idle us", "gaps.idle_us"),
    ("host reads", "host_reads"),
]
EXPERIMENT_COLUMNS: list[Column] = [
    ("experiment", "experiment"),
    ("batch", "batch"),
    ("context", "context"),
    ("width", "verify_width"),
    ("engine", "engine"),
    ("modules or kernels", "changed"),
    ("step ms p20", "step_ms.p20"),
    ("p50", "step_ms.p50"),
    ("p80", "step_ms.p80"),
    ("idle us", "gaps.idle_us"),
    ("same text", "same_text"),
]
NOT_RUN_COLUMNS: list[Column] = [
    ("model", "model"),
    ("batch", "batch"),
    ("context", "context"),
    ("what", "what"),
    ("bytes needed", "bytes_needed"),
    ("bytes there are", "bytes_available"),
    ("why", "why"),
]
FLOOR_COLUMNS: list[Column] = [
    ("asked for", "what"),
    ("value", "value"),
    ("by whole calls", "call_value"),
    ("of the defaults", "default_value"),
    ("required", "required"),
    ("verdict", "verdict"),
]


def parse_cells(text: str) -> list[Cell]:
    """Returns batches and contexts from `1x2048,8x2048`, or `grid`.

    Raises:
        typer.BadParameter: If it is something else.
    """
    if text == "grid":
        return GRID
    try:
        cells = [
            (int(a), int(b))
            for a, b in (part.split("x") for part in text.replace(",", " ").split())
        ]
    except ValueError:
        cells = []
    if not cells or min(min(cell) for cell in cells) < 1:
        raise typer.BadParameter(
            f"expected cells such as 1x2048,8x2048 (batch x context) or grid, got {text!r}"
        )
    return cells


def parse_names(text: str, known: tuple[str, ...]) -> list[str]:
    """Returns names separated by commas; `all` is all of them.

    Raises:
        typer.BadParameter: If one is not known.
    """
    names = text.replace(",", " ").split()
    if text == "all":
        names = list(known)
    unknown = sorted(set(names) - set(known))
    if not names or unknown:
        raise typer.BadParameter(
            f"expected names among {', '.join(known)}, got {unknown or text!r}; choose of those"
        )
    return names
