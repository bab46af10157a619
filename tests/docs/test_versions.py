"""The table of versions that the project was tested with says what the constraints say, and is written by a script."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dflash_hf.generation.generate import NEWEST_TRANSFORMERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tested.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that prints the versions and writes the table."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / ".ci" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned(file: str) -> dict[str, str]:
    """What a constraints file pins, by package."""
    return dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    )


def row_of(script: ModuleType, page: str, name: str) -> dict[str, str]:
    """The row of the table that has a name, by column."""
    table = page.partition(script.HEADING)[2]
    rows = [script.cells(line) for line in table.splitlines() if line.startswith("|")]
    [row] = [row for row in rows if row[0] == f"`{name}`"]
    return dict(zip(rows[0], row, strict=True))


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_table_says_what_is_pinned(script: ModuleType, file: str) -> None:
    row = row_of(script, PAGE, file)
    pins = pinned(file)
    assert row["torch"] == f"{pins['torch']}+cpu"
    others = {column: package for column, package in script.PACKAGES.items() if column != "torch"}
    assert {column: row[column] for column in others} == {
        column: pins.get(package, "") for column, package in others.items()
    }


def test_the_newest_tested_transformers_is_that_of_constraints() -> None:
    assert pinned("constraints.txt")["transformers"] == NEWEST_TRANSFORMERS


def test_versions_are_compared_with_those_of_another_python(script: ModuleType) -> None:
    mine = script.installed()
    assert script.is_same(mine, sys.executable)
    assert script.is_same(mine | {"Triton": "0"}, sys.executable), (
        "no text on a CPU goes through it"
    )
    assert not script.is_same(mine | {"Transformers": "0"}, sys.executable)


def test_what_passed_is_written_into_its_row_alone(script: ModuleType) -> None:
    values = {"Python": "3.99.0", "torch": "9.9.9", "passed": "2000-01-01"}
    page = script.written(PAGE, "constraints-oldest.txt", values)
    before = row_of(script, PAGE, "constraints-oldest.txt")
    assert row_of(script, page, "constraints-oldest.txt") == before | values
    changed = [
        old for old, new in zip(PAGE.splitlines(), page.splitlines(), strict=True) if old != new
    ]
    assert len(changed) == 1


def test_installed_versions_have_their_columns(script: ModuleType) -> None:
    row = row_of(script, PAGE, "constraints.txt")
    versions = script.installed()
    assert set(versions) < set(row)
    assert all(versions[column] for column in ("Python", "torch", "Transformers"))


@pytest.mark.parametrize(
    ("page", "name", "values", "words"),
    [
        (PAGE, "nowhere.txt", {}, "expected a row `nowhere.txt`"),
        ("# Nothing\n", "constraints.txt", {}, "expected a row `constraints.txt`"),
        (PAGE, "constraints.txt", {"jax": "1"}, r"with the columns \['jax'\]"),
    ],
    ids=["row", "table", "column"],
)
def test_a_table_without_the_place_is_refused(
    script: ModuleType, page: str, name: str, values: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        script.written(page, name, values)
