"""The guide's notebook has a cell for each block that the guide's own test runs, and is valid."""

import json
import runpy

import pytest

from support.doc_blocks import ROOT, blocks_of

GUIDE = ROOT / "docs" / "start" / "ten-minutes.md"


@pytest.fixture(scope="module")
def notebook():
    made = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["notebook"](GUIDE.read_text(encoding="utf-8"))
    return json.loads(json.dumps(made))


def test_cells_are_the_blocks_that_are_run(notebook):
    run = [block for block in blocks_of(GUIDE) if not block.not_run and block.language != "text"]
    cells = [cell["source"].removeprefix("%%bash\n") for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells == [block.code.rstrip("\n") for block in run]
    text = "".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert "make demo" in text
    assert "](../" not in text
    assert "<!--" not in text


def test_the_notebook_is_valid(notebook):
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    nbformat.validate(nbformat.from_dict(notebook))
