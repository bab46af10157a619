"""The notebook for Colab: every cell runs, on a small pair that takes its place in the cell of parameters."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "demos" / "colab.ipynb"
TOY = ROOT / "demos" / "toy"
# Names of the cell of parameters, and what they are in this test.
SMALL = {
    "REPOSITORY": "",
    "CLONE": str(ROOT),
    "INSTALL": False,
    "TARGET": str(TOY / "target"),
    "DRAFT": str(TOY / "draft"),
    "DTYPE": "float32",
    "MAX_NEW_TOKENS": 16,
    "PROMPTS": {"sums": "Compute 41 + 80 - 99 + 14.", "talk": "Hello."},
}


def parameters(book: Any) -> Any:
    """The cell that is tagged as the parameters'."""
    [cell] = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", [])]
    return cell


def test_parameters_are_the_names_that_are_replaced() -> None:
    book = nbformat.read(PATH, as_version=4)
    nbformat.validate(book)
    body = ast.parse(parameters(book).source).body
    names = [line.targets[0].id for line in body if isinstance(line, ast.Assign)]
    assert names == list(SMALL)
    elsewhere = [cell.source for cell in book.cells if cell is not parameters(book)]
    assert not any('from_pretrained("' in source for source in elsewhere)


@pytest.mark.timeout(600)  # seconds on a free machine, minutes on a busy one
def test_every_cell_runs_on_a_small_pair(kernel: Any, tmp_path: Path) -> None:
    book = nbformat.read(PATH, as_version=4)
    lines = [f"{name} = {value!r}" for name, value in SMALL.items()]
    parameters(book).source = "\n".join(lines)
    book.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}"))
    nbclient.NotebookClient(book, km=kernel, timeout=280).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    # In float32 the draft's text is the plain one: two prompts and a picture.
    assert printed.count("the same tokens: True") == 3
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_the_draft_is_published_for_the_target() -> None:
    import json

    listed = json.loads((ROOT / "src/dflash_hf/cli/published.json").read_text(encoding="utf-8"))
    said = {
        line.targets[0].id: line.value.value  # type: ignore[union-attr]
        for line in ast.parse(parameters(nbformat.read(PATH, as_version=4)).source).body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
    }
    pairs = {(one["target"], one["draft"]): one for one in listed}
    assert pairs[said["TARGET"], said["DRAFT"]]["thinking"] == "off"
    # The text says that there is none; a published one belongs into the notebook.
    assert not [one for one in listed if "Qwen3-VL" in one["target"]]
