"""Figures by matplotlib: the only module that imports it, and only when asked."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

MISSING = "expected {name} for this, got no module of that name; pip install 'dflash-hf[research]'"


def new_figure(width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure` of this many inches, not registered with pyplot.

    Raises:
        ImportError: Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING.format(name="matplotlib")) from error
    return Figure(figsize=(width, height), layout="constrained")


def svg(draw: Callable[[Any], None], width: float, height: float, style: Mapping[str, Any]) -> str:
    """Returns a figure as an SVG element whose text is text, in the fonts of whoever shows it.

    Args:
        draw (callable): Draws on the `matplotlib.figure.Figure` that it is given. No text is read as a formula.
        width, height (`float`): In inches.
        style (mapping): Of matplotlib's `rcParams`.

    Raises:
        ImportError: Without matplotlib.
    """
    new_figure(width, height)  # which says what is missing
    import matplotlib

    fixed = {"svg.fonttype": "none", "svg.hashsalt": "dflash-hf", "text.parse_math": False}
    settings: Any = {**style, **fixed}
    with matplotlib.rc_context(settings):
        figure = new_figure(width, height)
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True)
    text = written.getvalue()
    return text[text.index("<svg") :]  # without the head of a file


__all__ = ["MISSING", "new_figure", "svg"]
