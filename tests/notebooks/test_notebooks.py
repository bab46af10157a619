"""The notebooks run from top to bottom, and are committed as they ran: no error, all outputs, figures small.

Here they rehearse (`NOTEBOOK_REHEARSAL`): what takes minutes is done with few steps and prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).resolve().parents[2] / "demos" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000
# How the cell begins that takes SmolLM2 where it has been fetched, and the bundled toy elsewhere.
CHOOSES_THE_PAIR = (
    "# SmolLM2-135M-Instruct where `make real` has fetched it, the bundled toy elsewhere.\n"
)
# Notebooks without that cell, and why.
TOYS_ALONE = {
    "03_train_a_draft": "For SmolLM2 the first of two parts takes two hours",
    "04_break_a_draft": "on SmolLM2 three of the six mistakes cost too little to be found",
    "05_images": "SmolLM2 reads no images",
}


def images(book: nbformat.NotebookNode) -> int:
    """Number of figures among the outputs."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.timeout(600)  # seconds on a free machine, minutes on a busy one
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path, kernel: Any, tmp_path: Path) -> None:
    # As in a fresh clone: not with the larger models that `make real` may have left in build/.
    (tmp_path / "demos").symlink_to(FOLDER.parents[1] / "demos")
    committed = nbformat.read(path, as_version=4)
    book = nbformat.read(path, as_version=4)
    book.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}"))
    nbclient.NotebookClient(book, km=kernel, timeout=280).execute()
    del book.cells[0]
    assert images(book) == images(committed) > 0
    shown = [[bool(cell.get("outputs")) for cell in one.cells] for one in (book, committed)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_committed_as_it_ran(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_ends_with_what_was_learned(path: Path) -> None:
    last = nbformat.read(path, as_version=4).cells[-1]
    assert last.cell_type == "markdown"
    assert last.source.startswith("## What was learned\n\n* ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_on_the_real_pair_or_says_why_not(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.source.startswith(CHOOSES_THE_PAIR)]
    if path.stem in TOYS_ALONE:
        assert not cells
        assert TOYS_ALONE[path.stem] in book.cells[0].source
    else:
        [cell] = cells
        # The outputs that are kept are the real pair's.
        assert cell.outputs[0].text.startswith("target: build/smollm2/target")


def test_all_notebooks_are_there() -> None:
    names = [
        "01_quickstart",
        "02_inside_a_block",
        "03_train_a_draft",
        "04_break_a_draft",
        "05_images",
        "06_where_a_draft_fails",
    ]
    assert [path.stem for path in NOTEBOOKS] == names
