"""Templates of tensor names: `blocks.{layer}.attn.W_Q` stands for that tensor in every layer."""

import re
from collections.abc import Iterable

#: A number of a layer or of a head. A longer one is damage, and would not fit into the column of a table.
_NUMBER = "[0-9]{1,6}"


def template_pattern(template: str) -> str:
    """Return the regular expression for a template that contains {layer} and possibly {inner} or {head}."""
    escaped = re.escape(template)
    for index in ("layer", "inner", "head"):
        hole = rf"\{{{index}\}}"
        escaped = escaped.replace(hole, rf"(?P<{index}>{_NUMBER})", 1).replace(hole, f"(?P={index})")
    return escaped


def named(template: str, names: Iterable[str]) -> list[re.Match[str]]:
    """Return a match for each name that fits the template, with or without a prefix in front of it."""
    pattern = re.compile(r"(?:(?P<prefix>.+)\.)?" + template_pattern(template))
    # Comparing the end first is much faster, since it rules out most names.
    end = template.rpartition("}")[2]
    return [match for name in names if name.endswith(end) and (match := pattern.fullmatch(name))]
