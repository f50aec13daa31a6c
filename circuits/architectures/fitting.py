"""Find the families whose tensor names and shapes fit a file."""

from math import isqrt
from typing import Any

import torch

from ..checkpoints.tensor_file import TensorFile
from ..errors import CallError, QkovError
from ..weights.attention_weights import AttentionWeights
from .families import architectures
from .head_counts import count_heads
from .layouts import arrange_layer, axes
from .mapping import Mapping, Names
from .named_layouts import TARGETS
from .stacks import mapping_under, names_and_layouts, prefixes_of
from .tensor_names import named

#: A width above this is no weight's; a header without values may state any.
_WIDEST = 2**27


def fitting_families(file: TensorFile, prefix: str | None) -> dict[str, tuple[int, int, int]]:
    """Return the keys of the families whose names and shapes fit a file, best first, each with its score.

    Args:
        file: The file.
        prefix: The only prefix of names to accept; None accepts all.

    Returns:
        Scores that compare as tuples: the number of matched tensors, the number of marks beside the attention tensors,
        and minus the length of the prefixes.
    """
    scores = {}
    for key, architecture in architectures().items():
        if not architecture.by_names or not all(named(mark, file.shapes) for mark in architecture.marks):
            continue
        matched, prefix_length = 0, 0
        for stack in architecture.stacks:
            table = names_and_layouts(stack)
            for candidate in prefixes_of(table, set(file.shapes), prefix):
                mapping = mapping_under(candidate, table)
                if _shapes_fit(mapping, file, stack):
                    matched += sum(len(names) for names in mapping.layers(file.shapes).values())
                    prefix_length += len(candidate)
        if matched:
            own = {name for stack in architecture.stacks for name in stack["tensors"].values()}
            scores[key] = (matched, len(set(architecture.marks) - own), -prefix_length)
    return dict(sorted(scores.items(), key=lambda item: item[1], reverse=True))


def _shapes_fit(mapping: Mapping, file: TensorFile, stack: dict[str, Any]) -> bool:
    """Return whether the tensors of a layer form circuits of one width for some number of heads."""
    names = next(iter(mapping.layers(file.shapes).values()))
    shapes = mapping.shapes(names, file.shapes)
    sizes = {size for role, shape in shapes.items() for size in shape if role in TARGETS}
    beside = {
        layout: file.shapes[match.group()]
        for template, layout in stack.get("beside", {}).items()
        for match in named(mapping.full_name(template), file.shapes)
    }
    if not all(0 < size <= _WIDEST for size in sizes):
        return False
    numbers = (None,) if mapping.heads.query is None else sorted(set().union(*map(_divisors, sizes)))
    return any(_fits(mapping, names, shapes, heads, beside) for heads in numbers)


def _divisors(size: int) -> set[int]:
    """Return the divisors of a size, found in as many steps as its root; a header may state any size."""
    small = [divisor for divisor in range(1, isqrt(size) + 1) if size % divisor == 0]
    return {*small, *(size // divisor for divisor in small)}


def _fits(
    mapping: Mapping,
    names: Names,
    shapes: dict[str, tuple[int, ...]],
    heads: int | None,
    beside: dict[str, tuple[int, ...]],
) -> bool:
    counts = count_heads(shapes, mapping.layouts, heads)
    empty = {role: torch.empty(shape, device="meta") for role, shape in shapes.items()}
    try:
        arranged: dict[str, Any] = arrange_layer(empty, mapping.layouts, counts, names, mapping.origin)
        weights = AttentionWeights(0, **arranged)
    except (QkovError, CallError):
        return False
    W_Q, W_O = weights.W_Q, weights.W_O
    widths = {None if W_Q is None else W_Q.shape[1], None if W_O is None else W_O.shape[2]}
    widths |= {shape[-1] for role, shape in shapes.items() if role in ("b_O", "norm_gain")}
    widths |= {shape[axes(layout).index("d_model")] for layout, shape in beside.items()}
    # If neither a bias nor a gain shows the width, heads that seem wider than the model are transposed.
    shows_width = mapping.heads.query is not None or any(
        role.startswith("b_") or role == "norm_gain" for role in shapes
    )
    is_upright = shows_width or W_Q is None or W_Q.shape[2] <= W_Q.shape[1]
    biases = {name: bias.shape for name, bias in arranged.items() if name in ("b_Q", "b_K", "b_V")}
    biases_fit = all(shape == arranged[f"W_{name[2]}"].shape[::2] for name, shape in biases.items())
    return len(widths - {None}) <= 1 and is_upright and biases_fit
