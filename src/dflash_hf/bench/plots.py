"""The figures of a report, as SVG elements: text is text, and colours are those of the page around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_hf.figures import STYLE as SHARED
from dflash_hf.figures import svg

# matplotlib knows no variables: it is given colours of which each stands for one. On its own, a figure has the light
# ones. Okabe and Ito's, which those who see colours differently can tell apart; every line has its own marker too.
INK, MUTED, LINE, BAD, PAPER = "#000101", "#000102", "#000103", "#000104", "#000105"
SERIES = [f"#0002{number:02x}" for number in range(8)]
VARIABLES = {
    INK: "ink,#161a21",
    MUTED: "muted,#5b6676",
    LINE: "line,#e1e5eb",
    BAD: "bad,#a33a00",
    PAPER: "bg,#ffffff",
} | {
    stand_in: f"c{number},{colour}"
    for number, (stand_in, colour) in enumerate(
        zip(
            SERIES,
            ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7a4fbf", "#6b7280"),
            strict=True,
        )
    )
}
MARKERS = "osD^vPX*"
WIDTH = 3.9  # inches, of which a narrow screen shows one and a wide one three: text is readable on both
MAX_ROWS = 60  # of a figure with a row per set and method; beyond, all sets together
MAX_NAME = 26
MIN_VERIFIES = 5  # in a bin along a text: a mean of fewer says nothing
STYLE: dict[str, Any] = {
    **SHARED,
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "legend.fontsize": 7.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the report.

    Args:
        name (`str`): Its anchor on the page.
        title (`str`): What it shows.
        caption (`str`): How to read it.
        svg (`str`): The figure, as an SVG element.
    """

    name: str
    title: str
    caption: str
    svg: str


