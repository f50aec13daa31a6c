"""What the site makes of docstrings."""

import importlib.util

from .pages import ROOT

_spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
assert _spec is not None
assert _spec.loader is not None
docstrings = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docstrings)


def test_tables_examples_and_markup():
    lines = """Measure ||C|| of `W_QK`, *batch by batch.

    measure(circuit)

| name | formula |
|---|---|
| `norm` | (sum s^2) |

Args:
    circuit: W_, whatever
        it is.
""".splitlines()
    assert [line for line in docstrings.restructured(lines) if line] == [
        r"Measure \|\|C\|\| of ``W_QK``, \*batch by batch.",
        "::",
        "        measure(circuit)",
        ".. list-table::",
        "   :header-rows: 1",
        "   * - name",
        "     - formula",
        "   * - ``norm``",
        "     - (sum s^2)",
        "Args:",
        r"    circuit: W\_, whatever",
        "        it is.",
    ]
