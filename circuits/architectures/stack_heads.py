"""What a config states about the heads of a stack, held against the shapes of its layers."""

from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from typing import Any

from ..checkpoints.tensor_file import TensorFile
from ..errors import CallError, QkovError
from .config_lookups import Config, stated_by
from .head_counts import Stated, StatedHeads
from .layouts import width_of_model
from .mapping import Mapping, Names
from .stated_facts import UNKNOWN

#: Config keys for the width of the residual stream.
_WIDTHS = ("hidden_size", "d_model", "n_embd", "n_embed", "dim")
#: The config's width of a head, where a family has no other key for it.
_D_HEAD = {"config": "head_dim"}
_KEY_VALUE_HEADS = "num_key_value_heads"


def heads_of_stack(
    table: dict[str, Any], stack: dict[str, Any], config: Config | None, layers: Iterable[int], d_model: int | None
) -> StatedHeads:
    """Return what a config states about the heads of a stack.

    Heads are as wide as the config says (`head_dim`, or what the family has instead), else d_model divided by their
    number. A config may state the number layer by layer, as a list or by `pruned_heads`.

    Args:
        table: The table of the stack, without look-ups.
        stack: The table of the stack in the family file.
        config: The config; None if there is none.
        layers: Numbers of the layers in the file.
        d_model: Width of the residual stream, as the shapes show it.

    Raises:
        CallError: The config has a value that cannot be used.
    """
    heads = table.get("heads", UNKNOWN)
    query = None if heads is UNKNOWN else _numbers(heads)
    width = stated_width(stack, config)
    if width is not None:
        origin = "the width that the config states"
    elif isinstance(query, int):
        width, origin = table.get("d_head"), "the width of the family's heads"
        if type(width) is not int:
            width = d_model // query if config is not None and d_model is not None and d_model % query == 0 else None
            origin = "d_model divided by their number"
    else:
        origin = "the width in the first layer"
    pruned = _pruned(config)
    if pruned and isinstance(query, int) and not table.get("cross"):
        left = {layer: query - pruned.get(layer, 0) for layer in layers}
        if min(left.values()) < 1:
            raise CallError(
                f"its pruned_heads leave no head of {query} in layer {min(left, key=lambda each: left[each])}"
            )
        return StatedHeads(left, width, origin=origin)
    follows = isinstance(query, int) and width is not None and origin == "the width that the config states"
    return StatedHeads(query, width, origin=origin, may_differ=follows)


def stated_width(stack: dict[str, Any], config: Config | None) -> int | None:
    """Return the width of a head that a config states, or None if it states none.

    Args:
        stack: The table of the stack in the family file.
        config: The config; None if there is none.

    Raises:
        CallError: The width is not a number above 0.
    """
    width = None if config is None else stated_by(stack.get("d_head", _D_HEAD), config)
    if width is not None and (type(width) is not int or width < 1):
        raise CallError(f"it says that a head is {width!r} wide, where a number above 0 is expected")
    return width


def demand_config_of_same_model(
    mapping: Mapping, layers: Dictionary[int, Names], config: Config, file: TensorFile
) -> None:
    """Refuse a config that contradicts the shapes of every layer, since it belongs to another model.

    Args:
        mapping: The mapping of the stack.
        layers: Names of the tensors of every layer.
        config: The config; empty if there is none.
        file: The file that holds the tensors.

    Raises:
        QkovError: The message names the key of the config, and what the shapes say.
    """
    shapes = mapping.shapes(next(iter(layers.values())), file.shapes)
    role = next((role for role in ("Q", "QKV") if role in shapes), None)
    if role is not None:
        d_model = width_of_model(shapes[role], mapping.layouts[role])
        for key in _WIDTHS:
            _demand_equal(key, config.get(key), d_model, file)
    heads, key_value = mapping.heads, config.get(_KEY_VALUE_HEADS)
    key_value = key_value if type(key_value) is int else None
    if isinstance(heads.query, int) and (key_value is not None or heads.may_differ):
        contradiction = None
        for layer, names in layers.items():
            counts = heads.of_layer(layer).count(mapping.shapes(names, file.shapes), mapping.layouts)
            if counts is None:
                continue
            if counts.query == heads.query and key_value in (None, counts.key_value):
                return
            contradiction = contradiction or counts
        if contradiction is not None:
            _demand_equal(_KEY_VALUE_HEADS, key_value, contradiction.key_value, file)
            _demand_equal("the number of heads", heads.query, contradiction.query, file)


def _demand_equal(key: str, stated: object, shown: int | None, file: TensorFile) -> None:
    if shown is not None and isinstance(stated, int) and stated != shown:
        raise QkovError(
            f"{file.config_origin} of {file.address} says {key} = {stated}, but the shapes of the weights say "
            f"{shown}, so they belong to different models; put the weights' own config beside them"
        )


def _numbers(heads: Any) -> Stated:
    """Return a number of heads, or those of each layer."""
    numbers: list[Any] = heads if isinstance(heads, list) and heads else [heads]
    for number in numbers:
        if type(number) is not int:
            raise CallError(f"heads should be of type int, got {heads!r}")
        if number < 1:
            raise CallError(f"heads should be at least 1, got {number}")
    return heads if isinstance(heads, int) else dict(enumerate(numbers))


def _pruned(config: Config | None) -> dict[int, int]:
    """Return how many heads were pruned from each layer, as transformers' `pruned_heads` lists them."""
    stated = {} if config is None else config.get("pruned_heads") or {}
    try:
        return {int(layer): len(set(heads)) for layer, heads in stated.items()}
    except (AttributeError, TypeError, ValueError):
        raise CallError(
            f"it says pruned_heads = {stated!r}, where a list of heads for each layer is expected"
        ) from None
