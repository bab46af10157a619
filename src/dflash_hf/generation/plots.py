"""Statistics as a pandas frame and a matplotlib figure: the only module that imports either, and only when asked."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MISSING = "expected {name} for this, got no module of that name; pip install 'dflash-hf[research]'"


def verify_frame(
    num_tried: Sequence[Sequence[int]], num_accepted: Sequence[Sequence[int]], num_committed: Sequence[Sequence[int]]
) -> Any:
    """Builds a `pandas.DataFrame` with one line per row and verify.

    Args:
        num_tried, num_accepted, num_committed (sequences of sequences of `int`): Per row, the counts of each verify.

    Raises:
        ImportError: Without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(MISSING.format(name="pandas")) from error
    lines: list[dict[str, int]] = []
    columns = ["row", "verify", "num_tried", "num_accepted", "num_committed", "num_new"]
    for row, counts in enumerate(zip(num_tried, num_accepted, num_committed, strict=True)):
        total = 1  # the prefill's token
        for verify, (tried, right, kept) in enumerate(zip(*counts, strict=True)):
            total += kept
            lines.append(dict(zip(columns, (row, verify, tried, right, kept, total), strict=True)))
    return pandas.DataFrame(lines, columns=columns)


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


def acceptance_figure(
    joint: Sequence[float], conditional: Sequence[float], histogram: Sequence[int], acceptance_length: float
) -> Any:
    """Draws a `matplotlib.figure.Figure`: acceptance per position on the left, acceptance lengths on the right.

    Args:
        joint, conditional (sequences of `float`): Share accepted at each position, first proposal first.
        histogram (sequence of `int`): Verifies by tokens committed, from 0.
        acceptance_length (`float`): Their mean, marked by a line.

    Raises:
        ImportError: Without matplotlib.
    """
    figure = new_figure(9.0, 3.0)
    left, right = figure.subplots(1, 2)
    positions = range(1, len(joint) + 1)
    left.bar(positions, joint, color="#4c78a8", label="joint: all up to here")
    left.plot(positions, conditional, color="#f58518", marker="o", markersize=3, label="given all before")
    left.set(xlabel="position in the block", ylabel="share accepted", ylim=(0.0, 1.05))
    left.legend(fontsize="small")
    right.bar(range(1, len(histogram)), histogram[1:], color="#4c78a8")
    right.axvline(acceptance_length, color="#f58518", label=f"mean {acceptance_length:.2f}")
    right.set(xlabel="tokens committed by a verify", ylabel="verifies")
    right.legend(fontsize="small")
    return figure


__all__ = ["acceptance_figure", "new_figure", "svg", "verify_frame"]
