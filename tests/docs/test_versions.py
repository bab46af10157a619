"""The table of versions that the project was tested with says what the constraints say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").partition("### With which versions")[2]


def pinned(file: str) -> dict[str, str]:
    """What a constraints file pins, by package."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_table_says_what_is_pinned(file: str) -> None:
    row = re.search(rf"^\| `{file}` \|(.*)\|$", TABLE, re.MULTILINE)
    assert row, f"no row for {file}"
    _, torch, transformers, triton, _ = (cell.strip() for cell in row[1].split("|"))
    pins = pinned(file)
    assert torch == f"{pins['torch']}+cpu"
    assert transformers == pins["transformers"]
    assert triton == pins.get("triton", "")
