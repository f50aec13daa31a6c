"""Rearrange stored tensors to TransformerLens' axes [head, d_model, d_head]."""

import re
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass

import einops
from torch import Tensor

from ..errors import QkovError
from .named_layouts import SCORES_IN, TARGETS


@dataclass(frozen=True)
class HeadCounts:
    """Numbers of heads of a layer.

    Attributes:
        query: Number of query heads.
        key_value: Number of key-value heads.
        d_head: Inner width of one head.
    """

    query: int
    key_value: int
    d_head: int


def axes(layout: str) -> list[str]:
    """Return the names of a layout's axes, in order."""
    return re.findall(r"\w+", layout)


def joins_heads(layout: str) -> bool:
    """Return whether one dimension of the layout holds the heads and another axis, so that it hides their number."""
    return any("head" in group and len(group) > 1 for group in groups(layout))


def width_of_model(shape: tuple[int, ...], layout: str) -> int | None:
    """Return d_model as the shape of a weight shows it; None if the shape does not fit the layout.

    Args:
        shape: Shape of the stored weight.
        layout: Its axes in einops' notation.
    """
    sizes = dict(zip(map(tuple, groups(layout)), shape, strict=False))
    return sizes.get(("d_model",))


def arrange(
    role: str, tensor: Tensor, layout: str, counts: HeadCounts | None, name: str, origin: str
) -> dict[str, Tensor]:
    """Return a weight with TransformerLens' axes, by its role; QKV is split into its three weights.

    Args:
        role: One of `TARGETS`.
        tensor: The tensor as it is stored.
        layout: Its axes in einops' notation, such as "(head d_head) d_model" for a torch.nn.Linear.
        counts: Numbers of heads, if the layout joins the heads with another axis.
        name: Name of the tensor, for messages.
        origin: Where the layout comes from, for messages.

    Raises:
        QkovError: The tensor is not of floating type, is empty, or does not fit its layout.
    """
    demand_floating(tensor, name)
    if "head" not in axes(layout) and tensor.ndim == 1 + len(groups(layout)) and tensor.shape[0] == 1:
        tensor = tensor[0]
    if role == "QKV":
        return _split(tensor, layout, counts, name, origin)
    heads = None if counts is None else counts.key_value if role in ("K", "V") else counts.query
    return {role: _rearrange(tensor, layout, TARGETS[role], heads, name, origin, role)}


def arrange_bias(
    role: str, tensor: Tensor, layout: str, counts: HeadCounts | None, name: str, origin: str
) -> dict[str, Tensor]:
    """Return the bias of a weight as [head, d_head], and the bias of O as [d_model], by role.

    Args:
        role: The role of the weight.
        tensor: The bias as it is stored.
        layout: The axes of the weight, from which those of the bias follow.
        counts: Numbers of heads, if the layout joins the heads with another axis.
        name: Name of the bias, for messages.
        origin: Where the layout comes from, for messages.

    Raises:
        QkovError: The bias is not of floating type, is empty, or does not fit the layout.
    """
    if role == "O":
        demand_floating(tensor, name)
        return {"O": tensor}
    # A bias is a weight that reads one constant input.
    dimension = next(index for index, group in enumerate(groups(layout)) if group == ["d_model"])
    arranged = arrange(role, tensor.unsqueeze(dimension), layout, counts, name, origin)
    return {part: weight.squeeze(1) for part, weight in arranged.items()}


