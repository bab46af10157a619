"""Figures by matplotlib: the only module that imports it, and only when asked."""

from __future__ import annotations

import importlib
from typing import Any

# Blue is what is shown, orange what it is compared with: Okabe and Ito's, which those who see colours differently can
# tell apart.
BLUE, ORANGE = "#0072b2", "#d55e00"


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
    return module_of_research("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def legend_above(axes: Any, num_columns: int = 2) -> None:
    """Puts the legend of a `matplotlib.axes.Axes` above it, where there is no data that it could hide."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=num_columns, borderaxespad=0.2)
