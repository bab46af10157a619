"""From what `step.py` measured to the rows of its record, and the floors that are asked of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from .methods import OURS_DEFAULT, PLAIN_STATIC
from .pair import Pair
from .roofline import REFERENCE_WIDTH, derived_speeds, forward_work, length_at, step_work, verdict
from .rows import Group, Row, decode_row, percentiles
from .stages import Stages

FLOOR_MODEL = "qwen3-8b"
FLOOR_LENGTH = 4.5  # mean acceptance of verifies of 16
SHORT = 2048
LONG = 32768
# Batch, context, and what a step may take at most over its floor of bytes.
FLOOR_CELLS = ((1, SHORT, 1.35), (1, LONG, 1.5), (8, SHORT, 1.5))


def method_row(
    pair: Pair,
    model: str,
    name: str,
    width: int | None,
    cell: tuple[int, int],
    group: Group,
    engine: str | None,
) -> Row:
    """Returns the row of a method: its step's time and memory, and what follows from them.

    Args:
        pair, model: What ran.
        name (`str`): The method's.
        width (`int`, *optional*): Tokens verified per row; `None` for plain's.
        cell (`tuple[int, int]`): Batch and context.
        group (`Group`): Its runs.
        engine (`str`, *optional*): Which engine ours ran on.
    """
    batch, context = cell
    row = decode_row(pair, name, batch, "random", group, False)
    step = row["step_ms"]["p50"]
    block = None
    derived: dict[str, float] = {}
    if step:
        derived["at_1"] = round(batch / step * 1e3, 1)
    if width is not None:
        block = pair.block_size
        if step:
            derived |= derived_speeds(batch, width, step)
    peak_mib = None
    if row["peak_bytes"] is not None:
        peak_mib = round(row["peak_bytes"] / 2**20, 1)
    kept = (
        "dtype",
        "new_tokens",
        "runs",
        "step_ms",
        "prefill_ms",
        "acceptance_length",
        "peak_bytes",
    )
    return {
        "model": model,
        "method": name,
        "batch": batch,
        "context": context,
        "context_tokens": row["context_tokens"],
        "block": block,
        "verify_width": width,
        "engine": engine,
        **{key: row[key] for key in kept},
        "peak_mib": peak_mib,
        "derived_tokens_per_second": derived,
    }


def stage_row(
    pair: Pair,
    model: str,
    cell: tuple[int, int],
    stages: Stages,
    bandwidth: float,
    is_default: bool = False,
) -> Row:
    """Returns the row of a step's parts at one width, beside what it cannot be faster than.

    Args:
        pair, model: What ran.
        cell (`tuple[int, int]`): Batch and context.
        stages (`Stages`): What was measured.
        bandwidth (`float`): Bytes per second of a copy.
        is_default (`bool`): Whether neither a width nor a number of nodes was set.
    """
    batch, context = cell
    width = stages.width
    until = {name: statistics.median(values) for name, values in stages.until_ms.items()}
    parts = {"draft": until["draft"], "verify": until["verify"] - until["draft"]}
    parts["accept"] = until["step"] - until["verify"]
    work = step_work(pair, stages.context, batch, width)
    plain = forward_work(pair, stages.context, batch, 1)
    floor = work.bytes / bandwidth * 1e3
    derived: dict[str, float] = {}
    if not stages.is_tree:  # acceptance at a width is known of chains alone
        derived = derived_speeds(batch, width, until["step"])
    return {
        "model": model,
        "batch": batch,
        "context": context,
        "context_tokens": stages.context,
        "block": pair.block_size,
        "verify_width": width,
        "is_tree": stages.is_tree,
        "is_default": is_default,
        "dtype": pair.dtype,
        "engine": stages.engine,
        "not_captured": stages.not_captured,
        "host_reads": stages.host_reads,
        "capture_seconds": stages.capture_seconds,
        "kernels": stages.kernels,
        "gaps": stages.gaps,
        "prefill_ms": round(stages.prefill_ms, 4),
        "parts_ms": {name: round(value, 4) for name, value in parts.items()},
        "step_ms": percentiles(stages.until_ms["step"]),
        "bytes": work.to_dict(),
        "floor_ms": floor,
        "step_over_floor": until["step"] / floor,
        "plain_bytes": plain.to_dict(),
        "plain_floor_ms": plain.bytes / bandwidth * 1e3,
        "derived_tokens_per_second": derived,
    }


def floor_rows(
    rows: list[Row],
    stages: list[Row],
    memory: dict[str, Row],
    weights: dict[str, int],
    judged: bool,
) -> list[Row]:
    """Compares what was measured with what is asked of `FLOOR_MODEL` on one H200; `judged` only there.

    A step is judged by the graph's own replays of a chain of the whole block. Beside that value stand `call_value`,
    by whole calls of the same chain, in which the host has its part, and `default_value`, by replays of what users
    get.

    Args:
        rows, stages: Of [`method_row`] and [`stage_row`].
        memory: Per model, the greatest memory reserved by `"eager"` and by `"cuda_graph"`, in bytes.
        weights: Per model, bytes of both models' weights.
        judged (`bool`): Whether this is a GPU and the published shape; elsewhere values are only shown.
    """
    ours = [row for row in rows if row["model"] == FLOOR_MODEL]
    parts = [row for row in stages if row["model"] == FLOOR_MODEL]
    step = {(row["method"], row["batch"], row["context"]): row["step_ms"]["p50"] for row in ours}
    chains = [row for row in parts if not row["is_default"] and row["verify_width"] == row["block"]]
    defaults = [row for row in parts if row["is_default"]]
    chain_at = {(row["batch"], row["context"]): row for row in chains}
    default_at = {(row["batch"], row["context"]): row for row in defaults}

    def replay(
        rows_at: dict[tuple[int, int], Row], cell: tuple[int, int], key: str
    ) -> float | None:
        """A figure of the replays of a cell: `step_ms`, `floor_ms` or `step_over_floor`."""
        if cell not in rows_at:
            return None
        if key == "step_ms":
            return rows_at[cell]["step_ms"]["p50"]
        return rows_at[cell][key]

    found: list[Row] = []
    for batch, context, limit in FLOOR_CELLS:
        cell = (batch, context)
        found.append(
            _floor(
                f"step over its floor of bytes, batch {batch}, {context // 1024}k",
                replay(chain_at, cell, "step_over_floor"),
                limit,
                True,
                judged,
                call_value=_ratio(step.get(("ours", *cell)), replay(chain_at, cell, "floor_ms")),
                default_value=replay(default_at, cell, "step_over_floor"),
            )
        )
    alone = step.get(("ours", 1, SHORT))
    default = step.get((OURS_DEFAULT.name, 1, SHORT))
    for name in ("zlab", "stock"):
        theirs = step.get((name, 1, SHORT))
        what = f"step over {name}'s, batch 1, 2k"
        found.append(
            _floor(
                what,
                _ratio(alone, theirs),
                0.25,
                True,
                judged,
                default_value=_ratio(default, theirs),
            )
        )
    for batch, limit in ((8, 3.0), (32, 1.6)):
        what = f"derived tokens/s over plain/static's, batch {batch}, 2k"
        found.append(_floor(what, _gain(ours, batch), limit, False, judged))
    found.append(
        _floor(
            "step at 32k over 2k, batch 1",
            _ratio(replay(chain_at, (1, LONG), "step_ms"), replay(chain_at, (1, SHORT), "step_ms")),
            1.4,
            True,
            judged,
            call_value=_ratio(step.get(("ours", 1, LONG)), alone),
            default_value=_ratio(
                replay(default_at, (1, LONG), "step_ms"), replay(default_at, (1, SHORT), "step_ms")
            ),
        )
    )
    num_reading = None
    if parts:
        num_reading = sum(row["host_reads"] is not None for row in parts)
    found.append(_floor("kinds of step that wait for the host", num_reading, 0, True, judged))
    more = None
    if FLOOR_MODEL in memory:
        used = memory[FLOOR_MODEL]
        more = (used["cuda_graph"] - used["eager"]) / weights[FLOOR_MODEL]
    what = "memory of graphs beyond eager, share of the weights"
    found.append(_floor(what, more, 0.05, True, judged))
    return found


def _gain(rows: Iterable[Row], batch: int) -> float | None:
    """Ours at its best width against plain with a static cache, at the acceptance that is asked about."""
    here = [
        row
        for row in rows
        if (row["batch"], row["context"]) == (batch, SHORT) and row["step_ms"]["p50"]
    ]
    plain = [row["step_ms"]["p50"] for row in here if row["method"] == PLAIN_STATIC.name]
    speeds = [
        length_at(FLOOR_LENGTH, row["verify_width"]) / row["step_ms"]["p50"]
        for row in here
        if row["method"].startswith("ours")
        and "sampl" not in row["method"]
        and row["engine"] != "eager"
    ]
    if not plain or not speeds:
        return None
    return max(speeds) * plain[0]


def _ratio(over: float | None, under: float | None) -> float | None:
    if over is None or not under:
        return None
    return over / under


def _floor(
    what: str,
    value: float | None,
    limit: float,
    at_most: bool,
    judged: bool,
    call_value: float | None = None,
    default_value: float | None = None,
) -> Row:
    bound = "at most" if at_most else "at least"
    return {
        "what": what,
        "value": value,
        "call_value": call_value,
        "default_value": default_value,
        "required": f"{bound} {limit:g}",
        "verdict": verdict(value, limit, at_most, judged),
    }


__all__ = [
    "FLOOR_MODEL",
    "LONG",
    "REFERENCE_WIDTH",
    "SHORT",
    "floor_rows",
    "method_row",
    "stage_row",
]
