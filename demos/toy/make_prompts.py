"""Writes `held_out.jsonl`: the held-out prompts that the demo, the benchmarks and the tests answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from tasks import KINDS, make_sample

HERE = Path(__file__).parent


def main(
    per_kind: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 12,
    out: Annotated[Path, typer.Option(help="File to write.")] = HERE / "held_out.jsonl",
) -> None:
    """Write the first samples of every kind's held-out split, one JSON object a line."""
    samples = [make_sample(kind, "heldout", index) for kind in KINDS for index in range(per_kind)]
    rows = [{"kind": s.kind, "messages": list(s.messages), "answer": s.answer} for s in samples]
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    typer.echo(f"{len(rows)} prompts in {out}")


if __name__ == "__main__":
    typer.run(main)
