"""How many heads a layer has and how wide they are: what its shapes show, together with what is stated."""

from collections.abc import Mapping as Dictionary
from dataclasses import dataclass

from ..errors import CallError
from .layouts import HeadCounts, axes, groups, joins_heads
from .named_layouts import TARGETS

#: A number for all layers, or one for each layer.
Stated = int | Dictionary[int, int]

Shapes = Dictionary[str, tuple[int, ...]]


@dataclass(frozen=True)
class StatedHeads:
    """What a mapping, or a family with a config, states about the heads of a stack.

    Attributes:
        query: Number of query heads.
        d_head: Width of a head's queries and keys, and of its values too if `d_value` does not state another.
        d_value: Width of a head's values.
        origin: What states the width, for messages.
        may_differ: Whether a layer may have another number of heads, as its shapes show, since the width of a head is
            stated.
        one_width: Whether the heads of all layers have one width, even if it is not stated.
    """

    query: Stated | None = None
    d_head: Stated | None = None
    d_value: int | None = None
    origin: str = "the mapping"
    may_differ: bool = False
    one_width: bool = True

    def of_layer(self, layer: int) -> "LayerHeads":
        """Return what is stated about one layer.

        Raises:
            CallError: The numbers are stated layer by layer, and this layer is not among them.
        """
        query = _of_layer(self.query, layer, "heads")
        return LayerHeads(
            query=None if self.may_differ else query,
            d_head=_of_layer(self.d_head, layer, "d_head"),
            d_value=self.d_value,
            origin=self.origin,
        )


@dataclass(frozen=True)
class LayerHeads:
    """What is stated about the heads of one layer.

    Attributes:
        query: Number of query heads.
        d_head: Width of a head's queries and keys.
        d_value: Width of a head's values, if it is another.
        origin: What states the width, for messages.
    """

    query: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    origin: str = "the mapping"

    def count(self, shapes: Shapes, layouts: Dictionary[str, str]) -> HeadCounts | None:
        """Return the numbers that the shapes show together with what is stated, as `count_heads` does.

        Args:
            shapes: Shape of each tensor by role.
            layouts: Axes of each weight by role, in einops' notation.
        """
        return count_heads(shapes, layouts, self.query, self.d_head, self.d_value)

    @property
    def in_words(self) -> str:
        """What is stated, for messages."""
        heads = "heads" if self.query is None else f"{self.query} head{'s' * (self.query != 1)}"
        return heads if self.d_head is None else f"{heads} of width {self.d_head} ({self.origin})"


@dataclass(frozen=True)
class _Widths:
    """Number and width of the heads where they have dimensions of their own, and the dimension that joins the two."""

    heads: int | None
    width: int | None
    joined: int | None


