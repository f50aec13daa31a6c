"""Layers that the config beside the weights tells of, and whose attention is not there: of a model that was cut."""

from itertools import pairwise

from .architectures import skipped_layers
from .mapping import Mapping
from .named_tensors import TensorFile


def missing_layers(file: TensorFile, mapping: Mapping, layers: set[int], number: object) -> dict[str, str]:
    """Return which layers of a stack are missing, and how that is known, in words; nothing where none is.

    Layers of a kind that is named and skipped are not missing, nor are those in other files where this one is a part.

    Args:
        file: that holds the stack.
        mapping: of the stack.
        layers: the numbers of those that are there.
        number: of layers that the config tells, from 0 on; anything but an int where it tells none.
    """
    if type(number) is not int or file.partial is not None:
        return {}
    held = {layer for layer in layers if layer < number}
    if len(held) == number:
        return {}
    gaps = _gaps(held | skipped_layers(file.shapes), number)
    if not gaps:
        return {}
    several = "s" if gaps[0][0] != gaps[-1][1] else ""
    where = ", ".join(f"{first} to {last}" if first != last else str(first) for first, last in gaps)
    # Layers that share their weights count as one.
    whose = " with weights of their own" if "used_by" in mapping.facts.table else ""
    reason = (
        f"by {file.config_origin} there are {number} layers{whose}, and the attention of {len(held)} of them is there"
    )
    return {f"{mapping.stack} layer{several} {where}".lstrip(): reason}


def _gaps(there: set[int], number: int) -> list[tuple[int, int]]:
    """First and last of the numbers in a row that are not there; a damaged config may tell of too many to list."""
    found = [-1, *sorted(layer for layer in there if layer < number), number]
    return [(before + 1, after - 1) for before, after in pairwise(found) if after - before > 1]
