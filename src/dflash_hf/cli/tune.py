"""This module is `dflash-hf tune`, which measures the seconds of a step and stores them for later calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dflash_hf.cli.options import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    PairOption,
    TargetOption,
    values_of,
)
from dflash_hf.cli.pair import check_one_pair, given_or_bundled
from dflash_hf.errors import require
from dflash_hf.pair.loading import load_pair
from dflash_hf.tables import make_table

if TYPE_CHECKING:
    from dflash_hf.generation.cost_table import CostTable

DEFAULT_ROWS = "1,2,4,8,16,32"


def tune(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    rows: Annotated[
        str, typer.Option(help="Batch sizes to measure, separated by commas.")
    ] = DEFAULT_ROWS,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure how long steps take, and keep the result for later calls.

    The result decides how many tokens a step verifies.
    Stop other programs first, because they make the measured times longer.
    """
    check_one_pair(pair, target, draft)
    # torch is imported only if a command needs it.
    from dflash_hf.generation.tune import MAX_ROWS

    numbers = values_of(rows, int, "--rows")
    are_rows = min(numbers, default=0) > 0 and max(numbers) <= MAX_ROWS
    what = f"numbers of rows from 1 to {MAX_ROWS} as --rows"
    require(are_rows, what, rows, "write for example --rows 1,8")
    target, draft = given_or_bundled(target, draft, pair or "text", dtype)
    with Console(stderr=True).status("loading the pair") as status:
        model, assistant, _ = load_pair(target, draft, dtype, device)
        import torch

        from dflash_hf.generation.tune import tune as measure

        num_threads = torch.get_num_threads()
        measured = measure(
            model,
            assistant,
            rows=numbers,
            on_progress=lambda what: status.update(escape(what)),
        )
    if as_json:
        written = {"steps": measured.table.steps, "chains": measured.table.chains}
        typer.echo(json.dumps({"file": str(measured.path), **written}))
        return
    _show(Console(), measured.table)
    typer.echo(
        f"Later calls of this pair use these times, if torch has as many threads ({num_threads}). "
        f"They are stored in {measured.path}."
    )


def _show(console: Console, measured: CostTable) -> None:
    """Prints the milliseconds of a step, by rows and verified tokens."""
    widths = sorted(max(measured.steps.values(), key=len))
    headings = [str(width) for width in widths]
    table = make_table(
        "milliseconds of a step by rows and verified tokens", [], ["rows", *headings, "chain"]
    )
    for num_rows, seconds in measured.steps.items():
        cells = [f"{1000 * seconds[width]:.1f}" for width in widths]
        table.add_row(str(num_rows), *cells, f"{1000 * measured.chains[num_rows]:.1f}")
    console.print(table)
