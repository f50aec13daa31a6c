"""The families of models that are recognised, from the data that recognises them."""

from typing import Any

from ..circuits.architectures import architectures, unsupported


def families_facts() -> dict[str, Any]:
    """Return the families, and the kinds of attention that are named and skipped, as JSON can hold them."""
    return {
        "families": [
            {"family": each.key, "title": each.title, "model_types": list(each.model_types)}
            for each in architectures().values()
        ],
        "skipped": [
            {"title": each.title, "model_types": list(each.model_types), "reason": each.reason}
            for each in unsupported()
        ],
    }


def families_lines() -> list[str]:
    """Return the lines of a Markdown table of the families, and of a list of what is skipped."""
    facts = families_facts()
    lines = ["| family | models | model_type of their config |", "|---|---|---|"]
    for each in facts["families"]:
        types = ", ".join(f"`{name}`" for name in each["model_types"]) or "told by tensor names"
        lines.append(f"| `{each['family']}` | {each['title']} | {types} |")
    lines += ["", "Named and skipped, never guessed:", ""]
    lines += [f"- {each['title']}: {each['reason']}." for each in facts["skipped"]]
    return lines
