"""An unsupported version of a library is named in one line."""

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from qkov.circuits import QkovError
from qkov.reports.commands.main import run
from qkov.reports.terminal import requirements
from qkov.reports.terminal.requirements import demand_supported

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stated(monkeypatch):
    """Requirements that stand for those of qkov's metadata, and versions that stand for the installed ones."""
    texts = ["numpy", "pandas>=2,<4", "torch>=2.4", "transformers>=4.57", 'ray; extra == "ray"', 'x>=9; extra == "x"']
    installed = {"torch": "2.13.0+cpu", "pandas": "3.1.1", "numpy": "1.0", "transformers": "4.57.0.dev0", "x": "1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(requirements, "requires", lambda name: {"qkov": texts}[name])
    monkeypatch.setattr(requirements, "version", version)
    return installed


def test_supported_versions_pass(stated):
    stated["transformers"] = "5.0.0rc1"
    demand_supported("torch", "pandas", "numpy", "transformers", "x")


@pytest.mark.parametrize(
    ("library", "installed", "message"),
    [
        (
            "transformers",
            "4.40.0",
            "transformers 4.40.0 is installed, but qkov needs transformers>=4.57; "
            "run: pip install -U 'transformers>=4.57'",
        ),
        ("pandas", "4.0", "pandas 4.0 is installed, but qkov needs pandas<4,>=2; run: pip install -U 'pandas<4,>=2'"),
        ("torch", None, "torch is not installed, but qkov needs torch>=2.4; run: pip install -U 'torch>=2.4'"),
        ("numpy", None, "numpy is not installed, but qkov needs numpy; run: pip install -U 'numpy'"),
    ],
)
def test_others_are_refused(stated, library, installed, message):
    if installed is None:
        del stated[library]
    else:
        stated[library] = installed
    with pytest.raises(QkovError) as caught:
        demand_supported("torch", "pandas", "numpy", library)
    assert str(caught.value) == message


def test_a_command_says_so_in_one_line(stated, capsys, tmp_path):
    stated |= dict.fromkeys(("captum", "datasets", "scipy", "pyarrow", "matplotlib", "jinja2"), "99")
    stated["transformers"] = "4.40.0"
    assert run(["explain", "model", "agreement", "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("qkov: transformers 4.40.0 is installed, but qkov needs transformers>=4.57; run: ")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_every_library_that_a_command_asks_about_is_a_dependency():
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    known = {re.split(r"[<>=!~ ;\[]", text)[0] for text in stated}
    asked: set[str] = set()
    for file in (ROOT / "reports" / "commands").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "demand_supported":
                asked |= {str(leaf.value) for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
    assert "torch" in asked
    assert asked <= known
