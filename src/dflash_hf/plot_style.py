"""This module draws figures with matplotlib.

No other module imports matplotlib, and it is imported only when needed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Generator, Mapping
from typing import Any

# This is the style of every figure of this project. In a notebook use `matplotlib.pyplot.rcParams.update(STYLE)`. The
# shown values are blue, and the values that they are compared with are orange. The colours are those of Okabe and Ito,
# which people with colour blindness can tell apart.
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
# These are background colours for black text. They show where a token of a block comes from, and whether it was
# accepted.
TOKEN_COLOURS = {"anchor": "#dddddd", "kept": "#b7e4c7", "refused": "#f6c9a8", "own": "#bcd4f6"}


def module_of_research(name: str) -> Any:
    """Imports a module of the extra `research`. Raises `ImportError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"expected {name} for this, got no module of that name; pip install 'dflash-hf[research]'"
        ) from error


def new_figure(width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure` of this size in inches, which is not registered with pyplot."""
    return module_of_research("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )


@contextlib.contextmanager
def styled(style: Mapping[str, Any] = STYLE) -> Generator[None]:
    """Applies a style to the figures that are drawn inside the context. Other settings stay as they are."""
    with module_of_research("matplotlib").rc_context(style):
        yield


def legend_above(axes: Any, num_columns: int = 2) -> None:
    """Puts the legend of a `matplotlib.axes.Axes` above the axes, where it cannot hide data."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=num_columns, borderaxespad=0.2)


def svg(draw: Callable[[Any], None], width: float, height: float, style: Mapping[str, Any]) -> str:
    """Returns a figure as an SVG element whose text stays text, in the fonts of the program that shows it.

    Args:
        draw (callable): Draws on the `matplotlib.figure.Figure` that it gets. No text is read as a formula.
        width, height (`float`): Size in inches.
        style (mapping): Settings of matplotlib's `rcParams`.
    """
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "dflash-hf", "text.parse_math": False}
    with styled({**style, **fixed}):
        figure = new_figure(width, height)
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True)
    text = written.getvalue()
    return text[text.index("<svg") :]  # without the header of the file
