"""The notebooks run from top to bottom, and are committed as they ran: no error, all outputs, figures small.

Here they rehearse (`NOTEBOOK_REHEARSAL`): what takes minutes is done with few steps and prompts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).resolve().parents[2] / "demos" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000


def images(book: nbformat.NotebookNode) -> int:
    """Number of figures among the outputs."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.timeout(600)  # seconds on a free machine, minutes on a busy one
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = FOLDER.parents[1]
    # As in a fresh clone: not with the larger models that `make real` may have left in build/.
    (tmp_path / "demos").symlink_to(root / "demos")
    monkeypatch.setenv("PYTHONPATH", str(root / "src"))
    monkeypatch.setenv("NOTEBOOK_REHEARSAL", "1")
    committed = nbformat.read(path, as_version=4)
    book = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(book, timeout=280, kernel_name="python3", resources=place).execute()
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


def test_all_notebooks_are_there() -> None:
    names = ["01_quickstart", "02_inside_a_block", "03_train_a_draft", "04_break_a_draft", "05_images"]
    assert [path.stem for path in NOTEBOOKS] == names
