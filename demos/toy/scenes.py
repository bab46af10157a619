"""Pictures of the vision tasks, as plain descriptions and as drawings: scenes of objects, bar charts, signs.

A picture is a frozen value, equal and hashable like any other, so that a split can be decided without drawing it. The
canvas sizes are chosen so that the processor's resize (at most 9,216 pixels, sides in steps of 16) lands on whole
cells: 384 x 384 becomes 96 x 96, and 512 x 256 becomes 128 x 64.
"""

import math
import random
from dataclasses import dataclass
from functools import cache
from typing import Final

from PIL import Image, ImageDraw, ImageFont

CELL: Final = 128
# Drawn this many times larger and averaged down, for smooth edges.
_OVERSAMPLING: Final = 2

COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (214, 39, 40),
    "blue": (31, 97, 214),
    "green": (34, 153, 60),
    "yellow": (250, 208, 24),
    "purple": (136, 62, 178),
    "orange": (247, 127, 18),
    "pink": (247, 130, 190),
    "brown": (122, 74, 40),
}
BACKGROUNDS: Final[dict[str, tuple[int, int, int]]] = {
    "white": (255, 255, 255),
    "grey": (205, 208, 212),
    "black": (22, 24, 28),
}
SHAPES: Final = ("circle", "square", "triangle", "star", "diamond", "cross", "ring", "heart")
SIZES: Final[dict[str, int]] = {"big": 52, "small": 28}  # half the width of an object
GRIDS: Final[tuple[tuple[int, int], ...]] = ((3, 3), (2, 4), (4, 2))  # rows, columns

_ROW_NAMES: Final = {
    2: ("top", "bottom"),
    3: ("top", "middle", "bottom"),
    4: ("top", "upper", "lower", "bottom"),
}
_COLUMN_NAMES: Final = {
    2: ("left", "right"),
    3: ("left", "centre", "right"),
    4: ("far left", "left", "right", "far right"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One object of a scene: what it is, its cell (zero-based) and its distance from the cell's middle, in pixels."""

    shape: str
    colour: str
    size: str
    row: int
    column: int
    offset: tuple[int, int]

    @property
    def name(self) -> str:
        """Size, colour and shape, as the answers put them."""
        return f"{self.size} {self.colour} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Objects on a grid, in reading order."""

    rows: int
    columns: int
    background: str
    things: tuple[Thing, ...]

    def place(self, row: int, column: int) -> str:
        """Return the name of a cell: `top left`, `lower right` ..."""
        return f"{_ROW_NAMES[self.rows][row]} {_COLUMN_NAMES[self.columns][column]}"

    def draw(self) -> Image.Image:
        """Draw the scene."""
        canvas, pen = _canvas((self.columns * CELL, self.rows * CELL), BACKGROUNDS[self.background])
        for thing in self.things:
            x = (thing.column + 0.5) * CELL + thing.offset[0]
            y = (thing.row + 0.5) * CELL + thing.offset[1]
            _draw_thing(pen, thing, x, y, BACKGROUNDS[self.background])
        return canvas.reduce(_OVERSAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Bars of different colours with whole values of 1 to 9, from left to right; the value stands above its bar."""

    bars: tuple[tuple[str, int], ...]

    def draw(self) -> Image.Image:
        """Draw the chart."""
        side = 3 * CELL
        canvas, pen = _canvas((side, side), BACKGROUNDS["white"])
        unit, floor = 34, side - 28
        for value in range(1, 10):
            _line(
                pen,
                (14, floor - value * unit),
                (side - 14, floor - value * unit),
                (228, 230, 233),
                2,
            )
        step = (side - 28) / len(self.bars)
        for at, (colour, value) in enumerate(self.bars):
            left = 14 + (at + 0.18) * step
            right = 14 + (at + 0.82) * step
            _rectangle(pen, (left, floor - value * unit, right, floor), COLOURS[colour])
            _text(
                pen, ((left + right) / 2, floor - value * unit - 18), str(value), 34, (30, 32, 36)
            )
        _line(pen, (10, floor), (side - 10, floor), (30, 32, 36), 5)
        return canvas.reduce(_OVERSAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A short word or a number on a board."""

    text: str
    colour: str
    background: str

    def draw(self) -> Image.Image:
        """Draw the sign."""
        canvas, pen = _canvas((4 * CELL, 2 * CELL), BACKGROUNDS[self.background])
        rim = (150, 154, 160)
        for inset in range(10, 18):
            _outline(pen, (inset, inset, 4 * CELL - inset, 2 * CELL - inset), rim)
        _text(pen, (2 * CELL, CELL), self.text, 132, COLOURS[self.colour])
        return canvas.reduce(_OVERSAMPLING)


Picture = Scene | Chart | Sign


def draw_scene(rng: random.Random, grid: tuple[int, int], count: int) -> Scene:
    """Make up a scene of `count` objects, no two of them of the same colour and shape."""
    rows, columns = grid
    cells = sorted(
        rng.sample([(row, column) for row in range(rows) for column in range(columns)], count)
    )
    looks = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], count)
    things = tuple(
        Thing(
            shape=shape,
            colour=colour,
            size=rng.choice(tuple(SIZES)),
            row=row,
            column=column,
            offset=(rng.randint(-8, 8), rng.randint(-8, 8)),
        )
        for (row, column), (colour, shape) in zip(cells, looks, strict=True)
    )
    return Scene(
        rows=rows, columns=columns, background=rng.choice(tuple(BACKGROUNDS)), things=things
    )


def _canvas(
    size: tuple[int, int], colour: tuple[int, int, int]
) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (size[0] * _OVERSAMPLING, size[1] * _OVERSAMPLING), colour)
    return canvas, ImageDraw.Draw(canvas)


