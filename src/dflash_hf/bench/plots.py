"""This module draws the figures of a report as SVG elements, with text as text and the colours of the page around."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_hf import plot_style as shared

# Variables of the page, with the colours for a figure without the page. The numbered colours are those of Okabe and
# Ito, which colour-blind people can tell apart. Every line has its own marker too.
COLOURS = {
    **{
        "ink": shared.INK,
        "muted": shared.MUTED,
        "line": shared.LINE,
        "bad": "#a33a00",
        "bg": "#ffffff",
    },
    **{"c0": shared.BLUE, "c1": shared.ORANGE, "c2": shared.GREEN, "c3": "#cc79a7"},
    **{"c4": "#8a6d00", "c5": "#56b4e9", "c6": "#7a4fbf", "c7": "#6b7280"},
}
# matplotlib knows no variables, so it gets colours that stand for variables and are replaced later.
STAND_INS = {name: f"#0001{number:02d}" for number, name in enumerate(COLOURS)}
INK, MUTED, LINE, BAD, PAPER, *SERIES = STAND_INS.values()
MARKERS = "osD^vPX*"
# In inches. A narrow screen shows one figure per row and a wide screen three. Text is readable on both.
WIDTH = 3.9
MAX_ROWS = 60  # rows of a figure per set and method; with more, it shows only all sets together
MAX_NAME = 26
MIN_VERIFIES = 5  # in a bin along a text: a mean of fewer verifies is not meaningful
_OF_PAGE: dict[Any, str] = {shared.INK: INK, shared.MUTED: MUTED, shared.LINE: LINE}
STYLE: dict[str, Any] = {
    **{key: _OF_PAGE.get(value, value) for key, value in shared.STYLE.items()},
    **{"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7.5},
}
DASHED = (0, (3, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the report."""

    name: str  # its anchor on the page
    title: str  # says what it shows
    caption: str  # says how to read it
    svg: str  # the figure as an SVG element


