"""Figures by matplotlib: the only module that imports it, and only when asked."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Generator, Mapping
from typing import Any

# How every figure of this project looks; in a notebook: `matplotlib.pyplot.rcParams.update(STYLE)`. Blue is what is
# shown, orange what it is compared with: Okabe and Ito's, which those who see colours differently can tell apart.
INK = "#161a21"
MUTED = "#5b6676"
LINE = "#e1e5eb"
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
STYLE: dict[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
# Behind black text: where a token of a block comes from, and what became of it.
TOKEN_COLOURS = {"anchor": "#dddddd", "kept": "#b7e4c7", "refused": "#f6c9a8", "own": "#bcd4f6"}


def module_of_research(name: str) -> Any:
    """Imports a module of the extra `research`; raises `ImportError` without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"expected {name} for this, got no module of that name; pip install 'dflash-hf[research]'"
        ) from error


def new_figure(width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure` of this many inches, not registered with pyplot."""
    return module_of_research("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )


@contextlib.contextmanager
def styled(style: Mapping[str, Any] = STYLE) -> Generator[None]:
    """Draws what is drawn inside in a style, and leaves the settings of the rest as they are."""
    with module_of_research("matplotlib").rc_context(style):
        yield


def legend_above(axes: Any, num_columns: int = 2) -> None:
    """Puts the legend of a `matplotlib.axes.Axes` above it, where there is no data that it could hide."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=num_columns, borderaxespad=0.2)


def svg(draw: Callable[[Any], None], width: float, height: float, style: Mapping[str, Any]) -> str:
    """Returns a figure as an SVG element whose text is text, in the fonts of whoever shows it.

    Args:
        draw (callable): Draws on the `matplotlib.figure.Figure` that it is given. No text is read as a formula.
        width, height (`float`): In inches.
        style (mapping): Of matplotlib's `rcParams`.
    """
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "dflash-hf", "text.parse_math": False}
    with styled({**style, **fixed}):
        figure = new_figure(width, height)
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True)
    text = written.getvalue()
    return text[text.index("<svg") :]  # without the head of a file
