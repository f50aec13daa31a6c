"""Every package of qkov: each module is reached by its path, and every public name is there and explained."""

import ast
import importlib
import inspect
import pkgutil
import types
from typing import Literal, get_origin

import pytest

ROOTS = ("qkov.circuits", "qkov.analyses", "qkov.probes", "qkov.reports")


def modules_below(name):
    """The names of all modules of a package, the package among them."""
    package = importlib.import_module(name)
    return [name, *(found.name for found in pkgutil.walk_packages(package.__path__, f"{name}."))]


MODULES = [name for root in ROOTS for name in modules_below(root) if not name.endswith("__main__")]
PACKAGES = [name for name in MODULES if hasattr(importlib.import_module(name), "__path__")]
FACES = [name for name in PACKAGES if getattr(importlib.import_module(name), "__all__", None)]


def test_there_is_something_to_test():
    assert {"qkov.circuits", "qkov.analyses.attention", "qkov.analyses.tasks", "qkov.probes"} <= set(FACES)
    assert "qkov.analyses.attention.measures.rollout" in MODULES
    assert len(MODULES) > 100


def shadowed(names):
    """The modules that are not the attribute of their package under their own name."""
    hidden = []
    for name in names:
        parent, _, own = name.rpartition(".")
        module = importlib.import_module(name)
        if getattr(importlib.import_module(parent), own) is not module:
            hidden.append(name)
    return hidden


def test_no_function_takes_the_place_of_a_module():
    for face in FACES:  # A face may import names late, so all are used before the modules are looked up.
        for public in importlib.import_module(face).__all__:
            getattr(importlib.import_module(face), public)
    assert shadowed(MODULES) == []


def test_a_function_in_the_place_of_a_module_would_be_noticed(monkeypatch):
    measures = importlib.import_module("qkov.analyses.attention.measures")
    monkeypatch.setattr(measures, "rollout", measures.rollout.rollout)
    assert shadowed(MODULES) == ["qkov.analyses.attention.measures.rollout"]


@pytest.mark.parametrize("name", [name for name in PACKAGES if name not in FACES])
def test_inner_packages_export_nothing(name):
    source = inspect.getsource(importlib.import_module(name))
    assert all(isinstance(statement, ast.Expr) for statement in ast.parse(source).body)


@pytest.mark.parametrize("name", FACES)
def test_every_public_name_is_there_and_explained(name):
    face = importlib.import_module(name)
    assert len(set(face.__all__)) == len(face.__all__)
    for public in face.__all__:
        value = getattr(face, public)
        assert not isinstance(value, types.ModuleType), public
        # A class or function has a docstring of its own, an instance that of its class; a type alias cannot have one.
        assert get_origin(value) is Literal or (value.__doc__ or "").strip(), public


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_holds(name):
    assert (importlib.import_module(name).__doc__ or "").strip()