def _scaled(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x * _OVERSAMPLING, y * _OVERSAMPLING) for x, y in points]


def _rectangle(
    pen: ImageDraw.ImageDraw, box: tuple[float, float, float, float], fill: tuple[int, int, int]
) -> None:
    pen.rectangle([value * _OVERSAMPLING for value in box], fill=fill)


def _outline(
    pen: ImageDraw.ImageDraw, box: tuple[float, float, float, float], colour: tuple[int, int, int]
) -> None:
    pen.rectangle([value * _OVERSAMPLING for value in box], outline=colour, width=_OVERSAMPLING)


def _line(
    pen: ImageDraw.ImageDraw,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: tuple[int, int, int],
    width: int,
) -> None:
    pen.line(_scaled([start, end]), fill=colour, width=width * _OVERSAMPLING)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * _OVERSAMPLING)


def _text(
    pen: ImageDraw.ImageDraw,
    middle: tuple[float, float],
    text: str,
    size: int,
    colour: tuple[int, int, int],
) -> None:
    pen.text(_scaled([middle])[0], text, fill=colour, font=_font(size), anchor="mm")


def _round(angle: float, radius: float, x: float, y: float) -> tuple[float, float]:
    return x + radius * math.sin(angle), y - radius * math.cos(angle)


def _heart(x: float, y: float, half: float) -> list[tuple[float, float]]:
    """Points on the curve 16 sin^3 t, 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t."""
    points = []
    for at in range(40):
        t = at * math.tau / 40
        up = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x + half * math.sin(t) ** 3, y - half * up / 16 - half * 0.1))
    return points


def _draw_thing(
    pen: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, background: tuple[int, int, int]
) -> None:
    """Draw one object around a point."""
    half = SIZES[thing.size]
    colour = COLOURS[thing.colour]
    box = _scaled([(x - half, y - half), (x + half, y + half)])
    if thing.shape == "circle":
        pen.ellipse(box, fill=colour)
    elif thing.shape == "ring":
        pen.ellipse(box, fill=colour)
        pen.ellipse(
            _scaled([(x - half * 0.55, y - half * 0.55), (x + half * 0.55, y + half * 0.55)]),
            fill=background,
        )
    elif thing.shape == "square":
        pen.rectangle(
            _scaled([(x - half * 0.88, y - half * 0.88), (x + half * 0.88, y + half * 0.88)]),
            fill=colour,
        )
    elif thing.shape == "triangle":
        pen.polygon(
            _scaled([(x, y - half), (x + half, y + half * 0.8), (x - half, y + half * 0.8)]),
            fill=colour,
        )
    elif thing.shape == "diamond":
        pen.polygon(
            _scaled([(x, y - half), (x + half * 0.75, y), (x, y + half), (x - half * 0.75, y)]),
            fill=colour,
        )
    elif thing.shape == "cross":
        arm = half * 0.34
        pen.rectangle(_scaled([(x - arm, y - half), (x + arm, y + half)]), fill=colour)
        pen.rectangle(_scaled([(x - half, y - arm), (x + half, y + arm)]), fill=colour)
    elif thing.shape == "star":
        points = [
            _round(at * math.pi / 5, half * (1.08 if at % 2 == 0 else 0.45), x, y)
            for at in range(10)
        ]
        pen.polygon(_scaled(points), fill=colour)
    else:
        pen.polygon(_scaled(_heart(x, y, half)), fill=colour)
