"""Figures from records alone: rooflines, under what a copy and a matrix product reach, and curves of trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_hf.plot_style import BLUE, GREEN, MUTED, ORANGE, new_figure

from .rows import Row

Record = dict[str, Any]


def conditions(record: Record) -> str:
    """Returns the second line of every title: where and with what; and that a trial run's times mean nothing."""
    facts = record["provenance"]
    is_cpu = facts["device"] == "cpu"
    place = "CPU"
    if not is_cpu:
        place = facts["machine"]["gpus"][0]
    text = f"{place}, {facts['dtype']}, torch {facts['versions']['torch']}, {(facts['commit'] or 'no commit')[:9]}"
    if facts.get("is_tiny") or is_cpu or facts.get("interpreted"):
        return f"TRIAL RUN, TIMES MEAN NOTHING: {text}"
    if not facts.get("is_complete", True):
        return f"INCOMPLETE: {text}"
    return text


def kernel_figure(record: Record) -> Any:
    """Draws bytes per second over bytes moved, kernels and the best library, under the roof that a copy reaches.

    Returns:
        `matplotlib.figure.Figure`: Log axes; one colour per kernel, a circle for it, a cross for the library.
    """
    figure = new_figure(9, 6)
    axes = figure.subplots()
    rows: list[Row] = record["rows"]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        chosen = sorted(
            (row for row in rows if row["kernel"] == kernel), key=lambda row: row["bytes"]
        )
        sizes = [row["bytes"] for row in chosen]
        (line,) = axes.plot(
            sizes, [row["gigabytes_per_second"] for row in chosen], "o-", label=kernel
        )
        library = [row["bytes"] / row["best_library_us"] / 1e3 for row in chosen]
        axes.plot(sizes, library, "x--", color=line.get_color(), alpha=0.6)
    bandwidth = record["provenance"]["copy_bytes_per_second"] / 1e9
    axes.axhline(bandwidth, color="black", linewidth=1, label=f"copy, {bandwidth:.3g} GB/s")
    axes.set(xscale="log", yscale="log", xlabel="bytes a call has to move", ylabel="GB/s")
    axes.set_title(
        f"Kernels (o) and the best library or reference (x)\n{conditions(record)}",
        fontsize="medium",
    )
    axes.legend(fontsize="small")
    return figure


def step_figure(record: Record) -> Any:
    """Draws the steps twice: operations per second over operations per byte, and milliseconds beside their floor.

    Left, under the roofs of a copy (slanted) and of a matrix product (flat): circles are steps with a draft, from the
    replayed parts, crosses plain `generate`'s. Right, per cell and width: the parts of a step, the floor of bytes as a
    line across them.

    Returns:
        `matplotlib.figure.Figure`: Two axes.
    """
    figure = new_figure(14, 6)
    left, right = figure.subplots(1, 2)
    facts = record["provenance"]
    bandwidth = facts["copy_bytes_per_second"]
    rate = facts["product_flops_per_second"]
    points = step_points(record)
    for marker, wanted in (("o", True), ("x", False)):
        for name in dict.fromkeys(
            point["name"] for point in points if point["is_drafted"] == wanted
        ):
            chosen = sorted(
                (p for p in points if p["name"] == name), key=lambda point: point["intensity"]
            )
            left.plot(
                [p["intensity"] for p in chosen],
                [p["flops_per_second"] / 1e12 for p in chosen],
                marker,
                label=name,
            )
    found = [point["intensity"] for point in points] or [1.0]
    ridge = rate / bandwidth
    ends = sorted({min([*found, ridge]) / 2, ridge, max([*found, ridge]) * 2})
    left.plot(
        ends,
        [min(x * bandwidth, rate) / 1e12 for x in ends],
        color="black",
        linewidth=1,
        label="copy, product",
    )
    left.set(xscale="log", yscale="log", xlabel="operations per byte read", ylabel="TFLOP/s")
    left.legend(fontsize="x-small")
    _bars(right, record["stages"])
    figure.suptitle(f"Decoding steps with random weights\n{conditions(record)}", fontsize="medium")
    return figure


def step_points(record: Record) -> list[Row]:
    """Returns where each step stands under the roofs: `intensity` (operations per byte) and `flops_per_second`."""
    points: list[Row] = []
    plain = {
        (row["model"], row["method"], row["batch"], row["context"]): row["step_ms"]["p50"]
        for row in record["rows"]
    }
    for row in record["stages"]:
        cell = (row["batch"], row["context"])
        name = f"{row['model']}, width {row['verify_width']}"
        points.append(_point(name, row["bytes"], row["step_ms"]["p50"], True))
        if row["verify_width"] != row["block"]:
            continue
        for method in ("plain", "plain/static"):
            step_ms = plain.get((row["model"], method, *cell))
            if step_ms is not None:
                name = f"{row['model']}, {method}"
                points.append(_point(name, row["plain_bytes"], step_ms, False))
    return points


