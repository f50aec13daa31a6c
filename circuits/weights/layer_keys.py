"""How a layer of attention is identified, and how it is named in messages and reports."""

from collections.abc import Iterable

#: The stack ("" where there is only one) and the number of the layer in it.
LayerKey = tuple[str, int]


def layer_name(stack: str, layer: object) -> str:
    """Return a layer in words: "layer 3", or "encoder layer 3" in a model with several stacks."""
    return f"{stack} layer {layer}".lstrip()


def layer_label(stack: str, layer: object) -> str:
    """Return a layer's short name for lists of layers: "3", or "encoder 3" in a model with several stacks."""
    return f"{stack} {layer}".lstrip()


def layers_in_words(keys: Iterable[LayerKey]) -> str:
    """Return layers in words, three or more in a row as a range: "layers 0 to 3 and 7", "encoder layer 2"."""
    by_stack: dict[str, list[int]] = {}
    for stack, layer in keys:
        by_stack.setdefault(stack, []).append(layer)
    parts = []
    for stack, numbers in by_stack.items():
        ranges: list[list[int]] = []
        for number in sorted(numbers):
            if ranges and number == ranges[-1][-1] + 1:
                ranges[-1].append(number)
            else:
                ranges.append([number])
        shown: list[str] = []
        for part in ranges:
            shown += [f"{part[0]} to {part[-1]}"] if len(part) > 2 else map(str, part)
        parts.append(f"{stack} layer{'s' * (len(numbers) > 1)} {enumerated(shown)}".lstrip())
    return enumerated(parts)


def enumerated(parts: list[str]) -> str:
    """Return a list within a sentence: "1, 2 and 3"."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def capitalised(text: str) -> str:
    """Return a text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]