def figures(summary: dict[str, Any], text: tuple[str, list[int]] | None) -> dict[str, Figure]:
    """Draws the figures for which a summary has numbers. Returns them by name.

    Args:
        text (`tuple`, *optional*): Name of one text, and the number of tokens that each of its verifies committed.

    Raises:
        ImportError: Without matplotlib.
    """
    methods: list[dict[str, Any]] = []
    for number, method in enumerate(
        method for method in summary["methods"] if method["all"]["texts"]
    ):
        # After eight methods, colours are repeated with other markers.
        marker = MARKERS[(number + number // len(SERIES)) % len(MARKERS)]
        look = {"color": SERIES[number % len(SERIES)], "marker": marker}
        methods.append({**method, "look": look, "label": short(method["model_id"])})
    drawn = [
        _speedups(methods),
        _positions(methods),
        _along_text(methods, summary["text_bin_tokens"]),
        _one_text(text),
        _latencies(methods),
        _accuracies(methods),
        _margins(methods),
    ]
    return {figure.name: figure for figure in drawn if figure is not None}


def short(name: str) -> str:
    """Returns a name without its middle if it is long. Cells of a sweep differ at the end of their names."""
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME // 2]}…{name[1 - MAX_NAME // 2 :]}"


def figure(
    name: str, title: str, caption: str, height: float, draw: Callable[[Any], None]
) -> Figure:
    """Draws a figure with variables as its colours. Its ids get its name, so that a page can have several figures."""
    element = shared.svg(draw, WIDTH, height, STYLE)
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", element)
    for variable, stand_in in STAND_INS.items():
        element = element.replace(stand_in, f"var(--{variable},{COLOURS[variable]})")
    # The size is left out, so that the figure fills its place. Caption and table describe it for screen readers.
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", element[: element.index(">")])
    element = f'{head} role="img" aria-label="{title}"{element[element.index(">") :]}'
    return Figure(name=name, title=title, caption=caption, svg=element)


def _speedups(methods: Sequence[dict[str, Any]]) -> Figure | None:
    compared = [method for method in methods if method["all"]["speedup"]]
    names = list(dict.fromkeys(name for method in compared for name in method["sets"]))
    groups = [
        (name, [(m, m["sets"][name]["speedup"]) for m in compared if name in m["sets"]])
        for name in names
    ]
    if len(names) != 1:
        groups.append(("all sets", [(method, method["all"]["speedup"]) for method in compared]))
    if sum(len(rows) + 1 for _, rows in groups) > MAX_ROWS:
        groups = groups[-1:]
    groups = [(name, [row for row in rows if row[1] and row[1]["ratio"]]) for name, rows in groups]
    groups = [(name, rows) for name, rows in groups if rows]
    if not groups:
        return None
    count = sum(len(rows) + 1 for _, rows in groups)

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        labels = list[str]()
        y = 0
        largest = max(row[1]["high"] or row[1]["ratio"] for _, rows in groups for row in rows)
        for name, rows in groups:
            here = {"transform": axes.get_yaxis_transform(), "va": "center"}
            axes.text(0.0, y, short(name), weight="bold", backgroundcolor=PAPER, **here)
            labels.append("")
            for method, speed in rows:
                y += 1
                low = speed["low"]
                high = speed["high"]
                if low is None or high is None:  # one question alone has no interval
                    low = speed["ratio"]
                    high = speed["ratio"]
                _span(axes, y, low, high, speed["ratio"], method["look"])
                axes.text(high + largest * 0.03, y, f"{speed['ratio']:.2f}×", va="center")
                labels.append(method["label"])
            y += 1
        axes.axvline(1.0, color=MUTED, linewidth=0.8, linestyle=DASHED)
        _name_rows(axes, labels, "tokens/s over the baseline's", largest * 1.17)
        axes.spines["left"].set_visible(False)

    return figure(
        "fig-speedup",
        "Speed-up",
        "Ratio of tokens/s to the baseline's, with its 95 % bootstrap interval over questions. Left of the dashed "
        "line a method is slower than the baseline.",
        0.55 + 0.185 * count,
        draw,
    )


def _positions(methods: Sequence[dict[str, Any]]) -> Figure | None:
    drafting = [
        m for m in methods if m["all"]["acceptance"] and m["all"]["acceptance"]["acceptance_at_pos"]
    ]
    if not drafting:
        return None

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        for method in drafting:
            counts = method["all"]["acceptance"]
            positions = range(1, len(counts["acceptance_at_pos"]) + 1)
            axes.plot(
                positions, counts["acceptance_at_pos"], label=method["label"], **method["look"]
            )
            given = counts["conditional_acceptance_at_pos"]
            known = [
                (p, share) for p, share in zip(positions, given, strict=True) if share is not None
            ]
            if known:
                axes.plot(
                    *zip(*known, strict=True),
                    color=method["look"]["color"],
                    linewidth=1,
                    linestyle=DASHED,
                )
        axes.set(ylim=(0, 1.03), xlabel="position in the block", ylabel="share accepted")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid()
        _legend(drawing, len(drafting))

    caption = (
        "Solid: all proposals up to here accepted, of all drafts. "
        "Dashed: accepted here, of those accepted before."
    )
    return figure(
        "fig-positions", "Acceptance per position", caption, 2.4 + _rows(len(drafting)), draw
    )


def _along_text(methods: Sequence[dict[str, Any]], bin_tokens: int) -> Figure | None:
    lines = [
        (
            method,
            [
                row
                for row in method["all"]["acceptance"]["along_text"]
                if row["verifies"] >= MIN_VERIFIES
            ],
        )
        for method in methods
        if method["all"]["acceptance"]
    ]
    lines = [(method, rows) for method, rows in lines if rows]
    if not lines:
        return None

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        for method, rows in lines:
            ends = [row["from_token"] for row in rows]
            means = [row["tokens_per_verify"] for row in rows]
            axes.plot(
                [*ends, ends[-1] + bin_tokens],
                [*means, means[-1]],
                label=method["label"],
                drawstyle="steps-post",
                color=method["look"]["color"],
            )
        axes.set(xlabel="tokens of the text before a verify", ylabel="tokens per verify")
        axes.set_ylim(bottom=0)
        axes.grid()
        _legend(drawing, len(lines))

    caption = "Mean over all texts, by how far into its text a verify was."
    return figure(
        "fig-along", "Tokens per verify along a text", caption, 2.4 + _rows(len(lines)), draw
    )


def _one_text(text: tuple[str, list[int]] | None) -> Figure | None:
    if text is None:
        return None
    name, counts = text

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        starts = [1 + sum(counts[:number]) for number in range(len(counts))]
        axes.bar(
            starts, counts, counts, align="edge", color=SERIES[0], edgecolor=PAPER, linewidth=0.7
        )
        mean = sum(counts) / len(counts)
        axes.axhline(mean, color=INK, linewidth=0.8, linestyle=DASHED)
        axes.set_title(f"mean {mean:.2f}", loc="right", weight="normal")
        axes.set(xlabel="token of the text", ylabel="tokens committed", xlim=(0, None))
        axes.grid(axis="y")

    caption = f"Each bar is a verify, as wide and as high as the tokens that it committed: {name}."
    return figure("fig-text", "One text, verify by verify", caption, 2.2, draw)


def _latencies(methods: Sequence[dict[str, Any]]) -> Figure | None:
    panels = [("ttft", "TTFT, ms"), ("tpot", "TPOT, ms")]
    panels = [
        (name, label) for name, label in panels if any(method["all"][name] for method in methods)
    ]
    if not panels:
        return None

    def draw(drawing: Any) -> None:
        for axes, (name, label) in zip(
            drawing.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
        ):
            shown = [method for method in methods if method["all"][name]]
            for y, method in enumerate(shown):
                median, p95 = (1000 * method["all"][name][key] for key in ("median", "p95"))
                _span(axes, y, median, p95, median, method["look"])
            _name_rows(axes, [method["label"] for method in shown], label)

    height = 0.3 + len(panels) * (0.55 + 0.185 * len(methods))
    return figure(
        "fig-latency",
        "Latency",
        "Median, and a line to the 95th percentile, over texts.",
        height,
        draw,
    )


def _accuracies(methods: Sequence[dict[str, Any]]) -> Figure | None:
    names = list(
        dict.fromkeys(n for m in methods for n, block in m["sets"].items() if block["accuracy"])
    )
    if not names:
        return None

    def draw(drawing: Any) -> None:
        shown: dict[str, Any] = {}  # one drawn element per method, for the legend
        panels = list(drawing.subplots(len(names), 1, squeeze=False)[:, 0])
        for axes, name in zip(panels, names, strict=True):
            for method in methods:
                block = method["sets"].get(name)
                if not block or not block["accuracy"]:
                    continue
                found = block["accuracy"]
                ends = [
                    [max(0.0, sign * (found[end] - found["mean"]))]
                    for end, sign in (("low", -1), ("high", 1))
                ]
                look: dict[str, Any] = {"elinewidth": 0.9, "linestyle": "", **method["look"]}
                shown[method["model_id"]] = axes.errorbar(
                    block["tokens_per_second"], found["mean"], ends, **look
                )
            axes.set_title(short(name), loc="left")
            axes.set(ylim=(-0.03, 1.03), ylabel="accuracy")
            axes.set_xlim(left=0)
            axes.grid()
        panels[-1].set_xlabel("tokens/s")
        labels = [short(name) for name in shown]
        drawing.legend(list(shown.values()), labels, loc="outside lower center", ncols=2)

    caption = (
        "Share of questions answered right over tokens/s, with Wilson's 95 % interval: "
        "fast and wrong is low right."
    )
    height = 0.4 + 1.5 * len(names) + _rows(len(methods))
    return figure("fig-accuracy", "Accuracy beside throughput", caption, height, draw)


def _margins(methods: Sequence[dict[str, Any]]) -> Figure | None:
    shown = [m for m in methods if any(row["margin"] is not None for row in m["differing"])]
    if not shown:
        return None

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        for y, method in enumerate(shown):
            rows = sorted(
                (r for r in method["differing"] if r["margin"] is not None),
                key=lambda row: row["margin"],
            )
            for number, row in enumerate(rows):
                look = {"color": BAD, "marker": "x"} if row["is_tie"] is False else method["look"]
                place = y - 0.3 + 0.6 * (number % 7) / 6  # so that points do not cover each other
                axes.plot(
                    row["margin"], place, linestyle="", alpha=0.8, **{**look, "markersize": 3}
                )
        _name_rows(
            axes, [method["label"] for method in shown], "margin in the target's float32 logits"
        )

    caption = (
        "Of each answer that is not the baseline's, at its first token that differs. "
        "A cross is no tie of rounding."
    )
    return figure(
        "fig-margins", "Where texts differ, by how little", caption, 0.6 + 0.5 * len(shown), draw
    )


def _span(axes: Any, y: int, low: float, high: float, at: float, look: dict[str, Any]) -> None:
    """Draws a method's value in a row, and a line between two values."""
    axes.plot([low, high], [y, y], color=look["color"], linewidth=2.2, solid_capstyle="butt")
    axes.plot(at, y, linestyle="", **look)


def _name_rows(axes: Any, labels: Sequence[str], xlabel: str, right: float | None = None) -> None:
    """Sets the names of rows, the first row at the top. The values begin at 0."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set(ylim=(len(labels) - 0.4, -0.6), xlim=(0, right), xlabel=xlabel)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _rows(count: int) -> float:
    """Returns the height in inches of a legend with `count` entries."""
    return 0.17 * ((count + 1) // 2)


def _legend(drawing: Any, count: int) -> None:
    if count > 1:
        drawing.legend(loc="outside lower center", ncols=2)
