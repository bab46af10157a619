"""Says with which versions the Python that runs this runs the tests.

    python .ci/versions.py                             one line
    python .ci/versions.py --passed constraints.txt    into the row of that name in the table of docs/tested.md
    python .ci/versions.py --same-as .venv/bin/python  exit status 0 if the tests of texts would run with the same ones

The table is written by `make versions` alone, once the tests of all its environments have passed. Which row, and what
was run there, are its first and last column; the columns between are found by what is in the header.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tested.md"
HEADING = "## With which versions"
# Columns of the table and the package that each is about.
PACKAGES = {
    "torch": "torch",
    "Transformers": "transformers",
    "Triton": "triton",
    "huggingface_hub": "huggingface-hub",
    "tokenizers": "tokenizers",
    "accelerate": "accelerate",
    "numpy": "numpy",
}
# What a text on a CPU is computed with; kernels run in `make test-kernels` alone.
OF_TEXTS = (
    "Python",
    "torch",
    "Transformers",
    "huggingface_hub",
    "tokenizers",
    "accelerate",
    "numpy",
)


def installed() -> dict[str, str]:
    """Returns the version of Python and of each package, by column; an empty one where a package is missing."""
    found = {"Python": platform.python_version()}
    for column, package in PACKAGES.items():
        try:
            found[column] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[column] = ""
    return found


def cells(line: str) -> list[str]:
    """Returns the cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def written(page: str, name: str, values: dict[str, str]) -> str:
    """Returns a page with these values, by column, in the row of its table of versions that has a name.

    Raises:
        ValueError: If there is no such table, row or column.
    """
    lines = page.splitlines(keepends=True)
    try:
        start = lines.index(f"{HEADING}\n")
        header = next(at for at in range(start, len(lines)) if lines[at].startswith("|"))
        row = next(at for at in range(header, len(lines)) if cells(lines[at])[0] == f"`{name}`")
    except (ValueError, StopIteration):
        raise ValueError(f"expected a row `{name}` below '{HEADING}', got none; write it") from None
    columns = cells(lines[header])
    missing = [column for column in values if column not in columns]
    if missing:
        raise ValueError(f"expected a table with the columns {missing}, got {columns}; add them")
    now = dict(zip(columns, cells(lines[row]), strict=True))
    now.update(values)
    lines[row] = f"| {' | '.join(now.values())} |\n"
    return "".join(lines)


def is_same(mine: dict[str, str], other_python: str) -> bool:
    """Returns True if another Python has the same versions of all that a text is computed with."""
    shown = subprocess.run(
        [other_python, __file__, "--json"], check=True, capture_output=True, text=True
    ).stdout
    others: dict[str, str] = json.loads(shown)
    return all(mine[name] == others[name] for name in OF_TEXTS)


def main() -> None:
    """Prints the versions, and compares or writes them where that is asked for."""
    parser = argparse.ArgumentParser(description="Say with which versions this Python runs.")
    parser.add_argument(
        "--passed", metavar="ROW", help="write them into this row of the table in docs/tested.md"
    )
    parser.add_argument(
        "--same-as",
        metavar="PYTHON",
        help="say by the exit status whether this one has the same ones",
    )
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    options = parser.parse_args()
    row, versions = options.passed, installed()
    if options.json:
        print(json.dumps(versions))
        return
    if options.same_as:
        sys.exit(0 if is_same(versions, options.same_as) else 1)
    print(
        "versions:",
        ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()),
        flush=True,
    )
    if row is None:
        return
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        page = written(PAGE.read_text(encoding="utf-8"), row, versions | {"passed": today})
    except ValueError as error:
        sys.exit(f"versions: {error}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
