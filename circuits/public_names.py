"""The public names of a package, imported when they are first used.

A package's face lists its public names twice, as any face does: once as imports and once in `__all__`. Here the imports
stand under `if TYPE_CHECKING:`, where type checkers and editors see them, and `lazy_face` reads them from there. Thus
`import qkov.circuits` does not import torch, and a module that needs only `qkov.circuits.errors` starts quickly.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data
from typing import Any


def lazy_face(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` (PEP 562) of a package whose public names are imported late.

    `__getattr__` imports a public name from its module the first time it is used and keeps it in the package. It also
    imports the package's own modules, so that `qkov.circuits.algebra` can be reached as an attribute.

    Args:
        package: The name of the package, `__name__` in its `__init__.py`. That file must already have begun to run.
    """
    face = sys.modules[package]
    source = get_data(package, "__init__.py")
    assert source is not None
    homes = _names_for_type_checkers(source.decode())

    def __getattr__(name: str) -> Any:  # noqa: N807 (PEP 562 names it)
        if name in homes:
            module, name_there = homes[name]
            value = getattr(import_module(module, package), name_there)
            setattr(face, name, value)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=face)

    def __dir__() -> list[str]:  # noqa: N807 (PEP 562 names it)
        return sorted({*vars(face), *homes})

    return __getattr__, __dir__


def _names_for_type_checkers(source: str) -> dict[str, tuple[str, str]]:
    """Return the names imported under `if TYPE_CHECKING:`, each with its module and its name in that module."""
    return {
        alias.asname or alias.name: ("." * statement.level + (statement.module or ""), alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
