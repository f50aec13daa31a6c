"""From the docstrings of qkov, whose tables and examples are written as in Markdown, to what Sphinx expects."""

import re
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
_CODE = re.compile(r"(`[^`]*`)")
#: What reStructuredText takes for markup, as in `*batch`, `|x|` or `W_`.
_MARKUP = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def setup(app: Any) -> None:
    """Register the conversion with Sphinx, ahead of napoleon's."""
    app.connect("autodoc-process-docstring", _convert, priority=100)


def _convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured(lines)


def restructured(lines: list[str]) -> list[str]:
    """Return a docstring with its tables, its indented examples and its code marked as reStructuredText marks them."""
    converted: list[str] = []
    block: list[str] = []
    in_section = False
    for line in [*lines, ""]:
        kind = _kind(line, in_section=in_section, after=converted, block=block)
        if block and kind != _kind(block[0], in_section=in_section, after=["", ""], block=[]):
            converted += _table(block) if block[0].startswith("|") else _literal(block)
            block = []
        if kind:
            block.append(line)
            continue
        if line and not line.startswith(" "):
            in_section = _SECTION.match(line) is not None
        converted.append(_escaped(line))
    return converted


def _kind(line: str, *, in_section: bool, after: list[str], block: list[str]) -> str:
    """What a line belongs to: a table, an example, or (empty) running text."""
    if line.startswith("|"):
        return "table"
    begins = bool(block) and not block[0].startswith("|")
    if line.startswith("    ") and not in_section and (begins or not after or not after[-1].strip()):
        return "example"
    return ""


def _literal(lines: list[str]) -> list[str]:
    return ["", "::", "", *(f"    {line}" for line in lines), ""]


def _table(rows: list[str]) -> list[str]:
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    table = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in (cells[0], *cells[2:]):
        table += [f"   {'* -' if not number else '  -'} {_escaped(cell)}" for number, cell in enumerate(row)]
    return [*table, ""]


def _escaped(line: str) -> str:
    """Text with its markup escaped, and `code` shown as code."""
    return "".join(f"`{part}`" if part.startswith("`") else _MARKUP.sub(r"\\\1", part) for part in _CODE.split(line))