def arrange_layer(
    tensors: Dictionary[str, Tensor],
    layouts: Dictionary[str, str],
    counts: HeadCounts | None,
    names: Dictionary[str, tuple[str, ...]],
    origin: str,
) -> dict[str, Tensor]:
    """Return the weights and biases among a layer's tensors, as `W_Q`, `b_Q` and so on; joined biases are split.

    Args:
        tensors: The tensors of the layer by role.
        layouts: Axes of each weight by role, in einops' notation.
        counts: Numbers of heads, if a layout joins the heads with another axis.
        names: Names of the tensors by role, for messages.
        origin: Where the layouts come from, for messages.

    Raises:
        QkovError: A tensor is not of floating type, is empty, or does not fit its layout.
    """
    arranged: dict[str, Tensor] = {}
    for role, tensor in tensors.items():
        name = names[role][0]
        if role in TARGETS:
            parts = arrange(role, tensor, layouts[role], counts, name, origin)
            arranged |= {f"W_{part}": weight for part, weight in parts.items()}
        elif role.startswith("b_"):
            weight = role.removeprefix("b_")
            joined = weight == "QKV" and weight not in layouts
            biases = dict(zip(SCORES_IN, tensor.chunk(3), strict=True)) if joined else {weight: tensor}
            for of_weight, bias in biases.items():
                parts = arrange_bias(of_weight, bias, layouts[of_weight], counts, name, origin)
                arranged |= {f"b_{part}": value for part, value in parts.items()}
        else:
            demand_floating(tensor, name)
    return arranged


def demand_floating(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that cannot be measured.

    Args:
        tensor: The tensor.
        name: Its name, for messages.

    Raises:
        QkovError: It does not hold floating-point numbers, or is empty.
    """
    if not tensor.is_floating_point():
        raise QkovError(
            f"{name} holds {tensor.dtype} numbers; expected floating-point numbers (quantised weights are not read)"
        )
    if 0 in tensor.shape:
        raise QkovError(f"{name} has shape {tuple(tensor.shape)}, which holds nothing to measure")


def _split(tensor: Tensor, layout: str, counts: HeadCounts | None, name: str, origin: str) -> dict[str, Tensor]:
    order = axes(layout)
    if counts is None or not joins_heads(layout):
        parts = _rearrange(tensor, layout, TARGETS["QKV"], None, name, origin, "QKV", qkv=3).unbind(0)
        return dict(zip(SCORES_IN, parts, strict=True))
    if order.index("qkv") > order.index("head"):
        slots = counts.query // counts.key_value + 2
        target = "head qkv d_model d_head"
        grouped = _rearrange(tensor, layout, target, counts.key_value, name, origin, "QKV", qkv=slots)
        return {"Q": grouped[:, :-2].flatten(0, 1), "K": grouped[:, -2], "V": grouped[:, -1]}
    along = next(index for index, group in enumerate(groups(layout)) if "qkv" in group)
    sizes = [heads * counts.d_head for heads in (counts.query, counts.key_value, counts.key_value)]
    if along >= tensor.ndim or sum(sizes) != tensor.shape[along]:
        raise _misfit(tensor, layout, counts.query, name, origin, "QKV")
    of_one = layout.replace("qkv ", "")
    parts = dict(zip(SCORES_IN, tensor.split(sizes, dim=along), strict=True))
    return {
        part: _rearrange(
            weight, of_one, TARGETS[part], counts.query if part == "Q" else counts.key_value, name, origin, "QKV"
        )
        for part, weight in parts.items()
    }


def _rearrange(
    tensor: Tensor, layout: str, target: str, heads: int | None, name: str, origin: str, role: str, **sizes: int
) -> Tensor:
    if "head" not in axes(layout):
        target = target.replace("head", "1", 1)
    elif heads is not None:
        sizes["head"] = heads
    try:
        return einops.rearrange(tensor, f"{layout} -> {target}", **sizes)
    except einops.EinopsError as error:
        raise _misfit(tensor, layout, heads, name, origin, role) from error


def _misfit(tensor: Tensor, layout: str, heads: int | None, name: str, origin: str, role: str) -> QkovError:
    with_heads = "" if heads is None else f" with {heads} heads"
    hint = ""
    if role in ("QK", "OV") and tensor.ndim == 2:
        of_one = TARGETS[role].removeprefix("head ")
        hint = (
            f"; for the matrix of one head, state heads = 1 and [layout] {role} = '{of_one}'; W_V of several heads is "
            f"V, and needs the output projection O"
        )
    return QkovError(
        f"{name} has shape {tuple(tensor.shape)}, which does not fit the layout '{layout}'{with_heads} "
        f"that {origin} gives for {role}{hint}"
    )


def groups(layout: str) -> list[list[str]]:
    """Return the axes of each dimension of a layout, in order."""
    return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", layout)]
