"""Prints the floors, what failed and what was not run, of the records in a folder: the short end of `gpu_check.sh`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# Rows of products that are printed: those of a step of one sequence.
FEW_ROWS = 16
# Of a floor, or of a check that may not have been run
VERDICT = {True: "pass", False: "FAIL", None: "not run"}


def main(folder: Path) -> None:
    """Prints what there is, record by record, and floors over all cells together."""
    records = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }
    for name, record in records.items():
        facts = record["provenance"]
        state = ["CPU"]
        if facts["device"] != "cpu":
            state = [facts["machine"]["gpus"][0]]
        if facts.get("is_tiny"):
            state.append("tiny")
        if not facts.get("is_complete", True):
            state.append("INCOMPLETE")
        print(f"{name}: {', '.join(state)}")
        for line in lines_of(record):
            print(line)
    steps = [
        record for record in records.values() if record["provenance"].get("benchmark") == "step"
    ]
    if len(steps) > 1:
        print("floors over all cells:")
        for line in floor_lines(floors_together(steps)):
            print(line)


def lines_of(record: Record) -> list[str]:
    """Returns a line per floor that something was measured for, and one per thing that broke off or had no room."""
    lines = floor_lines(record.get("floors", []))
    for row in record.get("not_run", []):
        cell = f"{row['batch']}x{row['context']}"
        lines.append(f"  not run    {row['model']} {cell} {row['what']}: {row['why'][:160]}")
    for row in record.get("wrong", []):
        lines.append(f"  FAIL       {row['kernel']}, batch {row['batch']}: {row['why'][:160]}")
    lines += step_lines(record)
    for row in record["rows"]:
        lines += row_lines(row)
    return lines


def floor_lines(floors: list[Record]) -> list[str]:
    """Returns a line for each floor that has a value, with the same by whole calls and of the defaults beside it."""
    lines: list[str] = []
    for row in floors:
        if row["value"] is None:
            continue
        beside = {"by calls": row.get("call_value"), "defaults": row.get("default_value")}
        known = [f"{name} {value:.4g}" for name, value in beside.items() if value is not None]
        more = ""
        if known:
            more = f" ({', '.join(known)})"
        lines.append(
            f"  {row['verdict']:10} {row['what']}: {row['value']:.4g}{more}, {row['required']}"
        )
    return lines


def step_lines(record: Record) -> list[str]:
    """Returns what is odd about steps that were timed, and what experiments have changed."""
    lines: list[str] = []
    for row in record.get("stages", []):
        cell = f"{row['batch']}x{row['context']} width {row['verify_width']}"
        found = {key: row[key] for key in ("not_captured", "host_reads") if row[key]}
        lines += [f"  {key:10} {row['model']} {cell}: {why[:160]}" for key, why in found.items()]
    for row in record.get("experiments", []):
        verdict = VERDICT[bool(row["same_text"])]
        step = row["step_ms"]["p50"]
        lines.append(
            f"  {verdict:10} {row['experiment']}: a step of {step:.4g} ms, {row['changed']} changed"
        )
    return lines


def row_lines(row: Record) -> list[str]:
    """Returns a line for a row of training, of texts, of a check of the smoke test that did not pass, of a product."""
    if "loss_falls" in row:
        verdict = VERDICT[bool(row["loss_falls"])]
        losses = f"{row['first_loss']:.3g} to {row['last_loss']:.3g}"
        return [
            f"  {verdict:10} {row['model']}: {row['steps']} steps, loss {losses}, {row['step_ms']:.4g} ms"
        ]
    if "identity_rate" in row:
        widest = "-"
        if row["widest_margin"] is not None:
            widest = f"{row['widest_margin']:.3g}"
        is_kept = row["margins_kept"] and row["as_static"] is not False
        kept = VERDICT[bool(is_kept)]
        return [
            f"  {kept:10} {row['engine']} ({row['ran_on']}), batch {row['batch']}, {row['dtype']}: "
            f"{row['num_identical']} of {row['num_texts']} texts identical, widest margin {widest}"
        ]
    if "check" in row:
        if not row["why"]:
            return []
        return [f"  {VERDICT[row['passed']]:10} {row['check']}: {row['why'][:160]}"]
    if "weight" in row:
        # Older records have no ways: all their products are by torch.
        products = f"{row['weight']}, {row.get('way', 'torch')}, {row['rows']} rows"
        if row["error"] is not None:
            return [f"  FAIL       {products}: {row['error'][:160]}"]
        if row["rows"] == FEW_ROWS:
            share = row["share_of_copy_bandwidth"]
            return [f"  {products}: {row['gigabytes_per_second']:.4g} GB/s, {share:.3g} of a copy"]
    return []


def floors_together(records: list[Record]) -> list[Record]:
    """Returns the floors of `step.py` over all cells, each of which a process of its own has measured."""
    # It imports torch, which nothing else here needs; run as a script, this file's own folder is where imports begin.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from harness.step_rows import floor_rows

    facts = [record["provenance"] for record in records]
    memory: Record = {}
    weights: Record = {}
    for fact in facts:
        memory |= fact["graph_memory_bytes"]
        weights |= fact["weight_bytes"]
    judged = all(fact["device"] != "cpu" and not fact["is_tiny"] for fact in facts)
    rows = [row for record in records for row in record["rows"]]
    stages = [row for record in records for row in record["stages"]]
    return floor_rows(rows, stages, memory, weights, judged)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
