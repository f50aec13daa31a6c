"""Which tensors learn at how many times the base rate, in words."""

from collections.abc import Iterable

from ...circuits.weights.layer_keys import LayerKey, enumerated, layer_name, layers_in_words
from .entries import CircuitEntries, CircuitName, in_words
from .multipliers import HeadMultipliers


def lines_of_circuit(
    circuit: CircuitName, trained: Iterable[CircuitEntries], multipliers: HeadMultipliers
) -> list[str]:
    """Return one line for each multiplier of a circuit, with the layers and heads that have it where it has several.

    Args:
        circuit: QK or OV.
        trained: The entries of the circuit that are trained.
        multipliers: The multiplier of each head.
    """
    several = len(multipliers.all_of(circuit)) > 1
    lines, trained = [], list(trained)
    for multiplier in sorted(multipliers.all_of(circuit), reverse=True):
        names, count, sizes = {}, 0, {}
        for part in trained:
            of_part = [block.count for block in part.blocks if multipliers.of(circuit, block) == multiplier]
            if of_part:
                names[part.name] = None
                # Layers that share weights have blocks of the same entries.
                count += min(sum(of_part), part.count)
                sizes[id(part.parameter)] = part.parameter.numel()
        size = sum(sizes.values())
        of_size = "" if count == size else f" of {size:,}"
        where = f" in {_where(multipliers, circuit, multiplier)}" if several else ""
        lines.append(
            f"{circuit}: {multiplier:g} times the base rate{where}, "
            + (f"{count:,}{of_size} entries in {in_words(names)}" if names else "of which nothing is trained")
        )
    return lines


def _where(multipliers: HeadMultipliers, circuit: CircuitName, multiplier: float) -> str:
    """The layers all of whose heads have a multiplier, and the heads of other layers that have it."""
    whole: list[LayerKey] = []
    parts = []
    for layer, of_heads in multipliers.heads(circuit).items():
        heads = [str(head) for head, of_head in enumerate(of_heads) if of_head == multiplier]
        if len(heads) == len(of_heads):
            whole.append(layer)
        elif heads:
            parts.append(f"head{'s' * (len(heads) > 1)} {enumerated(heads)} of {layer_name(*layer)}")
    return ", ".join([*([layers_in_words(whole)] if whole else []), *parts])
