"""Draw the figures of recorded results again, from their JSON alone.

    python benchmarks/plot.py benchmarks/results/step.json benchmarks/results/kernels.json

A figure goes beside its record, as `step.png`. A title says where its data come from, and shouts where they come from
a trial on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from harness.plots import FIGURES


def main(
    records: Annotated[
        list[Path],
        typer.Argument(help="Records of step.py, kernel_times.py, objectives.py or peers.py."),
    ],
) -> None:
    """Draw figures from records."""
    for path in records:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            kind = record["provenance"]["benchmark"]
            draw = FIGURES[kind]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise typer.BadParameter(
                f"expected a record of {' or '.join(FIGURES)} in {path}, got {type(error).__name__}: {error}; give "
                "what step.py, kernel_times.py, objectives.py or peers.py wrote"
            ) from error
        image = path.with_suffix(".png")
        draw(record).savefig(image, dpi=120)
        print(f"written to {image}")


if __name__ == "__main__":
    typer.run(main)
