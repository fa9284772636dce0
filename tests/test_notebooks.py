"""Notebooks run from start to end; stored notebooks are small."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _errors(notebook: nbformat.NotebookNode) -> list[str]:
    """Warnings and error messages among the outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [
        output.get("text", output.get("evalue", ""))
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@pytest.mark.exhaustive
def test_notebooks_run(tmp_path: Path) -> None:
    """All in one kernel, which takes seconds to start. Each defines all that it uses."""
    cells = []
    for path in NOTEBOOKS:
        cells += nbformat.read(path, as_version=4).cells
        cells.append(nbformat.v4.new_code_cell("%reset -f"))
    # A tenth of the training steps, and sizes with which notebooks share compiled functions.
    sizes = {
        "num_layers=2": "num_layers=1",
        "tokens=1024": "tokens=512",
        "range(3000)": "range(1000)",
    }
    for cell in cells:
        for old, new in sizes.items():
            cell.source = cell.source.replace(old, new)
        pattern = r"(steps=|_every=|step in range\()(\d+)"
        cell.source = re.sub(pattern, lambda m: f"{m[1]}{int(m[2]) // 10}", cell.source)
    alone = {
        # this clone, regardless of what is installed
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}})
    client.execute(env=os.environ | alone)  # CellExecutionError if a cell fails
    assert not _errors(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imported_names_exist(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    code = re.sub(r"^( *)%.*", r"\1pass", code, flags=re.MULTILINE)  # IPython's own commands
    statements = ast.walk(ast.parse(code))
    imports = [x for x in statements if isinstance(x, ast.Import | ast.ImportFrom)]
    assert imports
    exec("\n".join(map(ast.unparse, imports)), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_small_and_from_one_complete_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not _errors(notebook)
    assert path.stat().st_size < 250_000