def _point(name: str, work: Row, step_ms: float, is_drafted: bool) -> Row:
    rate = work["flops"] / (step_ms / 1e3)
    return {
        "name": name,
        "is_drafted": is_drafted,
        "intensity": work["flops"] / work["total"],
        "flops_per_second": rate,
    }


def _bars(axes: Any, stages: list[Row]) -> None:
    """Stacks draft, verify and acceptance of every row, with its floor across."""
    names = [
        f"{row['model']}\n{row['batch']}x{row['context']} w{row['verify_width']}" for row in stages
    ]
    bottom = [0.0] * len(stages)
    for part in ("draft", "verify", "accept"):
        # A part is a difference of two medians: noise may put it below nothing.
        heights = [max(row["parts_ms"][part], 0.0) for row in stages]
        axes.bar(range(len(stages)), heights, bottom=bottom, label=part)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    for index, row in enumerate(stages):
        axes.plot(
            [index - 0.45, index + 0.45],
            [row["floor_ms"]] * 2,
            color="black",
            label=None if index else "floor",
        )
    axes.set_xticks(range(len(stages)), names, rotation=60, ha="right", fontsize="x-small")
    axes.set(ylabel="milliseconds per step")
    if stages:
        axes.legend(fontsize="small")


def objectives_figure(record: Record) -> Any:
    """Draws the acceptance length of the held-out prompts over the steps, for each recipe.

    Returns:
        `matplotlib.figure.Figure`: One line for each recipe, in a band from its least to its greatest seed.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    rows: list[Row] = record["rows"]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        curves = [row["curve"] for row in rows if row["recipe"] == recipe]
        steps = [step for step, _ in curves[0]]
        lengths = [[length for _, length in curve] for curve in curves]
        of_step = list(zip(*lengths, strict=True))
        means = [sum(values) / len(values) for values in of_step]
        (line,) = axes.plot(steps, means, "o-", label=recipe)
        least = [min(values) for values in of_step]
        greatest = [max(values) for values in of_step]
        axes.fill_between(steps, least, greatest, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="steps", ylabel="acceptance length, held-out prompts")
    axes.legend()
    return figure


def peers_figure(record: Record) -> Any:
    """Draws tokens per second: above, each way one by one, the best on top; below, by the rows of a batch.

    Returns:
        `matplotlib.figure.Figure`: A column of two axes per dtype. This package is blue.
    """
    dtypes = list(dict.fromkeys(row["dtype"] for row in record["rows"]))
    figure = new_figure(9, 6)
    panels = figure.subplots(2, len(dtypes), squeeze=False)
    for column, dtype in enumerate(dtypes):
        rows = [row for row in record["rows"] if row["dtype"] == dtype]
        _ways(panels[0, column], dtype, rows)
        _batches(panels[1, column], rows)
    facts = record["provenance"][dtypes[0]]
    versions = facts["versions"]
    figure.suptitle(
        f"SmolLM2-135M, {facts['machine']['cpu']}, {facts['threads']} thread, torch {versions['torch']}, "
        f"Transformers {versions['transformers']}, {(facts['commit'] or 'no commit')[:9]}",
        fontsize="medium",
    )
    return figure


def _ways(axes: Any, dtype: str, rows: list[Row]) -> None:
    """Bars of the ways one by one, all sets together, the fastest on top."""
    speeds = {
        row["way"]: row["tokens_per_second"]
        for row in rows
        if row["rows"] == 1 and row["set"] == "all"
    }
    names = sorted(speeds, key=lambda name: speeds[name])
    values = [speeds[name] for name in names]
    bars = axes.barh(names, values, color=[_colour(name) for name in names])
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_title(f"{dtype}, one row, all sets")
    axes.set_xlabel("tokens/s")
    axes.margins(x=0.12)


def _batches(axes: Any, rows: list[Row]) -> None:
    """Lines of the ways that take batches, over the questions that batches have."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["rows"] > 1 and row["set"] == "all":
            lines.setdefault(row["way"], {})[row["rows"]] = row["tokens_per_second"]
    for (way, line), marker in zip(lines.items(), "osD^vP", strict=False):
        axes.plot(list(line), list(line.values()), marker=marker, label=way, color=_colour(way))
    axes.set(xlabel="rows of a batch", ylabel="tokens/s", ylim=(0, None))
    axes.set_xticks(sorted({size for line in lines.values() for size in line}))
    axes.legend(fontsize="small")


def _colour(way: str) -> str:
    """This package is blue, without the draft lighter; plain `generate` is grey, servers are green, others orange."""
    own = {"dflash": BLUE, "undrafted": "#7fb8d8", "plain": MUTED, "plain-static": "#a3abb6"}
    others = {"stock": ORANGE, "stock-static": ORANGE, "zlab": ORANGE, "lookup": ORANGE}
    return {**own, **others}.get(way, GREEN)


FIGURES: dict[str, Callable[[Record], Any]] = {
    "peers": peers_figure,
    "kernels": kernel_figure,
    "step": step_figure,
    "objectives": objectives_figure,
}