def figures(summary: dict[str, Any], text: tuple[str, list[int]] | None) -> dict[str, Figure]:
    """Draws what a summary has something to show for, by name.

    Args:
        summary (`dict`): Of a run.
        text (`tuple`, *optional*): The name of one text, and the tokens that each of its verifies committed.

    Raises:
        ImportError: Without matplotlib.
    """
    methods = [method for method in summary["methods"] if method["all"]["texts"]]
    colours = {method["model_id"]: SERIES[number % len(SERIES)] for number, method in enumerate(methods)}
    # Beyond eight methods a colour comes again with the next marker.
    markers = {
        method["model_id"]: MARKERS[(number + number // len(SERIES)) % len(MARKERS)]
        for number, method in enumerate(methods)
    }
    pen = Pen(colours=colours, markers=markers)
    drawn = [
        _speedups(methods, pen),
        _positions(methods, pen),
        _along_text(methods, pen, summary["text_bin_tokens"]),
        _one_text(text),
        _latencies(methods, pen),
        _accuracies(methods, pen),
        _margins(methods, pen),
    ]
    return {figure.name: figure for figure in drawn if figure is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pen:
    """How the points and lines of each method look, in all figures alike."""

    colours: dict[str, str]
    markers: dict[str, str]

    def of(self, method: dict[str, Any]) -> dict[str, Any]:
        """Colour and marker of a method."""
        return {"color": self.colours[method["model_id"]], "marker": self.markers[method["model_id"]]}


def short(name: str) -> str:
    """Returns a name, its middle left out where it is long: cells of a sweep differ at the end."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 2]}…{name[1 - MAX_NAME // 2 :]}"


def figure(name: str, title: str, caption: str, height: float, draw: Callable[[Any], None]) -> Figure:
    """Draws a figure, its colours made variables, its ids its own on a page of several."""
    element = svg(draw, WIDTH, height, STYLE)
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", element)
    for stand_in, variable in VARIABLES.items():
        element = element.replace(stand_in, f"var(--{variable})")
    # As large as there is room; what it shows is said by its caption, and by the table beside it.
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", element[: element.index(">")])
    element = f'{head} role="img" aria-label="{title}"{element[element.index(">") :]}'
    return Figure(name=name, title=title, caption=caption, svg=element)


def _speedups(methods: Sequence[dict[str, Any]], pen: Pen) -> Figure | None:
    compared = [method for method in methods if method["all"]["speedup"]]
    names = list(dict.fromkeys(name for method in compared for name in method["sets"]))
    groups = [(name, [(m, m["sets"][name]["speedup"]) for m in compared if name in m["sets"]]) for name in names]
    if len(names) != 1:
        groups.append(("all sets", [(method, method["all"]["speedup"]) for method in compared]))
    if sum(len(rows) + 1 for _, rows in groups) > MAX_ROWS:
        groups = groups[-1:]
    groups = [(name, found) for name, rows in groups if (found := [row for row in rows if row[1] and row[1]["ratio"]])]
    if not groups:
        return None
    count = sum(len(rows) + 1 for _, rows in groups)

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        labels, y = list[str](), 0
        largest = max(row[1]["high"] or row[1]["ratio"] for _, rows in groups for row in rows)
        for name, rows in groups:
            here = {"transform": axes.get_yaxis_transform(), "va": "center"}
            axes.text(0.0, y, short(name), weight="bold", backgroundcolor=PAPER, **here)
            labels.append("")
            for method, speed in rows:
                y += 1
                low, high = (speed[end] if speed[end] is not None else speed["ratio"] for end in ("low", "high"))
                axes.plot([low, high], [y, y], color=pen.of(method)["color"], linewidth=2.2, solid_capstyle="butt")
                axes.plot(speed["ratio"], y, linestyle="", **pen.of(method))
                axes.text(high + largest * 0.03, y, f"{speed['ratio']:.2f}×", va="center")
                labels.append(short(method["model_id"]))
            y += 1
        axes.axvline(1.0, color=MUTED, linewidth=0.8, linestyle=(0, (3, 2)))
        axes.set(ylim=(y - 0.4, -0.6), xlim=(0, largest * 1.17), xlabel="tokens/s over the baseline's")
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")

    return figure(
        "fig-speedup",
        "Speed-up",
        "Ratio of tokens/s to the baseline's, with its 95 % bootstrap interval over questions. Left of the dashed "
        "line a method is slower than the baseline.",
        0.55 + 0.185 * count,
        draw,
    )


def _positions(methods: Sequence[dict[str, Any]], pen: Pen) -> Figure | None:
    drafting = [m for m in methods if m["all"]["acceptance"] and m["all"]["acceptance"]["acceptance_at_pos"]]
    if not drafting:
        return None

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        for method in drafting:
            counts = method["all"]["acceptance"]
            positions = range(1, len(counts["acceptance_at_pos"]) + 1)
            axes.plot(positions, counts["acceptance_at_pos"], label=short(method["model_id"]), **pen.of(method))
            given = counts["conditional_acceptance_at_pos"]
            known = [(p, share) for p, share in zip(positions, given, strict=True) if share is not None]
            if known:
                axes.plot(*zip(*known, strict=True), color=pen.of(method)["color"], linewidth=1, linestyle=(0, (3, 2)))
        axes.set(ylim=(0, 1.03), xlabel="position in the block", ylabel="share accepted")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid()
        _legend(drawing, len(drafting))

    caption = (
        "Solid: all proposals up to here accepted, of all drafts. Dashed: accepted here, of those accepted before."
    )
    return figure("fig-positions", "Acceptance per position", caption, 2.4 + _rows(len(drafting)), draw)


def _along_text(methods: Sequence[dict[str, Any]], pen: Pen, bin_tokens: int) -> Figure | None:
    lines = [
        (method, [row for row in method["all"]["acceptance"]["along_text"] if row["verifies"] >= MIN_VERIFIES])
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
                label=short(method["model_id"]),
                drawstyle="steps-post",
                color=pen.of(method)["color"],
            )
        axes.set(xlabel="tokens of the text before a verify", ylabel="tokens per verify")
        axes.set_ylim(bottom=0)
        axes.grid()
        _legend(drawing, len(lines))

    caption = "Mean over all texts, by how far into its text a verify was."
    return figure("fig-along", "Tokens per verify along a text", caption, 2.4 + _rows(len(lines)), draw)


def _one_text(text: tuple[str, list[int]] | None) -> Figure | None:
    if text is None:
        return None
    name, counts = text

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        starts = [1 + sum(counts[:number]) for number in range(len(counts))]
        axes.bar(starts, counts, counts, align="edge", color=SERIES[0], edgecolor=PAPER, linewidth=0.7)
        mean = sum(counts) / len(counts)
        axes.axhline(mean, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
        axes.set_title(f"mean {mean:.2f}", loc="right", weight="normal")
        axes.set(xlabel="token of the text", ylabel="tokens committed", xlim=(0, None))
        axes.grid(axis="y")

    caption = f"Each bar is a verify, as wide and as high as the tokens that it committed: {name}."
    return figure("fig-text", "One text, verify by verify", caption, 2.2, draw)


def _latencies(methods: Sequence[dict[str, Any]], pen: Pen) -> Figure | None:
    panels = [("ttft", "TTFT, ms"), ("tpot", "TPOT, ms")]
    panels = [(name, label) for name, label in panels if any(method["all"][name] for method in methods)]
    if not panels:
        return None

    def draw(drawing: Any) -> None:
        for axes, (name, label) in zip(drawing.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            shown = [method for method in methods if method["all"][name]]
            for y, method in enumerate(shown):
                median, p95 = (1000 * method["all"][name][key] for key in ("median", "p95"))
                axes.plot([median, p95], [y, y], color=pen.of(method)["color"], linewidth=2.2, solid_capstyle="butt")
                axes.plot(median, y, linestyle="", **pen.of(method))
            axes.set_yticks(range(len(shown)), [short(method["model_id"]) for method in shown])
            axes.set(ylim=(len(shown) - 0.4, -0.6), xlabel=label)
            axes.set_xlim(left=0)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x")

    height = 0.3 + len(panels) * (0.55 + 0.185 * len(methods))
    return figure("fig-latency", "Latency", "Median, and a line to the 95th percentile, over texts.", height, draw)


def _accuracies(methods: Sequence[dict[str, Any]], pen: Pen) -> Figure | None:
    names = list(dict.fromkeys(n for m in methods for n, block in m["sets"].items() if block["accuracy"]))
    if not names:
        return None

    def draw(drawing: Any) -> None:
        shown: dict[str, Any] = {}
        panels = list(drawing.subplots(len(names), 1, squeeze=False)[:, 0])
        for axes, name in zip(panels, names, strict=True):
            for method in methods:
                block = method["sets"].get(name)
                if not block or not block["accuracy"]:
                    continue
                found = block["accuracy"]
                ends = [[max(0.0, sign * (found[end] - found["mean"]))] for end, sign in (("low", -1), ("high", 1))]
                look: dict[str, Any] = {"elinewidth": 0.9, "linestyle": "", **pen.of(method)}
                shown[method["model_id"]] = axes.errorbar(block["tokens_per_second"], found["mean"], ends, **look)
            axes.set_title(short(name), loc="left")
            axes.set(ylim=(-0.03, 1.03), ylabel="accuracy")
            axes.set_xlim(left=0)
            axes.grid()
        panels[-1].set_xlabel("tokens/s")
        labels = [short(name) for name in shown]
        drawing.legend(list(shown.values()), labels, loc="outside lower center", ncols=2)

    caption = (
        "Share of questions answered right over tokens/s, with Wilson's 95 % interval: fast and wrong is low right."
    )
    height = 0.4 + 1.5 * len(names) + _rows(len(methods))
    return figure("fig-accuracy", "Accuracy beside throughput", caption, height, draw)


def _margins(methods: Sequence[dict[str, Any]], pen: Pen) -> Figure | None:
    shown = [m for m in methods if any(row["margin"] is not None for row in m["differing"])]
    if not shown:
        return None

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        for y, method in enumerate(shown):
            rows = sorted((r for r in method["differing"] if r["margin"] is not None), key=lambda row: row["margin"])
            for number, row in enumerate(rows):
                look = {"color": BAD, "marker": "x"} if row["is_tie"] is False else pen.of(method)
                place = y - 0.3 + 0.6 * (number % 7) / 6  # beside one another, not on one another
                axes.plot(row["margin"], place, linestyle="", alpha=0.8, **{**look, "markersize": 3})
        axes.set_yticks(range(len(shown)), [short(method["model_id"]) for method in shown])
        axes.set(ylim=(len(shown) - 0.4, -0.6), xlabel="margin in the target's float32 logits")
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")

    caption = (
        "Of each answer that is not the baseline's, at its first token that differs. A cross is no tie of rounding."
    )
    return figure("fig-margins", "Where texts differ, by how little", caption, 0.6 + 0.5 * len(shown), draw)


def _rows(count: int) -> float:
    """Inches of a legend of so many entries."""
    return 0.17 * ((count + 1) // 2)


def _legend(drawing: Any, count: int) -> None:
    if count > 1:
        drawing.legend(loc="outside lower center", ncols=2)


__all__ = ["Figure", "figures"]
