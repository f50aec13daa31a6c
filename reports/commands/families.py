"""The command `qkov families`."""

from typing import Any

from ...circuits.architectures.families import architectures, unsupported
from ..terminal.output import print_json, say
from .options import Json


def families(as_json: Json = False) -> None:
    """List the model families that are recognised.

    The list is a Markdown table. Below it stand the kinds of attention that are named and skipped, with the reasons.
    """
    if as_json:
        print_json(families_facts())
        return
    for line in families_lines():
        say(line)


def families_facts() -> dict[str, Any]:
    """Return the families, and the kinds of attention that are named and skipped, in a form that JSON can hold."""
    return {
        "families": [
            {"family": family.key, "title": family.title, "model_types": list(family.model_types)}
            for family in architectures().values()
        ],
        "skipped": [
            {"title": kind.title, "model_types": list(kind.model_types), "reason": kind.reason}
            for kind in unsupported()
        ],
    }


def families_lines() -> list[str]:
    """Return the lines of a Markdown table of the families, followed by a list of what is skipped."""
    facts = families_facts()
    lines = ["| family | models | model_type of their config |", "|---|---|---|"]
    for family in facts["families"]:
        types = ", ".join(f"`{name}`" for name in family["model_types"]) or "recognised by tensor names"
        lines.append(f"| `{family['family']}` | {family['title']} | {types} |")
    lines += ["", "Named and skipped, never guessed:", ""]
    lines += [f"- {kind['title']}: {kind['reason']}." for kind in facts["skipped"]]
    return lines