def count_heads(
    shapes: Shapes,
    layouts: Dictionary[str, str],
    heads: int | None = None,
    d_head: int | None = None,
    d_value: int | None = None,
) -> HeadCounts | None:
    """Return the numbers of heads of a layer: its shapes, together with what is stated, determine them.

    A dimension that joins the heads with their width has to be the product of the two. The values have the width of the
    queries and keys, unless another is stated or shown.

    Args:
        shapes: Shape of each tensor by role.
        layouts: Axes of each weight by role, in einops' notation.
        heads: Number of query heads, if it is stated.
        d_head: Width of a head, if it is stated.
        d_value: Width of a head's values, if it is stated.

    Returns:
        The numbers; None if the weights are collapsed, or fit no number of heads.
    """
    widths = {role: _widths(shapes[role], layouts[role]) for role in shapes if role in TARGETS}
    has_qk, has_ov = not widths.keys().isdisjoint(("Q", "K", "QKV")), not widths.keys().isdisjoint(("V", "O", "QKV"))
    shown = [widths[role].heads for role in ("O", "Q", "QKV") if role in widths]
    query = heads or next((number for number in shown if number), None)
    of_scores = _first_width(widths, ("Q", "K", "QKV")) or d_head
    of_values = _first_width(widths, ("V", "O", "QKV")) or d_value
    joined = {role: of_role.joined for role, of_role in widths.items() if of_role.joined}
    for role, width in (("Q", of_scores), ("O", of_values or of_scores or d_head)):
        if query is None and role in joined and width:
            query = joined[role] // width
    if not query:
        return None
    if of_scores is None and "Q" in joined:
        of_scores = joined["Q"] // query
    if of_values is None:
        of_values = of_scores if has_qk and of_scores else d_head or (joined["O"] // query if "O" in joined else None)
    if of_scores is None and "QKV" in joined:
        of_scores = of_values = of_values or joined["QKV"] // (3 * query)
    of_scores, of_values = of_scores or of_values, of_values or of_scores
    if not of_scores or not of_values:
        return None
    key_value = next((widths[role].heads for role in ("K", "V") if role in widths and widths[role].heads), None)
    if key_value is None:
        key_value = _key_value_heads(joined, query, of_scores, of_values)
    stated_width = d_head if has_qk else d_value or d_head
    counts = HeadCounts(query, key_value, of_scores if has_qk else of_values)
    products = {"Q": query * of_scores, "K": key_value * of_scores, "V": key_value * of_values, "O": query * of_values}
    products["QKV"] = (query + 2 * key_value) * of_scores
    fits = all(joined[role] == products[role] for role in joined)
    contradicts = stated_width is not None and joined and counts.d_head != stated_width
    contradicts = contradicts or (has_ov and d_value is not None and of_values != d_value)
    return counts if fits and not contradicts and key_value > 0 and query % key_value == 0 else None


def demand_counts(
    shapes: Shapes, layouts: Dictionary[str, str], names: Dictionary[str, tuple[str, ...]], stated: LayerHeads
) -> HeadCounts | None:
    """Return the numbers of heads of a layer, or refuse a layer whose widths are not heads times the width of a head.

    Args:
        shapes: Shape of each tensor by role.
        layouts: Axes of each weight by role, in einops' notation.
        names: Names of the tensors by role, for messages.
        stated: What is stated about the heads of this layer.

    Returns:
        The numbers; None if no dimension joins heads with their width.

    Raises:
        CallError: The shapes contradict what is stated, or each other.
    """
    query = stated.query
    for role in ("Q", "O", "QKV"):
        shown = _widths(shapes[role], layouts[role]).heads if role in shapes else None
        if query is not None and shown not in (None, query):
            tensor = f"{names[role][0]} has" if len(names[role]) == 1 else f"{names[role][0]} and its like are"
            raise CallError(f"{tensor} {shown} heads, and {query} are stated; leave heads out, or correct the number")
    counts = stated.count(shapes, layouts)
    joining = [role for role in shapes if role in TARGETS and joins_heads(layouts[role])]
    has_its_dimensions = all(len(shapes[role]) == len(groups(layouts[role])) for role in shapes if role in TARGETS)
    if counts is not None or not joining or not has_its_dimensions:
        return counts
    role = _misfit(joining, shapes, layouts, stated)
    widths = ", ".join(f"{names[each][0]} {_widths(shapes[each], layouts[each]).joined}" for each in joining)
    raise CallError(
        f"{names[role][0]} has shape {tuple(shapes[role])}, which does not fit {stated.in_words} (widths of heads "
        f"times their number: {widths}); if the layers differ, state heads or d_head for each layer in a mapping "
        f"(--map FILE.toml: heads = [4, 2, ...] or d_head = 8)"
    )


def _misfit(joining: list[str], shapes: Shapes, layouts: Dictionary[str, str], stated: LayerHeads) -> str:
    """Return the first role whose shape contradicts what is stated or the role before it, or else the first of all."""
    width = stated.d_head
    for role in joining:
        joined = _widths(shapes[role], layouts[role]).joined or 0
        if role in ("Q", "O") and stated.query:
            width = width or joined // stated.query
            if joined != stated.query * width:
                return role
        if role in ("K", "V") and width and joined % width:
            return role
    return joining[0]


def _key_value_heads(joined: dict[str, int], query: int, of_scores: int, of_values: int) -> int:
    if "K" in joined:
        return joined["K"] // of_scores
    if "V" in joined:
        return joined["V"] // of_values
    return (joined["QKV"] // of_scores - query) // 2 if "QKV" in joined else query


def _first_width(widths: dict[str, _Widths], roles: tuple[str, ...]) -> int | None:
    return next((widths[role].width for role in roles if role in widths and widths[role].width), None)


def _widths(shape: tuple[int, ...], layout: str) -> _Widths:
    parts = groups(layout)
    if len(parts) != len(shape):
        return _Widths(None, None, None)
    sizes = dict(zip(map(tuple, parts), shape, strict=True))
    joined = next((size for part, size in sizes.items() if len(part) > 1 and "d_head" in part), None)
    return _Widths(sizes.get(("head",), None if "head" in axes(layout) else 1), sizes.get(("d_head",)), joined)


def _of_layer(stated: Stated | None, layer: int, what: str) -> int | None:
    if stated is None or isinstance(stated, int):
        return stated
    if layer not in stated:
        raise CallError(
            f"{what} states {len(stated)} layer{'s' * (len(stated) != 1)}, and layer {layer} is not among them"
        )
    return stated[layer]
