"""Conversions of records: codes are expanded, dates, times and units rewritten, keys restyled, the layout changed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tasks_base import Draw, same_text, user


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A field, its snake_case key, and a draw of (source value, target value)."""

    key: str
    draw: Callable[[random.Random], tuple[str, str]]


def _coded(codes: dict[str, str]) -> Callable[[random.Random], tuple[str, str]]:
    """Return a draw of a code and its expansion."""
    items = tuple(codes.items())
    return lambda rng: rng.choice(items)


def _date(rng: random.Random) -> tuple[str, str]:
    """Draw an ISO date and its day-first form."""
    year, month, day = rng.randint(2010, 2029), rng.randint(1, 12), rng.randint(1, 28)
    return f"{year}-{month:02d}-{day:02d}", f"{day:02d}.{month:02d}.{year}"


def _clock(rng: random.Random) -> tuple[str, str]:
    """Draw a 24 hour time and its 12 hour form."""
    hour, minute = rng.randint(0, 23), rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50))
    return (
        f"{hour:02d}:{minute:02d}",
        f"{hour % 12 or 12}:{minute:02d} {'am' if hour < 12 else 'pm'}",
    )


def _cents(rng: random.Random) -> tuple[str, str]:
    """Draw an amount in cents and in euros."""
    cents = rng.randint(1000, 9999)
    return str(cents), f"{cents // 100}.{cents % 100:02d} EUR"


def _grams(rng: random.Random) -> tuple[str, str]:
    """Draw a weight in grams and in kilograms."""
    grams = rng.randint(1000, 9999)
    return str(grams), f"{grams // 1000}.{grams % 1000:03d} kg"


def _centimetres(rng: random.Random) -> tuple[str, str]:
    """Draw a length in centimetres and in metres."""
    length = rng.randint(100, 999)
    return str(length), f"{length // 100}.{length % 100:02d} m"


def _room(rng: random.Random) -> tuple[str, str]:
    """Draw a room number and its floor and door."""
    floor, door = rng.randint(1, 9), rng.randint(10, 99)
    return f"{floor}{door}", f"floor {floor}, door {door}"


def _duration(rng: random.Random) -> tuple[str, str]:
    """Draw a duration with a colon and with units."""
    hours, minutes = rng.randint(1, 9), rng.randint(10, 59)
    return f"{hours}:{minutes}", f"{hours} h and {minutes} min"


def _score(rng: random.Random) -> tuple[str, str]:
    """Draw a fraction of ten and its wording."""
    points = rng.randint(0, 9)
    return f"{points}/10", f"{points} out of 10 points"


def _version(rng: random.Random) -> tuple[str, str]:
    """Draw a dotted version and its wording."""
    major, minor = rng.randint(0, 9), rng.randint(0, 9)
    return f"{major}.{minor}", f"release {major}, update {minor}"


def _latitude(rng: random.Random) -> tuple[str, str]:
    """Draw a latitude and its wording."""
    degrees, north = rng.randint(10, 89), rng.random() < 0.5
    return f"{degrees}{'N' if north else 'S'}", f"{degrees} degrees {'north' if north else 'south'}"


_COLUMNS: Final = (
    Column(key="date", draw=_date),
    Column(key="time", draw=_clock),
    Column(key="price", draw=_cents),
    Column(key="weight", draw=_grams),
    Column(key="item_size", draw=_centimetres),
    Column(key="room", draw=_room),
    Column(key="travel_time", draw=_duration),
    Column(key="test_result", draw=_score),
    Column(key="version", draw=_version),
    Column(key="latitude", draw=_latitude),
    Column(
        key="order_status",
        draw=_coded(
            {
                "N": "new",
                "P": "paid",
                "S": "shipped",
                "D": "delivered",
                "R": "returned",
                "X": "cancelled",
            }
        ),
    ),
    Column(key="is_active", draw=_coded({"Y": "yes", "N": "no"})),
)


def _snake(key: str) -> str:
    """Keep a snake_case key."""
    return key


def _camel(key: str) -> str:
    """Turn a snake_case key into camelCase."""
    head, *tail = key.split("_")
    return head + "".join(part.capitalize() for part in tail)


def _title(key: str) -> str:
    """Turn a snake_case key into Title Case words."""
    return " ".join(part.capitalize() for part in key.split("_"))


_KEY_STYLES: Final = {"snake_case": _snake, "camelCase": _camel, "Title Case": _title}

Rows = list[list[str]]


def _to_yaml(keys: list[str], rows: Rows) -> str:
    """Write rows as a YAML list of mappings."""
    return "\n".join(
        "\n".join(
            f"{'  ' if at else '- '}{k}: {v}"
            for at, (k, v) in enumerate(zip(keys, row, strict=True))
        )
        for row in rows
    )


def _to_lines(keys: list[str], rows: Rows) -> str:
    """Write each row as a line of key=value pairs."""
    return "\n".join("; ".join(f"{k}={v}" for k, v in zip(keys, row, strict=True)) for row in rows)


def _to_compact_json(keys: list[str], rows: Rows) -> str:
    """Write rows as JSON lines."""
    return "\n".join(
        "{" + ", ".join(f'"{k}": "{v}"' for k, v in zip(keys, row, strict=True)) + "}"
        for row in rows
    )


def _to_pairs(keys: list[str], rows: Rows) -> str:
    """Write rows as two-column comma separated values."""
    return "\n".join(f"{k},{v}" for row in rows for k, v in zip(keys, row, strict=True))


def _to_object(keys: list[str], rows: Rows) -> str:
    """Write each row as a JSON object with one value per line."""
    return "\n".join(
        "{\n" + ",\n".join(f'  "{k}": "{v}"' for k, v in zip(keys, row, strict=True)) + "\n}"
        for row in rows
    )


def _to_list(keys: list[str], rows: Rows) -> str:
    """Write rows as a Markdown list with bold keys."""
    return "\n".join(f"* **{k}**: {v}" for row in rows for k, v in zip(keys, row, strict=True))


_SOURCES: Final = {"CSV": _to_pairs, "JSON": _to_compact_json, "key=value": _to_lines}
_TARGETS: Final = {"JSON": _to_object, "YAML": _to_yaml, "a Markdown list": _to_list}
_REQUESTS: Final = (
    "Convert this {source} to {target}. Expand the codes and use {style} keys.",
    "Please turn the {source} data below into {target} with {style} keys and readable values.",
    "Rewrite the following {source} as {target}; keys in {style}, all codes spelled out.",
)


def make_structured(rng: random.Random) -> Draw:
    """Draw a record of seven to ten coded fields and its conversion."""
    columns = rng.sample(_COLUMNS, rng.randint(7, 10))
    cells = [column.draw(rng) for column in columns]
    source, target, style = (
        rng.choice(list(_SOURCES)),
        rng.choice(list(_TARGETS)),
        rng.choice(list(_KEY_STYLES)),
    )
    source_text = _SOURCES[source](
        [column.key for column in columns], [[cell[0] for cell in cells]]
    )
    answer = _TARGETS[target](
        [_KEY_STYLES[style](column.key) for column in columns], [[cell[1] for cell in cells]]
    )
    request = rng.choice(_REQUESTS).format(source=source, target=target, style=style)
    return Draw(
        messages=(user(f"{request}\n{source_text}"),), answer=answer, checker=same_text(answer)
    )
