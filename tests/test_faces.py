"""The faces of the packages: every public name is there, imported only when it is used."""

import importlib
import pydoc
import subprocess
import sys
import types

import pytest
from qkov.circuits.public_names import lazy_face

FACES = [
    "qkov.circuits",
    "qkov.analyses.attention",
    "qkov.analyses.dynamics",
    "qkov.analyses.tasks",
    "qkov.analyses.trajectories",
    "qkov.probes",
]


@pytest.mark.parametrize("name", FACES)
def test_every_public_name_is_what_its_module_defines(name):
    face = importlib.import_module(name)
    assert face.__all__
    for public in face.__all__:
        value = getattr(face, public)
        assert getattr(face, public) is value
        assert not isinstance(value, types.ModuleType), public
        assert getattr(value, "__name__", public) in (public, "Literal")


@pytest.mark.parametrize("name", FACES)
def test_importing_a_face_imports_none_of_its_modules(name):
    code = (
        f"import sys, {name} as face\n"
        f"inner = [module for module in sys.modules if module.startswith({name!r} + '.')]\n"
        "assert set(inner) <= {'qkov.circuits.public_names'}, inner\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(face.__all__) <= set(dir(face))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", FACES)
def test_a_name_that_is_not_there_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Nothing'") as caught:
        getattr(importlib.import_module(name), "Nothing")  # noqa: B009 (a name that no type checker knows)
    assert caught.value.name == "Nothing"
    assert not hasattr(importlib.import_module(name), "_nothing")


def test_the_modules_of_a_package_can_be_reached_as_attributes():
    code = "import qkov.circuits; print(qkov.circuits.algebra.__name__)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "qkov.circuits.algebra\n"
    )


def test_an_imported_name_may_be_renamed_and_come_from_elsewhere(tmp_path, monkeypatch):
    package = tmp_path / "some_face"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from qkov.circuits.public_names import lazy_face\n"
        "if TYPE_CHECKING:\n"
        "    from .inner import one as uno, two\n"
        "    from math import tau\n"
        "__getattr__, __dir__ = lazy_face(__name__)\n"
    )
    (package / "inner.py").write_text("one = 1\ntwo = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    face = importlib.import_module("some_face")
    assert "some_face.inner" not in sys.modules
    assert {"uno", "two", "tau"} <= set(dir(face))
    assert (face.uno, face.two, face.tau) == (1, 2, importlib.import_module("math").tau)
    assert not hasattr(face, "one")
    for name in ("some_face", "some_face.inner"):
        del sys.modules[name]


def test_a_face_has_to_be_a_package_that_runs():
    with pytest.raises(KeyError):
        lazy_face("qkov.circuits.nowhere")


@pytest.mark.parametrize("name", FACES)
def test_help_shows_every_public_name(name):
    face = importlib.import_module(name)
    page = pydoc.plain(pydoc.render_doc(face))
    for public in face.__all__:
        assert public in page
        # The introduction presents the names in groups; none may be forgotten there.
        assert public in (face.__doc__ or ""), public


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    import qkov.circuits

    assert qkov.circuits.__version__ == version("qkov")
