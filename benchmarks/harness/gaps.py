"""How long a device stands idle between the kernels of one replay, from the events of torch's profiler."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.autograd import DeviceType

from .rows import percentiles

# Gaps that are named in a record, the longest first.
NUM_NAMED = 10
NAME_LENGTH = 60


class Span(NamedTuple):
    """What a device did, from `begin` to `end`, both in microseconds on one clock."""

    name: str
    begin: float
    end: float


def spans_of(profiler: Any) -> list[Span]:
    """Returns what a profiler saw on a CUDA device: kernels, copies and fills, in no order."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]


def gaps_between(spans: list[Span]) -> dict[str, Any] | None:
    """Returns the times in which nothing ran, between the first begin and the last end; `None` for fewer than two.

    A gap is from the latest end so far to the next begin. Spans that overlap, on several streams, have none between
    them.

    Returns:
        `dict`: `spans` (their number), `gaps` (of those, how many had a gap before them), in microseconds `span_us`
        (from first to last), `busy_us` (something ran), `idle_us` (nothing did), `gap_us` (percentiles of the gaps),
        and `longest`: the longest gaps with the names before and behind them.
    """
    if len(spans) < 2:
        return None
    ordered = sorted(spans, key=lambda span: span.begin)
    first = ordered[0]
    last_name = first.name
    last_end = first.end
    found: list[dict[str, Any]] = []
    for span in ordered[1:]:
        gap = span.begin - last_end
        if gap > 0:
            found.append(
                {
                    "microseconds": round(gap, 3),
                    "behind": last_name[:NAME_LENGTH],
                    "before": span.name[:NAME_LENGTH],
                }
            )
        if span.end > last_end:
            last_name = span.name
            last_end = span.end
    idle = sum(gap["microseconds"] for gap in found)
    whole = last_end - first.begin
    longest = sorted(found, key=lambda gap: gap["microseconds"], reverse=True)
    return {
        "spans": len(spans),
        "gaps": len(found),
        "span_us": round(whole, 3),
        "busy_us": round(whole - idle, 3),
        "idle_us": round(idle, 3),
        "gap_us": percentiles([gap["microseconds"] for gap in found]),
        "longest": longest[:NUM_NAMED],
    }
