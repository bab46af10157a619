"""Prints the floors and what was not run, of the records in a folder: the short end of `gpu_check.sh`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def lines_of(record: dict[str, Any]) -> list[str]:
    """Returns a line per floor that something was measured for, and one per thing that broke off or had no room."""
    lines: list[str] = []
    for row in record.get("floors", []):
        if row["value"] is None:
            continue
        value = "-" if row["value"] is None else f"{row['value']:.4g}"
        lines.append(f"  {row['verdict']:10} {row['what']}: {value}, {row['required']}")
    for row in record.get("not_run", []):
        cell = f"{row['batch']}x{row['context']}"
        lines.append(f"  not run    {row['model']} {cell} {row['what']}: {row['why'][:160]}")
    for row in record.get("stages", []):
        cell = f"{row['batch']}x{row['context']} width {row['verify_width']}"
        found = {key: row[key] for key in ("not_captured", "host_reads") if row[key]}
        lines += [f"  {key:10} {row['model']} {cell}: {why[:160]}" for key, why in found.items()]
    for row in record["rows"]:
        if "loss_falls" in row:
            verdict = "pass" if row["loss_falls"] else "FAIL"
            losses = f"{row['first_loss']:.3g} to {row['last_loss']:.3g}"
            lines.append(
                f"  {verdict:10} {row['model']}: {row['steps']} steps, loss {losses}, {row['step_ms']:.4g} ms"
            )
        if "identity_rate" in row:
            widest = "-" if row["widest_margin"] is None else f"{row['widest_margin']:.3g}"
            kept = "pass" if row["margins_kept"] and row["as_static"] is not False else "FAIL"
            lines.append(
                f"  {kept:10} {row['engine']} ({row['ran_on']}), batch {row['batch']}, {row['dtype']}: "
                f"{row['num_identical']} of {row['num_texts']} texts identical, widest margin {widest}"
            )
    return lines


def main(folder: Path) -> None:
    """Prints what there is; a record that is missing is named."""
    for name in ("step", "sampled", "families", "compiled", "train", "kernels", "identity"):
        path = folder / f"{name}.json"
        if not path.is_file():
            print(f"{name}: no record")
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        facts = record["provenance"]
        state = "" if facts.get("is_complete", True) else ", INCOMPLETE"
        print(f"{name}: {facts['machine']['gpu'] or 'CPU'}{', tiny' if facts.get('is_tiny') else ''}{state}")
        print("\n".join(lines_of(record)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
