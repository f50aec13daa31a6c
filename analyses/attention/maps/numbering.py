"""The stack and the number of a layer, from the paths of the modules that compute attention."""

from collections.abc import Sequence

from ....circuits.weights.layer_keys import LayerKey


def numbered(paths: Sequence[str]) -> dict[str, LayerKey]:
    """Return the layer that each path stands for; the paths of one stack differ only in their numbers.

    A stack is named by the path without its numbers. If there is only one stack, its name is empty.
    """
    templates: dict[str, list[str]] = {}
    for path in paths:
        templates.setdefault(".".join(part for part in path.split(".") if not part.isdigit()), []).append(path)
    return {
        path: ("" if len(templates) == 1 else template, layer)
        for template, members in templates.items()
        for path, layer in zip(members, layer_numbers(members), strict=True)
    }


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """Return the layer number of each path of one stack: the first number in it, or its position in the list.

    The numbers have gaps where a model mixes attention with other kinds of layers.
    """
    first_numbers = [next((int(part) for part in path.split(".") if part.isdigit()), None) for path in paths]
    numbers = [number for number in first_numbers if number is not None]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))
